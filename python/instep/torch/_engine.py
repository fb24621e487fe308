"""The engine of every optimizer of this package: arenas for its parameters, and steps over some of them.

The engine does not choose the order of steps and does not wait for gradients. The caller calls it when a gradient is
complete. Calls for different parameters may come from different threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import NoneType
from typing import Any, Optional, Union

import torch
from torch import Tensor

from .. import _native
from ._arena import Arena, Member
from ._formats import WORDS, Formats
from ._groups import TOGETHER
from ._kinds import Kind, is_dense
from ._sharded import Holders, is_distributed, shard_of, sharded_as
from ._threads import openmp

NO_FACTORS = (1, 1.0, 0, 0)
MOST_ROUTES = 256
"""The largest number of parameter lists in the cache. DDP has one list per bucket, and only unused parameters cause
more lists."""

dtype_of = attrgetter("dtype")
Gradient = Union[Tensor, int, None]
"""A gradient: a tensor, an address, or None. The tensor at an address has its parameter's type and order of elements."""


@dataclass
class Batch:
    """Parameters of one arena with complete gradients of the same type."""

    arena: Arena
    indices: tuple[int, ...]
    grads: Sequence[Gradient]
    grad_dtype: torch.dtype
    has_addresses: bool = False
    """Whether every parameter has a gradient, given as an address."""

    @property
    def has_any(self) -> bool:
        """Whether any parameter of the batch has a gradient."""
        return self.has_addresses or any(grad is not None for grad in self.grads)


@dataclass
class Route:
    """The arenas of a list of parameters: for each arena, the indices of its parameters and their positions in the list."""

    params: list[Tensor]
    parts: list[tuple[Arena, tuple[int, ...], list[int]]]
    others: list[int]
    """The positions in ``params`` of parameters without an arena."""

    def batches(self, grads: Sequence[Gradient]) -> list[Batch]:
        """Sorts the gradients of these parameters by arena and type."""
        batches = []
        is_whole = len(self.parts) == 1 and not self.others
        for arena, indices, places in self.parts:
            own = grads if is_whole else [grads[k] for k in places]
            kinds = set(map(type, own))
            if kinds == {int}:
                batches.append(Batch(arena, indices, own, arena.dtype, True))
                continue
            # None and addresses have no type.
            has_type = kinds.isdisjoint((int, NoneType))
            dtypes = set(map(dtype_of, own if has_type else [grad for grad in own if isinstance(grad, Tensor)]))
            dtypes = dtypes or {arena.dtype}
            if len(dtypes) == 1:
                batches.append(Batch(arena, indices, own, _taken_as(dtypes.pop())))
                continue
            for dtype in sorted(dtypes, key=str):
                members = [k for k, grad in enumerate(own) if isinstance(grad, Tensor) and grad.dtype == dtype]
                some = tuple(indices[k] for k in members), [own[k] for k in members]
                batches.append(Batch(arena, *some, _taken_as(dtype)))
        return batches


@dataclass
class Prepared:
    """The native step's arguments for a batch, and the tensors that must live until that step has run."""

    step: _native.Step
    bound: _native.Bound
    keeps: list[Tensor]
    copies: list[tuple[Tensor, Tensor]]
    """Tensors that are stepped through a dense copy, each with its copy. They are parameters with gaps between their
    elements, and gradients with other strides if the step writes them."""


@dataclass
class Decided:
    """The decisions of a pass: one norm for each set of parameters that are clipped together."""

    norms: Mapping[int, _native.Norm]
    """The norms by clip (see `Kind.clip`)."""

    def decision(self) -> tuple[float, float, bool]:
        """Norm and clip coefficient of the groups without a ``max_norm`` of their own, and whether all steps are skipped."""
        return self.norms[TOGETHER].decision()


