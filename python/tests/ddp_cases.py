"""Every rank runs these cases. Most cases train under DistributedDataParallel with our optimizer and with torch.optim,
on the same batches, and compare the results.

After backward, the reference steps with the same gradients. In the reference, DDP divides gradients by the number of
ranks. In our model, the step divides them.
"""

import contextlib
import copy
import io
import warnings
from typing import Any, Optional

import torch
import torch.distributed as dist
from models import make
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from instep.torch import (
    apply_optimizer_in_backward,
    as_overlapped_optim,
    get_in_backward_optimizers,
    register_ddp,
)

TORCH = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
OPTIONS = {
    "adamw": {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6},
    "adam": {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6},
    "sgd": {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.01},
}
CAP = {"bucket_cap_mb": 0.02}


def pair(model: nn.Module, **options: Any) -> tuple[DistributedDataParallel, DistributedDataParallel]:
    """Wraps two copies of the model in DDP."""
    return tuple(DistributedDataParallel(copy.deepcopy(model), **{**CAP, **options}) for _ in range(2))


def assert_close(ours: nn.Module, theirs: nn.Module, units: float, where: object) -> None:
    """Asserts that parameters differ by at most ``units`` units in the last place of their largest value (at least
    0.01).
    """
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters()):
        p, q = p.detach(), q.detach()
        allowed = units * torch.finfo(p.dtype).eps * max(p.abs().max().item(), 0.01)
        worst = (p.float() - q.float()).abs().max().item() if p.numel() else 0.0
        assert worst <= allowed, f"{where}: {name} differs by {worst}, more than {allowed}"


def assert_same_everywhere(model: nn.Module) -> None:
    """Asserts that all ranks have the same bits."""
    for param in model.parameters():
        first = param.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, param.detach())


def compare(
    rank: int,
    world: int,
    model: str = "gpt",
    optimizer: str = "adamw",
    dtype: torch.dtype = torch.float32,
    steps: int = 20,
    max_norm: Optional[float] = None,
    gradients: str = "average",
    micro_batches: int = 1,
    schedule: bool = False,
    **ddp: Any,
) -> None:
    """Trains both sides from the same parameters in every step, and compares every step."""
    ours, theirs = pair(make(model, dtype), **ddp)
    options = OPTIONS[optimizer]
    stepped = register_ddp(ours, optimizer, max_norm=max_norm, gradients=gradients, **options)
    wanted = TORCH[optimizer](theirs.parameters(), **options)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 5, 0.5) for o in (stepped, wanted)] if schedule else []
    for step in range(steps):
        batches = [ours.module.batch() for _ in range(micro_batches)]
        if dtype != torch.float32 and model == "resnet":
            batches = [(x.to(dtype), y) for x, y in batches]
        for side in (ours, theirs):
            for micro, batch in enumerate(batches):
                is_last = micro == micro_batches - 1
                with contextlib.nullcontext() if is_last else side.no_sync():
                    loss_of(side, batch).backward()
        if max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
            assert abs(stepped.last_norm() - norm.item()) <= 1e-2 * norm.item()
        means = [p.grad.clone() for p in theirs.parameters()]
        for p, mean in zip(ours.parameters(), means):
            held = {"clear": torch.zeros_like(mean), "sum": mean * world, "average": mean}[gradients]
            tolerance = 8 * torch.finfo(dtype).eps * mean.abs().max().item()
            assert (p.grad - held).abs().max().item() <= tolerance, f"step {step}: gradient"
        wanted.step()
        stepped.step()
        for one in schedules:
            one.step()
        for o in (stepped, wanted):
            o.zero_grad()
        assert_close(ours, theirs, 32 if dtype == torch.float32 else 4, f"step {step}")
        assert_same_everywhere(ours)
        level(ours, theirs, stepped, wanted)


