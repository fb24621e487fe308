"""Steps FSDP2's shards on the host: FSDP's units are the buckets, and FSDP makes the copies.

FSDP itself copies gradients to the host. PyTorch 2.15 waits for the end of this copy before it calls a parameter's
hook. Some older versions call the hook before the copy has ended, so the step waits for FSDP's own event. FSDP reads
parameters only in `FSDPParamGroup.unshard`, so `unshard` waits for steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ._backward import BackwardOptimizer
from ._norm import GlobalNorm
from ._offload_bucket import Bucket, Decider
from ._offload_device import ALIGNMENT, Cuda, Device, place_of_scale
from ._offload_engine import Offload
from ._offload_simulated import Simulated
from ._wrapped import OfOneModel


class Shards(Offload):
    """The engine over shards in host memory."""

    records: dict[int, Any]
    """FSDP's own records, by parameter."""

    def send_shards(self, params: Sequence[Tensor], present: Sequence[Tensor]) -> None:
        """Sends the gradients of a unit. The parameters in ``present`` have gradients, and the unit's other parameters
        have none.
        """
        bucket, _ = self.place_of[id(params[0])]
        known = set(map(id, present))
        grads = [param.grad if id(param) in known else None for param in bucket.params]
        self.send(bucket, grads, copied(self.records, present))

    def page_locked_bytes(self) -> int:
        """The size in bytes of FSDP's page-locked shards, with padding, and of a loss scale."""
        locked = [param._sharded_param_data for param in self.records.values() if param.pin_memory]
        return (0 if self.scale is None else ALIGNMENT) + sum(shard.numel() * shard.itemsize for shard in locked)


class Copied:
    """The event that FSDP records after it copies a gradient to the host."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()

    def is_done(self) -> bool:
        return bool(self.event.query())


def copied(records: dict[int, Any], params: Sequence[Tensor]) -> list[Copied]:
    """The events that FSDP records after it copies the gradients of these parameters to the host. Copies for which FSDP
    has already waited have no event.
    """
    events = (getattr(records.get(id(param)), "grad_offload_event", None) for param in params)
    return [Copied(event) for event in events if event is not None]


def records_of(model: nn.Module) -> dict[int, Any]:
    """FSDP's records of a model's parameters, by parameter."""
    return {id(record.sharded_param): record for group in groups_of(model) for record in group.fsdp_params}


def groups_of(model: nn.Module) -> Iterator[Any]:
    """FSDP's groups of parameters. FSDP unshards the parameters of a group together."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            one = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            yield from (group for group in one if group is not None)


def is_offloaded(model: nn.Module) -> bool:
    """Whether a ``CPUOffloadPolicy`` puts all shards on the host."""
    if not isinstance(model, FSDPModule):
        return False
    records = records_of(model).values()
    return bool(records) and all(record.offload_to_cpu for record in records)


def offload_shards(
    optimizer: BackwardOptimizer,
    model: nn.Module,
    units: Sequence[list[Tensor]],
    norm: Optional[GlobalNorm],
    spread: Sequence[Any],
    numa: bool,
) -> Shards:
    """Makes the engine of an optimizer. FSDP then waits for the engine's steps before it reads shards. The decision's
    norm covers the shards on all ranks of ``spread``.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    buckets = [Bucket(index, params) for index, params in enumerate(reversed([params for params in units if params]))]
    decider = None
    if norm is not None:
        decider = Decider(optimizer._max_norm, optimizer._skip_nonfinite, lambda: norm, spread)
    [one, *_] = [group.device for group in groups_of(model)]
    device: Device = Cuda(one, numa) if one.type == "cuda" else Simulated()
    scale = None if optimizer._scaler is None else place_of_scale(device)
    offload = Shards(lambda: optimizer._engine, device, buckets, names, decider, None, scale)
    offload.records = records_of(model)
    for group in groups_of(model):
        group.unshard = gated(group.unshard, functools.partial(_wait_for, offload, list(group.fsdp_params)))

    def settle(*_: Any) -> None:
        if not offload.is_open:
            offload.wait()

    for module in model.modules():
        module.register_state_dict_pre_hook(OfOneModel(settle))
        module.register_load_state_dict_pre_hook(OfOneModel(settle))
    return offload


def gated(call: Callable[..., Any], wait: Callable[[], None]) -> Callable[..., Any]:
    """Returns a function that calls ``wait``, then ``call``."""

    @functools.wraps(call)
    def waits(*given: Any, **named: Any) -> Any:
        wait()
        return call(*given, **named)

    return waits


def _wait_for(offload: Offload, params: Sequence[Any]) -> None:
    places = [offload.place_of.get(id(param.sharded_param)) for param in params]
    offload.gate({id(place[0]): place[0] for place in places if place is not None}.values())


def norm_beside(spread: Sequence[Any]) -> GlobalNorm:
    """A norm on the host. The norm's all-reduces use separate process groups, so that they overlap with the trainer's
    collectives.
    """
    groups = dict.fromkeys(group for holders in spread for group, _ in holders)
    own: dict[Any, Any] = {
        group: dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)
        for group in groups
    }
    return GlobalNorm(torch.device("cpu"), own)
