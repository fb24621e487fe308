"""Every rank runs these cases. Offloaded training must have the same bits as a training that steps after backward."""

import contextlib
import copy
import functools
import math
import random
import threading
import time
from collections.abc import Callable
from typing import Any, Optional

import hosted
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ddp_cases import Branches
from fsdp_cases import loss_of, shard, shard_of
from models import make
from offload_programs import judge
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from instep.torch import FusedOptimizer, offload, register_fsdp
from instep.torch._offload_engine import Offload
from instep.torch._offload_fsdp import records_of
from instep.torch._offload_simulated import Simulated


def slow(offload: Offload, seed: int) -> None:
    """Delays all work of a worker."""
    draw, take_in, end = random.Random(seed), offload._take_in, offload._end
    offload._take_in = lambda *given: (time.sleep(draw.random() * 0.01), take_in(*given))
    offload._end = lambda *given: (time.sleep(draw.random() * 0.01), end(*given))


def assert_equal(ours: nn.Module, theirs: nn.Module, where: object) -> None:
    """Asserts that every shard has the same bits."""
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters()):
        assert torch.equal(shard_of(p), shard_of(q)), f"{where}: {name}"


def in_fsdp(
    rank: int,
    world: int,
    model: str = "gpt",
    dtype: torch.dtype = torch.float32,
    max_norm: Optional[float] = None,
    scales: bool = False,
    micro_batches: int = 1,
    hsdp: bool = False,
    steps: int = 5,
    policy: Optional[str] = None,
    **options: Any,
) -> None:
    """Trains with ``fully_shard`` and an offload policy. Steps overlap with the next forward pass."""
    base = make(model, dtype)
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")) if hsdp else None
    ours = shard(copy.deepcopy(base), offload=True, mesh=mesh, policy=policy)
    theirs = shard(copy.deepcopy(base), mesh=mesh, policy=policy)
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2) if scales else None for _ in range(2)]
    stepped = offload(ours, "adamw", lr=0.01, max_norm=max_norm, grad_scaler=scalers[0], **options)
    wanted = FusedOptimizer(theirs.parameters(), "adamw", lr=0.01, max_norm=max_norm, **options)
    slow(stepped._offload, rank)
    for step in range(steps):
        batches = [base.batch() for _ in range(micro_batches)]
        losses: list[list[Tensor]] = [[], []]
        for side, seen, scaler in zip((ours, theirs), losses, scalers):
            for micro, batch in enumerate(batches):
                side.set_requires_gradient_sync(micro == micro_batches - 1)
                loss = loss_of(side, batch)
                seen.append(loss.detach())
                loss = loss * float("inf") if scales and step == 2 and rank == world - 1 else loss
                (loss if scaler is None else scaler.scale(loss)).backward()
        assert all(map(torch.equal, *losses)), f"step {step}: {losses}"
        assert all(param.grad is None for param in ours.parameters())
        for optimizer, scaler in zip((stepped, wanted), scalers):
            if scaler is None:
                optimizer.step()
            elif optimizer is wanted:
                found = torch.stack([~shard_of(p.grad).isfinite().all() for p in theirs.parameters()]).any().float()
                dist.all_reduce(found, dist.ReduceOp.MAX)
                for p in theirs.parameters():
                    shard_of(p.grad).mul_(1.0 / scaler._scale)
                if not found:
                    optimizer.step()
                scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {found.device: found}
                scaler.update()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
        assert not scales or scalers[0].get_scale() == scalers[1].get_scale(), step
        assert max_norm is None or scales or stepped.last_norm() == wanted.last_norm()
    stepped.wait()
    assert_equal(ours, theirs, "at the end")
    for p, q in zip(ours.parameters(), theirs.parameters()):
        for name, value in wanted.state[q].items():
            assert torch.equal(shard_of(stepped.state[p][name]), shard_of(value)), name


