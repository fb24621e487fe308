"""Every rank runs loops that torch accepts, but that would have another effect with this library. The library must
report each such loop.
"""

import contextlib
import copy
import functools
import gc
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Optional

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import instep
from instep.torch import (
    FusedOptimizer,
    apply_optimizer_in_backward,
    functional,
    get_in_backward_optimizers,
    offload,
    register_ddp,
    register_fsdp,
)

SHARDED = [key for key in instep.OPTIMIZERS if not instep.OPTIMIZERS[key].scales_by_norms]
WRAPPERS = ["ddp", "ddp-view", "fsdp2", "fsdp1"]


def raised(call: Callable[[], Any], error: type = RuntimeError) -> str:
    """Returns the text of the error that a call raises, or nothing if it returns."""
    try:
        call()
    except error as text:
        return str(text)
    return ""


def net() -> nn.Module:
    """Returns two linear layers, equal on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def wrap(wrapper: str, model: nn.Module) -> nn.Module:
    """Puts a model into one of the wrappers."""
    if wrapper.startswith("ddp"):
        return DistributedDataParallel(model, gradient_as_bucket_view=wrapper == "ddp-view")
    if wrapper == "fsdp1":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def registered(wrapper: str, key: str = "sgd", model: Optional[nn.Module] = None, **options: Any) -> tuple[nn.Module, Any]:
    """Returns a wrapped model, and the optimizer that steps it inside backward."""
    model = wrap(wrapper, net() if model is None else model)
    return model, (register_ddp if wrapper.startswith("ddp") else register_fsdp)(model, key, **options)


def train(model: nn.Module) -> None:
    """Makes one backward pass."""
    model(torch.ones(2, 4)).pow(2).sum().backward()


def values(model: nn.Module) -> list[Tensor]:
    """Copies this rank's part of all parameters."""
    return [(p.to_local() if isinstance(p, DTensor) else p).detach().clone() for p in model.parameters()]


def zero_one(model: nn.Module) -> None:
    [p for p in model.parameters() if p.grad is not None and p.numel() > 0][0].grad.zero_()


def none_one(model: nn.Module) -> None:
    [p for p in model.parameters() if p.grad is not None][0].grad = None


CHANGES = {
    "clip": lambda model: torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1e-3),
    "clip one by one": lambda model: torch.nn.utils.clip_grad_norm_(
        [p for p in model.parameters() if p.grad is not None], 1e-3, foreach=False
    ),
    "zero": zero_one,
    "none": none_one,
}


def late_change(rank: int, world: int, wrapper: str, change: Optional[str]) -> None:
    """A gradient that changes between backward and `step` is refused; a gradient that is only read is accepted. The
    next pass works.
    """
    keys = SHARDED if wrapper.startswith("fsdp") else list(instep.OPTIMIZERS)
    for key in keys if change == "clip" else keys[:1]:
        model, stepped = registered(wrapper, key)
        for _ in range(2):
            train(model)
            torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None and p.grad.numel() > 0])
            if change is not None:
                CHANGES[change](model)
            text = raised(stepped.step)
            assert ("clip by max_norm=" in text) == (change is not None), (key, text)
            stepped.zero_grad()
            stepped.step()


def late_change_without_step(rank: int, world: int, wrapper: str, change: Optional[str]) -> None:
    """A loop that never calls `step` gets one warning when it clears a clipped gradient. There is no warning for
    gradients that are zero or None, or that `step` has checked.
    """
    keys = SHARDED if wrapper.startswith("fsdp") else list(instep.OPTIMIZERS)
    for key in keys if change == "clip" else keys[:1]:
        model, stepped = registered(wrapper, key)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(3):
                train(model)
                if change == "clear":
                    model.zero_grad(set_to_none=False)
                elif change == "none":
                    model.zero_grad()
                elif change is not None:
                    CHANGES[change](model)
                stepped.zero_grad()
        late = [str(one.message) for one in told if "clip by max_norm=" in str(one.message)]
        assert len(late) == (change is not None and change.startswith("clip")), (key, change, late)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model, stepped = registered(wrapper, key)
            train(model)
            stepped.step()
            if change == "clip":
                CHANGES[change](model)
            stepped.zero_grad()


