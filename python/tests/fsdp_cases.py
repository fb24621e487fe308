"""Every rank runs these cases. Most cases train two FSDP models on the same batches, and compare them: one steps with
our optimizer inside backward, the other with torch.optim after backward.
"""

import contextlib
import copy
from typing import Any, Optional

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ddp_cases import OPTIONS, TORCH, Branches
from models import Block, Layer, make
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils._pytree import tree_map

from instep.torch import FusedOptimizer, as_overlapped_optim, register_fsdp

POLICIES = {
    None: None,
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bf16-reduced": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
}


def shard_of(tensor: Any) -> Tensor:
    """Returns the part of a tensor that this rank holds."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def shard(
    model: nn.Module, mesh: Any = None, policy: Optional[str] = None, offload: bool = False, **options: Any
) -> nn.Module:
    """Applies FSDP2 to each layer of a model and then to the model."""
    if mesh is None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if POLICIES[policy] is not None:
        options["mp_policy"] = POLICIES[policy]
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for child in model.children():
        for layer in child if isinstance(child, (nn.ModuleList, nn.Sequential)) else []:
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def wrap(model: nn.Module, **options: Any) -> nn.Module:
    """Wraps a model in FSDP1 with the same units."""
    policy = ModuleWrapPolicy({Layer, Block})
    options = {"use_orig_params": True, "device_id": torch.device("cpu"), "auto_wrap_policy": policy, **options}
    return FullyShardedDataParallel(model, **options)


def assert_close(ours: nn.Module, theirs: nn.Module, units: float, where: object) -> None:
    """Asserts that shards differ by at most ``units`` units in the last place of their largest value (at least 0.01)."""
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters()):
        p, q = shard_of(p), shard_of(q)
        if p.numel():
            allowed = units * torch.finfo(p.dtype).eps * max(q.float().abs().max().item(), 0.01)
            worst = (p.float() - q.float()).abs().max().item()
            assert worst <= allowed, f"{where}: {name} differs by {worst}, more than {allowed}"


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """Returns the loss of a batch from the wrapper's own forward."""
    if isinstance(batch, tuple):
        return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])
    return nn.functional.cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def level(ours: nn.Module, theirs: nn.Module, stepped: Any, wanted: Any) -> None:
    """Gives our side the reference's parameters and states, so that roundings do not add up over steps."""
    for p, q in zip(ours.parameters(), theirs.parameters()):
        shard_of(p).copy_(shard_of(q))
        for name, value in stepped.state[p].items():
            if name != "step":
                shard_of(value).copy_(shard_of(wanted.state[q][name]))
    for p, q in zip(ours.buffers(), theirs.buffers()):
        p.copy_(q)


def clip(model: nn.Module, max_norm: float) -> float:
    """Clips gradients with PyTorch's own function for the wrapper."""
    if isinstance(model, FullyShardedDataParallel):
        return model.clip_grad_norm_(max_norm).item()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return norm.full_tensor().item()


def compare(
    rank: int,
    world: int,
    wrapper: str = "fsdp2",
    model: str = "gpt",
    optimizer: str = "adamw",
    dtype: torch.dtype = torch.float32,
    steps: int = 10,
    max_norm: Optional[float] = None,
    gradients: str = "average",
    micro_batches: int = 1,
    schedule: bool = False,
    hsdp: bool = False,
    divide_factor: Optional[float] = None,
    frozen: bool = False,
    **options: Any,
) -> None:
    """Trains both sides from the same shards in every step, and compares every step."""
    if hsdp:
        options["mesh"] = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    base = make(model, dtype)
    if frozen:
        for p in list(base.parameters())[2:4]:
            p.requires_grad_(False)
    ours, theirs = ((shard if wrapper == "fsdp2" else wrap)(copy.deepcopy(base), **options) for _ in range(2))
    if divide_factor is not None:
        for side in (ours, theirs):
            for module in side.modules():
                if hasattr(module, "set_gradient_divide_factor"):
                    module.set_gradient_divide_factor(divide_factor)
                    module.set_force_sum_reduction_for_comms(True)  # gloo multiplies nothing
    stepped = register_fsdp(ours, optimizer, max_norm=max_norm, gradients=gradients, **OPTIONS[optimizer])
    wanted = TORCH[optimizer](theirs.parameters(), **OPTIONS[optimizer])
    schedules = [torch.optim.lr_scheduler.StepLR(o, 3, 0.5) for o in (stepped, wanted)] if schedule else []
    for step in range(steps):
        batches = [base.batch() for _ in range(micro_batches)]
        if dtype != torch.float32 and model == "resnet":
            batches = [(x.to(dtype), y) for x, y in batches]
        for side in (ours, theirs):
            for micro, batch in enumerate(batches):
                is_last = micro == micro_batches - 1
                if wrapper == "fsdp2":
                    side.set_requires_gradient_sync(is_last)
                with contextlib.nullcontext() if is_last or wrapper == "fsdp2" else side.no_sync():
                    loss_of(side, batch).backward()
        if max_norm is not None:
            norm = clip(theirs, max_norm)
            assert abs(stepped.last_norm() - norm) <= 1e-2 * norm
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters()):
            if gradients == "clear" or not p.requires_grad:
                assert p.grad is None, name
            elif p.grad is not None and max_norm is None:
                assert torch.equal(shard_of(p.grad), shard_of(q.grad)), name
        wanted.step()
        stepped.step()
        stepped.wait()
        for one in schedules:
            one.step()
        for o in (stepped, wanted):
            o.zero_grad()
        assert_close(ours, theirs, 32 if dtype == torch.float32 else 4, f"step {step}")
        level(ours, theirs, stepped, wanted)