def in_ddp(
    rank: int,
    world: int,
    model: str = "gpt",
    dtype: torch.dtype = torch.float32,
    max_norm: Optional[float] = None,
    scales: bool = False,
    micro_batches: int = 1,
    unused: bool = False,
    wrapping: Optional[dict[str, Any]] = None,
    late: float = 0.005,
    **options: Any,
) -> None:
    """Trains with DDP. Buckets are copied to the host after their all-reduce."""
    torch.manual_seed(2)
    base = Branches() if unused else make(model, dtype)
    wrapping = {"bucket_cap_mb": 0.02, "find_unused_parameters": unused, **(wrapping or {})}
    ours, theirs = (DistributedDataParallel(copy.deepcopy(base), **wrapping) for _ in range(2))
    kind = next(base.parameters()).device.type
    scalers = [torch.amp.GradScaler(kind, init_scale=64.0, growth_interval=2) if scales else None for _ in range(2)]
    record: list[Any] = []
    options = {"device": Simulated(rank, late, record=record), **options}
    stepped = offload(ours, "adamw", lr=0.01, max_norm=max_norm, grad_scaler=scalers[0], bucket_bytes=20000, **options)
    options.pop("device")
    wanted = FusedOptimizer(theirs.parameters(), "adamw", lr=0.01, max_norm=max_norm, **options)
    for step in range(5):
        batches = [torch.randn(4, 8) if unused else base.batch() for _ in range(micro_batches)]
        losses: list[list[Tensor]] = [[], []]
        for side, seen, scaler in zip((ours, theirs), losses, scalers):
            for micro, batch in enumerate(batches):
                with side.no_sync() if micro < micro_batches - 1 else contextlib.nullcontext():
                    loss = side(batch, step % 2).pow(2).mean() if unused else loss_of(side, batch)
                    seen.append(loss.detach())
                    loss = loss * float("inf") if scales and step == 2 and rank == world - 1 else loss
                    (loss if scaler is None else scaler.scale(loss)).backward()
        assert all(map(torch.equal, *losses)), f"step {step}: {losses}"
        for optimizer, scaler in zip((stepped, wanted), scalers):
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
        assert not scales or scalers[0].get_scale() == scalers[1].get_scale(), step
        assert all(p.grad is None for p in ours.parameters())
    stepped.wait()
    assert_equal(ours, theirs, "at the end")
    judge(record, decides=max_norm is not None or scales)
    stepped.close()


def save(rank: int, world: int, folder: str) -> None:
    """Trains, and saves while steps may still run."""
    model = shard(make("gpt"), offload=True)
    stepped = offload(model, "adamw", lr=0.01, max_norm=0.1)
    slow(stepped._offload, rank)
    torch.manual_seed(5)
    for _ in range(3):
        loss_of(model, torch.randint(256, (2, 25))).backward()
    states = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, stepped)}
    dcp.save(states, checkpoint_id=folder)


def load(rank: int, world: int, folder: str) -> list[Tensor]:
    """Loads the checkpoint of `save` at any number of ranks, and trains. Returns the loaded parameters and states in
    full.
    """
    model = shard(make("gpt"), offload=True)
    stepped = offload(model, "adamw", lr=0.01, max_norm=0.1)
    saved = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, stepped)}
    dcp.load(saved, checkpoint_id=folder)
    set_model_state_dict(model, saved["model"])
    set_optimizer_state_dict(model, stepped, saved["optimizer"])
    torch.manual_seed(6)
    found = [stepped.state[p][name].full_tensor().clone() for p in model.parameters() for name in ("exp_avg", "exp_avg_sq")]
    found += [p.full_tensor().detach().clone() for p in model.parameters()]
    loss_of(model, torch.randint(256, (2, 25))).backward()
    assert int(stepped.state_dict()["state"][0]["step"]) == 4
    return found


