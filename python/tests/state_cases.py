"""Cases of FusedOptimizer inside torch.distributed's wrappers of optimizers, for `test_distributed_states`."""

import copy
import io
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import instep
from instep.torch import (
    FusedOptimizer,
    apply_optimizer_in_backward,
    get_in_backward_optimizers,
    offload,
    register_ddp,
    register_fsdp,
)

TORCH = {name.lower(): getattr(torch.optim, name) for name in dir(torch.optim) if name[0].isupper()}


def model() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))


def give(param: Tensor, number: int, k: int) -> None:
    """Gives every parameter a gradient that depends only on the step and the parameter, sharded as the parameter is."""
    grad = torch.linspace(-1, 1, param.numel()).view(param.shape) * (0.5 + k - 0.3 * number)
    param.grad = distribute_tensor(grad, param.device_mesh, param.placements) if hasattr(param, "placements") else grad


def train(net: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for number in numbers:
        for k, param in enumerate(net.parameters()):
            give(param, number, k)
        optimizer.step()


def full(value: Tensor) -> Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach()


def assert_alike(net: nn.Module, other: nn.Module) -> None:
    for p, q in zip(net.parameters(), other.parameters()):
        torch.testing.assert_close(full(p), full(q), rtol=1e-5, atol=2e-6)


def make(side: str, params: Any, key: str, options: dict[str, Any]) -> torch.optim.Optimizer:
    return FusedOptimizer(params, key, **options) if side == "ours" else TORCH[key](params, foreach=False, **options)


def zero(rank: int, world: int, key: str, options: dict[str, Any], resumes: bool) -> None:
    """ZeRO assigns whole parameters to ranks. A consolidated state dict is loaded into a new optimizer."""
    ours, theirs = model(), model()
    optimizer = ZeroRedundancyOptimizer(ours.parameters(), FusedOptimizer, optimizer=key, **options)
    wanted = TORCH[key](theirs.parameters(), foreach=False, **options)
    train(ours, optimizer, range(3))
    train(theirs, wanted, range(3))
    assert_alike(ours, theirs)
    if resumes:
        optimizer.consolidate_state_dict(to=0)
        saved = [optimizer.state_dict() if rank == 0 else None]
        dist.broadcast_object_list(saved)
        optimizer = ZeroRedundancyOptimizer(ours.parameters(), FusedOptimizer, optimizer=key, **options)
        optimizer.load_state_dict(copy.deepcopy(saved[0]))
        # Torch's own optimizer of this name takes it, too.
        twin = model()
        for p, q in zip(twin.parameters(), theirs.parameters()):
            p.data.copy_(q.data)
        other = ZeroRedundancyOptimizer(twin.parameters(), TORCH[key], **options)
        other.load_state_dict(copy.deepcopy(saved[0]))
        train(twin, other, range(3, 6))
    train(ours, optimizer, range(3, 6))
    train(theirs, wanted, range(3, 6))
    assert_alike(ours, theirs)
    if resumes:
        assert_alike(twin, theirs)
    for state in optimizer.optim.state.values():
        assert float(state.get("step", 6)) == 6


def local_sgd(rank: int, world: int, key: str, options: dict[str, Any]) -> None:
    """Each rank steps separately, and parameters are averaged from time to time. The training is saved and resumed."""
    nets, optimizers = [model(), model()], []
    for side, net in zip(("ours", "theirs"), nets):
        inner = make(side, net.parameters(), key, options)
        optimizers.append(PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=2, warmup_steps=1)))
    for number in range(8):
        for net, optimizer in zip(nets, optimizers):
            train(net, optimizer, range(number + rank, number + rank + 1))
        assert_alike(*nets)
        if number == 4:
            saved = copy.deepcopy(optimizers[0].state_dict())
            inner = make("ours", nets[0].parameters(), key, options)
            optimizers[0] = PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=2, warmup_steps=1))
            optimizers[0].load_state_dict(saved)


def checkpoint(
    rank: int, world: int, key: str, options: dict[str, Any], side: str, numbers: tuple[int, int], load: Any, save: Any
) -> list[Tensor]:
    """Resumes from a checkpoint with the optimizer of one side, and writes another checkpoint. Returns the parameters."""
    net = model()
    if world > 1:
        fully_shard(net)
    params = list(net.parameters())
    optimizer = make(side, [{"params": params[:1], "lr": 0.05}, {"params": params[1:]}], key, options)
    if load is not None:
        model_state, optimizer_state = get_state_dict(net, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=load)
        set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        assert [group["lr"] for group in optimizer.param_groups] == [0.05, options["lr"]]
    train(net, optimizer, range(*numbers))
    model_state, optimizer_state = get_state_dict(net, optimizer)
    for state in optimizer_state["state"].values():
        assert float(state.get("step", numbers[1])) == numbers[1]
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=save)
    return [full(param) for param in net.parameters()]