def closure_change(rank: int, world: int, wrapper: str) -> None:
    """If a closure changes a gradient, as Lightning's clipping does, `step` raises. A closure that clears gradients and
    runs backward is accepted.
    """
    model, stepped = registered(wrapper)

    def closure(clips: bool) -> None:
        stepped.zero_grad()
        train(model)
        if clips:
            CHANGES["clip"](model)

    for _ in range(2):
        stepped.step(lambda: closure(False))
    assert "clip by max_norm=" in raised(lambda: stepped.step(lambda: closure(True)))


def unscaled(rank: int, world: int, wrapper: str) -> None:
    """After a call of the scaler's unscale_, scaler.step raises, because unscale_ divides gradients a second time."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model, stepped = registered(wrapper, lr=0.1, grad_scaler=scaler)
    for is_wrong in (False, True, False):
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        if is_wrong:
            scaler.unscale_(stepped)
        text = raised(lambda: scaler.step(stepped))
        assert ("unscale_ has divided" in text) == is_wrong, text
        scaler.update()
        stepped.zero_grad()


def settings_apart(rank: int, world: int, wrapper: str, key: str = "adamw") -> None:
    """If only one rank changes a rate, all ranks stop in the next pass, and none hangs."""
    if wrapper == "in-backward":
        model = net()
        apply_optimizer_in_backward(key, model.parameters(), {"lr": 0.1})
        model = DistributedDataParallel(model)
        groups = [optimizer.param_groups[0] for optimizer in get_in_backward_optimizers(model)]
    else:
        model, stepped = registered(wrapper, key, lr=0.1)
        groups = stepped.param_groups
    for _ in range(3):
        train(model)
    if rank == 1:
        groups[-1]["lr"] = 0.2
    train(model)
    assert "ranks stepped with different ones" in raised(lambda: train(model))
    groups[-1]["lr"] = 0.2
    assert "ranks stepped with different ones" in raised(lambda: train(model))
    train(model)


def options_apart(rank: int, world: int, wrapper: str) -> None:
    """Ranks also stop if their options differ from the beginning."""
    model, _ = registered(wrapper, max_norm=1.0 + rank)
    train(model)
    assert "ranks stepped with different ones" in raised(lambda: train(model))


def wrong_on_one_rank(rank: int, world: int, wrapper: str, max_norm: Optional[float]) -> None:
    """A rate that is invalid on one rank raises an error there, after the sums that the other ranks wait for."""
    model, stepped = registered(wrapper, lr=0.1, max_norm=max_norm)
    train(model)
    stepped.param_groups[0]["lr"] = -1.0 if rank == 1 else 0.1
    text = raised(lambda: train(model), (ValueError, RuntimeError))
    assert ("lr = -1" in text) == (rank == 1), text


def kept(rank: int, world: int, wrapper: str, clears: bool) -> None:
    """If a loop accumulates gradients although every backward pass makes a step, there is one warning."""
    model, stepped = registered(wrapper)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            output = model(torch.ones(2, 4)).pow(2).sum()
            if clears:
                stepped.zero_grad()  # After forward, as many loops have it.
            output.backward()
    texts = [str(one.message) for one in caught if "accumulate under no_sync()" in str(one.message)]
    assert len(texts) == (0 if clears else 1), texts


def zeros_kept(rank: int, world: int, wrapper: str) -> None:
    """Gradients that are zero need not be cleared, because a backward that adds to zeros does not accumulate. Passes
    without gradient synchronisation also cause no warning.
    """
    model, stepped = registered(wrapper, foreach=True)  # So that torch zeroes a list, and counts no versions of DTensors.
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for step in range(4):
            if wrapper == "fsdp2":
                model.set_requires_gradient_sync(False)
                train(model)
                model.set_requires_gradient_sync(True)
                train(model)
            else:
                with model.no_sync():
                    train(model)
                train(model)
            stepped.zero_grad(set_to_none=wrapper == "fsdp1")


def another(rank: int, world: int, wrapper: str) -> None:
    """A second optimizer over the same parameters is refused when it steps, even if it was made first. A wrapper of our
    own optimizer is accepted.
    """
    model = wrap(wrapper, net())
    first = torch.optim.SGD(model.parameters(), lr=0.1)
    apart = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    stepped = (register_ddp if wrapper.startswith("ddp") else register_fsdp)(model, "sgd", lr=0.1)
    later = FusedOptimizer(model.parameters(), "adamw")
    for _ in range(2):
        train(model)
        before = values(model)
        for other, name in ((first, "SGD"), (later, "FusedOptimizer")):
            text = raised(other.step)
            assert f"{name}: its parameters are stepped inside backward by {type(stepped).__name__}" in text, text
        assert all(torch.equal(a, b) for a, b in zip(before, values(model)))
        apart.step()
        stepped.zero_grad()

    class Outer(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__([nn.Parameter(torch.ones(1))], {})
            self.inner, self.param_groups = inner, inner.param_groups

        def step(self) -> None:
            self.inner.step()

    train(model)
    Outer(stepped).step()


def claimed(rank: int, world: int) -> None:
    """Only one optimizer may step a parameter inside backward; a deleted model releases its parameters."""
    model = net()
    wrapped, stepped = registered("ddp", model=model)
    assert "another register_ddp" in raised(functools.partial(register_ddp, wrapped))
    assert "another register_ddp" in raised(lambda: register_ddp(DistributedDataParallel(model)))
    assert "another register_ddp" in raised(lambda: apply_optimizer_in_backward("sgd", model.parameters(), {}))
    del wrapped, stepped
    registered("ddp", model=model)
    model = net()
    apply_optimizer_in_backward("sgd", model.parameters(), {})
    assert "apply_optimizer_in_backward steps one" in raised(lambda: register_ddp(DistributedDataParallel(model)))
    hooked = DistributedDataParallel(net())
    hooked.register_comm_hook(None, lambda _, bucket: bucket.buffer())
    assert "name it in hook= instead" in raised(lambda: register_ddp(hooked))


def converted(rank: int, world: int, wrapper: str, steps: int) -> None:
    """A model that is converted after its registration is refused before its next forward pass, because nothing would
    be stepped.
    """
    model, _ = registered(wrapper, lr=0.1)
    for _ in range(steps):
        train(model)
    model.to(torch.bfloat16)
    assert "convert first, then wrap and register anew" in raised(lambda: model(torch.ones(2, 4, dtype=torch.bfloat16)))
    if wrapper != "fsdp1":
        with torch.no_grad():  # No backward follows, so nothing would be missed.
            model(torch.ones(2, 4, dtype=torch.bfloat16))


def there_and_back(rank: int, world: int, wrapper: str) -> None:
    """A model that is converted and converted back has also lost its hooks, although its parameters have their old type
    and device.
    """
    model = net()
    if wrapper == "in-backward":
        apply_optimizer_in_backward("sgd", model.parameters(), {"lr": 0.1})
        model = DistributedDataParallel(model)
    elif wrapper == "offload":
        model = DistributedDataParallel(model)
        offload(model, "sgd", lr=0.1)
    else:
        model, _ = registered(wrapper, lr=0.1, model=model)
    train(model)
    for layer in model.module:
        layer.weight.data = layer.weight.data.clone()  # Its hooks are where they were.
    train(model)
    for param in model.parameters():
        param.requires_grad_(False)
    model(torch.ones(2, 4))
    for param in model.parameters():
        param.requires_grad_(True)
    model.to(torch.bfloat16).to(torch.float32)
    assert "0.weight: converted and back" in raised(lambda: model(torch.ones(2, 4)))


def converted_before(rank: int, world: int, entry: str, back: bool) -> None:
    """A model that was converted between wrapping and registration is refused, because DDP's hooks would not run."""
    model = DistributedDataParallel(net())
    model.to(torch.bfloat16)
    if back:
        model.to(torch.float32)
    register = offload if entry == "offload" else register_ddp
    assert "0.weight: converted after it was wrapped" in raised(lambda: register(model, "sgd", lr=0.1))
    model = DistributedDataParallel(net())
    model(torch.ones(2, 4)).sum().backward()  # Its gradients have a graph no longer.
    optimizer = register(model, "sgd", lr=0.1)
    before = values(model)
    model(torch.ones(2, 4)).sum().backward()
    if entry == "offload":
        optimizer.wait()
    assert not torch.equal(before[0], values(model)[0])
    model = net()
    model[0].weight.requires_grad_(False)
    model = DistributedDataParallel(model)
    model.module[0].weight.requires_grad_(True)
    assert "0.weight: converted after it was wrapped, or unfrozen" in raised(lambda: register(model, "sgd", lr=0.1))
    register(model, "sgd", lr=0.1, params=[model.module[1].weight])