def failing(rank: int, world: int) -> None:
    """If a step fails on one rank, that rank raises an error, and no other rank waits for it forever."""
    model = shard(make("gpt"), offload=True)
    stepped = offload(model, "adamw", lr=0.01, max_norm=0.1)
    loss_of(model, torch.randint(256, (2, 25))).backward()
    stepped.wait()
    if rank == 1:

        def fails(*given: Any) -> None:
            raise ValueError("no memory")

        stepped._offload._arrived = fails
    try:
        loss_of(model, torch.randint(256, (2, 25))).backward()
        stepped.wait()
    except RuntimeError as error:
        assert rank == 1 and "no memory" in str(error), error
    else:
        assert rank != 1


def kept_bytes(optimizer: Any) -> int:
    """Returns the bytes of an optimizer's states, scales and masters."""
    runs = []
    for arena in optimizer._engine.arenas:
        runs += [*arena.states.values(), *arena.scales.values(), *([] if arena.master is None else [arena.master])]
    return sum(run.numel() * run.itemsize for run in runs)


class Summed(nn.Module):
    """A module with parameters of these shapes, and with inner modules. The output contains the sum of all parameters,
    so every element has a gradient.
    """

    def __init__(self, shapes: Any, dtype: torch.dtype, inner: Any = ()) -> None:
        super().__init__()
        self.own = nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in shapes)
        self.inner = nn.ModuleList(inner)

    def forward(self, x: Tensor) -> Tensor:
        for one in self.inner:
            x = one(x)
        return x + sum(param.float().sum() for param in self.own)


class Locked:
    """Replaces PyTorch's page-locking, which needs a device driver, and counts the bytes that PyTorch would lock."""

    def __init__(self) -> None:
        self.runs: dict[int, Tensor] = {}

    def __enter__(self) -> "Locked":
        self.real = Tensor.pin_memory, Tensor.is_pinned

        def lock(tensor: Tensor, *_: Any) -> Tensor:
            copied = tensor.clone()
            self.runs[copied.untyped_storage().data_ptr()] = copied
            return copied

        Tensor.pin_memory = lock
        Tensor.is_pinned = lambda tensor, *_: tensor.untyped_storage().data_ptr() in self.runs
        return self

    def __exit__(self, *_: Any) -> None:
        Tensor.pin_memory, Tensor.is_pinned = self.real

    @property
    def bytes(self) -> int:
        return sum(run.numel() * run.itemsize for run in self.runs.values())


def held(
    rank: int, world: int, entries: Any, optimizer: str, dtype: torch.dtype, scales: bool, replicas: int, **options: Any
) -> dict[str, int]:
    """Returns the bytes that a training of offloaded shards allocates before its second pass."""
    repeated = [shapes for repeat, shapes in entries for _ in range(repeat or 0)]
    root = Summed([shape for repeat, shapes in entries if repeat is None for shape in shapes], dtype)
    mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
    mesh = mesh if replicas > 1 else mesh["shard"]
    with Locked() as locked:
        root.inner.extend(Summed(shapes, dtype) for shapes in repeated)
        for module in [*root.inner, root]:
            fully_shard(module, mesh=mesh, offload_policy=CPUOffloadPolicy())
        scaler = torch.amp.GradScaler("cpu") if scales else None
        stepped = offload(root, optimizer, grad_scaler=scaler, **{"gradients": "average", **options})
        found = []
        for _ in range(2):
            loss = root(torch.zeros((), requires_grad=True))
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is not None:
                scaler.step(stepped)
                scaler.update()
            stepped.wait()
            found.append((locked.bytes + stepped._offload.device.page_locked_bytes, kept_bytes(stepped)))
        assert found[0] == found[1] and found[0][0] == stepped.page_locked_bytes()
        grads = [shard_of(param.grad) for param in root.parameters()]
        gradient_bytes = sum(grad.numel() * grad.itemsize for grad in grads)
    return {"page_locked_bytes": found[0][0], "kept_bytes": found[0][1], "gradient_bytes": gradient_bytes}


class Late:
    """Imitates FSDP's event after a copy, for a copy that is still running when FSDP calls the hook. The gradient is
    NaN until a thread has waited for the event.
    """

    def __init__(self, grad: Tensor) -> None:
        self.grad, self.values = grad, grad.clone()
        grad.fill_(math.nan)

    def synchronize(self) -> None:
        self.grad.copy_(self.values)

    def query(self) -> bool:
        return torch.equal(self.grad, self.values)


