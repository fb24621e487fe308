"""FusedOptimizer in Lightning's Trainer: precisions, clipping, accumulation and resuming, beside torch's optimizer. The
tests take 3 s.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from instep.torch import FusedOptimizer

lightning = pytest.importorskip("lightning")


class Module(lightning.LightningModule):
    """A model of two layers with FusedOptimizer or torch's AdamW, and a schedule."""

    def __init__(self, side: str, fused: bool, is_manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.side, self.fused = side, fused
        self.automatic_optimization = not is_manual

    def configure_optimizers(self):
        options = {"lr": 0.01, "weight_decay": 0.1, "fused": self.fused}
        ours = lambda params: FusedOptimizer(params, "adamw", **options)
        optimizer = (ours if self.side == "ours" else lambda params: torch.optim.AdamW(params, **options))(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
        return loss


def fit(module: Module, folder, epochs: int, resume=None, **options) -> tuple[list[Tensor], torch.optim.Optimizer, object]:
    if options.get("precision") == "16-mixed":  # By this name alone, Lightning takes bfloat16 on a CPU, and no scaler.
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        mixed = lightning.pytorch.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)
        options = {**options, "precision": None, "plugins": mixed}
    torch.manual_seed(1)
    data = DataLoader(TensorDataset(torch.randn(32, 4), torch.randn(32, 1)), batch_size=8)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )
    trainer.fit(module, data, ckpt_path=resume)
    return [param.detach() for param in module.parameters()], trainer.optimizers[0], trainer


OPTIONS = [
    {"precision": "32-true"},
    {"precision": "32-true", "gradient_clip_val": 0.1},
    {"precision": "32-true", "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    {"precision": "32-true", "accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    {"precision": "bf16-mixed", "gradient_clip_val": 0.1},
    {"precision": "16-mixed", "gradient_clip_val": 0.1},
    {"precision": "16-mixed"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_lightning_trains_and_resumes_to_the_same_parameters(options, tmp_path):
    wanted, _, _ = fit(Module("theirs", False), tmp_path / "theirs", 4, **options)
    whole, optimizer, _ = fit(Module("ours", False), tmp_path / "ours", 4, **options)
    _, _, trainer = fit(Module("ours", False), tmp_path / "part", 2, **options)
    trainer.save_checkpoint(tmp_path / "part.ckpt")
    resumed, again, _ = fit(Module("ours", False), tmp_path / "part", 4, tmp_path / "part.ckpt", **options)
    # Torch's optimizer goes on from our checkpoint, too.
    theirs, _, _ = fit(Module("theirs", False), tmp_path / "other", 4, tmp_path / "part.ckpt", **options)
    for ours, other in zip(whole, wanted):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-5)
    for ours, other, third in zip(whole, resumed, theirs):
        assert torch.equal(ours, other)
        torch.testing.assert_close(ours, third, rtol=1e-4, atol=1e-5)
    for one in (optimizer, again):
        steps = 16 // options.get("accumulate_grad_batches", 1)
        assert all(state["step"] == steps for state in one.state.values())


def test_lightning_refuses_to_clip_beside_a_fused_step_as_with_torchs(tmp_path):
    for side in ("ours", "theirs"):
        with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
            fit(Module(side, True), tmp_path, 1, precision="bf16-mixed", gradient_clip_val=0.1)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_manual_loop_of_lightning_clips(precision, tmp_path):
    wanted, _, _ = fit(Module("theirs", False, True), tmp_path / "theirs", 2, precision=precision)
    ours, _, _ = fit(Module("ours", False, True), tmp_path / "ours", 2, precision=precision)
    for mine, other in zip(ours, wanted):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