def unused(rank: int, world: int) -> None:
    """A branch that no rank used does not change. The other parameters of its unit are stepped after backward."""
    torch.manual_seed(2)
    base = Branches()
    ours, theirs = (fully_shard(copy.deepcopy(base), mesh=init_device_mesh("cpu", (world,))) for _ in range(2))
    options = {"lr": 0.1, "weight_decay": 0.1}
    register_fsdp(ours, "adamw", **options)
    wanted = torch.optim.AdamW(theirs.parameters(), **options)
    for step in range(4):
        x = torch.randn(4, 8)
        for side in (ours, theirs):
            side(x, step % 2).pow(2).mean().backward()
        wanted.step()
        for side in (ours, theirs):
            side.zero_grad()
        assert_close(ours, theirs, 16, f"step {step}")
    assert all(torch.equal(p.full_tensor(), q) for p, q in zip(ours.branches[2].parameters(), base.branches[2].parameters()))


def scaler(rank: int, world: int) -> None:
    """An infinite gradient on one rank skips the step on all ranks. The scale stays equal to the reference scaler's
    scale.
    """
    base = make("gpt")
    ours, theirs = shard(copy.deepcopy(base)), shard(copy.deepcopy(base))
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2) for _ in range(2)]
    stepped = register_fsdp(ours, "sgd", lr=0.1, grad_scaler=scalers[0], max_norm=0.5)
    wanted = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for step in range(5):
        batch = base.batch()
        for side, o, s in ((ours, stepped, scalers[0]), (theirs, wanted, scalers[1])):
            loss = loss_of(side, batch)
            s.scale(loss * float("inf") if step == 2 and rank == 1 else loss).backward()
            if o is wanted:
                s.unscale_(o)
                torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
            s.step(o)
            s.update()
            o.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale(), step
        assert_close(ours, theirs, 64, f"step {step}")


def train(model: nn.Module, steps: int, seed: int) -> None:
    """Makes some passes that do not depend on the number of ranks: every rank has the same batch."""
    torch.manual_seed(seed)
    for _ in range(steps):
        loss_of(model, torch.randint(256, (2, 25))).backward()
        model.zero_grad()


def save(rank: int, world: int, folder: str) -> None:
    """Trains, then saves model and optimizer with torch.distributed.checkpoint."""
    model = shard(make("gpt"))
    stepped = register_fsdp(model, "adamw", lr=1e-2)
    train(model, 3, 5)
    dcp.save(
        {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, stepped)}, checkpoint_id=folder
    )


def load(rank: int, world: int, folder: str) -> list[Tensor]:
    """Loads the checkpoint of `save` at any number of ranks, and returns the full states and parameters."""
    model = shard(make("gpt"))
    stepped = register_fsdp(model, "adamw", lr=1e-2)
    saved = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, stepped)}
    dcp.load(saved, checkpoint_id=folder)
    set_model_state_dict(model, saved["model"])
    set_optimizer_state_dict(model, stepped, saved["optimizer"])
    found = [stepped.state[p][name].full_tensor() for p in model.parameters() for name in ("exp_avg", "exp_avg_sq")]
    found += [p.full_tensor().detach() for p in model.parameters()]
    assert int(stepped.state_dict()["state"][0]["step"]) == 3
    train(model, 1, 6)
    assert int(stepped.state_dict()["state"][0]["step"]) == 4
    return [value.cpu() for value in found]