def copied_late(rank: int, world: int, beside: Optional[int]) -> None:
    """Steps wait for the copies of gradients to the host, even if unit ``beside`` is not offloaded."""
    torch.manual_seed(3)
    ours = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    theirs = copy.deepcopy(ours)
    policy = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    for number, layer in enumerate(ours):
        fully_shard(layer, **({} if number == beside else policy))
        fully_shard(theirs[number])
    fully_shard(ours, **policy)
    fully_shard(theirs)

    def delay(param: Tensor, record: Any) -> None:
        record.grad_offload_event = Late(shard_of(param.grad))

    late = [record for record in records_of(ours).values() if record.offload_to_cpu]
    assert len(late) == (6 if beside is None else 4)
    for record in late:
        record.sharded_param.register_post_accumulate_grad_hook(functools.partial(delay, record=record))
    stepped = (offload if beside is None else register_fsdp)(ours, "adamw", lr=0.01)
    wanted = FusedOptimizer(theirs.parameters(), "adamw", lr=0.01)
    for step in range(3):
        x = torch.randn(4, 6)
        for side in (ours, theirs):
            side(x).pow(2).sum().backward()
        wanted.step()
        stepped.wait()
        assert_equal(ours, theirs, step)
        for side in (stepped, wanted):
            side.zero_grad()
    if beside is None:
        end(ours, stepped)


def end(ours: nn.Module, stepped: Any) -> None:
    """After `close`, backward raises. Other calls, such as `state_dict` and `zero_grad`, still work."""

    class Closing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            with pytest.raises(RuntimeError, match=r"close\(\) inside backward"):
                stepped.close()
            return grad

    ours(Closing.apply(torch.randn(4, 6, requires_grad=True))).sum().backward()
    stepped.close()
    with pytest.raises(RuntimeError, match="closed, so nothing steps this gradient"):
        ours(torch.randn(4, 6)).sum().backward()
    stepped.close()
    assert stepped.state_dict()["state"]
    ours.state_dict()
    stepped.zero_grad(set_to_none=False)
    stepped.last_norm()


