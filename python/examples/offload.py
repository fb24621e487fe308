"""Trains a small GPT whose optimizer states do not fit on the device: states and steps are on the host.

    python python/examples/offload.py [--device cuda]

Without a GPU, the device is simulated, and refuses to allocate more than 40 MB. Parameters, gradients and activations
fit into 40 MB, but only without the optimizer states.
"""

import argparse
import contextlib

import torch
from torch import Tensor, nn
from torch.nn import functional

from instep.torch import Simulated, offload


class GPT(nn.Module):
    """Layers of attention over bytes."""

    def __init__(self, width: int = 256, layers: int = 4, context: int = 32) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, width), nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, functional.gelu, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return self.head(self.layers(self.embed(tokens) + self.place(places), mask, is_causal=True))


def train(make_optimizer: str, name: str, steps: int) -> str:
    """Trains on the bytes of this file. Returns a text with the last loss, and with the peak memory of the simulated
    device.
    """
    device = None if name == "cuda" else Simulated(memory_bytes=40_000_000)
    where = torch.device(name)
    text = torch.frombuffer(bytearray(open(__file__, "rb").read()), dtype=torch.uint8).long()
    torch.manual_seed(0)
    with device or contextlib.nullcontext():
        model = GPT().to(where)
    if make_optimizer == "offload":
        optimizer = offload(model, "adamw", lr=1e-3, max_norm=1.0, device=device)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        starts = torch.randint(len(text) - 33, (8,)).tolist()
        with device or contextlib.nullcontext():
            batch = torch.stack([text[start : start + 33] for start in starts]).to(where)
            loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()  # Gradients go down, and are stepped on the host.
            optimizer.step()  # An offloaded step does nothing here: the next forward pass waits, module by module.
            optimizer.zero_grad()
    told = f"a loss of {loss.item():.2f} after {steps} steps"
    return told if device is None else f"{told}, with at most {device.memory.peak} bytes on the device"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        try:
            train("beside the model", "cpu", 1)
        except MemoryError as error:
            print(f"an optimizer beside the model: {error}")
    print(f"offloaded: {train('offload', arguments.device, arguments.steps)}")