def delayed(rank: int, world: int) -> None:
    """DDP may sum some parameters itself at the end of backward. Those parameters are refused, and the others can be
    stepped.
    """
    model = net()
    delayed_ones = [("0.weight", model[0].weight)]
    given = {"delay_all_reduce_named_params": delayed_ones, "param_to_hook_all_reduce": model[0].bias}
    ddp = DistributedDataParallel(model, **given)
    assert "delay_all_reduce_named_params" in raised(lambda: register_ddp(ddp, "sgd", lr=0.1))
    others = [param for param in model.parameters() if param is not model[0].weight]
    register_ddp(ddp, "sgd", lr=0.1, params=others)
    before = values(model)
    ddp(torch.ones(2, 4)).sum().backward()
    assert [torch.equal(one, two) for one, two in zip(before, values(model))] == [True, False, False, False]
    model = net()
    apply_optimizer_in_backward("sgd", model.parameters(), {"lr": 0.1})
    given = {"delay_all_reduce_named_params": [("0.weight", model[0].weight)], "param_to_hook_all_reduce": model[0].bias}
    ddp = DistributedDataParallel(model, **given)
    assert "delay_all_reduce_named_params" in raised(lambda: ddp(torch.ones(2, 4)).sum().backward())


ENTRIES = [*WRAPPERS, "in-backward", "in-backward-ddp", "offload", "offload-ddp", "offload-fsdp"]