def beside_the_trainer(rank: int, world: int, scales: bool, **options: Any) -> None:
    """Backward returns before the last step of its pass ends, also with a clip and a scaler."""
    base = make("gpt", torch.float32)
    ours = shard(base, offload=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if scales else None
    stepped = offload(ours, "adamw", lr=0.01, grad_scaler=scaler, **options)
    has_returned, seen, end = threading.Event(), [], stepped._offload._end

    def wait_and_end(*given: Any) -> None:
        seen.append(has_returned.wait(60))
        end(*given)

    stepped._offload._end = wait_and_end
    loss = loss_of(ours, base.batch())
    (loss if scaler is None else scaler.scale(loss)).backward()
    has_returned.set()
    stepped.wait()
    assert seen == [True]


def note_reads(model: nn.Module) -> dict[str, Tensor]:
    """Records the values that each module reads in a forward pass, by name. Call this after all other hooks are
    registered.
    """
    reads: dict[str, Tensor] = {}

    def note(module: nn.Module, _: Any, prefix: str) -> None:
        for name, param in module._parameters.items():
            if param is not None:
                reads[f"{prefix}.{name}".lstrip(".")] = param.detach().clone()

    for prefix, module in model.named_modules():
        module.register_forward_pre_hook(lambda module, given, prefix=prefix: note(module, given, prefix))
    return reads


def step_beside(
    model: nn.Module,
    stepped: Any,
    twins: dict[str, Any],
    wanted: Any,
    given: dict[str, list[Tensor]],
    loss: Callable[[], Tensor],
) -> None:
    """Trains, and steps reference copies of the parameters with the same gradients. In forward passes and after steps,
    the parameters must have the same bits as the copies.
    """
    reads = note_reads(model)
    for step in range(6):
        loss().backward()
        stepped.step()
        assert twins.keys() <= reads.keys()
        for name, twin in twins.items():
            full = twin.full_tensor() if isinstance(twin, DTensor) else twin
            assert torch.equal(reads[name].cpu(), full), f"step {step}: {name} in forward"
        for name, twin in twins.items():
            twin.grad = given[name].pop()
        wanted.step()
        if step % 2:  # Otherwise the next forward pass is all that waits.
            stepped.wait()
            for name, param in model.named_parameters():
                assert torch.equal(shard_of(param).detach().cpu(), shard_of(twins[name])), f"step {step}: {name}"


def on_device(rank: int, world: int, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    """The parameters of a plain module have the same bits as copies that are stepped on the host with the same
    gradients.
    """
    model = make("gpt", dtype)
    formats = {name: options.pop(name) for name in ("states", "master") if name in options}
    given: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda param, name=name: given[name].append(param.grad.cpu()))
    stepped = offload(model, "adamw", lr=0.01, bucket_bytes=20000, **formats, **options)
    twins = {name: nn.Parameter(param.detach().cpu().clone()) for name, param in model.named_parameters()}
    wanted = FusedOptimizer(twins.values(), "adamw", lr=0.01, max_norm=options.get("max_norm"), **formats)
    step_beside(model, stepped, twins, wanted, given, lambda: model.loss(model.batch()))
    assert options.get("max_norm") is None or stepped.last_norm() == wanted.last_norm()
    stepped.close()


def fsdp_on_device(rank: int, world: int, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    """Shards that FSDP offloads have the same bits as copies that are stepped after backward with the same gradients.
    With a GPU, the shards are page-locked.
    """
    base = make("gpt", dtype)
    kind = next(base.parameters()).device.type
    policy = CPUOffloadPolicy(pin_memory=kind == "cuda")
    model = shard(base, mesh=init_device_mesh(kind, (world,)), offload_policy=policy)
    formats = {name: options.pop(name) for name in ("states", "master") if name in options}
    on_host = init_device_mesh("cpu", (world,))
    given: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}

    def note(param: Tensor, name: str) -> None:
        if kind == "cuda":
            torch.cuda.synchronize()  # Versions of PyTorch differ in when the copy has ended.
        given[name].append(twin_of(param, param.grad))

    def twin_of(param: Any, values: Tensor) -> Tensor:
        local = shard_of(values).clone()
        whole = {"shape": param.shape, "stride": param.stride(), "run_check": False}
        return DTensor.from_local(local, on_host, param.placements, **whole)

    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda param, name=name: note(param, name))
    stepped = offload(model, "adamw", lr=0.01, **formats, **options)
    twins = {name: nn.Parameter(twin_of(param, param)) for name, param in model.named_parameters()}
    wanted = FusedOptimizer(twins.values(), "adamw", lr=0.01, max_norm=options.get("max_norm"), **formats)
    step_beside(model, stepped, twins, wanted, given, lambda: loss_of(model, base.batch().to(kind)))
    assert options.get("max_norm") is None or stepped.last_norm() == wanted.last_norm()
    assert (stepped.page_locked_bytes() > 0) == (kind == "cuda")


def on_hosted(rank: int, world: int, **options: Any) -> None:
    """`on_device` also works on the device "hosted", for which PyTorch runs backward on a thread other than the
    trainer's.
    """
    hosted.register()
    with torch.device("hosted"):
        threads: set[int] = set()
        param = nn.Parameter(torch.ones(3))
        param.register_post_accumulate_grad_hook(lambda _: threads.add(threading.get_ident()))
        param.sum().backward()
        assert len(threads) == 1 and threading.get_ident() not in threads
        record: list[Any] = []
        on_device(rank, world, device=Simulated(1, 0.02, record=record), **options)
    judge(record, decides="max_norm" in options)
    assert {what for what, _ in record} >= {"down ends", "step ends", "up ends", "read"}
