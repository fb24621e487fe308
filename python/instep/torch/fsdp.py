"""FSDP with the optimizer fused into the reduction of its units.

FSDP reduces the gradients of a unit during backward, and gives each rank its shards. Once all shards of a unit have
arrived, one launch on a separate stream steps them. The next unit's reduction therefore does not wait for the step. A
clip, a gradient scaler or ``skip_nonfinite`` needs the norm of all shards first. With any of them, all units are
stepped together.
PyTorch's own `register_fsdp` raises NotImplementedError. This module therefore uses other interfaces of PyTorch:
post-accumulate-grad hooks (FSDP2) and in-backward optimizers (FSDP1).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from typing import Any, Optional, Union

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from ._backward import BackwardOptimizer
from ._engine import Batch, Engine, Prepared
from ._later import Agreement, Member
from ._norm import GlobalNorm
from ._offload_fsdp import Shards, copied, is_offloaded, norm_beside, offload_shards, records_of
from ._offload_waiting import Waiting, budget
from ._outermost import Outermost
from ._running import ATTACHED, claim, refuse_attached, refuse_claimed
from ._sharded import Holders, is_distributed, shard_of
from ._stepped import SteppedGradients
from ._wrapped import Wrapped, before_backward, before_forward, of_one_that_lives
from .ddp import frozen_in
from .optimizer import address

GRADIENTS = ("average", "clear")


def register_fsdp(
    module: nn.Module,
    optimizer: Union[str, type] = "adamw",
    *,
    params: Optional[Iterable[Any]] = None,
    max_norm: Optional[float] = None,
    gradients: str = "average",
    grad_scaler: Optional[torch.amp.GradScaler] = None,
    skip_nonfinite: bool = False,
    numa: bool = True,
    **options: Any,
) -> FSDPOptimizer:
    """Steps a sharded model's parameters inside its backward pass, each unit as soon as its gradients are reduced.

    Call this function once, after `fully_shard` or ``FullyShardedDataParallel`` and before the first forward pass.
    ``backward()`` then updates the shards. With ``CPUOffloadPolicy``, steps overlap with the next forward pass, unless
    a scaler needs the gradients (``gradients="average"``). The forward pass waits for each unit's step before it uses
    the unit. Call ``wait()`` before other code reads shards. The returned optimizer is for schedulers, scalers and
    checkpoints. Its ``step`` only checks: it raises if gradients have changed after backward.

    Arguments:
        module: the root module to which `fully_shard` (FSDP2) was applied, or a ``FullyShardedDataParallel`` module (FSDP1)
            with ``use_orig_params=True``.
        params: the parameters to step, or param groups of them; None for all, an empty list for none.
        max_norm: clips by the exact global norm over all ranks' shards. All units are then stepped together.
        gradients: the content of ``.grad`` after backward. ``"average"`` is the shard that FSDP has reduced.
            ``"clear"`` is None, which frees the gradient's memory as soon as its unit is stepped. With a scaler,
            ``"clear"`` is allowed only if all units have a ``CPUOffloadPolicy``.
        grad_scaler: a scaler. The step divides gradients by the scaler's scale. The step of all shards on all ranks is
            skipped if one gradient is infinite or NaN. Still call ``scaler.step(optimizer)`` and ``scaler.update()``.
        skip_nonfinite: skips the step of all shards on all ranks if one gradient is infinite or NaN.
        numa: with ``CPUOffloadPolicy``, whether the steps' threads stay on the cores near the GPU.
        options: hyperparameters and options of `FusedOptimizer`.

    """
    if not isinstance(module, (FSDPModule, FullyShardedDataParallel)):
        if any(isinstance(inner, (FSDPModule, FullyShardedDataParallel)) for inner in module.modules()):
            raise TypeError(
                f"{type(module).__name__}: modules inside it are sharded, but not itself; call fully_shard on it too, last"
            )
        raise TypeError(f"{type(module).__name__}: not sharded; call fully_shard on it first")
    if grad_scaler is not None and gradients != "average" and not is_offloaded(module):
        raise ValueError("gradients: the scaler looks for infinities in them after backward; use 'average' with it")
    if gradients not in GRADIENTS:
        raise ValueError(f"gradients = {gradients!r}: not known; use one of {', '.join(GRADIENTS)}")
    return FSDPOptimizer(module, optimizer, params, max_norm, gradients, grad_scaler, skip_nonfinite, numa, options)


class Unit:
    """The parameters that FSDP reduces together."""

    def __init__(self, params: list[Tensor], holders: Optional[Holders], members: list[Member]) -> None:
        self.params, self.holders, self.members = params, holders, members
        self.arrived: list[Tensor] = []

    @property
    def is_complete(self) -> bool:
        """Whether all gradients have arrived. FSDP1 reports only parameters of which this rank has a part."""
        return len(self.arrived) == sum(param.numel() > 0 or is_distributed(param) for param in self.params)


class FSDPOptimizer(Waiting, BackwardOptimizer):
    """The optimizer that `register_fsdp` makes."""

    _made_by = "register_fsdp"
    _offload: Optional[Shards] = None

    def __init__(
        self,
        module: nn.Module,
        optimizer: Union[str, type],
        params: Optional[Iterable[Any]],
        max_norm: Optional[float],
        gradients: str,
        grad_scaler: Optional[torch.amp.GradScaler],
        skip_nonfinite: bool,
        numa: bool,
        options: dict[str, Any],
    ) -> None:
        self._clears = gradients == "clear"
        self._decide_by(max_norm, grad_scaler, skip_nonfinite)
        self._guard = threading.RLock()
        self._units = units_of(module)
        self._unit_of = {param: unit for unit in self._units for param in unit.params}
        # In the model's order, because torch's state dicts number parameters in this order. Units have another order.
        chosen = [p for p in module.parameters() if p in self._unit_of] if params is None else list(params)
        self._refuse_whole(module, params is None)
        self._records = records_of(module)
        self._is_beside = is_offloaded(module)
        if self._is_beside:
            options = {"threads": budget(), **options}
        super().__init__(chosen or [{"params": []}], optimizer, max_norm=max_norm, **options)
        self._own = {param for group in self.param_groups for param in group["params"]}
        self._refuse_others()
        refuse_claimed(self._own)
        refuse_attached(self._own)
        for unit in self._units:
            unit.params = [param for param in unit.params if param in self._own]
        own = [param for unit in self._units for param in unit.params]
        self._backward, self._has_begun = Outermost(self._end), False
        self._failure: Optional[Exception] = None
        self._measured: list[tuple[Batch, Prepared]] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._spread = list(dict.fromkeys(map(self._holders_of, own)))
        self._agreement = Agreement(member for unit in self._units for member in unit.members)
        self._stepped = SteppedGradients(own)
        self._hooks = {param: watch(param, self._arrive) for param in own}
        if self._is_beside:
            norm = self._pass_norm() if self._decides else None
            self._offload = offload_shards(self, module, [unit.params for unit in self._units], norm, self._spread, numa)
        self._wrapped = Wrapped(module, own, frozen_in(module) if params is None else [])
        before_forward(module, self._follow_conversions)
        self._may_hold_nothing = any(unit.holders is not None for unit in self._units)
        before_backward(module, self._open)
        claim(self)

    def _new_engine(self) -> Engine:
        # If a step runs beside the trainer's work, OpenMP's threads would spin on autograd's cores after it.
        return Engine(self._key, self._formats, threads=self._threads, team=(lambda: 0) if self._is_beside else None)

    def _new_norm(self, device: torch.device) -> GlobalNorm:
        return norm_beside(self._spread) if self._is_beside else super()._new_norm(device)

    def _refuse_others(self) -> None:
        others = self._own - self._unit_of.keys()
        if any(not param.requires_grad for param in others):
            raise ValueError(
                "params: one of them takes no gradient, so backward cannot step it; leave it out, or unfreeze it first"
            )
        if others:
            raise ValueError("params: one of them is not a parameter that this model shards; step it by another optimizer")

    def _follow_conversions(self) -> None:
        """Moves the hooks before a forward pass, if torch has moved parameters to other tensors."""
        self._backward.forget()
        converted = self._wrapped.converted()
        if any(not is_distributed(param) for _, param in converted):
            self._wrapped.refuse_converted()  # FSDP1 trains its own memory, and these tensors are no longer views of it.
        for _, param in converted:
            self._hooks[param].remove()
            self._hooks[param] = watch(param, self._arrive)
        self._wrapped.follow()
        self._wrapped.refuse_unfrozen("unfreeze it before register_fsdp")

    def _refuse_whole(self, module: nn.Module, is_for_all: bool) -> None:
        """Refuses parameters that FSDP ignores, because they would silently never be stepped."""
        if not is_for_all:
            return
        for name, param in module.named_parameters():
            if param.requires_grad and param not in self._unit_of:
                raise ValueError(f"{name}: not sharded, so no unit steps it; give params= without it, and step it yourself")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Always raises, because the units are fixed when `register_fsdp` is called."""
        if hasattr(self, "_backward"):
            raise NotImplementedError("param group: units are known when register_fsdp is called; name all groups in params=")
        super().add_param_group(param_group)

    def _holders_of(self, param: Tensor) -> Holders:
        unit = self._unit_of.get(param)
        return super()._holders_of(param) if unit is None or unit.holders is None else unit.holders

    def _open(self, _: Tensor) -> None:
        with self._guard:
            self._stepped.warn_if_kept()
            if not self._backward.is_open:
                self._has_begun = False
                self._backward.open()
            if self._may_hold_nothing:
                # If FSDP1 gave this rank no part of any used parameter, the rank still takes part in the decision.
                self._begin()

    @torch.no_grad()
    def _arrive(self, param: Tensor) -> None:
        """Receives a parameter after its shard is reduced. The current stream is then the reduction's stream."""
        with self._guard:
            self._begin()
            unit = self._unit_of[param]
            if any(param is other for other in unit.arrived):
                self._fail(
                    RuntimeError(
                        "parameter: reduced twice in one backward, and its first gradient is stepped with; "
                        "call set_requires_gradient_sync(False) for all but the last"
                    )
                )
                return
            unit.arrived.append(param)
            if unit.is_complete:
                self._try(self._complete, unit)

    def _begin(self) -> None:
        """Opens a pass at its first gradient. Drops the remaining gradients of a failed earlier pass."""
        if self._has_begun and self._backward.is_open:
            return
        self._backward.open()
        for unit in self._units:
            unit.arrived.clear()
        self._measured.clear()
        self._failure = None
        scale = None
        if self._decides:
            scale = None if self._scaler is None else self._scaler._get_scale_async()
            if self._offload is None:
                self._pass_norm().begin((1, 1.0, address(scale), 0))
        self._opt_called = True  # torch's schedulers read this attribute.
        self._has_begun = True
        if self._offload is not None:
            self._try(self._offload.prepare)
        self._try(self._follow)
        if self._offload is not None:
            self._try(self._adopt, [param for unit in self._units for param in unit.params])
            if not self._offload.is_closed:
                self._offload.begin((1, 1.0), scale)

    def _follow(self) -> None:
        self._agreement.read()
        self._stepped.read()
        self._follow_states()

    def _try(self, call: Callable[..., object], *given: Any) -> None:
        """Calls a task, unless the pass has failed. Backward raises the task's error only after the collectives for
        which other ranks wait.
        """
        if self._failure is not None:
            return
        try:
            call(*given)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error

    def _pass_norm(self) -> GlobalNorm:
        return self._norm({shard_of(param).device for unit in self._units for param in unit.params})

    def _complete(self, unit: Unit) -> None:
        params = [param for param in unit.params if any(param is other for other in unit.arrived)]
        if self._offload is not None:
            self._offload.send_shards(unit.params, params)
            if self._clears:
                for param in params:
                    param.grad = None
            return
        for event in copied(self._records, params):  # of units with a CPUOffloadPolicy, if other units have none
            event.wait()
        self._adopt(params)
        for batch in self._engine.route(params).batches([param.grad for param in params]):
            with self._stream_on(batch.arena.device):
                for grad in batch.grads:
                    if isinstance(grad, Tensor) and batch.arena.device.type == "cuda":
                        shard_of(grad).record_stream(torch.cuda.current_stream(batch.arena.device))
                if self._decides:
                    self._measured.append((batch, self._pass_norm().add(self._engine, batch)))
                else:
                    self._engine.step(batch)
        if self._clears and not self._decides:
            for param in params:
                param.grad = None

    def _stream_on(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Returns a context for the optimizer's stream. On a GPU, that stream first waits for the current stream."""
        if device.type != "cuda":
            return contextlib.nullcontext()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        self._streams[device].wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(self._streams[device])

    def page_locked_bytes(self) -> int:
        """The bytes of page-locked memory that ``CPUOffloadPolicy`` and a scaler need: shards with padding, and a loss
        scale.

        PyTorch's allocator of page-locked memory rounds each shard up to a power of two. The figure does not include
        this rounding.
        """
        return 0 if self._offload is None else self._offload.page_locked_bytes()

    @torch.no_grad()
    def _end(self) -> None:
        """Runs after backward and FSDP's own callback. Steps the remaining units, or sends them to the worker if steps
        run on the host. Makes the caller's stream wait for all steps on the device.
        """
        with self._guard:
            if not self._has_begun:
                return
            self._has_begun = False
            self._agreement.ask(self._in_common)
            has_stepped = any(unit.arrived for unit in self._units)
            for unit in self._units:
                if unit.arrived and not unit.is_complete:
                    self._try(self._complete, unit)
                unit.arrived.clear()
            if self._offload is not None:
                if self._offload.is_open:
                    self._offload.end(drops=self._failure is not None)
                if self._scaler is not None and not self._clears:
                    self._try(self._offload.wait)  # The scaler writes gradients, which steps read.
            elif self._decides:
                self._decide()
            for device, stream in self._streams.items():
                torch.cuda.current_stream(device).wait_stream(stream)
            if has_stepped:  # The note runs after FSDP1 has put the gradients in their final memory.
                Variable._execution_engine.queue_callback(self._stepped.note)
            if self._failure is not None:
                raise self._failure

    def _decide(self) -> None:
        measured, self._measured = self._measured, []
        norm = self._pass_norm()
        with self._stream_on(norm.device):
            decided = norm.decide(self._max_norm, self._skip_nonfinite, self._spread)
            for batch, prepared in measured if self._failure is None else []:
                self._engine.step_decided(batch, prepared, decided)
        if self._clears:
            for batch, _ in measured:
                for index in batch.indices:
                    batch.arena.params[index].grad = None


class Arrival:
    """An object that FSDP1 uses as the optimizer of one parameter."""

    def __init__(self, param: Tensor, arrive: Callable[[Tensor], None]) -> None:
        self.param, self.arrive = param, arrive

    def step(self) -> None:
        """Reports that the parameter's gradient is reduced."""
        self.arrive(self.param)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing, so the gradient stays until the unit is stepped."""


def watch(param: Tensor, arrive: Callable[[Tensor], None]) -> Any:
    """Makes torch call ``arrive`` for each reduced gradient of a parameter. Returns a handle that removes the hook."""
    if is_distributed(param):
        return param.register_post_accumulate_grad_hook(of_one_that_lives(arrive))
    arrival = Arrival(param, arrive)
    setattr(param, ATTACHED, [arrival])
    return arrival


def units_of(root: nn.Module) -> list[Unit]:
    """The trainable parameters of each sharded module, without the parameters of sharded modules inside it."""
    units: list[Unit] = []
    seen: set[Tensor] = set()

    def visit(module: nn.Module, unit: Optional[Unit]) -> None:
        if isinstance(module, FullyShardedDataParallel):
            unit = Unit([], holders_in(module), members_in(module))
            units.append(unit)
        elif isinstance(module, FSDPModule):
            unit = Unit([], None, [])
            units.append(unit)
        for child in module.children():
            visit(child, unit)
        for param in module.parameters(recurse=False):
            is_ours = unit is not None and (unit.holders is not None or is_distributed(param))
            if unit is not None and is_ours and param.requires_grad and param not in seen:
                seen.add(param)
                unit.params.append(param)
                if unit.holders is None:
                    unit.members.extend(members_of(param.device_mesh))  # type: ignore[attr-defined]  # of DTensor

    visit(root, None)
    return [unit for unit in units if unit.params]


def holders_in(module: FullyShardedDataParallel) -> Holders:
    """The ranks over which FSDP1 shards a module's parameters."""
    from torch.distributed.fsdp import ShardingStrategy

    if not module._use_orig_params:
        raise NotImplementedError("use_orig_params=False: parameters cannot be told apart; build the model with True")
    if module._is_root is not None:
        raise RuntimeError("FullyShardedDataParallel: has run already; call register_fsdp before the first forward pass")
    if module.sharding_strategy == ShardingStrategy.NO_SHARD:
        raise NotImplementedError(
            "NO_SHARD: nothing is sharded, and FSDP tells no optimizer of a gradient; use DDP and register_ddp"
        )
    if module._fsdp_extension is not None:
        raise NotImplementedError(
            "FullyShardedDataParallel over tensor parallelism: it does not say who holds the rest; use fully_shard"
        )
    group, device = module.process_group, module.compute_device
    assert group is not None and device is not None, "FSDP1 has both after it has wrapped a module"
    return ((group, device.type),)


def members_in(module: FullyShardedDataParallel) -> list[Member]:
    """The ranks with which FSDP1 trains a module: those that have its shards, and those that have replicas of these
    shards.
    """
    device = module.compute_device or torch.device("cpu")
    groups = [module.process_group, getattr(module, "_inter_node_pg", None)]
    return [(group, device) for group in groups if group is not None]


def members_of(mesh: Any) -> list[Member]:
    """The ranks along each dimension of a mesh."""
    return [(mesh.get_group(dim), torch.device(mesh.device_type)) for dim in range(mesh.ndim)]
