"""Changes one line in timm's training loop, the one that makes the optimizer. Schedule, clip, loss scaler, moving
average and checkpoint are timm's own. Every step is judged against torch's AdamW within a derived bound.
"""

import contextlib

import pytest
import torch
from judged import assert_close_runs, judged
from torch import Tensor

import instep.torch

timm = pytest.importorskip("timm")
models, optim, scheduler, utils, factory = (
    pytest.importorskip(f"timm.{name}") for name in ("models", "optim", "scheduler", "utils", "optim._optim_factory")
)

HYPER = {"lr": 2e-3, "weight_decay": 0.05}


def by_name(net: torch.nn.Module, name: str, **options) -> torch.optim.Optimizer:
    """Makes the optimizer with this name, which timm's ``--opt`` accepts."""
    return optim.create_optimizer_v2(net, opt=name, **HYPER, **options)


def registered(net: torch.nn.Module, **options) -> torch.optim.Optimizer:
    """Adds our optimizer to timm's registry in one line, and makes it by its name."""
    if "instepadamw" not in optim.list_optimizers():
        factory.default_registry.register(optim.OptimInfo("instepadamw", instep.torch.AdamW, has_betas=True))
    return by_name(net, "instepadamw", **options)


def constructed(net: torch.nn.Module) -> torch.optim.Optimizer:
    """Makes our optimizer over timm's param groups."""
    groups = optim.param_groups_weight_decay(net, HYPER["weight_decay"], no_weight_decay_list=net.no_weight_decay())
    return instep.torch.AdamW(groups, lr=HYPER["lr"])


def images(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Returns batches of images and classes, always the same."""
    torch.manual_seed(1)
    return [(torch.randn(4, 3, 16, 16), torch.randint(10, (4,))) for _ in range(count)]


def train(make, folder, dtype: torch.dtype, resume=None) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """Trains as timm's train.py does. Returns the model's and the moving average's values, and the number of steps.

    float16 has timm's loss scaler. Trains two epochs of four steps, or only the second epoch from a checkpoint.
    """
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 10}
    net = timm.create_model("vit_tiny_patch16_224", **sizes)
    optimizer = make(net)
    scaler = utils.NativeScaler(device="cpu") if dtype is torch.float16 else None
    autocast = contextlib.nullcontext() if dtype is torch.float32 else torch.autocast("cpu", dtype)
    start, average = 0, utils.ModelEmaV3(net, decay=0.9)
    if resume:
        start = models.resume_checkpoint(net, str(resume), optimizer, scaler, log_info=False)
        models.load_checkpoint(average.module, str(resume), use_ema=True)
    schedule, epochs = scheduler.create_scheduler_v2(
        optimizer, num_epochs=2, warmup_epochs=1, warmup_lr=1e-4, step_on_epochs=False, updates_per_epoch=4
    )
    schedule.step_update(4 * start)
    saver = utils.CheckpointSaver(net, optimizer, model_ema=average, amp_scaler=scaler, checkpoint_dir=str(folder))
    folder.mkdir(exist_ok=True)
    for epoch in range(start, epochs):
        for number, (x, y) in enumerate(images()):
            with autocast:
                loss = torch.nn.functional.cross_entropy(net(x), y)
            optimizer.zero_grad()
            if scaler is not None:
                scaler(loss, optimizer, clip_grad=1.0, clip_mode="norm", parameters=net.parameters())
            else:
                loss.backward()
                utils.dispatch_clip_grad(net.parameters(), value=1.0, mode="norm")
                optimizer.step()
            average.update(net, step=4 * epoch + number)
            schedule.step_update(4 * epoch + number + 1)
        saver.save_checkpoint(epoch)
    return net.state_dict(), average.module.state_dict(), max(int(state["step"]) for state in optimizer.state.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["32", "bf16", "16-scaled"])
@pytest.mark.parametrize("make", [constructed, registered])
def test_timms_loop_trains_to_the_same_parameters_and_resumes(tmp_path, make, dtype):
    before = train(lambda net: by_name(net, "adamw"), tmp_path / "before", dtype)
    with judged() as verdict:
        after = train(make, tmp_path / "after", dtype)
        resumed = train(make, tmp_path / "after", dtype, tmp_path / "after" / "checkpoint-0.pth.tar")
    # timm's scaler begins with a scale that overflows float16, and skips the first step.
    assert before[2] == after[2] == resumed[2] == (7 if dtype is torch.float16 else 8)
    assert verdict.steps == after[2] + 4
    for one, other, third in zip(before[:2], after, resumed):
        assert all(torch.equal(third[name], value) for name, value in other.items())
        assert_close_runs(one, other, dtype is not torch.float32, "qkv.bias")


def test_a_rate_per_layer_is_timms():
    """timm's schedules multiply a group's rate by its ``lr_scale``."""
    torch.manual_seed(0)
    net = timm.create_model("vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=32, depth=2, num_heads=2)
    optimizer = registered(net, layer_decay=0.5)
    schedule, _ = scheduler.create_scheduler_v2(optimizer, num_epochs=4)
    schedule.step(2)
    assert len({group["lr"] for group in optimizer.param_groups}) == 4
    with judged():
        net(images(1)[0][0]).square().mean().backward()
        optimizer.step()