class Engine:
    """The arenas of an optimizer's parameters, and steps over some of them."""

    def __init__(
        self,
        key: str,
        formats: Formats,
        after: str = "keep",
        threads: Optional[int] = None,
        held: Callable[[Tensor], Tensor] = shard_of,
        team: Optional[Callable[[], int]] = None,
    ) -> None:
        self.key, self.formats, self.after, self.threads = key, formats, after, threads
        # ``held`` gives the part of a parameter that this rank steps. ``team`` gives the address of the OpenMP runtime
        # that has the threads of a step, or 0.
        self.held, self.team = held, team or openmp
        self.arenas: list[Arena] = []
        self.places: dict[Tensor, tuple[Arena, int]] = {}
        self.routes: dict[tuple[int, ...], Route] = {}
        # The identities (``id``) of all parameters that have a place. A tensor's hash is a Python function, which takes
        # longer than everything else that a step does with the tensor.
        self.known: set[int] = set()
        self.lock = threading.RLock()

    def build(self, members: Iterable[tuple[Kind, Member]]) -> list[Arena]:
        """Makes an arena for each kind of parameters. Steps use the arenas only after a call of `register`."""
        kinds: dict[Kind, list[Member]] = {}
        for kind, member in members:
            kinds.setdefault(kind, []).append(member)
        threads = self.threads_now()
        return [Arena(self.key, kind, some, self.after, threads, self.held, self.team) for kind, some in kinds.items()]

    def register(self, places: Mapping[Tensor, tuple[Arena, int]], gone: Iterable[Tensor] = ()) -> None:
        """Records the arena and the index of each of these parameters. Deletes the records of the parameters in
        ``gone``.
        """
        for param in gone:
            del self.places[param]
        self.places.update(places)
        self.known = set(map(id, self.places))
        self.arenas = list({id(arena): arena for arena, _ in self.places.values()}.values())
        self.routes.clear()

    def group_of(self, param: Tensor) -> dict[str, Any]:
        """The param group with which a parameter was last stepped."""
        arena, index = self.places[param]
        return arena.groups[index]

    @property
    def holders(self) -> list[Holders]:
        """The groups of ranks over which parameters are sharded, in the same order on all ranks."""
        return list(dict.fromkeys(arena.holders for arena in self.arenas))

    def threads_now(self) -> int:
        """The number of threads of a step on the CPU: the user's number, or torch's own number within limits."""
        return min(torch.get_num_threads(), _native.MAX_THREADS) if self.threads is None else self.threads

    def follow_threads(self) -> None:
        """Makes later steps run on torch's current number of threads."""
        threads = self.threads_now()
        for arena in self.arenas:
            arena.use_threads(threads)

    def leave_gradients(self, after: str) -> None:
        """Sets what later steps do to the gradients that they have used."""
        self.after = after
        for arena in self.arenas:
            arena.leave_gradients(after)

    def without_place(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Returns the listed parameters that have no arena yet, each once."""
        listed = list(params)
        if self.known.issuperset(map(id, listed)):
            return []
        return list({id(param): param for param in listed if id(param) not in self.known}.values())

    def route(self, params: Sequence[Tensor]) -> Route:
        """Finds the arenas of parameters. The result is cached by the identities of the parameters."""
        key = tuple(map(id, params))
        route = self.routes.get(key)
        if route is not None:
            return route
        parts: dict[int, tuple[Arena, list[int], list[int]]] = {}
        others = []
        for place, param in enumerate(params):
            if param not in self.places:
                others.append(place)
                continue
            arena, index = self.places[param]
            _, indices, places = parts.setdefault(id(arena), (arena, [], []))
            indices.append(index)
            places.append(place)
        if len(self.routes) >= MOST_ROUTES:
            self.routes.clear()
        found = [(arena, tuple(indices), places) for arena, indices, places in parts.values()]
        route = self.routes[key] = Route(list(params), found, others)
        return route

    def prepare(self, batch: Batch) -> Prepared:
        """Finds the native step of a batch and the addresses of its tensors."""
        arena = batch.arena
        with self.lock:
            shards, (shapes, strides, _, found) = arena.follow(batch.indices)
            addresses, grads, keeps, copies = list(found), list(batch.grads), [], []
            for k, grad in enumerate(() if batch.has_addresses else grads):
                if isinstance(grad, Tensor):
                    if arena.has_dtensors:
                        grad = _sharded_like(grad, arena.params[batch.indices[k]])
                    stride = strides[k]
                    if arena.has_gaps and not is_dense(shards[k]):
                        copy = torch.empty_like(shards[k], memory_format=torch.preserve_format).copy_(shards[k])
                        copies.append((shards[k], copy))
                        stride, addresses[k] = copy.stride(), copy.data_ptr()
                    if (
                        grad.layout is not torch.strided
                        or grad.dtype is not batch.grad_dtype
                        or grad.stride() != stride
                        or grad.shape != shapes[k]
                        or grad.device != arena.device
                        or grad.is_neg()
                    ):
                        given, grad = grad, _as_param(grad, shards[k], batch.grad_dtype)
                        if arena.after != "keep":
                            copies.append((given, grad))
                    keeps.append(grad)
                    grads[k] = grad.data_ptr()
            for k, index in enumerate(batch.indices if arena.empty else ()):
                if index in arena.empty:
                    addresses[k], grad_address = arena.instead_of(index)
                    grads[k] = None if grads[k] is None else grad_address
            bound: _native.Bound = {
                "params": addresses,
                "grads": grads if batch.has_addresses else [0 if grad is None else grad for grad in grads],  # type: ignore[misc,typeddict-item]
                "states": [run.data_ptr() for run in arena.states.values()],
                "scales": [run.data_ptr() for run in arena.scales.values()],
                "master": 0 if arena.master is None else arena.master.data_ptr(),
                "counts": arena.count_address,
                "carried": arena.carried_address,
            }
            step = arena.step_over(batch.indices, batch.grad_dtype)
            step.refuse_written(arena.count_address, arena.carried_address)
            return Prepared(step, bound, keeps, copies)

    def step_all(self, batches: Sequence[Batch], factors: _native.Factors) -> None:
        """Steps batches of different arenas. If no kernel supports one of the gradients, no batch is stepped."""
        for batch, prepared in [(batch, self.prepare(batch)) for batch in batches]:
            self._run(batch, prepared, factors)

    def step(self, batch: Batch, factors: _native.Factors = NO_FACTORS) -> None:
        """Steps a batch. On a GPU, the step runs on the current stream."""
        self._run(batch, self.prepare(batch), factors)

    def _run(self, batch: Batch, prepared: Prepared, factors: _native.Factors) -> None:
        prepared.step.step(prepared.bound, factors, stream_on(batch.arena.device))
        self._written(batch, prepared)

    def add_norm(self, batch: Batch, norm: _native.Norm) -> Prepared:
        """Adds the gradients of a batch to a norm, except those that are None."""
        prepared = self.prepare(batch)
        prepared.step.add_norm(prepared.bound, norm, stream_on(batch.arena.device))
        return prepared

    def step_decided(self, batch: Batch, prepared: Prepared, decided: Decided) -> None:
        """Steps a batch. The batch's norm must already have decided whether the step is clipped or skipped."""
        norm = decided.norms[batch.arena.kind.clip]
        prepared.step.step_decided(prepared.bound, norm, stream_on(batch.arena.device))
        self._written(batch, prepared)

    def _written(self, batch: Batch, prepared: Prepared) -> None:
        """Increments the parameters' version counters, so that autograd refuses a backward pass through old values."""
        for given, copy in prepared.copies:
            given.detach().copy_(copy)
        arena, stepped = batch.arena, batch.indices
        if not batch.has_addresses:
            stepped = tuple(index for index, grad in zip(batch.indices, batch.grads) if grad is not None)
        torch.autograd.graph.increment_version([arena.params[index] for index in stepped])
        arena.note(stepped)
        if arena.hidden:
            arena.show_begun(stepped)


def stream_on(device: torch.device) -> int:
    """The current CUDA stream of a device, or 0 for the CPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def in_param_order(params: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """Returns the gradients of a bucket with the strides that they have in DDP's buffer. A dense parameter's gradient
    has the parameter's strides.
    """
    return [
        grad.as_strided(param.shape, param.stride(), grad.storage_offset()) if is_dense(param) else grad
        for param, grad in zip(params, grads)
    ]


def starts_in(
    buffer: Tensor, params: Sequence[Tensor], grads: Sequence[Tensor], own: Container[Tensor]
) -> Optional[list[int]]:
    """Returns, for each gradient, the byte of the bucket at which it starts. Returns None if one of the gradients
    cannot be stepped in place, or if one of the parameters is not in ``own``.
    """
    starts = []
    for param, grad in zip(params, grads):
        is_inside = grad.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        is_as_param = (grad.dtype, grad.device, grad.stride()) == (param.dtype, param.device, param.stride())
        start = int(grad.storage_offset() - buffer.storage_offset()) * grad.itemsize
        if not (is_inside and is_as_param and is_dense(param) and param in own):
            return None
        starts.append(start)
    return starts


def _sharded_like(grad: Tensor, param: Tensor) -> Tensor:
    """This rank's shard of a gradient."""
    if not is_distributed(param):
        return grad
    return shard_of(grad) if grad.placements == param.placements else sharded_as(grad, param)  # type: ignore[attr-defined]  # of DTensor


def _taken_as(dtype: torch.dtype) -> torch.dtype:
    """The element type in which a kernel reads a gradient of this type."""
    if not dtype.is_floating_point:
        raise NotImplementedError(f"gradient of {dtype}: no kernel has this type; use {', '.join(WORDS.values())}")
    return dtype if dtype in WORDS else torch.float32


def _as_param(grad: Tensor, param: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of a gradient, with the elements in the same memory order as in the parameter."""
    if grad.layout != torch.strided:
        raise NotImplementedError(f"gradient of layout {grad.layout}: no kernel has it; use a dense one (sparse=False)")
    if grad.shape != param.shape or grad.device != param.device:
        raise ValueError(
            f"gradient of {tuple(grad.shape)} on {grad.device}: its parameter is {tuple(param.shape)} on {param.device}"
        )
    return torch.empty_like(param, dtype=dtype, memory_format=torch.preserve_format).copy_(grad)
