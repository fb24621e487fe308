"""Optimizers that run inside backward, parameter by parameter, or bucket by bucket under DistributedDataParallel.

Signatures and meaning are those of ``torch.distributed.optim._apply_optimizer_in_backward``, so a program changes only
its import. At its first forward pass, DDP looks for such optimizers and asks PyTorch for a hook. If this module made
one of the optimizers, this module provides the hook.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.distributed.algorithms.ddp_comm_hooks import optimizer_overlap_hooks
from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ._engine import Engine, in_param_order
from ._formats import Formats
from ._futures import awaited, joined, wait_for
from ._later import Agreement
from ._running import ATTACHED, refuse_claimed
from ._state import GroupSnapshot
from ._usage import usage_of, watch
from ._wrapped import WrappedByDDP, before_forward
from .optimizer import FusedOptimizer, key_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket


class InBackwardOptimizer(FusedOptimizer):
    """The optimizer of one parameter. All optimizers of one call of `apply_optimizer_in_backward` have their states in
    shared arenas, so that one launch can step a bucket.
    """

    _opt_called: bool

    def __init__(self, param: Tensor, shared: Shared, kwargs: dict[str, Any]) -> None:
        self._given: Optional[Shared] = shared
        if kwargs.get("max_norm") is not None:
            raise ValueError("max_norm: one parameter's optimizer does not know the norm of all; use register_ddp")
        super().__init__([param], shared.key, **kwargs)

    def _reset(self) -> None:
        super()._reset()
        # A copy of an optimizer shares nothing with the others.
        self._shared: Shared = self.__dict__.pop("_given", None) or Shared(self._key, self._formats, self._threads)
        self._shared.members.append(self)

    def _new_engine(self) -> Engine:
        return self._shared.engine

    def _follow_states(self) -> GroupSnapshot:
        groups = super()._follow_states()
        if groups.limits:
            raise ValueError("max_norm: one parameter's optimizer does not know the norm of all; use register_ddp")
        return groups

    def _family(self) -> Sequence[FusedOptimizer]:
        return self._shared.members

    def _gone(self, own: Collection[Tensor]) -> list[Tensor]:
        return []

    def _adopt(self, params: Iterable[Tensor]) -> None:
        if self._engine.without_place(params):
            super()._adopt(p for one in self._shared.members for p in one._listed())


class Shared:
    """The state that the optimizers of one call of `apply_optimizer_in_backward` share."""

    def __init__(self, key: str, formats: Formats, threads: Optional[int]) -> None:
        self.key = key
        self.engine = Engine(key, formats, threads=threads)
        self.members: list[InBackwardOptimizer] = []


def apply_optimizer_in_backward(
    optimizer_class: Union[str, type],
    params: Iterable[Tensor],
    optimizer_kwargs: dict[str, Any],
    register_hook: bool = True,
) -> None:
    """Steps each parameter as soon as its gradient is accumulated, and sets the gradient to None.

    Arguments:
        optimizer_class: a class of ``torch.optim``, or a key of ``instep.OPTIMIZERS``.
        params: the parameters. Each parameter gets its own optimizer. Further calls add optimizers, which run in the
            order of the calls.
        optimizer_kwargs: hyperparameters, and options of `FusedOptimizer`.
        register_hook: whether a hook of each parameter runs the optimizers. If False, the optimizers are only attached
            to the parameters. DDP finds and runs them in both cases.

    """
    key = key_of(optimizer_class)
    named = ("states", "master", "seed", "min_8bit_size")
    formats = Formats(**{name: optimizer_kwargs[name] for name in named if name in optimizer_kwargs})
    shared: list[Shared] = []
    listed: dict[int, int] = {}
    made: list[tuple[Tensor, InBackwardOptimizer]] = []
    for param in params:
        # If a parameter is listed twice, it has two optimizers with separate states.
        time = listed[id(param)] = listed.get(id(param), 0) + 1
        if time > len(shared):
            shared.append(Shared(key, formats, optimizer_kwargs.get("threads")))
        made.append((param, InBackwardOptimizer(param, shared[time - 1], optimizer_kwargs)))
        if register_hook and not param.requires_grad:
            raise ValueError("parameter: takes no gradient, so backward cannot step it; leave it out, or register_hook=False")
    refuse_claimed(param for param, _ in made)
    for param, optimizer in made:
        # These are PyTorch's own names, which users' code may read.
        for name, value in (
            (ATTACHED, optimizer),
            ("_optimizer_classes", optimizer_class),
            ("_optimizer_kwargs", optimizer_kwargs),
        ):
            setattr(param, name, [*getattr(param, name, []), value])
        watch([param])
        if register_hook and param not in param_to_optim_hook_handle_map:
            param_to_optim_hook_handle_map[param] = [param.register_post_accumulate_grad_hook(_step_attached)]
    optimizer_overlap_hooks._apply_optim_in_backward_hook = _answer


def get_in_backward_optimizers(module: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """The optimizers that are attached to a module's parameters, for checkpoints and schedulers."""
    return [optimizer for param in module.parameters() for optimizer in getattr(param, ATTACHED, [])]


def _step_attached(param: Tensor) -> None:
    for optimizer in getattr(param, ATTACHED):
        optimizer.step()
    param.grad = None


_theirs = optimizer_overlap_hooks._apply_optim_in_backward_hook


