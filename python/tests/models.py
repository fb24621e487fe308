"""Small versions of real models: a residual network as in torchvision, and a GPT over the bytes of a text."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Two convolutions with norms, and a skip connection."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.downsample = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        return functional.relu(y + self.downsample(x))


class ResNet(nn.Module):
    """Several stages of blocks, then a linear layer."""

    def __init__(self, width: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.stages = nn.Sequential(Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2))
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)).mean(dim=(2, 3)))

    @staticmethod
    def batch(size: int = 4) -> tuple[Tensor, Tensor]:
        """Returns inputs and classes."""
        return torch.randn(size, 3, 12, 12), torch.randint(10, (size,))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the cross entropy."""
        return functional.cross_entropy(self(batch[0]).float(), batch[1])


class Layer(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Transformer layers over bytes; the output layer shares its weight with the embedding."""

    def __init__(self, width: int = 32, layers: int = 2, heads: int = 2, context: int = 24) -> None:
        super().__init__()
        self.context = context
        self.embed = nn.Embedding(256, width)
        self.place = nn.Embedding(context, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def batch(self, size: int = 4) -> Tensor:
        """Returns pieces of this file."""
        text = torch.frombuffer(bytearray(open(__file__, "rb").read()), dtype=torch.uint8).long()
        starts = torch.randint(len(text) - self.context - 1, (size,))
        pieces = torch.stack([text[start : start + self.context + 1] for start in starts])
        return pieces.to(self.embed.weight.device)

    def loss(self, batch: Tensor) -> Tensor:
        """Returns the cross entropy of the next byte."""
        return functional.cross_entropy(self(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())


MODELS = {"resnet": ResNet, "gpt": GPT}


def make(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Returns a model with the same values on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return MODELS[name]().to(dtype)
