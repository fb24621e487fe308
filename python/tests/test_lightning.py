"""FusedOptimizer in Lightning's Trainer, beside torch's AdamW, in every precision that a CPU has."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from instep.torch import FusedOptimizer

lightning = pytest.importorskip("pytorch_lightning")
MAKERS = {
    "ours": FusedOptimizer,
    "ours-fused": FusedOptimizer,
    "theirs": torch.optim.AdamW,
    "theirs-fused": torch.optim.AdamW,
}


class Net(lightning.LightningModule):
    """Two layers, their optimizer and a schedule."""

    def __init__(self, which: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.which = which
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return (self.net(batch[0]).float() - batch[0].sum(1, keepdim=True)).pow(2).mean()

    def configure_optimizers(self) -> dict:
        optimizer = MAKERS[self.which](self.parameters(), lr=0.01, weight_decay=0.1, fused=self.which.endswith("-fused"))
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)}


def batches() -> DataLoader:
    """Always the same, in the same order."""
    return DataLoader(TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(1))), batch_size=4)


def trainer(precision: str, epochs: int, **options) -> lightning.Trainer:
    """A trainer that says little."""
    if precision == "16-mixed":  # By its name alone, Lightning takes bfloat16 on a CPU.
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        options["plugins"] = lightning.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)
    else:
        options["precision"] = precision
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(accelerator="cpu", max_epochs=epochs, enable_checkpointing=False, **quiet, **options)


def fit(which: str, precision: str, **options) -> list[Tensor]:
    """The parameters after some epochs."""
    model = Net(which)
    trainer(precision, 3, **options).fit(model, batches())
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("clip", [None, 0.05], ids=["free", "clipped"])
@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
def test_lightning_trains_to_the_same_parameters(precision, clip):
    ours, theirs = (fit(which, precision, gradient_clip_val=clip) for which in ("ours", "theirs"))
    assert all(torch.allclose(p, q, rtol=1e-4, atol=1e-5) for p, q in zip(ours, theirs))


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_what_lightning_says_to_a_fused_optimizer_it_says_to_ours(precision):
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit("theirs-fused", precision, gradient_clip_val=0.05)
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit("ours-fused", precision, gradient_clip_val=0.05)
    ours, theirs = (fit(which, precision) for which in ("ours-fused", "theirs-fused"))
    assert all(torch.allclose(p, q, rtol=1e-4, atol=1e-5) for p, q in zip(ours, theirs))


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("first, then", [("ours", "ours"), ("ours", "theirs"), ("theirs", "ours")])
def test_lightning_resumes_here_and_in_torch(tmp_path, first, then, precision):
    whole = fit(first, precision, gradient_clip_val=0.05)
    half = trainer(precision, 2, gradient_clip_val=0.05)
    half.fit(Net(first), batches())
    half.save_checkpoint(tmp_path / "half.ckpt")
    model = Net(then)
    trainer(precision, 3, gradient_clip_val=0.05).fit(model, batches(), ckpt_path=tmp_path / "half.ckpt", weights_only=False)
    assert all(torch.allclose(p, q, rtol=1e-4, atol=1e-5) for p, q in zip(whole, model.parameters()))
    moved = [torch.equal(p, q) for p, q in zip(Net(then).parameters(), model.parameters())]
    assert not any(moved)