def resume(rank: int, world: int) -> None:
    """Our optimizer resumes from a checkpoint of torch's optimizer, and the reverse, with full and with sharded state
    dicts.
    """
    ours, theirs = shard(make("gpt")), shard(make("gpt"))
    stepped = register_fsdp(ours, "adamw", lr=1e-2)
    wanted = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    for step in range(6):
        batch = torch.randint(256, (2, 25))
        for side in (ours, theirs):
            loss_of(side, batch).backward()
        wanted.step()
        stepped.zero_grad()
        wanted.zero_grad()
        assert_close(ours, theirs, 64, f"step {step}")
        with torch.no_grad():
            for p, q in zip(ours.parameters(), theirs.parameters()):
                shard_of(p).copy_(shard_of(q))
        options = StateDictOptions(full_state_dict=step % 2 == 0)
        if step in (1, 2):
            given = get_optimizer_state_dict(theirs, wanted, options=options)
            set_optimizer_state_dict(ours, stepped, given, options=options)
        if step in (3, 4):
            # torch's optimizers keep the tensors that they load.
            given = tree_map(
                lambda value: value.clone() if isinstance(value, Tensor) else value,
                get_optimizer_state_dict(ours, stepped, options=options),
            )
            set_optimizer_state_dict(theirs, wanted, given, options=options)


def masters(rank: int, world: int) -> None:
    """Masters of bfloat16 shards train like f32 shards. The shards are the rounded masters, and both have the same
    placements.
    """
    base = make("gpt", torch.bfloat16)
    ours, theirs = shard(copy.deepcopy(base)), shard(base.float())
    stepped = register_fsdp(ours, "adamw", lr=1e-2, master="float32", states="float32")
    wanted = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    for step in range(4):
        loss_of(ours, torch.randint(256, (2, 25))).backward()
        with torch.no_grad():
            for p, q in zip(ours.parameters(), theirs.parameters()):
                q.grad = p.grad.float()
        wanted.step()
        for p, q in zip(ours.parameters(), theirs.parameters()):
            master = stepped.state[p]["master"]
            assert master.placements == p.placements
            assert torch.allclose(shard_of(master), shard_of(q), atol=1e-6)
            assert torch.equal(shard_of(p), shard_of(master).bfloat16()), step
        stepped.zero_grad()


def failed_pass(rank: int, world: int) -> None:
    """A backward pass that fails on all ranks has no effect on the next backward pass."""
    ours = shard(nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))))
    theirs = shard(nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))))
    with torch.no_grad():
        for p, q in zip(theirs.parameters(), ours.parameters()):
            shard_of(p).copy_(shard_of(q))
    register_fsdp(ours, "sgd", lr=0.1, max_norm=10.0)
    wanted = torch.optim.SGD(theirs.parameters(), lr=0.1)
    x = torch.ones(2, 4, requires_grad=True)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("on purpose")

    for side in (ours, theirs):
        try:
            side(Fails.apply(x)).sum().backward()
        except RuntimeError as error:
            assert "on purpose" in str(error)
        side.zero_grad()
        side(torch.ones(2, 4)).sum().backward()
    wanted.step()
    assert_close(ours, theirs, 16, "after a failure")


def ordinary(rank: int, world: int, max_norm: Optional[float]) -> None:
    """FusedOptimizer steps DTensors after backward."""
    base = make("resnet")
    ours, theirs = shard(copy.deepcopy(base)), shard(copy.deepcopy(base))
    stepped = FusedOptimizer(ours.parameters(), "adam", max_norm=max_norm, **OPTIONS["adam"])
    wanted = torch.optim.Adam(theirs.parameters(), **OPTIONS["adam"])
    for step in range(4):
        batch = base.batch()
        for side in (ours, theirs):
            loss_of(side, batch).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
        for o in (stepped, wanted):
            o.step()
            o.zero_grad()
        assert_close(ours, theirs, 32, f"step {step}")
        level(ours, theirs, stepped, wanted)


def empty_rank(rank: int, world: int, wrapper: str) -> None:
    """A rank without any part of the trained parameters takes part in the other ranks' decision."""
    base = nn.Sequential(nn.Linear(1, 1, bias=False))
    ours, theirs = ((fully_shard if wrapper == "fsdp2" else wrap)(copy.deepcopy(base)) for _ in range(2))
    stepped = register_fsdp(ours, "sgd", lr=0.1, max_norm=0.01)
    wanted = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for _ in range(3):
        for side in (ours, theirs):
            side(torch.full((2, 1), rank + 1.0)).sum().backward()
        clip(theirs, 0.01)
        wanted.step()
        stepped.zero_grad()
        wanted.zero_grad()
        assert_close(ours, theirs, 16, "empty")