class Scaled(nn.Module):
    """The input is a number, which is the gradient of every element of both parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(6, 2))

    def forward(self, scale: Tensor) -> Tensor:
        return self.first.sum() * scale + self.second.sum() * scale


def entered(
    entry: str, key: str, options: dict[str, Any], dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """Returns a model whose parameters are stepped by one of the four entries."""
    net = Scaled().to(dtype)
    if entry == "after":
        return net, [FusedOptimizer(net.parameters(), key, **options)]
    if entry == "named":
        return net, [getattr(instep.torch, instep.OPTIMIZERS[key].name)(net.parameters(), **options)]
    if entry == "offload":
        return net, [offload(net, key, **options)]
    if entry == "fsdp1":
        wrapped = FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"))
        return wrapped, [register_fsdp(wrapped, key, **options)]
    if entry == "ddp":
        ddp = DistributedDataParallel(net)
        return ddp, [register_ddp(ddp, key, **options)]
    if entry == "fsdp":
        fully_shard(net)
        return net, [register_fsdp(net, key, **options)]
    apply_optimizer_in_backward(key, net.parameters(), options)
    return net, get_in_backward_optimizers(net)


def entries(rank: int, world: int, entry: str, key: str) -> None:
    """Every entry uses states that a user puts into ``state`` or writes in place, as torch does."""
    options = {"lr": 0.1}
    net, optimizers = entered(entry, key, options)
    other = Scaled()
    wanted = TORCH[key](other.parameters(), foreach=False, **options)
    state = {param: held for one in optimizers for param, held in one.state.items()}
    assert not state or key == "adagrad"

    def owner(param: Tensor) -> torch.optim.Optimizer:
        return next(one for one in optimizers for group in one.param_groups for p in group["params"] if p is param)

    def sharded(value: Any, param: Tensor) -> Any:
        is_shard = hasattr(param, "placements") and isinstance(value, Tensor) and value.dim() > 0
        return distribute_tensor(value, param.device_mesh, param.placements) if is_shard else copy.deepcopy(value)

    def both(change: Any) -> None:
        for mine, his in zip(net.parameters(), other.parameters()):
            change(owner(mine).state, mine)
            change(wanted.state, his)

    def step(scale: float) -> None:
        net(torch.tensor(scale)).backward()
        for one in optimizers if entry == "after" else ():
            one.step()
        other(torch.tensor(scale)).backward()
        wanted.step()
        net.zero_grad()
        wanted.zero_grad()
        for mine, his in zip(net.parameters(), other.parameters()):
            torch.testing.assert_close(full(mine), his.detach(), rtol=1e-5, atol=2e-6)
            held = owner(mine).state[mine]
            assert float(held["step"]) == float(wanted.state[his]["step"])
            for name, value in wanted.state[his].items():
                torch.testing.assert_close(full(held[name]), value, rtol=1e-5, atol=2e-6, check_dtype=False)

    # Before the first step.
    maker = Scaled()
    source = TORCH[key](maker.parameters(), foreach=False, **options)
    for _ in range(5):
        maker(torch.tensor(0.5)).backward()
        source.step()
        source.zero_grad()
    for mine, his, given in zip(net.parameters(), other.parameters(), maker.parameters()):
        owner(mine).state[mine] = {name: sharded(value, mine) for name, value in source.state[given].items()}
        wanted.state[his] = copy.deepcopy(source.state[given])
    step(0.0)
    for number in range(3):
        step(1.0 - number)
    # A dict of his own with equal values, then a write in place, then a tensor in the place of another.
    both(lambda state, param: state.update({param: {name: value.clone() for name, value in state[param].items()}}))
    step(0.25)
    both(lambda state, param: state[param]["step"].fill_(20))
    step(-0.5)
    both(lambda state, param: state[param].update(step=torch.tensor(40.0)))
    step(0.75)


def issue(rank: int, world: int, entry: str) -> None:
    """Adam continues from a given state: a count of 5 and moments of 1 and 4. The gradient is 0."""
    net, optimizers = entered(entry, "adam", {"lr": 0.1})
    for one in optimizers:
        for param in [p for group in one.param_groups for p in group["params"]]:
            one.state[param] = {"step": 5, "exp_avg": torch.ones_like(param), "exp_avg_sq": torch.full_like(param, 4.0)}
    net(torch.tensor(0.0)).backward()
    for one in optimizers if entry == "after" else ():
        one.step()
    for param in net.parameters():
        torch.testing.assert_close(full(param), torch.full(param.shape, 0.9926), rtol=0, atol=5e-5)
    assert all(held["step"] == 6 for one in optimizers for held in one.state.values())


def first_sums(rank: int, world: int, entry: str) -> None:
    """Adagrad's sums exist before the first step. If a user writes 4 into a sum, a gradient of 1 makes the sum 5."""
    net, optimizers = entered(entry, "adagrad", {"lr": 0.1})
    for one in optimizers:
        one.load_state_dict(copy.deepcopy(one.state_dict()))  # From now on, they lie in the memory that steps write.
    for held in [held for one in optimizers for held in one.state.values()]:
        held["sum"].fill_(4.0)
    for number, value in ((1, 1 - 0.1 / 5**0.5), (2, 1 - 0.1 / 5**0.5 - 0.1 / 6**0.5)):
        pass_over(net, optimizers, entry, 1.0)
        for param in net.parameters():
            torch.testing.assert_close(full(param), torch.full(param.shape, value))
        assert all(held["step"] == number for one in optimizers for held in one.state.values() if held["sum"].numel() > 0)