def loss_of(side: nn.Module, batch: Any) -> torch.Tensor:
    """Returns the loss of a batch from DDP's own forward."""
    if isinstance(batch, tuple):
        return functional.cross_entropy(side(batch[0]).float(), batch[1])
    return functional.cross_entropy(side(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def level(ours: nn.Module, theirs: nn.Module, stepped: Any, wanted: Any) -> None:
    """Gives our side the reference's parameters and states, so that roundings do not add up over steps."""
    for p, q in zip(ours.parameters(), theirs.parameters()):
        p.copy_(q)
    for p, q in zip(ours.buffers(), theirs.buffers()):
        p.copy_(q)
    for p, q in zip(ours.parameters(), theirs.parameters()):
        for name, value in stepped.state[p].items():
            if name != "step":
                value.copy_(wanted.state[q][name])


def subset(rank: int, world: int, chosen: str, view: bool) -> None:
    """Our optimizer steps some parameters. DDP still averages the gradients of all other parameters."""
    ours, theirs = pair(make("gpt"), gradient_as_bucket_view=view)
    params = {"first": list(ours.parameters())[:1], "none": []}[chosen]
    stepped = register_ddp(ours, "sgd", params=params, lr=0.1)
    initial = [p.detach().clone() for p in ours.parameters()]
    wanted = torch.optim.SGD(list(theirs.parameters())[:1], lr=0.1) if params else None
    for step in range(4):
        batch = ours.module.batch()
        for side in (ours, theirs):
            loss_of(side, batch).backward()
        for p, q in zip(ours.parameters(), theirs.parameters()):
            assert torch.allclose(p.grad, q.grad, rtol=1e-5, atol=1e-7), step
        if wanted is not None:
            wanted.step()
            wanted.zero_grad()
        stepped.zero_grad()
        ours.zero_grad()
        theirs.zero_grad()
    assert_close(ours, theirs, 32, chosen)
    moved = [not torch.equal(p, q) for p, q in zip(ours.parameters(), initial)]
    assert moved == [bool(params)] + [False] * (len(moved) - 1)


class Branches(nn.Module):
    """Uses only the branch with the number ``which``."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.branches[which](x)


def unused(rank: int, world: int, view: bool, in_backward: bool) -> None:
    """A parameter that no rank used does not change. A parameter that some rank used is stepped with the mean over all
    ranks.
    """
    torch.manual_seed(2)
    ours, theirs = pair(Branches(), find_unused_parameters=True, gradient_as_bucket_view=view)
    options = {"lr": 0.1, "weight_decay": 0.1}
    if in_backward:
        apply_optimizer_in_backward(torch.optim.AdamW, ours.parameters(), options)
    else:
        register_ddp(ours, "adamw", **options)
    wanted = torch.optim.AdamW(theirs.parameters(), **options)
    initial = [p.detach().clone() for p in ours.module.branches[2].parameters()]
    for step in range(6):
        x = torch.randn(4, 8)
        which = (rank + step) % 2 if step != 3 else 0
        for side in (ours, theirs):
            side(x, which).pow(2).mean().backward()
        wanted.step()
        for side in (ours, theirs):
            side.zero_grad()
        assert_close(ours, theirs, 16, f"step {step}")
    assert all(torch.equal(p, q) for p, q in zip(ours.module.branches[2].parameters(), initial))


def scaler(rank: int, world: int) -> None:
    """An infinite gradient on one rank skips the step on all ranks. The scale stays equal to the reference scaler's
    scale.
    """
    ours, theirs = pair(make("gpt"))
    scalers = [torch.amp.GradScaler(torch.get_default_device().type, init_scale=64.0, growth_interval=2) for _ in range(2)]
    stepped = register_ddp(ours, "sgd", lr=0.1, grad_scaler=scalers[0], max_norm=0.5)
    wanted = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for step in range(6):
        batch = ours.module.batch()
        for side, o, s in ((ours, stepped, scalers[0]), (theirs, wanted, scalers[1])):
            loss = loss_of(side, batch)
            s.scale(loss * float("inf") if step == 2 and rank == world - 1 else loss).backward()
            if o is wanted:
                s.unscale_(o)
                torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
            s.step(o)
            s.update()
            o.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale(), step
        assert_close(ours, theirs, 64, f"step {step}")
    assert stepped.state_dict()["state"] == wanted.state_dict()["state"] == {}


def in_backward(rank: int, world: int, model: str, view: bool, before: bool, optimizer: str) -> None:
    """Optimizers are attached to parameters before or after wrapping, as in PyTorch; gradients are None afterwards."""
    base = make(model)
    twin = copy.deepcopy(base)
    options = {"lr": 0.03}
    attach = lambda m: apply_optimizer_in_backward(TORCH[optimizer], m.parameters(), options)
    if before:
        attach(base)
    ours = DistributedDataParallel(base, gradient_as_bucket_view=view, **CAP)
    if not before:
        attach(ours)
    theirs = DistributedDataParallel(twin, gradient_as_bucket_view=view, **CAP)
    wanted = TORCH[optimizer](theirs.parameters(), **options)
    attached = get_in_backward_optimizers(ours)
    assert len(attached) == len(list(ours.parameters()))
    schedules = [torch.optim.lr_scheduler.ConstantLR(one, 1.0) for one in attached]
    for step in range(8):
        batch = ours.module.batch()
        for side in (ours, theirs):
            loss_of(side, batch).backward()
        assert all(p.grad is None for p in ours.parameters())
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Such as "lr_scheduler.step() before optimizer.step()".
            for schedule in schedules:
                schedule.step()
        wanted.step()
        wanted.zero_grad()
        assert_close(ours, theirs, 64, f"step {step}")
        with torch.no_grad():
            for p, q in zip(ours.parameters(), theirs.parameters()):
                (one,) = p._in_backward_optimizers
                p.copy_(q)
                for name, value in one.state[p].items():
                    if name != "step":
                        value.copy_(wanted.state[q][name])


def mixed_ownership(rank: int, world: int, view: bool) -> None:
    """Parameters without an optimizer in backward have the mean gradient on every rank, with and without bucket views."""
    ours, theirs = pair(make("resnet"), gradient_as_bucket_view=view)
    apply_optimizer_in_backward(torch.optim.SGD, ours.module.head.parameters(), {"lr": 0.1})
    for _ in range(3):
        batch = ours.module.batch()
        for side in (ours, theirs):
            side.zero_grad()
            loss_of(side, batch).backward()
        for (name, p), q in zip(ours.module.stages.named_parameters(), theirs.module.stages.parameters()):
            assert torch.allclose(p.grad, q.grad, rtol=1e-5, atol=1e-7), name
        with torch.no_grad():
            for p in theirs.module.head.parameters():
                p -= 0.1 * p.grad
    assert_close(ours.module.head, theirs.module.head, 32, "head")


def overlapped(rank: int, world: int) -> None:
    """A registered optimizer steps in DDP's hook."""
    ours, theirs = pair(make("gpt"))
    as_overlapped_optim(torch.optim.AdamW, None, 1e-2, weight_decay=0.1).register_ddp(ours)
    wanted = torch.optim.AdamW(theirs.parameters(), 1e-2, weight_decay=0.1, eps=1e-8)
    batch = ours.module.batch()
    for side in (ours, theirs):
        loss_of(side, batch).backward()
    wanted.step()
    assert_close(ours, theirs, 64, "registry")


def resume(rank: int, world: int) -> None:
    """Our optimizer resumes from a checkpoint of torch's optimizer, and the reverse."""
    base = make("gpt")
    ours, theirs = pair(base)
    stepped = register_ddp(ours, "adamw", lr=1e-2)
    wanted = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    for step in range(9):
        batch = ours.module.batch()
        for side in (ours, theirs):
            loss_of(side, batch).backward()
        wanted.step()
        stepped.zero_grad()
        wanted.zero_grad()
        assert_close(ours, theirs, 64, f"step {step}")
        with torch.no_grad():
            for p, q in zip(ours.parameters(), theirs.parameters()):
                p.copy_(q)
        if step == 2:
            stepped.load_state_dict(copy.deepcopy(wanted.state_dict()))
        if step == 5:
            wanted.load_state_dict(copy.deepcopy(stepped.state_dict()))


def ignored(rank: int, world: int, in_backward: bool) -> None:
    """A parameter that DDP ignores may differ between ranks; all other parameters stay equal."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["1.weight"])
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    ours = DistributedDataParallel(model)
    if in_backward:
        apply_optimizer_in_backward("sgd", model.parameters(), {"lr": 0.1})
    else:
        alone = torch.optim.SGD([model[1].weight], lr=0.1)
        register_ddp(ours, "sgd", lr=0.1)
    ours(torch.full((2, 4), 1.0 + rank)).pow(2).sum().backward()
    if not in_backward:
        alone.step()
    for name, param in model.named_parameters():
        all_ranks = [torch.empty_like(param) for _ in range(world)]
        dist.all_gather(all_ranks, param.detach())
        same = all(torch.equal(one, all_ranks[0]) for one in all_ranks)
        assert same == (name != "1.weight"), name


def averages(rank: int, world: int) -> None:
    """Gradients of parameters without an optimizer are whole numbers, and DDP gives their exact mean in a hundred
    passes.
    """
    model = nn.Linear(3, 2, bias=False)
    ours = DistributedDataParallel(model)
    register_ddp(ours, "sgd", params=[])
    for step in range(100):
        ours(torch.full((1, 3), float(rank + step))).sum().backward()
        mean = torch.full((2, 3), float(sum(r + step for r in range(world)))) / world
        assert torch.equal(model.weight.grad, mean), (step, model.weight.grad)
        model.zero_grad()


def own_sum(rank: int, world: int) -> None:
    """A user's hook replaces all_reduce and sums the buckets."""
    ours, theirs = pair(make("gpt"))
    calls = []

    def hook(bucket: dist.GradBucket):
        calls.append(bucket.index())
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future()

    register_ddp(ours, "sgd", lr=0.1, hook=hook)
    wanted = torch.optim.SGD(theirs.parameters(), lr=0.1)
    batch = ours.module.batch()
    for side in (ours, theirs):
        loss_of(side, batch).backward()
    wanted.step()
    assert calls
    assert_close(ours, theirs, 32, "own sum")


def mixed_types(rank: int, world: int) -> None:
    """A model has layers of two types: DDP makes buckets per type, and one clip covers both types."""
    base = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 64).to(torch.bfloat16), nn.Linear(64, 16))
    ours, theirs = pair(base)
    stepped = register_ddp(ours, "adamw", lr=1e-2, max_norm=0.5)
    wanted = torch.optim.AdamW(theirs.parameters(), lr=1e-2)

    def forward(side: DistributedDataParallel, x: torch.Tensor) -> torch.Tensor:
        # DDP's forward runs the module as a whole, so the casts are in hooks.
        return side(x).float().pow(2).mean()

    for side in (ours, theirs):
        side.module[1].register_forward_pre_hook(lambda _, inputs: (inputs[0].to(torch.bfloat16),))
        side.module[1].register_forward_hook(lambda _, inputs, output: output.float())
    for step in range(5):
        x = torch.randn(8, 16)
        for side in (ours, theirs):
            forward(side, x).backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        assert abs(stepped.last_norm() - norm.item()) <= 1e-2 * norm.item()
        wanted.step()
        stepped.zero_grad()
        wanted.zero_grad()
        assert_close(ours, theirs, 8, f"step {step}")
        level(ours, theirs, stepped, wanted)


