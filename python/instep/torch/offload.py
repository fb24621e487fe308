"""Trains with optimizer states and steps on the host, while the device runs forward and backward.

The tensors that are stepped depend on the kind of model. With FSDP, `offload` steps the shards, which are already on
the host. With DDP, it steps buckets after their all-reduce. For a plain module, it steps buckets that it makes itself.
In all three cases, `offload` uses the engine of `_offload_engine.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Optional, Union

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ._backward import BackwardOptimizer
from ._engine import Engine
from ._kinds import is_dense
from ._offload_bucket import Bucket, Decider, laid_out
from ._offload_device import ALIGNMENT, Cuda, Device, aligned, place_of_scale
from ._offload_engine import Offload
from ._offload_fsdp import is_offloaded
from ._offload_gates import Gates
from ._offload_ring import Ring
from ._offload_simulated import Simulated
from ._offload_waiting import Waiting, budget
from ._outermost import Outermost
from ._running import claim, refuse_attached, refuse_claimed
from ._sharded import is_distributed, shard_of
from ._stepped import SteppedGradients
from ._wrapped import Wrapped, before_backward, before_forward, of_one_that_lives
from .ddp import DDPOptimizer, frozen_in
from .fsdp import FSDPOptimizer, register_fsdp

ACCUMULATE = ("device", "host")
BUCKET_BYTES = 25 << 20


def offload(
    module: nn.Module,
    optimizer: Union[str, type] = "adamw",
    *,
    params: Optional[Iterable[Any]] = None,
    max_norm: Optional[float] = None,
    grad_scaler: Optional[torch.amp.GradScaler] = None,
    skip_nonfinite: bool = False,
    accumulate: str = "device",
    bucket_bytes: int = BUCKET_BYTES,
    ring_bytes: Optional[int] = None,
    numa: bool = True,
    device: Optional[Device] = None,
    **options: Any,
) -> Union[OffloadedOptimizer, OffloadedDDPOptimizer, FSDPOptimizer]:
    """Makes an optimizer with its states on the host. Steps run on the host during backward and the next forward pass.

    Call this function once, after the model is on its device and wrapped, and before its first forward pass.
    ``backward()`` copies the gradients to the host, and ``.grad`` is then None. In the next forward pass, each module
    waits for its own parameters. Before other code reads parameters, call ``wait()``. When a state dict is saved or
    loaded, ``wait()`` is called automatically.

    Arguments:
        module: a plain module, a ``DistributedDataParallel``, or a module to which `fully_shard` was applied with a
            ``CPUOffloadPolicy``. For such a sharded module, `offload` calls `register_fsdp`, by default with
            ``gradients="clear"``.
        params: the parameters to step, or param groups of them; None for all parameters that require a gradient.
        max_norm: clips by the exact global norm. Steps then run after backward, beside the next forward pass, in the
            order in which that pass is likely to use the parameters.
        grad_scaler: a scaler. The step divides gradients by the scaler's scale. The step is skipped if one gradient is
            infinite or NaN. Still call ``scaler.step(optimizer)`` and ``scaler.update()``.
        skip_nonfinite: skips the step if one gradient is infinite or NaN.
        accumulate: where `no_sync` adds gradients: on the ``"device"``, or on the ``"host"`` in float32.
        bucket_bytes: the approximate size, in bytes, of the gradients that are copied and stepped together.
        ring_bytes: page-locked memory for gradients that are being copied, at least one bucket. If this memory is full,
            backward waits until the worker frees some of it. By default, this memory holds all gradients. It also does
            with a clip, a scaler or ``skip_nonfinite``, unless ``accumulate="host"``.
        numa: whether the steps' threads stay on the cores near the GPU.
        device: replaces the module's own device. `Simulated` imitates a device by a second memory of the host.
        options: hyperparameters and options of `FusedOptimizer`. ``threads`` is the number of threads of a step. By
            default, steps leave two of the process's cores free.

    """
    if accumulate not in ACCUMULATE:
        raise ValueError(f"accumulate = {accumulate!r}: not known; use one of {', '.join(ACCUMULATE)}")
    if isinstance(module, FSDPModule):
        if not is_offloaded(module):
            raise ValueError(f"{type(module).__name__}: its shards lie on the device; use fully_shard with CPUOffloadPolicy")
        if (accumulate, bucket_bytes, ring_bytes, device) != ("device", BUCKET_BYTES, None, None):
            raise ValueError(
                "accumulate, bucket_bytes, ring_bytes, device: FSDP's units are the buckets, and FSDP copies and adds "
                "their gradients; leave them out"
            )
        return register_fsdp(
            module,
            optimizer,
            params=params,
            max_norm=max_norm,
            grad_scaler=grad_scaler,
            skip_nonfinite=skip_nonfinite,
            numa=numa,
            **{"gradients": "clear", **options},
        )
    if isinstance(module, FullyShardedDataParallel):
        raise NotImplementedError("FullyShardedDataParallel: offload takes fully_shard with CPUOffloadPolicy; use that")
    memory = Memory(bucket_bytes, ring_bytes, accumulate, numa, device)
    if isinstance(module, DistributedDataParallel):
        return OffloadedDDPOptimizer(module, optimizer, params, max_norm, grad_scaler, skip_nonfinite, memory, options)
    return OffloadedOptimizer(module, optimizer, params, max_norm, grad_scaler, skip_nonfinite, memory, options)


class Memory:
    """Options for the memory on the host, and for the device and the threads of the steps."""

    def __init__(
        self,
        bucket_bytes: int,
        ring_bytes: Optional[int] = None,
        accumulate: str = "device",
        numa: bool = True,
        device: Optional[Device] = None,
    ) -> None:
        self.bucket_bytes, self.ring_bytes, self.accumulate, self.numa = bucket_bytes, ring_bytes, accumulate, numa
        self.device = device

    def device_of(self, params: Sequence[Tensor]) -> Device:
        """The device on which these parameters lie."""
        if self.device is not None:
            return self.device
        devices = {param.device for param in params}
        if len(devices) > 1:
            raise NotImplementedError(
                f"params on {len(devices)} devices: offload takes those of one; call it for each model part"
            )
        [one] = devices or {torch.device("cpu")}
        if one.type not in ("cpu", "cuda"):
            raise NotImplementedError(f"parameter on {one}: no copies are known there; use cuda")
        return Simulated() if one.type == "cpu" else Cuda(one, self.numa)

    def split(self, params: Sequence[Tensor]) -> list[list[Tensor]]:
        """Divides parameters into buckets, in the order in which backward is likely to finish their gradients."""
        buckets: list[list[Tensor]] = []
        size = self.bucket_bytes
        for param in reversed(params):
            if size >= self.bucket_bytes:
                buckets.append([])
                size = 0
            buckets[-1].append(param)
            size += param.numel() * param.element_size()
        return buckets


class Mirrored(Waiting):
    """An optimizer of parameters on a device. Its steps run on mirrors, which are copies of the parameters in
    page-locked host memory.
    """

    _offload: Optional[Offload] = None

    def _reset(self) -> None:
        super()._reset()
        self._mirrors: dict[int, Tensor] = getattr(self, "_mirrors", {})

    def _new_engine(self) -> Engine:
        mirrors = self._mirrors

        def held(param: Tensor) -> Tensor:
            mirror = mirrors.get(id(param))
            return shard_of(param) if mirror is None else mirror

        # OpenMP's threads would spin on autograd's cores after every step.
        return Engine(self._key, self._formats, "keep", self._threads, held, lambda: 0)

    def _refuse_dtensors(self, params: Iterable[Tensor]) -> None:
        if any(is_distributed(param) for param in params):
            raise NotImplementedError("parameter of DTensor: offload takes shards of fully_shard with CPUOffloadPolicy alone")

    def _start(self, model: nn.Module, memory: Memory, params: Sequence[Tensor], decides: bool) -> None:
        """Makes the mirrors, the ring and the threads."""
        device = memory.device_of(params)
        names = {id(param): name for name, param in model.named_parameters()}
        self._memory = memory
        buckets = self._buckets(device, memory, params, 0)
        sizes = [bucket.gradient_bytes for bucket in buckets]
        waits = decides and memory.accumulate == "device"
        ring_bytes = sum(sizes) if waits or memory.ring_bytes is None else memory.ring_bytes
        if ring_bytes < max(sizes, default=0):
            raise ValueError(f"ring_bytes = {ring_bytes}: the largest bucket has {max(sizes)}; give at least that")
        decider = None
        if decides:
            host = torch.device("cpu")
            skips = self._skip_nonfinite
            decider = Decider(self._max_norm, skips, lambda: self._norm({host}))
        ring = Ring(device.page_locked(ring_bytes))
        scale = None if self._scaler is None else place_of_scale(device)
        self._offload = Offload(lambda: self._engine, device, buckets, names, decider, ring, scale)
        self._gates = Gates(model, self._offload)
        # At this point, all memory is allocated.
        self._offload.follow()
        self._follow_states()
        self._adopt(self._listed())

    def _buckets(self, device: Device, memory: Memory, params: Sequence[Tensor], first: int) -> list[Bucket]:
        buckets = []
        for index, own in enumerate(memory.split(params), first):
            size = sum(aligned(param.numel() * param.element_size()) for param in own)
            plain = [param.detach() for param in own]
            forms = [one if is_dense(one) else torch.empty_like(one, device="meta") for one in plain]
            views = laid_out(device.page_locked(size), 0, forms, (param.dtype for param in own))
            mirrors = [view.data for view in views]  # Each mirror has its own version.
            for param, mirror in zip(own, mirrors):
                mirror.copy_(param.detach())
                self._mirrors[id(param)] = mirror
            bucket = Bucket(index, own, mirrors)
            if memory.accumulate == "host":
                bucket.sums = [torch.empty_like(one, dtype=torch.float32) for one in mirrors]
            buckets.append(bucket)
        return buckets

    def page_locked_bytes(self) -> int:
        """The bytes of page-locked memory: mirrors of the parameters, the ring, and a loss scale."""
        assert self._offload is not None and self._offload.ring is not None, "it has both once it is made"
        mirrors = (one for bucket in self._offload.buckets for one in bucket.mirrors or ())
        scale = 0 if self._offload.scale is None else ALIGNMENT
        return scale + self._offload.ring.size + sum(aligned(one.numel() * one.element_size()) for one in mirrors)


class OffloadedOptimizer(Mirrored, BackwardOptimizer):
    """The optimizer that `offload` makes for a plain module."""

    _made_by = "offload"

    def __init__(
        self,
        module: nn.Module,
        optimizer: Union[str, type],
        params: Optional[Iterable[Any]],
        max_norm: Optional[float],
        grad_scaler: Optional[torch.amp.GradScaler],
        skip_nonfinite: bool,
        memory: Memory,
        options: dict[str, Any],
    ) -> None:
        trained = [param for param in module.parameters() if param.requires_grad]
        chosen = trained if params is None else list(params)
        super().__init__(chosen or [{"params": []}], optimizer, max_norm=max_norm, **{"threads": budget(), **options})
        self._own = {param for group in self.param_groups for param in group["params"]}
        self._module = module
        self._refuse_others(self._own)
        refuse_claimed(self._own)
        refuse_attached(self._own)
        refuse_sparse(module)
        self._syncs = True
        self._decide_by(max_norm, grad_scaler, skip_nonfinite)
        self._stepped = SteppedGradients(())  # The gradients are freed before anyone could change them.
        own = [param for param in module.parameters() if param in self._own]
        self._start(module, memory, own, self._decides)
        self._with_gradient: list[Tensor] = []
        for param in own:
            param.register_post_accumulate_grad_hook(of_one_that_lives(self._arrive))
        self._wrapped = Wrapped(module, own, frozen_in(module) if params is None else [])
        before_forward(module, self._refuse_unhooked)
        self._backward = Outermost(self._end)
        before_backward(module, self._open)
        claim(self)

    def _refuse_others(self, params: Iterable[Tensor]) -> None:
        known = set(self._module.parameters())
        for param in params:
            if param not in known:
                raise ValueError("params: one of them is not a parameter of this module; step it by another optimizer")
            if not param.requires_grad:
                raise ValueError("params: one of them takes no gradient; leave it out, or unfreeze it first")
        self._refuse_dtensors(params)

    def _refuse_unhooked(self) -> None:
        self._backward.forget()
        self._wrapped.refuse_converted()
        self._wrapped.refuse_unfrozen("add it by add_param_group")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Steps further parameters of the module from the next backward on, and allocates their memory."""
        self.wait()
        super().add_param_group(param_group)
        if self._offload is None:
            return  # The base class also calls this method, to build the optimizer.
        added = self.param_groups[-1]["params"]
        try:
            self._refuse_others(added)
            refuse_claimed(set(added) - self._own)
        except Exception:
            self.param_groups.pop()
            raise
        self._own.update(added)
        core = self._offload
        self._offload = None
        buckets = self._buckets(core.device, self._memory, added, len(core.buckets))
        core.grow(buckets, core.decider is not None and self._memory.accumulate == "device")
        self._offload = core
        self._gates.follow()
        for param in added:
            param.register_post_accumulate_grad_hook(of_one_that_lives(self._arrive))
        self._wrapped = Wrapped(self._module, self._own, [pair for pair in self._wrapped.frozen if pair[1] not in self._own])

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside this context accumulate gradients. The next backward pass outside this context steps
        with the sum.
        """
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def _open(self, _: Tensor) -> None:
        self._drop_failed()
        self._backward.open()

    def _drop_failed(self) -> None:
        """Drops an earlier backward pass that has raised, if no forward pass has dropped it already."""
        core = self._offload
        if core is not None and core.is_open and not self._backward.is_open:
            self._with_gradient.clear()
            core.abandon()

    @torch.no_grad()
    def _arrive(self, param: Tensor) -> None:
        core = self._offload
        assert core is not None, "hooks come after it"
        adds_on_host = self._memory.accumulate == "host"
        if not self._syncs and not adds_on_host:
            return
        self._drop_failed()
        if not core.is_open:
            if core.prepare():
                self._follow_states()
                self._adopt(self._listed())
                core.begin((1, 1.0), None if self._scaler is None else self._scaler._get_scale_async())
                self._opt_called = True  # torch's schedulers read this attribute.
            self._backward.open()
        self._hand_over(param)

    def _hand_over(self, param: Tensor) -> None:
        assert self._offload is not None, "hooks come after it"
        grad, param.grad = param.grad, None
        self._with_gradient.append(param)
        self._offload.take(param, grad, is_last=self._syncs)

    @torch.no_grad()
    def _end(self) -> None:
        assert self._offload is not None, "hooks come after it"
        if not self._offload.is_open:
            return
        if self._syncs and self._memory.accumulate == "device":
            # These parameters were used by an earlier backward, and not by this backward.
            for param in self._own:
                if param.grad is not None:
                    self._hand_over(param)
        seen, self._with_gradient = self._with_gradient, []
        self._offload.end(is_last=self._syncs)
        self._gates.note_pass(seen)


class OffloadedDDPOptimizer(Mirrored, DDPOptimizer):
    """The optimizer that `offload` makes for a ``DistributedDataParallel`` model."""

    _made_by = "offload"

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizer: Union[str, type],
        params: Optional[Iterable[Any]],
        max_norm: Optional[float],
        grad_scaler: Optional[torch.amp.GradScaler],
        skip_nonfinite: bool,
        memory: Memory,
        options: dict[str, Any],
    ) -> None:
        if memory.accumulate != "device":
            raise ValueError("accumulate = 'host': DDP's no_sync adds on the device; use 'device'")
        refuse_sparse(ddp.module)
        hook = options.pop("hook", None)
        options = {"threads": budget(), **options}
        DDPOptimizer.__init__(self, ddp, optimizer, params, max_norm, "sum", grad_scaler, skip_nonfinite, hook, options)
        self._refuse_dtensors(self._own)
        own = [param for param in ddp.module.parameters() if param in self._own]
        self._arrivals = 0
        self._with_gradient: list[Tensor] = []
        self._start(ddp.module, memory, own, self._decides)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Always raises, because host copies are made only for the parameters that the model has when `offload` is called."""
        if self._offload is not None:
            raise NotImplementedError("param group: offload makes its memory at once; name all groups in params=")
        DDPOptimizer.add_param_group(self, param_group)

    def _gradients_of(self, bucket: Any, buffer: Tensor) -> list[Any]:
        return list(bucket.gradients())

    def _begin(self) -> None:
        core = self._offload
        assert core is not None, "hooks come after it"
        with self._guard:
            self._arrivals = 0
            core.prepare()
            super()._begin()
            scale = None if self._scaler is None else self._scaler._get_scale_async()
            core.begin((self._divisor, 1.0), scale)

    @torch.no_grad()
    def _arrive(
        self, params: list[Tensor], grads: list[Any], buffer: Tensor, flags: Optional[Tensor], result: Future[Tensor]
    ) -> None:
        core = self._offload
        assert core is not None, "hooks come after it"
        self._opt_called = True  # torch's schedulers read this attribute.
        others = [grad for param, grad in zip(params, grads) if param not in self._own]
        used = [True] * len(params) if flags is None else [number != 0 for number in flags.tolist()]
        if others and not self._divides_first:
            torch._foreach_div_(others, self._world_size)
        own = [(param, grad if use else None) for param, grad, use in zip(params, grads, used) if param in self._own]
        for param, grad in own:
            core.take(param, grad)
        with self._guard:
            self._with_gradient += [param for param, grad in own if grad is not None]
            self._arrivals += 1
            is_over = self._arrivals == self._expected
        if is_over:
            core.end()
        result.set_result(buffer)

    def _note_at_the_end(self) -> None:
        """Drops the gradients after DDP has moved them to their final memory, which happens after DDP's last hook."""
        if torch._C._current_graph_task_id() != -1:  # A rank that has joined runs no backward pass.
            queue = Variable._execution_engine.queue_callback
            queue(lambda: queue(self._let_go))

    def _let_go(self) -> None:
        for param in self._own:
            param.grad = None
        seen, self._with_gradient = self._with_gradient, []
        self._gates.note_pass(seen)


def refuse_sparse(module: nn.Module) -> None:
    """Refuses modules with sparse gradients, because no kernel supports them."""
    for name, one in module.named_modules():
        if isinstance(one, (nn.Embedding, nn.EmbeddingBag)) and one.sparse:
            raise NotImplementedError(f"{name or 'model'}: gives sparse gradients, which no kernel takes; use sparse=False")