def subset(rank: int, world: int) -> None:
    """Our optimizer steps some parameters. FSDP still reduces the gradients of all other parameters."""
    ours, theirs = shard(make("gpt")), shard(make("gpt"))
    register_fsdp(ours, "sgd", params=list(ours.parameters())[:1], lr=0.1)
    before = [shard_of(p).clone() for p in ours.parameters()]
    batch = torch.randint(256, (2, 25))
    for side in (ours, theirs):
        loss_of(side, batch).backward()
    torch.optim.SGD(list(theirs.parameters())[:1], lr=0.1).step()
    assert_close(ours, theirs, 32, "subset")
    assert [torch.equal(shard_of(p), q) for p, q in zip(ours.parameters(), before)][1:] == [True] * (len(before) - 1)
    assert all(torch.equal(shard_of(p.grad), shard_of(q.grad)) for p, q in zip(ours.parameters(), theirs.parameters()))


def overlapped(rank: int, world: int) -> None:
    """A registered optimizer steps FSDP's shards. PyTorch's own registered optimizer raises NotImplementedError for
    shards.
    """
    ours, theirs = shard(make("gpt")), shard(make("gpt"))
    as_overlapped_optim(torch.optim.AdamW, None, 1e-2, weight_decay=0.1).register_fsdp(ours)
    wanted = torch.optim.AdamW(theirs.parameters(), 1e-2, weight_decay=0.1)
    batch = torch.randint(256, (2, 25))
    for side in (ours, theirs):
        loss_of(side, batch).backward()
    wanted.step()
    assert_close(ours, theirs, 64, "registry")


def copied(rank: int, world: int) -> None:
    """A deep copy of the states is independent of later steps."""
    ours = shard(make("gpt"))
    stepped = register_fsdp(ours, "adamw", lr=1e-2)
    train(ours, 1, 0)
    saved = copy.deepcopy(stepped.state_dict())
    before = [shard_of(p).clone() for p in ours.parameters()]
    train(ours, 1, 1)
    pairs = [(values["exp_avg"], now["exp_avg"]) for values, now in zip(saved["state"].values(), stepped.state.values())]
    assert not any(torch.equal(shard_of(m), shard_of(n)) for m, n in pairs if shard_of(m).numel() > 0)
    after = [shard_of(p).clone() for p in ours.parameters()]
    for p, q in zip(ours.parameters(), before):
        shard_of(p).copy_(q)
    stepped.load_state_dict(saved)
    train(ours, 1, 1)
    assert all(torch.equal(shard_of(p), q) for p, q in zip(ours.parameters(), after))


def misuse(rank: int, world: int) -> None:
    """Each mistake is refused with an error that names it."""

    def refused(error: type, text: str, call: Any, *given: Any, **options: Any) -> None:
        try:
            call(*given, **options)
        except error as raised:
            assert text in str(raised), raised
        else:
            raise AssertionError(f"not refused: {text}")

    sharded = shard(make("gpt"))
    refused(TypeError, "not sharded", register_fsdp, make("gpt"))
    refused(
        ValueError, "not a parameter that this model shards", register_fsdp, sharded, params=[nn.Parameter(torch.ones(2))]
    )
    refused(ValueError, "gradients", register_fsdp, sharded, gradients="sum")
    ignoring = make("gpt")
    kept = next(ignoring.parameters())
    refused(ValueError, "not sharded, so no unit steps it", register_fsdp, fully_shard(ignoring, ignored_params={kept}))
    stepped = register_fsdp(sharded, "adamw", params=list(sharded.layers.parameters()))
    refused(RuntimeError, "another register_fsdp", register_fsdp, sharded, "adamw")
    register_fsdp(sharded, "sgd", params=list(sharded.place.parameters()))
    refused(NotImplementedError, "name all groups", stepped.add_param_group, {"params": [nn.Parameter(torch.ones(2))]})
    refused(NotImplementedError, "holds parts of rows", register_fsdp, wrap(make("gpt")), "adamw", states="8bit")
    refused(NotImplementedError, "use_orig_params", register_fsdp, wrap(make("gpt"), use_orig_params=False))
    whole = wrap(make("gpt"), sharding_strategy=ShardingStrategy.NO_SHARD)
    refused(NotImplementedError, "NO_SHARD", register_fsdp, whole)
    late = wrap(make("gpt"))
    late(torch.randint(256, (2, 24)))
    refused(RuntimeError, "before the first forward", register_fsdp, late)
