"""DistributedDataParallel with the optimizer fused into its gradient buckets.

DDP calls a hook for each bucket during backward. The hook starts the bucket's all-reduce. When the all-reduce ends, its
future's callback steps the bucket. A clip, a gradient scaler or ``skip_nonfinite`` needs the norm of all gradients
first. With any of them, all buckets are stepped after the last all-reduce. PyTorch's ``_hook_then_optimizer`` is
similar, but steps one parameter at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Optional, Union

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ._backward import BackwardOptimizer
from ._engine import MOST_ROUTES, Batch, Prepared, in_param_order, starts_in
from ._futures import awaited, joined, wait_for
from ._later import Agreement
from ._norm import GlobalNorm
from ._running import claim, refuse_attached, refuse_claimed
from ._stepped import SteppedGradients
from ._usage import usage_of
from ._wrapped import WrappedByDDP, before_backward, before_forward, refuse_unhooked
from .optimizer import address

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

AFTER = {"average": "average", "clear": "zero", "sum": "keep"}


def register_ddp(
    ddp: DistributedDataParallel,
    optimizer: Union[str, type] = "adamw",
    *,
    params: Optional[Iterable[Any]] = None,
    max_norm: Optional[float] = None,
    gradients: str = "average",
    grad_scaler: Optional[torch.amp.GradScaler] = None,
    skip_nonfinite: bool = False,
    hook: Optional[Callable[[GradBucket], Future[Tensor]]] = None,
    **options: Any,
) -> DDPOptimizer:
    """Steps a model's parameters inside its backward pass: each bucket as soon as its gradients are summed.

    Call this function once, after wrapping the model and before its first forward pass. ``backward()`` then updates the
    parameters. The returned optimizer is for schedulers, scalers and checkpoints. The optimizer's ``step`` only checks:
    it raises if gradients have changed after backward.

    Arguments:
        params: the parameters to step, or param groups of them; None for all, an empty list for none. DDP still
            averages the gradients of all other parameters.
        max_norm: clips by the exact global norm. All buckets are then stepped together, after the last sum.
        gradients: the content of ``.grad`` after backward. ``"average"`` is the mean over ranks as the step used it:
            clipped, and without the loss scale. ``"clear"`` is zeros. ``"sum"`` is the sum over ranks, not divided, or
            the mean if any parameter is float16. It is the fastest choice, for loops that do not read gradients.
        grad_scaler: a scaler. The step divides gradients by the scaler's scale. The step of all buckets is skipped if one
            gradient is infinite or NaN. Still call ``scaler.step(optimizer)`` and ``scaler.update()``.
        skip_nonfinite: skips the step of all buckets if one gradient is infinite or NaN.
        hook: a function that replaces ``all_reduce``. The function must write a bucket's sum into the bucket's own
            buffer, and must not divide the sum.
        options: hyperparameters and options of `FusedOptimizer`.

    """
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(f"{type(ddp).__name__}: not a DistributedDataParallel model; wrap it first")
    if grad_scaler is not None and gradients != "average":
        raise ValueError("gradients: the scaler looks for infinities in them after backward; use 'average' with it")
    if gradients not in AFTER:
        raise ValueError(f"gradients = {gradients!r}: not known; use one of {', '.join(AFTER)}")
    for name, module in ddp.module.named_modules():
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse:
            raise NotImplementedError(f"{name or 'model'}: gives sparse gradients, which no kernel takes; use sparse=False")
    return DDPOptimizer(ddp, optimizer, params, max_norm, gradients, grad_scaler, skip_nonfinite, hook, options)


@dataclass
class Reduced:
    """A bucket that has its complete sum and waits for the sums of other buckets."""

    batches: list[Batch]
    prepared: list[Prepared]
    buffer: Tensor
    result: Future[Tensor]


class DDPOptimizer(BackwardOptimizer):
    """The optimizer that `register_ddp` makes."""

    _made_by = "register_ddp"

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizer: Union[str, type],
        params: Optional[Iterable[Any]],
        max_norm: Optional[float],
        gradients: str,
        grad_scaler: Optional[torch.amp.GradScaler],
        skip_nonfinite: bool,
        hook: Optional[Callable[[GradBucket], Future[Tensor]]],
        options: dict[str, Any],
    ) -> None:
        self._gradients = gradients
        trained = [p for p in ddp._get_data_parallel_params(ddp.module) if p.requires_grad]
        chosen = trained if params is None else list(params)
        super().__init__(chosen or [{"params": []}], optimizer, max_norm=max_norm, **options)
        self._delayed = set(ddp._delay_all_reduce_params)
        managed = [param for param in trained if param not in self._delayed]
        self._managed = set(managed)
        self._own = {param for group in self.param_groups for param in group["params"]}
        self._refuse_others(self._own)
        self._decide_by(max_norm, grad_scaler, skip_nonfinite)
        self._refuse_tensor_parallelism(self._own)
        refuse_claimed(self._own)
        refuse_attached(managed)
        if ddp._comm_hooks:
            raise RuntimeError(
                "register_ddp: this model has a communication hook, and DDP takes one; name it in hook= instead"
            )
        refuse_unhooked(ddp, self._own)
        self._wrapped = WrappedByDDP(ddp, managed, frozen_in(ddp.module) if params is None else [])
        self._group = ddp.process_group
        self._world_size = dist.get_world_size(self._group)
        # The sum of float16 gradients may overflow although their mean does not.
        self._divides_first = any(param.dtype == torch.float16 for param in managed)
        self._divisor = 1 if self._divides_first else self._world_size
        self._failure: Optional[Exception] = None
        self._sum = hook or self._all_reduce
        self._guard = threading.RLock()
        self._reduced: list[Reduced] = []
        self._expected: Optional[int] = None
        # A cache of the results of `starts_in`, with their parameters. The key is a bucket's type, its length and its
        # parameters' identities.
        self._starts: dict[tuple[Any, ...], tuple[list[Tensor], Optional[list[int]]]] = {}
        self._usage = usage_of(ddp, managed)
        self._agreement = Agreement((self._group, param.device) for param in managed[:1])
        self._stepped = SteppedGradients(self._own, self._own == self._managed or not ddp.gradient_as_bucket_view)
        self.hook = self._hook()
        ddp.register_comm_hook(None, self.hook)
        before_forward(ddp, self._refuse_unhooked)
        if gradients != "clear":
            before_backward(ddp, lambda _: self._stepped.warn_if_kept())
        claim(self)

    def _refuse_others(self, params: Iterable[Tensor]) -> None:
        if not self._delayed.isdisjoint(params):
            raise NotImplementedError(
                "delay_all_reduce_named_params: DDP sums these itself, and no hook sees them; wrap without it, or leave "
                "them out of params="
            )
        if self._managed.issuperset(params):
            return
        if any(not param.requires_grad for param in params):
            raise ValueError(
                "params: one of them takes no gradient, so DDP sums none; leave it out, or unfreeze it and wrap anew"
            )
        raise ValueError("params: one of them is not a parameter that this model reduces; step it by another optimizer")

    def _refuse_tensor_parallelism(self, params: Iterable[Tensor]) -> None:
        """Refuses norms with tensor parallelism, because they need a further all-reduce, for which DDP's callback
        cannot wait.
        """
        if self._decides and any(self._holders_of(param) for param in params):
            raise NotImplementedError(
                "max_norm, skip_nonfinite, grad_scaler: this rank holds a shard of a parameter, and DDP does not know "
                "who holds the rest; use fully_shard and register_fsdp"
            )

    def _refuse_unhooked(self) -> None:
        """Checks before a forward pass that DDP's hooks are on the tensors that will get gradients."""
        self._wrapped.refuse_changed()
        self._wrapped.refuse_unfrozen("unfreeze it before you wrap the model")

    def _refuse_params(self, params: list[Tensor]) -> None:
        super()._refuse_params(params)
        if hasattr(self, "_managed"):
            self._refuse_others(params)
            refuse_claimed(set(params) - self._own)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds further parameters of the model, which are stepped from the next backward on."""
        super().add_param_group(param_group)
        if hasattr(self, "_managed"):  # The base class also calls this method, to build the optimizer.
            self._own.update(self.param_groups[-1]["params"])
            self._stepped.params = list(self._own)
            self._starts.clear()

    def _after(self) -> str:
        return AFTER[self._gradients]

    def _all_reduce(self, bucket: GradBucket) -> Future[Tensor]:
        return dist.all_reduce(bucket.buffer(), group=self._group, async_op=True).get_future()

    def _hook(self) -> Callable[[Any, GradBucket], Future[Tensor]]:
        def sum_then_step(_, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with its own classes, so there are none.
            buffer = bucket.buffer()
            if bucket.index() == 0:
                try:
                    self._failure = None
                    self._begin()
                except Exception as error:
                    self._failure = error  # Raised after the sum, for which other ranks wait.
            params, grads = bucket.parameters(), self._gradients_of(bucket, buffer)
            if self._divides_first:
                buffer.div_(self._world_size)
            if bucket.is_last():
                self._expected = bucket.index() + 1
            summed = self._sum(bucket)
            if not isinstance(summed, torch._C.Future):
                raise TypeError(f"hook: returned {type(summed).__name__}; return the Future of the sum")
            if bucket.is_last():
                self._agreement.ask(self._in_common)
                self._note_at_the_end()
            sums: list[Future[Any]] = [summed]
            flags = None
            if self._usage is not None:
                asked, flags = self._usage.anywhere(params, buffer.device)
                sums.append(asked)
                if bucket.is_last():
                    self._usage.clear()
            result: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)

            def after_sum(_: Future[Any]) -> None:
                try:
                    wait_for(sums)
                    if self._failure is not None:
                        raise self._failure
                    self._arrive(params, grads, buffer, flags, result)
                except Exception as error:  # A callback of a future cannot raise. DDP raises the error in backward.
                    self._give_up(result, error)

            joined(sums).add_done_callback(awaited(after_sum))
            return result

        return sum_then_step

    def _gradients_of(self, bucket: GradBucket, buffer: Tensor) -> list[Any]:
        """The gradients of a bucket. If all gradients can be stepped in place, returns their addresses, because a step
        with addresses is faster. Otherwise returns tensors.
        """
        params = bucket.parameters()
        key = (buffer.dtype, buffer.numel(), *map(id, params))
        known = self._starts.get(key)
        if known is None:
            if len(self._starts) >= MOST_ROUTES:
                self._starts.clear()
            grads = in_param_order(params, bucket.gradients())
            known = self._starts[key] = params, starts_in(buffer, params, grads, self._own)
        _, starts = known
        if starts is None:
            return list(in_param_order(params, bucket.gradients()))
        address = buffer.data_ptr()
        return [address + start for start in starts]

    def _note_at_the_end(self) -> None:
        """Records the gradients after DDP has moved them to their final memory, which happens after DDP's last hook."""
        if torch._C._current_graph_task_id() != -1:  # A rank that has joined runs no backward pass.
            queue = Variable._execution_engine.queue_callback
            queue(lambda: queue(self._stepped.note))

    def _begin(self) -> None:
        """Begins a pass when its first bucket arrives. The previous pass has ended by then."""
        with self._guard:
            self._reduced, self._expected = [], None
            self._agreement.read()
            self._stepped.read()
            # This adopts all parameters at once, so that each rebuilt bucket is one launch. It runs on backward's
            # stream, for which sums wait.
            self._adopt(self._follow_states().params)

    @torch.no_grad()
    def _arrive(
        self, params: list[Tensor], grads: list[Any], buffer: Tensor, flags: Optional[Tensor], result: Future[Tensor]
    ) -> None:
        """Steps a bucket after its sum is complete. If a pass needs a norm, all buckets are stepped after the last sum."""
        self._opt_called = True  # torch's schedulers read this attribute.
        route = self._engine.route(params)
        others = [grads[place] for place in route.others]
        if flags is not None:
            grads = [grad if used != 0 else None for grad, used in zip(grads, flags.tolist())]
        batches = route.batches(grads)
        if others and not self._divides_first:
            torch._foreach_div_(others, self._world_size)
        if not self._decides:
            for batch in batches:
                self._engine.step(batch, (self._divisor, 1.0, 0, 0))
            result.set_result(buffer)
            return
        with self._guard:
            batches = [batch for batch in batches if batch.has_any]
            norm = self._pass_norm(buffer.device)
            prepared = [norm.add(self._engine, batch) for batch in batches]
            self._reduced.append(Reduced(batches, prepared, buffer, result))
            if len(self._reduced) == self._expected:
                self._decide(norm)

    def _pass_norm(self, device: torch.device) -> GlobalNorm:
        norm = self._norm({device})
        if not self._reduced:
            scale = None if self._scaler is None else self._scaler._get_scale_async()
            norm.begin((self._divisor, 1.0, address(scale), 0))
        return norm

    def _decide(self, norm: GlobalNorm) -> None:
        """Steps every bucket or none, after the last sum."""
        reduced, self._reduced = self._reduced, []
        decided = norm.decide(self._max_norm, self._skip_nonfinite, ())
        for bucket in reduced:
            for batch, prepared in zip(bucket.batches, bucket.prepared):
                self._engine.step_decided(batch, prepared, decided)
        for bucket in reduced:
            bucket.result.set_result(bucket.buffer)

    def _give_up(self, result: Future[Tensor], error: Exception) -> None:
        """Sets an error on every waiting bucket, so that backward raises the error."""
        with self._guard:
            waiting, self._reduced = [bucket.result for bucket in self._reduced], []
        failure = Failure(error)
        for future in {id(future): future for future in [*waiting, result]}.values():
            if not future.done():
                future.set_exception(failure)  # type: ignore[arg-type]  # torch types it as a result


def frozen_in(model: torch.nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters that do not require a gradient now, with their names."""
    return [(name, param) for name, param in model.named_parameters() if not param.requires_grad]


class Failure(RuntimeError):
    """The error of a bucket that was not stepped. DDP expects a tensor, so it raises "Unable to cast ... to Tensor", and
    that message contains this error's text.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(f"the bucket, whose step failed:\n{type(error).__name__}: {error}\n")
        self.__cause__ = error
