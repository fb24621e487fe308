"""Every rank runs these trainings with 8-bit states and stochastic rounding. The resulting bits must not depend on the
mesh.

Only rank 0 has gradients, and sums are not divided, so sums are exact at any number of ranks.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from instep.torch import FusedOptimizer, register_fsdp

STEPS = 4
OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 0.01},
    "adam": {"lr": 0.01, "amsgrad": True},
    "sgd": {"lr": 0.05, "momentum": 0.9},
    "lion": {"lr": 0.01},
    "rmsprop": {"lr": 0.01, "momentum": 0.9},
}


def made(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Returns layers with rows of 300, 256, 896 and 70 elements. Biases and rows of 70 elements have float32 states.
    The last layer has three rows, so one of four ranks has no row of it.
    """
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(300, 256), nn.Linear(256, 896), nn.Linear(896, 70), nn.Linear(70, 3))
    return layers.to(dtype)


def sharded(model: nn.Module, hsdp: bool = False) -> nn.Module:
    """Applies FSDP2 to each layer. With ``hsdp``, each shard has two replicas."""
    world = dist.get_world_size()
    shape = (2, world // 2) if hsdp else (world,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    return summed(model, mesh)


def summed(model: nn.Module, mesh: Any) -> nn.Module:
    """Applies FSDP2 to each layer and to the model; gradients are sums over ranks."""
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def backward(model: nn.Module, rank: int, step: int) -> None:
    """Makes a backward pass whose gradients come from rank 0."""
    torch.manual_seed(step)
    dtype = next(model.parameters()).dtype
    (model(torch.randn(4, 300, dtype=dtype)).float().pow(2).sum() * (rank == 0)).backward()


def full(value: Tensor) -> Tensor:
    """Returns the full tensor. A conversion is needed, because gloo cannot send unsigned 16-bit integers."""
    if not isinstance(value, DTensor):
        return value
    if value.dtype == torch.uint16:
        local, spread = value.to_local().view(torch.int16).int(), (value.device_mesh, value.placements)
        value = DTensor.from_local(local, *spread, run_check=False, shape=value.shape, stride=value.stride())
    return value.full_tensor()


def digest(model: nn.Module, stepped: Any) -> str:
    """Returns a hash of parameters and states."""
    found = hashlib.sha256()
    for param in model.parameters():
        for name, value in [("", param.detach()), *sorted(stepped.state[param].items())]:
            found.update(name.encode() + full(value).reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def trained(rank: int, world: int, key: str, dtype: torch.dtype, hsdp: bool = False, **formats: Any) -> str:
    """Returns the hash after some passes."""
    model = sharded(made(dtype), hsdp)
    stepped = register_fsdp(model, key, **OPTIONS[key], **formats)
    for step in range(STEPS):
        backward(model, rank, step)
        model.zero_grad()
    if formats.get("states") == "8bit":
        words = {value.dtype for param in model.parameters() for value in stepped.state[param].values()}
        assert {torch.uint8, torch.float32} <= words, words
    return digest(model, stepped)


class Beside(nn.ModuleList):
    """Layers beside each other. The output's derivative with respect to an element is one product, which is exact on
    any mesh.
    """

    def forward(self, given: list[tuple[Tensor, Tensor]]) -> Tensor:
        return sum((layer(x) * factors).sum() for layer, (x, factors) in zip(self, given))


def on_two_dimensions(style: Any, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    """Returns layers under tensor parallelism and FSDP2, and their mesh of 2 x 2 ranks or of one rank.

    The number of rows of most layers is not a multiple of four, and one rank has no row of the last layer.
    """
    side = 2 if dist.get_world_size() == 4 else 1
    mesh = init_device_mesh("cpu", (side, side), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(3)
    model = Beside(nn.Linear(*size) for size in [(300, 6), (256, 8), (40, 5), (130, 7), (200, 3)]).to(dtype)
    for layer in model:
        parallelize_module(layer, mesh["tp"], style())
    return summed(model, mesh["dp"]), mesh


def trained_by_rows(rank: int, world: int, key: str, dtype: torch.dtype, **formats: Any) -> str:
    """Returns the hash after some passes under FSDP2 over tensor parallelism that shards weights by rows."""
    model, mesh = on_two_dimensions(ColwiseParallel, dtype)
    assert world == 1 or all(isinstance(param.placements[0], _StridedShard) for param in model.parameters())
    stepped = register_fsdp(model, key, **OPTIONS[key], **formats)
    for step in range(STEPS):
        torch.manual_seed(step)
        given = []
        for layer in model:
            x, factors = torch.randn(1, layer.in_features, dtype=dtype), torch.randn(1, layer.out_features, dtype=dtype)
            given.append((x, factors.chunk(mesh["tp"].size(), 1)[mesh["tp"].get_local_rank()]))
        (model(given) * (mesh["dp"].get_local_rank() == 0)).backward()
        model.zero_grad()
    return digest(model, stepped)


def refused_cuts(rank: int, world: int) -> None:
    """Shardings that would change the bits are refused, and the error names the sharding: parts of rows with 8-bit
    states, and non-consecutive rows with stochastic rounding.
    """

    def refusal(make: Any) -> str:
        try:
            make()
        except NotImplementedError as error:
            return str(error)
        return "nothing"

    model, _ = on_two_dimensions(RowwiseParallel, torch.bfloat16)
    assert "holds parts of rows" in refusal(lambda: register_fsdp(model, "adamw", states="8bit", seed=5))
    register_fsdp(model, "adamw", seed=5)
    mesh = init_device_mesh("cpu", (2, 2))
    for placements in ([_StridedShard(0, split_factor=2), Replicate()], [Shard(0), _StridedShard(0, split_factor=2)]):
        for dtype, formats in [(torch.float32, {"states": "8bit", "seed": 5}), (torch.bfloat16, {"seed": 5})]:
            sharded = [nn.Parameter(distribute_tensor(torch.ones(8, 256, dtype=dtype), mesh, placements))]
            found = refusal(lambda: FusedOptimizer(sharded, "adamw", **formats))
            assert "rows that are not neighbours" in found, (placements, found)
        FusedOptimizer(sharded, "adamw", states="8bit")


def stepped_after(rank: int, world: int, key: str, dtype: torch.dtype, hsdp: bool = False, **formats: Any) -> str:
    """Returns the hash after some steps of ``FusedOptimizer`` over DTensors with given gradients."""
    mesh = init_device_mesh("cpu", (2, world // 2) if hsdp else (world,))
    placements = [Replicate(), Shard(0)] if hsdp else [Shard(0)]
    torch.manual_seed(4)
    whole_params = [torch.randn(shape).to(dtype) for shape in [(7, 300), (3, 4, 64), (300,), (5, 256), (2, 130)]]
    params = [nn.Parameter(distribute_tensor(value, mesh, placements)) for value in whole_params]
    stepped = FusedOptimizer(params, key, **OPTIONS[key], **formats)
    for _ in range(STEPS):
        for param in params:
            param.grad = distribute_tensor(torch.randn(param.shape).to(dtype), mesh, placements)
        stepped.step()
    model = nn.ParameterList(params)
    return digest(model, stepped)


def resumed(rank: int, world: int, key: str, dtype: torch.dtype, first: int, last: int, folder: str, ends: bool) -> str:
    """Loads the states of an earlier call if there is one, trains some passes, and saves unless it is the last call."""
    model = sharded(made(dtype))
    stepped = register_fsdp(model, key, **OPTIONS[key], states="8bit", seed=5)

    def state() -> dict[str, Any]:
        return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, stepped)}

    if first > 0:
        saved = state()
        dcp.load(saved, checkpoint_id=f"{folder}/{first}")
        set_model_state_dict(model, saved["model"])
        set_optimizer_state_dict(model, stepped, saved["optimizer"])
    for step in range(first, last):
        backward(model, rank, step)
        model.zero_grad()
    if not ends:
        dcp.save(state(), checkpoint_id=f"{folder}/{last}")
    return digest(model, stepped)


def other_blocks(rank: int, world: int) -> None:
    """Saved states of parameters that were not sharded are loaded into sharded parameters. If rows are multiples of a
    block, training continues with the same bits. Otherwise the scales are refused with an error that names them.
    """
    mesh = init_device_mesh("cpu", (world,))
    for row, fits in ((256, True), (300, False)):
        plain = [nn.Parameter(torch.ones(rows, row)) for rows in (4, 3)]
        optimizer = FusedOptimizer(plain, "adamw", lr=0.1, states="8bit", seed=5)
        for param in plain:
            param.grad = torch.arange(1.0 * param.numel()).view_as(param)
        optimizer.step()
        sharded = [nn.Parameter(distribute_tensor(param.detach().clone(), mesh, [Shard(0)])) for param in plain]
        other = FusedOptimizer(sharded, "adamw", lr=0.1, states="8bit", seed=5)
        if not fits:
            try:
                other.load_state_dict(optimizer.state_dict())
            except ValueError as error:
                assert "its blocks are (4, 2)" in str(error), error
                continue
            raise AssertionError("taken")
        other.load_state_dict(optimizer.state_dict())
        for param, full_param in zip(sharded, plain):
            param.grad = distribute_tensor(full_param.grad, mesh, [Shard(0)])
        optimizer.step()
        other.step()
        for param, full_param in zip(sharded, plain):
            assert torch.equal(full(param.detach()), full_param.detach())
            for name in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(full(other.state[param][name]), optimizer.state[full_param][name]), name