def _answer(gradient_is_bucket_view: bool) -> Callable[..., Future[Tensor]]:
    """Returns the hook that DDP requests. If all optimizers are PyTorch's, this hook calls PyTorch's own hook.
    Otherwise it calls a `BucketHook`.
    """
    hooks: list[Callable[..., Future[Tensor]]] = []

    def either(weak_ddp, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with its own classes, so there are none.
        if not hooks:
            ddp = weak_ddp()
            ours = any(isinstance(one, InBackwardOptimizer) for one in get_in_backward_optimizers(ddp.module))
            hooks.append(BucketHook(ddp, gradient_is_bucket_view) if ours else _theirs(gradient_is_bucket_view))
        return hooks[0](weak_ddp, bucket)

    return either


class BucketHook:
    """Sums a bucket, then runs the optimizers of its parameters, with one launch for each kind of parameters."""

    def __init__(self, ddp: DistributedDataParallel, gradient_is_bucket_view: bool) -> None:
        self.group, self.is_view = ddp.process_group, gradient_is_bucket_view
        self.world_size = dist.get_world_size(self.group)
        delayed = set(ddp._delay_all_reduce_params)
        if any(getattr(param, ATTACHED, []) for param in delayed):
            raise NotImplementedError(
                "delay_all_reduce_named_params: optimizers in backward would step these with this rank's own gradients; "
                "wrap without it"
            )
        trained = [p for p in ddp._get_data_parallel_params(ddp.module) if p.requires_grad]
        self.params = [param for param in trained if param not in delayed]
        self.usage = usage_of(ddp, self.params)
        self.is_queued = False
        self.agreement = Agreement((self.group, param.device) for param in self.params[:1])
        self.failure: Optional[Exception] = None
        self.wrapped = WrappedByDDP(ddp, self.params, [])
        before_forward(ddp, self.wrapped.refuse_changed)

    def __call__(self, _: Any, bucket: GradBucket) -> Future[Tensor]:
        params, buffer = bucket.parameters(), bucket.buffer()
        grads = in_param_order(params, bucket.gradients())
        if bucket.index() == 0:
            self._begin()
        if not self.is_queued and torch._C._current_graph_task_id() != -1:
            # If a rank has joined, it has no backward pass, and no gradient to remove.
            Variable._execution_engine.queue_callback(self._after_backward)
            self.is_queued = True
        # The sum of float16 gradients may overflow although their mean does not.
        divisor = self.world_size
        if buffer.dtype == torch.float16:
            buffer.div_(divisor)
            divisor = 1
        sums: list[Future[Any]] = [dist.all_reduce(buffer, group=self.group, async_op=True).get_future()]
        if bucket.is_last():
            self.agreement.ask(self._in_common)
        flags: Optional[Tensor] = None
        if self.usage is not None:
            asked, flags = self.usage.anywhere(params, buffer.device)
            sums.append(asked)
            if bucket.is_last():
                self.usage.clear()

        def step(_: Future[Any]) -> Tensor:
            wait_for(sums)
            if self.failure is not None:
                raise self.failure
            self._step(params, grads, flags, divisor)
            return buffer

        return joined(sums).then(awaited(step))

    def _begin(self) -> None:
        self.failure = None
        try:
            self.agreement.read()
        except RuntimeError as error:
            self.failure = error  # Raised after the sum, for which other ranks wait.

    def _in_common(self) -> object:
        """The settings that must be equal on all ranks."""
        attached = [one for param in self.params for one in getattr(param, ATTACHED, [])]
        ours = [one for one in attached if isinstance(one, InBackwardOptimizer)]
        return [(one._key, one._formats, one._settings.of(one.param_groups[0])) for one in ours]

    @torch.no_grad()
    def _step(self, params: list[Tensor], grads: list[Tensor], flags: Optional[Tensor], divisor: int) -> None:
        is_used = [True] * len(params) if flags is None else [flag != 0 for flag in flags.tolist()]
        rounds: list[list[tuple[InBackwardOptimizer, Tensor, Tensor]]] = []
        for param, grad, used in zip(params, grads, is_used):
            attached = getattr(param, ATTACHED, [])
            if all(isinstance(one, InBackwardOptimizer) for one in attached) and attached:
                for k, optimizer in enumerate(attached if used else []):
                    rounds.extend([] for _ in range(k + 1 - len(rounds)))
                    rounds[k].append((optimizer, param, grad))
                continue
            grad.div_(divisor)
            if not self.is_view and used:
                # Once DDP knows of optimizers in backward, it does not copy the bucket back.
                param.grad = grad if attached else grad.clone()
            for optimizer in attached if used else []:
                optimizer.step()
        for members in rounds:
            self._run(members, divisor)

    def _run(self, members: list[tuple[InBackwardOptimizer, Tensor, Tensor]], divisor: int) -> None:
        by_call: dict[int, list[tuple[InBackwardOptimizer, Tensor, Tensor]]] = {}
        for member in members:
            by_call.setdefault(id(member[0]._shared), []).append(member)
        for of_call in by_call.values():
            engine = of_call[0][0]._engine
            with engine.lock:
                for optimizer, _, _ in of_call:
                    optimizer._follow_states()
                    optimizer._opt_called = True  # torch's schedulers read this attribute.
                of_call[0][0]._adopt([param for _, param, _ in of_call])
                for batch in engine.route([p for _, p, _ in of_call]).batches([g for _, _, g in of_call]):
                    engine.step(batch, (divisor, 1.0, 0, 0))

    def _after_backward(self) -> None:
        self.is_queued = False
        for param in self.params:
            if getattr(param, ATTACHED, []):
                param.grad = None
