"""Changes one line in a program with Lightning's Trainer, and tests precisions, clipping, accumulation and resuming.
Every step is judged against torch's AdamW within a derived bound. The tests take 7 s.
"""

import pytest
import torch
from judged import assert_close_runs, judged
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import instep.torch

lightning = pytest.importorskip("lightning")


class Module(lightning.LightningModule):
    """A model of two layers with an AdamW and a schedule."""

    def __init__(self, adamw: type, fused: bool = False, is_manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.adamw, self.fused = adamw, fused
        self.automatic_optimization = not is_manual

    def configure_optimizers(self):
        optimizer = self.adamw(self.parameters(), lr=0.01, weight_decay=0.1, fused=self.fused)
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


def fit(
    module: Module, folder, epochs: int, resume=None, **options
) -> tuple[dict[str, Tensor], torch.optim.Optimizer, object]:
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
    return dict(module.state_dict()), trainer.optimizers[0], trainer


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
    steps = 16 // options.get("accumulate_grad_batches", 1)
    before, _, _ = fit(Module(torch.optim.AdamW), tmp_path / "before", 4, **options)
    with judged() as verdict:
        after, optimizer, _ = fit(Module(instep.torch.AdamW), tmp_path / "after", 4, **options)
    assert verdict.steps == steps
    _, _, trainer = fit(Module(instep.torch.AdamW), tmp_path / "part", 2, **options)
    trainer.save_checkpoint(tmp_path / "part.ckpt")
    with judged() as verdict:
        resumed, again, _ = fit(Module(instep.torch.AdamW), tmp_path / "part", 4, tmp_path / "part.ckpt", **options)
    assert verdict.steps == steps // 2
    # Torch's optimizer goes on from our checkpoint, too.
    theirs, _, _ = fit(Module(torch.optim.AdamW), tmp_path / "other", 4, tmp_path / "part.ckpt", **options)
    assert all(torch.equal(resumed[name], value) for name, value in after.items())
    assert_close_runs(before, after)
    assert_close_runs(theirs, after)
    for one in (optimizer, again):
        assert all(state["step"] == steps for state in one.state.values())
    for whole, part in zip(optimizer.state.values(), again.state.values()):
        assert all(torch.equal(whole[name], part[name]) for name in whole)


def test_lightning_refuses_to_clip_beside_a_fused_step_as_with_torchs(tmp_path):
    for adamw in (torch.optim.AdamW, instep.torch.AdamW):
        with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
            fit(Module(adamw, True), tmp_path, 1, precision="bf16-mixed", gradient_clip_val=0.1)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_manual_loop_of_lightning_clips(precision, tmp_path):
    before, _, _ = fit(Module(torch.optim.AdamW, is_manual=True), tmp_path / "before", 2, precision=precision)
    with judged() as verdict:
        after, _, _ = fit(Module(instep.torch.AdamW, is_manual=True), tmp_path / "after", 2, precision=precision)
    assert verdict.steps == 8
    assert_close_runs(before, after)