def entered(entry: str, model: nn.Module, **options: Any) -> tuple[nn.Module, Any]:
    """Returns a model and the optimizer that steps it inside backward; for per-parameter optimizers, the first of
    them.
    """
    if entry.startswith("in-backward"):
        apply_optimizer_in_backward("adamw", model.parameters(), {"lr": 0.1, **options})
        wrapped = DistributedDataParallel(model) if entry.endswith("ddp") else model
        return wrapped, get_in_backward_optimizers(model)[0]
    if entry.startswith("offload"):
        policy = CPUOffloadPolicy(pin_memory=False)
        wrapped = fully_shard(model, offload_policy=policy) if entry.endswith("fsdp") else model
        wrapped = DistributedDataParallel(model) if entry.endswith("ddp") else wrapped
        return wrapped, offload(wrapped, "adamw", lr=0.1, **options)
    return registered(entry, "adamw", model, lr=0.1, **options)


def freed(rank: int, world: int, entry: str) -> None:
    """A model keeps its optimizer alive until the model is deleted."""
    model, stepped = entered(entry, net())
    train(model)
    seen = weakref.ref(stepped), weakref.ref(stepped._engine)
    before = values(model)
    del stepped
    gc.collect()
    train(model)
    if entry.startswith("offload"):
        seen[0]().wait()
    assert not all(map(torch.equal, before, values(model)))
    del model
    until = time.monotonic() + 20
    # A thread of the process group drops the last pass's futures when it comes to it.
    while any(ref() is not None for ref in seen) and time.monotonic() < until:
        time.sleep(0.01)
        gc.collect()
    assert [ref() for ref in seen] == [None, None]


class Recomputed(nn.Module):
    """Has three layers. Checkpoints recompute the first and the third layer in backward passes inside the outer
    backward pass.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad_(True)
        for number, layer in enumerate(self.layers):
            x = layer(x) if number == 1 else torch.utils.checkpoint.checkpoint(layer, x.tanh(), use_reentrant=True)
        return x


def recomputed(rank: int, world: int, entry: str, max_norm: Optional[float]) -> None:
    """Backward passes inside another pass belong to the same step: there is one clip, and one step per parameter."""
    base = Recomputed()
    alone = copy.deepcopy(base)
    for number, layer in enumerate(base.layers):
        if entry in ("fsdp2", "offload-fsdp"):
            fully_shard(layer, offload_policy=CPUOffloadPolicy(pin_memory=False)) if entry != "fsdp2" else fully_shard(layer)
        elif entry == "fsdp1":
            base.layers[number] = wrap(entry, layer)
    model, stepped = entered(entry, base, **({} if max_norm is None else {"max_norm": max_norm}))
    wanted = torch.optim.AdamW(alone.parameters(), lr=0.1)
    for _ in range(3):
        for side in (model, alone):
            train(side)
        if max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), max_norm)
            torch.testing.assert_close(torch.tensor(stepped.last_norm()), norm.detach())
        wanted.step()
        for side in (model, alone):
            side.zero_grad()
        if entry.startswith("offload"):
            stepped.wait()
        context = FullyShardedDataParallel.summon_full_params(model) if entry == "fsdp1" else contextlib.nullcontext()
        with context:
            for mine, his in zip(base.parameters(), alone.parameters()):
                mine = mine.full_tensor() if isinstance(mine, DTensor) else mine
                torch.testing.assert_close(mine, his, rtol=1e-4, atol=1e-5)


class WithOwn(nn.Module):
    """A module with its own parameter, like a class token, and a child module with a parameter of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.child, self.own = nn.Linear(4, 4, bias=False), nn.Parameter(torch.full((4, 4), 0.5))
        nn.init.constant_(self.child.weight, 0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x * torch.arange(1.0, 5.0)) @ self.own


