"""Every rank runs these trainings in 8 bits and with stochastic rounding, whose bits must not depend on the mesh.

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
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

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
    """Returns layers with rows of 300, 256 and 896 elements, biases and rows of 70 elements whose states stay in
    float32, and one row fewer than ranks.
    """
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(300, 256), nn.Linear(256, 896), nn.Linear(896, 70), nn.Linear(70, 3))
    return layers.to(dtype)


def sharded(model: nn.Module, hsdp: bool = False) -> nn.Module:
    """Applies FSDP2 to each layer; ``hsdp`` asks for two copies of the shards."""
    world = dist.get_world_size()
    shape = (2, world // 2) if hsdp else (world,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
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


def whole(value: Tensor) -> Tensor:
    """Returns the full tensor; gloo cannot send unsigned 16-bit integers."""
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
            found.update(name.encode() + whole(value).reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
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


def stepped_after(rank: int, world: int, key: str, dtype: torch.dtype, **formats: Any) -> str:
    """Returns the same hash for ``FusedOptimizer`` over DTensors with given gradients."""
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(4)
    whole_params = [torch.randn(shape).to(dtype) for shape in [(7, 300), (3, 4, 64), (300,), (5, 256), (2, 130)]]
    params = [nn.Parameter(distribute_tensor(value, mesh, [Shard(0)])) for value in whole_params]
    stepped = FusedOptimizer(params, key, **OPTIONS[key], **formats)
    for _ in range(STEPS):
        for param in params:
            param.grad = distribute_tensor(torch.randn(param.shape).to(dtype), mesh, [Shard(0)])
        stepped.step()
    model = nn.ParameterList(params)
    return digest(model, stepped)


def resumed(rank: int, world: int, first: int, last: int, folder: str, ends: bool) -> str:
    """Loads the states of an earlier call if there is one, trains some passes, and saves unless it is the last call."""
    model = sharded(made())
    stepped = register_fsdp(model, "adamw", **OPTIONS["adamw"], states="8bit", seed=5)

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
    """Scales of a parameter that is not sharded are accepted if its rows are whole blocks, and refused by name
    otherwise.
    """
    mesh = init_device_mesh("cpu", (world,))
    for row, fits in ((256, True), (300, False)):
        plain = nn.Parameter(torch.ones(4, row))
        optimizer = FusedOptimizer([plain], "adamw", lr=0.1, states="8bit")
        plain.grad = torch.arange(4.0 * row).reshape(4, row)
        optimizer.step()
        cut = nn.Parameter(distribute_tensor(plain.detach().clone(), mesh, [Shard(0)]))
        other = FusedOptimizer([cut], "adamw", lr=0.1, states="8bit")
        if not fits:
            try:
                other.load_state_dict(optimizer.state_dict())
            except ValueError as error:
                assert "its blocks are (4, 2)" in str(error), error
                continue
            raise AssertionError("taken")
        other.load_state_dict(optimizer.state_dict())
        for param, grad in ((plain, plain.grad), (cut, distribute_tensor(plain.grad, mesh, [Shard(0)]))):
            param.grad = grad
        optimizer.step()
        other.step()
        assert torch.equal(whole(cut.detach()), plain.detach())