def masters_of(optimizers: list[Any]) -> list[Tensor]:
    """Copies this rank's parts of all masters."""
    masters = [held["master"] for one in optimizers for held in one.state.values() if "master" in held]
    return [part.float() for part in (getattr(one, "_local_tensor", one) for one in masters) if part.numel() > 0]


def other_weights(rank: int, world: int, entry: str, master: str) -> None:
    """If loaded, replaced or rebuilt states have masters of other weights, the user's weights do not change."""
    for key in instep.OPTIMIZERS:
        if key == "lamb" and entry.startswith("fsdp"):
            continue
        options = {"lr": 0.1, "master": master, "weight_decay": 0.0}
        if "weight_decay" not in instep.OPTIMIZERS[key].defaults:
            del options["weight_decay"]
        net, optimizers = entered(entry, key, options, torch.bfloat16)
        for number in range(3):
            pass_over(net, optimizers, entry, 0.3 + number)
        masters = masters_of(optimizers)

        def write(value: float, net: nn.Module, optimizers: list[Any]) -> None:
            with torch.no_grad():
                for param in net.parameters():
                    param.fill_(value)
            for group in [group for one in optimizers for group in one.param_groups]:
                group["lr"] = 0.0

        def stays(value: float, net: nn.Module, optimizers: list[Any]) -> None:
            pass_over(net, optimizers, entry, 0.0)
            for param in net.parameters():
                assert torch.equal(full(param), torch.full(param.shape, value, dtype=torch.bfloat16)), (key, value, param)

        saved = [copy.deepcopy(one.state_dict()) for one in optimizers]
        again, others = entered(entry, key, options, torch.bfloat16)
        write(5.0, again, others)
        for one, state in zip(others, saved):
            one.load_state_dict(state)
        write(5.0, again, others)
        stays(5.0, again, others)
        # States that go on are those of the user's weights now: new objects, and new memory.
        write(3.0, again, others)
        for one in others:
            for param in list(one.state):
                one.state[param] = {name: value.clone() for name, value in one.state[param].items()}
        stays(3.0, again, others)
        flag = next((name for name in ("amsgrad", "centered") if name in instep.OPTIMIZERS[key].defaults), None)
        write(2.0, again, others)
        for one in others if flag is not None else ():
            one.param_groups[0][flag] = True
        stays(2.0, again, others)
        # Masters whose weights are still there keep their bits.
        same, third = entered(entry, key, options, torch.bfloat16)
        with torch.no_grad():
            for param, source in zip(same.parameters(), net.parameters()):
                param.copy_(source)
        for one, state in zip(third, saved):
            one.load_state_dict(state)
            one.param_groups[0]["lr"] = 0.0
        pass_over(same, third, entry, 0.0)
        found = masters_of(third)
        assert len(found) == len(masters) and all(map(torch.equal, found, masters)), (key, found, masters)


def pass_over(net: nn.Module, optimizers: list[Any], entry: str, scale: float) -> None:
    """Makes a backward pass and its step."""
    net(torch.tensor(scale)).backward()
    for one in optimizers if entry in ("after", "named") else ():
        one.step()
    if entry == "offload":
        optimizers[0].wait()
    net.zero_grad()


def shown(rank: int, world: int, entry: str) -> None:
    """At every entry, states behave as in torch. They are current, have their own memory, are visible to hooks, and
    leave a user's own entries in place.
    """
    for key in instep.OPTIMIZERS:
        if key == "lamb" and entry.startswith("fsdp"):
            continue
        net, optimizers = entered(entry, key, {"lr": 0.1})
        for number in range(3):
            pass_over(net, optimizers, entry, 1.0 - number)
            for one in optimizers:
                one.state["epoch"] = number
                saved = one.state_dict()["state"]
                assert saved.pop("epoch") == number
                held = {param: entries for param, entries in one.state.items() if param != "epoch"}
                assert len(saved) == len(held) and (key != "sgd" or not held), (key, saved, held)
                for entries in (entries for param, entries in held.items() if param.numel() > 0):  # FSDP1 has empty shards.
                    assert entries["step"] == number + 1 and entries["step"].dtype == torch.float32, (key, entries)
                    assert any(all(state[name] is value for name, value in entries.items()) for state in saved.values())
                    stream = io.BytesIO()
                    torch.save(entries, stream)
                    assert len(stream.getvalue()) < 8000, (key, len(stream.getvalue()))
        _, others = entered(entry, key, {"lr": 0.1})
        for one, other in zip(optimizers, others):
            seen: list[Any] = []
            other.register_load_state_dict_post_hook(lambda who, seen=seen: seen.extend(dict(who.state).items()))
            other.load_state_dict(one.state_dict())
            assert ("epoch", 2) in seen and len(seen) == len(one.state), (key, seen)
            assert all(held["step"] == 3 for param, held in seen if param != "epoch" and param.numel() > 0), (key, seen)