def in_order(rank: int, world: int, entry: str) -> None:
    """A state dict numbers the parameters as torch does, in the model's order."""
    (model, stepped), other = entered(entry, WithOwn()), WithOwn()
    theirs = wrap({"offload-ddp": "ddp", "offload-fsdp": "fsdp2"}.get(entry, entry), other) if entry != "offload" else other
    wanted = torch.optim.AdamW(theirs.parameters(), lr=0.1)
    train(theirs)
    wanted.step()
    with torch.no_grad():
        for mine, his in zip(model.parameters(), theirs.parameters()):
            mine.copy_(his)
    stepped.load_state_dict(copy.deepcopy(wanted.state_dict()))
    for net_ in (model, theirs):
        net_.zero_grad()
        train(net_)
    wanted.step()
    if entry.startswith("offload"):
        stepped.wait()
    for mine, his in zip(values(model), values(theirs)):
        torch.testing.assert_close(mine, his)


def restrided(rank: int, world: int, wrapper: str, steps: int) -> None:
    """A bucket has the strides that parameters have when the model is wrapped."""
    model = nn.Conv2d(3, 4, 2)
    if wrapper == "in-backward":
        apply_optimizer_in_backward("sgd", model.parameters(), {"lr": 0.1})
        model = DistributedDataParallel(model)
    else:
        model, _ = registered(wrapper, lr=0.1, model=model)
    for _ in range(1 + steps):  # With optimizers in backward DDP asks for a hook in its first pass.
        model(torch.ones(2, 3, 4, 4)).sum().backward()
    before = values(model)
    model.to(memory_format=torch.channels_last)
    assert "weight: has other strides" in raised(lambda: model(torch.ones(2, 3, 4, 4)))
    assert all(map(torch.equal, before, values(model)))
    model.to(memory_format=torch.contiguous_format)
    model(torch.ones(2, 3, 4, 4)).sum().backward()
    assert not torch.equal(before[0], values(model)[0])


def converted_in_backward(rank: int, world: int) -> None:
    """Optimizers in backward refuse changed strides too."""
    model = net()
    apply_optimizer_in_backward("sgd", model.parameters(), {"lr": 0.1})
    model = DistributedDataParallel(model)
    train(model)
    model.to(torch.bfloat16)
    assert "convert first, then wrap and register anew" in raised(lambda: model(torch.ones(2, 4, dtype=torch.bfloat16)))


def moved_shards(rank: int, world: int) -> None:
    """torch swaps sharded parameters when it converts a model. The next backward steps the new parameters, or raises
    an error that says why it cannot.
    """
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    for key in SHARDED:
        model, stepped = registered("fsdp2", key, lr=1.0)
        model.to(torch.bfloat16)
        for _ in range(2):
            with torch.no_grad():
                for param in model.parameters():
                    param.fill_(0.01)  # Small, so that every optimizer's first step shows in 16 bits.
            before = values(model)
            model(x).sum().backward()
            assert not any(torch.equal(a, b) for a, b in zip(before, values(model)) if a.numel()), key
            stepped.zero_grad()
            model.to("cpu")  # Swaps them again, for equal ones.
            model.to_empty(device="cpu")
        model.to(torch.float32)
        assert raised(lambda: train(model))  # FSDP2's own buffers have kept the old type.