def join(rank: int, world: int, divide: bool) -> None:
    """Ranks have different numbers of batches."""
    ours, theirs = pair(make("resnet"))
    register_ddp(ours, "sgd", lr=0.05)
    wanted = torch.optim.SGD(theirs.parameters(), lr=0.05)
    batches = [ours.module.batch() for _ in range(3 + rank)]
    with ours.join(divide_by_initial_world_size=divide):
        for batch in batches:
            loss_of(ours, batch).backward()
            ours.zero_grad()
    assert_same_everywhere(ours)
    if not divide:
        return  # DDP divides by the ranks that are left on its own path alone, without a hook.
    with theirs.join(divide_by_initial_world_size=True):
        for batch in batches:
            loss_of(theirs, batch).backward()
            wanted.step()
            wanted.zero_grad()
    if rank == world - 1:
        assert_close(ours, theirs, 512, "join")


class Strided(nn.Module):
    """A model with a convolution in channels_last and a transposed matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.matrix = nn.Parameter(torch.randn(5, 8).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).mean(dim=(2, 3)).sin() @ self.matrix


def strides(rank: int, world: int, in_backward: bool, view: bool) -> None:
    """Gradients lie in a bucket with their parameters' strides."""
    torch.manual_seed(4)
    ours, theirs = pair(Strided(), gradient_as_bucket_view=view)
    if in_backward:
        apply_optimizer_in_backward("adamw", ours.parameters(), {"lr": 0.1})
    else:
        register_ddp(ours, "adamw", lr=0.1)
    wanted = torch.optim.AdamW(theirs.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for step in range(4):
        x = torch.randn(2, 3, 6, 6)
        for side in (ours, theirs):
            side(x).pow(2).sum().backward()
        if not in_backward:
            for p, q in zip(ours.parameters(), theirs.parameters()):
                rtol, atol = (1e-4, 1e-5) if p.is_cuda else (1e-5, 1e-6)  # cuDNN's convolution enlarges a difference
                torch.testing.assert_close(p.grad, q.grad, rtol=rtol, atol=atol, msg=lambda why: f"step {step}: {why}")
        wanted.step()
        for side in (ours, theirs):
            side.zero_grad()
        assert_close(ours, theirs, 64, f"step {step}")


def overflow(rank: int, world: int, in_backward: bool) -> None:
    """Two gradients of 40,000 have a finite mean in float16, but their sum is infinite."""
    model = nn.Linear(1, 1, bias=False).half()
    with torch.no_grad():
        model.weight.fill_(1.0)
    ours = DistributedDataParallel(model)
    if in_backward:
        apply_optimizer_in_backward("sgd", ours.parameters(), {"lr": 1e-4})
    else:
        register_ddp(ours, "sgd", lr=1e-4)
    (ours(torch.ones(1, 1, dtype=torch.float16)) * 40000).sum().backward()
    assert abs(model.weight.item() + 3.0) < 0.01, model.weight


def changes(rank: int, world: int) -> None:
    """Param groups are added during the training, and later a state is loaded."""
    ours, theirs = pair(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    stepped = register_ddp(ours, "adamw", params=ours.module[1].parameters(), lr=0.1)
    wanted = torch.optim.AdamW(theirs.module[1].parameters(), lr=0.1)
    torch.manual_seed(rank)
    for step in range(8):
        if step == 2:
            for o, side in ((stepped, ours), (wanted, theirs)):
                o.add_param_group({"params": list(side.module[0].parameters()), "lr": 0.01})
        if step == 4:
            for o in (stepped, wanted):
                o.load_state_dict(copy.deepcopy(o.state_dict()))
                o.param_groups[0]["lr"] = 0.02
        x = torch.randn(8, 4)
        for side in (ours, theirs):
            side(x).pow(2).sum().backward()
        wanted.step()
        for side in (ours, theirs):
            side.zero_grad()
        assert_close(ours, theirs, 256, f"step {step}")


def frozen_and_saved(rank: int, world: int) -> None:
    """A parameter is frozen before the first pass; the whole model is saved and wrapped again."""
    torch.manual_seed(2)
    ours = DistributedDataParallel(Branches(), find_unused_parameters=True)
    register_ddp(ours, "sgd", lr=0.1)
    ours.module.branches[1].weight.requires_grad_(False)
    ours(torch.ones(2, 8), 0).sum().backward()
    stream = io.BytesIO()
    torch.save(ours.module, stream)
    stream.seek(0)
    again = DistributedDataParallel(torch.load(stream, weights_only=False), find_unused_parameters=True)
    register_ddp(again, "sgd", lr=0.1)
    before = again.module.branches[0].weight.detach().clone()
    again(torch.ones(2, 8), 0).sum().backward()
    assert not torch.equal(before, again.module.branches[0].weight)
