"""Cases of FusedOptimizer in what torch.distributed puts around an optimizer, for `test_distributed_states`."""

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.tensor import distribute_tensor

from instep.torch import FusedOptimizer

TORCH = {name.lower(): getattr(torch.optim, name) for name in dir(torch.optim) if name[0].isupper()}


def model() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))


def give(param: Tensor, number: int, k: int) -> None:
    """A gradient that depends on the step and the parameter alone, cut as the parameter is."""
    grad = torch.linspace(-1, 1, param.numel()).view(param.shape) * (0.5 + k - 0.3 * number)
    param.grad = distribute_tensor(grad, param.device_mesh, param.placements) if hasattr(param, "placements") else grad


def train(net: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for number in numbers:
        for k, param in enumerate(net.parameters()):
            give(param, number, k)
        optimizer.step()


def whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach()


def assert_alike(net: nn.Module, other: nn.Module) -> None:
    for p, q in zip(net.parameters(), other.parameters()):
        torch.testing.assert_close(whole(p), whole(q), rtol=1e-5, atol=2e-6)


def make(side: str, params: Any, key: str, options: dict[str, Any]) -> torch.optim.Optimizer:
    return FusedOptimizer(params, key, **options) if side == "ours" else TORCH[key](params, foreach=False, **options)


def zero(rank: int, world: int, key: str, options: dict[str, Any], resumes: bool) -> None:
    """Parameters are spread over ranks as whole tensors; a consolidated state dict is loaded into a new optimizer."""
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
    """Ranks step by themselves, and their parameters are averaged from time to time; it is saved and goes on."""
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
    """Goes on from a checkpoint, with one side's optimizer, and writes another one. Returns the parameters."""
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
    return [whole(param) for param in net.parameters()]