def unfrozen(rank: int, world: int, wrapper: str) -> None:
    """If a parameter is unfrozen after wrapping, the next pass raises an error that names the parameter. A frozen
    parameter in ``params`` is refused at registration.
    """
    model = net()
    model[0].weight.requires_grad_(False)
    if wrapper != "fsdp1":  # FSDP1 takes no frozen parameter beside others.
        wrapped, _ = registered(wrapper, model=model)
        train(wrapped)
        frozen = next(wrapped.parameters())
        frozen.requires_grad_(True)
        text = raised(lambda: train(wrapped))
        assert "0.weight: takes a gradient, which it did not" in text, text
        frozen.requires_grad_(False)
        wrapped.zero_grad()
        train(wrapped)
    model = net()
    model[0].requires_grad_(False)
    wrapped = wrap(wrapper, model if wrapper != "fsdp1" else nn.Sequential(wrap("fsdp1", model[0]), wrap("fsdp1", model[1])))
    register = register_ddp if wrapper.startswith("ddp") else register_fsdp
    text = raised(lambda: register(wrapped, "sgd", params=list(wrapped.parameters())), ValueError)
    assert "takes no gradient" in text, text


def copied(rank: int, world: int) -> None:
    """A copy of a model, as for a moving average, has none of the model's hooks."""
    model, stepped = registered("ddp", lr=0.1)
    train(model)
    average = torch.optim.swa_utils.AveragedModel(model.module)
    twin = copy.deepcopy(model)
    twin.module.to(torch.bfloat16)
    twin.module(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    average.update_parameters(model.module)
    stepped.step()


def tensor_parallel(model: nn.Module, mesh: Any) -> nn.Module:
    """Shards two layers over the second dimension of a mesh, and then over the first dimension by FSDP."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"])


class Spread(nn.Module):
    """A module with a weight that is sharded over a mesh. The weight's gradient is the input."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.mesh, self.weight = mesh, nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * distribute_tensor(x, self.mesh, [Shard(0)])).sum()


def norm_over_two_dimensions(rank: int, world: int, entry: str) -> None:
    """Every rank of a 2 x 2 mesh has one element of the gradient (1, 2, 3, 4), and all ranks get the norm 5.477."""
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.tensor([1.0, 2.0, 3.0, 4.0])
    if entry == "register_fsdp":
        model = fully_shard(Spread(mesh["tp"]), mesh=mesh["dp"])
        param = model.weight
        assert any(isinstance(placement, _StridedShard) for placement in param.placements), param.placements
        stepped = register_fsdp(model, "sgd", lr=1.0, max_norm=1.0)
        model(whole).backward()
    else:
        param = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [_StridedShard(0, split_factor=2), Shard(0)]))
        stepped = FusedOptimizer([param], "sgd", lr=1.0, max_norm=1.0)
        param.grad = distribute_tensor(whole, mesh, param.placements)
        stepped.step()
    assert abs(stepped.last_norm() - 30**0.5) < 1e-6, stepped.last_norm()
    assert torch.allclose(param.full_tensor(), -whole / 30**0.5, atol=1e-5), param.full_tensor()


def skipped_over_two_dimensions(rank: int, world: int, scales: bool) -> None:
    """One infinite gradient on one rank of a 2 x 2 mesh skips the step on all ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if scales else None
    model = fully_shard(Spread(mesh["tp"]), mesh=mesh["dp"])
    stepped = register_fsdp(model, "sgd", lr=1.0, skip_nonfinite=not scales, grad_scaler=scaler)
    for last in (4.0, float("inf")):
        before = values(model)
        loss = model(torch.tensor([1.0, 2.0, 3.0, last]))
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.step(stepped)
            scaler.update()
        assert torch.equal(before[0], values(model)[0]) == (last == float("inf")), last
        stepped.zero_grad()
    assert scaler is None or scaler.get_scale() == 2.0


def fsdp_and_tensor_parallel(rank: int, world: int, key: str, max_norm: Optional[float]) -> None:
    """FSDP over tensor parallelism trains to the same values as one process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    alone = net()
    model = tensor_parallel(net(), mesh)
    stepped = register_fsdp(model, key, max_norm=max_norm)
    wanted = FusedOptimizer(alone.parameters(), key, max_norm=max_norm)
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(8, 4)
        for side in (model, alone):
            side(x).pow(2).sum().backward()
        wanted.step()
        if max_norm is not None:
            assert abs(stepped.last_norm() / wanted.last_norm() - 1) < 1e-5, (stepped.last_norm(), wanted.last_norm())
        for side in (stepped, wanted):
            side.zero_grad()
        for p, q in zip(model.parameters(), alone.parameters()):
            assert torch.allclose(p.full_tensor(), q, rtol=1e-4, atol=1e-5), step
            with torch.no_grad():
                q.copy_(p.full_tensor())


def unfit_shards(rank: int, world: int) -> None:
    """If a rank cannot step a parameter with only its own shard, every entry refuses the parameter when the optimizer
    is made.
    """
    from torch.distributed.tensor import Partial
    from torch.testing._internal.two_tensor import TwoTensor

    def refused(text: str, call: Callable[[], Any]) -> None:
        found = raised(call, NotImplementedError)
        assert text in found, found

    columns = init_device_mesh("cpu", (world,))
    sharded = [distribute_tensor(torch.ones(256, 256), columns, [Shard(1)])]
    for key, options, text in [("lamb", {}, "LAMB: scales a change"), ("adamw", {"states": "8bit"}, "holds parts of rows")]:
        for wrapper in ("fsdp2", "fsdp1") if key == "lamb" else ("fsdp1",):
            model = wrap(wrapper, net())
            refused(text, lambda: register_fsdp(model, key, **options))
        shards = list(wrap("fsdp2", net()).parameters()) if key == "lamb" else [nn.Parameter(sharded[0])]
        refused(text, lambda: FusedOptimizer(shards, key, **options))
        refused(text, lambda: apply_optimizer_in_backward(key, shards, options))
        added = FusedOptimizer([nn.Parameter(torch.ones(1))], key, **options)
        refused(text, lambda: added.add_param_group({"params": shards}))
        assert len(added.param_groups) == 1
        if key == "lamb":
            lists = [[shards[0]], [torch.ones_like(shards[0])], *([torch.zeros_like(shards[0])] for _ in range(2))]
            settings = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.0}
            refused("params[0]: without memory of its own", lambda: functional.lamb_(*lists, [torch.zeros(())], **settings))
        # One that comes into a group by itself is refused before anything is stepped.
        beside = nn.Parameter(torch.ones(3))
        replaced = FusedOptimizer([beside, nn.Parameter(torch.ones(4, 4))], key, **options)
        replaced.param_groups[0]["params"][1] = shards[0]
        for param in (beside, shards[0]):
            param.grad = torch.ones_like(param)
        before = shards[0].to_local().detach().clone()
        refused(text, replaced.step)
        assert torch.equal(beside, torch.ones(3)) and torch.equal(shards[0].to_local(), before)
        register_ddp(wrap("ddp", net()), key, **options)
    mesh = init_device_mesh("cpu", (world,))
    plain = TwoTensor(torch.ones(4), torch.ones(4))
    for subclass in (plain, DTensor.from_local(plain, mesh, [Shard(0)], run_check=False)):
        refused("parameter of TwoTensor", lambda: FusedOptimizer([nn.Parameter(subclass)], "sgd"))
    partial = nn.Parameter(DTensor.from_local(torch.ones(4), mesh, [Partial()], run_check=False))
    refused("Partial placement", lambda: FusedOptimizer([partial], "sgd"))


def ddp_over_tensor_parallelism(rank: int, world: int) -> None:
    """DDP does not know the ranks that hold the other shards of a parameter, so a norm over them is refused."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = net()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    _pre_dp_module_transform(model)
    model = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    for register in (register_ddp, offload):
        assert "who holds the rest" in raised(lambda: register(model, max_norm=1.0), NotImplementedError)
    assert "scales a change" in raised(lambda: register_ddp(model, "lamb"), NotImplementedError)


def texts(rank: int, world: int) -> None:
    """A module that is not sharded itself, and shards of a subclass without memory, are refused."""
    inner = net()
    fully_shard(inner[0])
    assert "modules inside it are sharded, but not itself" in raised(lambda: register_fsdp(inner), TypeError)
    assert "not sharded; call fully_shard" in raised(lambda: register_fsdp(net()), TypeError)
