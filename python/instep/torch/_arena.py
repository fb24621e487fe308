"""Parameters of one kind, their optimizer states, and the native steps over them.

States are stored in the order in which parameters were registered, and each state starts at a multiple of 256 elements.
States therefore do not move when DDP rebuilds its buckets. The tensors in ``optimizer.state`` are views of this memory.
The native steps store the step counts. A vector has the counts as float32 numbers, and ``optimizer.state`` has views of
this vector. Each step on the CPU writes the vector; for a GPU, `Arena.write_numbers` does so. If DDP rebuilds its
buckets, new native steps take over the counts of their parameters.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import OPTIMIZERS, _native
from ._formats import MASTER_TYPES, QUANTUM, STATE_TYPES, WORDS, padded
from ._groups import Hyper
from ._kinds import FIRST, NO_UPDATE, Kind, dense_strides, goes_on_from, is_dense, states_of
from ._memory import alone, zeros_apart
from ._sharded import Rows, is_distributed, rows_of, sharded_as, spread_as

ELEMENT = 16
"""Bytes between the zeros that are stepped instead of empty parameters."""
FRESH = (0, 1.0)
"""The progress of a parameter that has had no update."""
UNSEEN = (0, 0, 0)
"""The address and versions of a parameter that has not been compared with its master."""

State = MutableMapping[Any, Any]
shape_of, dtype_of = attrgetter("shape"), attrgetter("dtype")


class Owner(Protocol):
    """The optimizer of a parameter."""

    state: Any


Member = tuple[Tensor, dict[str, Any], Hyper, Owner, int]
"""A parameter with its group, the group's hyperparameters, its optimizer, and the index of its first element."""
Forms = tuple[list[torch.Size], list[tuple[int, ...]], list[torch.dtype], list[int]]
"""Shapes, strides, types and addresses."""
Mark = tuple[int, ...]
"""The address of a state and the versions that count writes to it."""
Progress = tuple[int, float]
"""The number of updates that a parameter has had, and the number that its optimizer carries."""


class Arena:
    """The parameters of one kind, with their states and native steps."""

    def __init__(
        self,
        key: str,
        kind: Kind,
        members: Sequence[Member],
        after: str,
        threads: int,
        held: Callable[[Tensor], Tensor],
        team: Callable[[], int],
    ) -> None:
        self.key, self.kind, self.formats, self.after, self.threads = key, kind, kind.formats, after, threads
        # ``held`` gives the tensor that is stepped for a parameter. ``team`` gives the address of an OpenMP runtime, or
        # 0.
        self.held, self.team = held, team
        self.dtype, self.device, self.holders = kind.dtype, kind.device, kind.holders
        self.params = [param for param, *_ in members]
        self.groups = [group for _, group, *_ in members]
        self.hypers = {id(group): hyper for _, group, hyper, *_ in members}
        # These references are weak, so an optimizer and its arenas are freed as soon as the user drops the optimizer.
        self.owners = [weakref.ref(owner) for *_, owner, _ in members]
        self.firsts = [first for *_, first in members]
        shards = [held(param) for param in self.params]
        self.lengths = [shard.numel() or 1 for shard in shards]
        self.rows = [rows_of(param) or Rows(length, 0) for param, length in zip(self.params, self.lengths)]
        *self.offsets, self.len = itertools.accumulate(map(self._room, range(len(members))), initial=0)
        self.has_dtensors = any(is_distributed(param) for param in self.params)
        self.is_apart = any(shard is not param for shard, param in zip(shards, self.params))
        self.has_gaps = not all(map(is_dense, shards))
        self.shapes, self.strides = [shard.shape for shard in shards], [dense_strides(shard) for shard in shards]
        self.master_word = self.formats.master_of(self.dtype)
        self.empty = {index for index, shard in enumerate(shards) if shard.numel() == 0}
        self._allocate()
        self.local = [self._views(index) for index in range(len(members))]
        self.shown = [
            {name: view if name in self.numbers else spread_as(view, param) for name, view in views.items()}
            for views, param in zip(self.local, self.params)
        ]
        self.marks: list[dict[str, Mark]] = [{} for _ in members]
        # The parameters that were given states with a count of 0. An ordinary first step would not read these states.
        self.goes_on: set[int] = set()
        # Parameters that ``state`` does not show yet, because they have had no update and the user gave them no state.
        # A GPU does not report at once whether it skipped a step, so parameters in ``unsure`` may have had an update.
        self.hidden, self.unsure = set[int](), set[int]()
        self.seen = [UNSEEN] * len(members)
        self.live: dict[tuple[tuple[int, ...], torch.dtype], _native.Step] = {}
        # By parameter indices: the parameters, and their properties at the last check.
        self.known: dict[tuple[int, ...], tuple[list[Tensor], Forms]] = {}
        # By group: the live native steps that have the group, and the group's number in each.
        self.stepped_by: dict[int, dict[tuple[tuple[int, ...], torch.dtype], tuple[_native.Step, int]]] = {}
        self.progress: list[Progress] = [FRESH] * len(members)

    def _room(self, index: int) -> int:
        """The number of elements that each state of a parameter takes up, including gaps after rows and at the end."""
        row, length = self.rows[index].row, self.lengths[index]
        if not self._has_rows(index):
            return padded(length)
        return length // row * padded(row) or QUANTUM

    def _has_rows(self, index: int) -> bool:
        """Whether each row of the parameter begins a new block of 8-bit states."""
        return self.kind.word == "8bit" and is_distributed(self.params[index])

    def _allocate(self) -> None:
        made = itertools.count()

        def zeros(dtype: torch.dtype, length: int = self.len) -> Tensor:
            return zeros_apart(length, dtype, self.device, next(made))

        names, count = self.kind.names, len(self.params)
        self.states = {name: zeros(STATE_TYPES[self.kind.word]) for name in names}
        is_coded = self.kind.word == "8bit"
        self.scales = {name: zeros(torch.float32, self.len // QUANTUM) for name in names} if is_coded else {}
        self.master = None if self.master_word == "none" else zeros(MASTER_TYPES[self.master_word])
        self.instead = torch.zeros(2 * ELEMENT * count, dtype=torch.uint8, device=self.device) if self.empty else None
        carried = OPTIMIZERS[self.key].carried
        # These are on the CPU even if a GPU steps, as in torch.
        self.numbers = self.vectors = {"step": torch.zeros(count, dtype=torch.float32, device="cpu")}
        if carried is not None:
            self.vectors[carried] = torch.ones(count, dtype=torch.float64, device="cpu")
        # SGD has no count in torch, but stochastic rounding needs one.
        if self.key == "sgd" and self.formats.seed_of(self.dtype, self.kind.word) is None:
            self.numbers = {}
        addresses = [self.vectors[name].data_ptr() if name in self.vectors else 0 for name in ("step", carried)]
        self.count_address, self.carried_address = addresses
        # Writes to these values are detected. A user may write them, and they distinguish a first step from later
        # steps.
        self.watched = {*(self.numbers or self.states), *FIRST.get(self.key, ())[:1]}

    def _views(self, index: int) -> dict[str, Tensor]:
        """All states of a parameter, by their names in a state dict."""
        shape, strides, offset = self.shapes[index], self.strides[index], self.offsets[index]
        blocks: tuple[int, ...] = (-(-shape.numel() // QUANTUM),)
        if self._has_rows(index):
            row = padded(self.rows[index].row)
            strides, blocks = (row, *strides[1:]), (shape[0], row // QUANTUM)

        def part(run: Tensor) -> Tensor:
            return alone(torch.as_strided(run, shape, strides, run.storage_offset() + offset))

        def scales_of(run: Tensor) -> Tensor:
            first = offset // QUANTUM
            return alone(run[first : first + math.prod(blocks)].view(blocks))

        views = {name: alone(vector[index]) for name, vector in self.numbers.items()}
        views |= {name: part(run) for name, run in self.states.items()}
        views |= {f"{name}_scales": scales_of(run) for name, run in self.scales.items()}
        return views if self.master is None else views | {"master": part(self.master)}

    def own_names(self, index: int, held: dict[str, Any]) -> set[str]:
        """The names under which ``held`` still has this arena's tensors. A tensor is left out if it has moved since its
        mark was made, or if it is watched and was written since then.
        """
        shown, marks = self.shown[index], self.marks[index]
        return {name for name in shown if held.get(name) is shown[name] and self._mark(index, name) == marks[name]}

    def _mark(self, index: int, name: str) -> Mark:
        view, versions = self.local[index][name], [watched._version for watched in self.watched_as(index, name)]
        return view.data_ptr(), *versions

    def watched_as(self, index: int, name: str) -> list[Tensor]:
        """Returns the tensors in which torch counts the writes to a state. If the state is not watched, returns
        an empty list. A write to a ``DTensor`` is counted in the ``DTensor`` itself.
        """
        if name not in self.watched or name not in self.local[index]:
            return []
        local, shown = self.local[index][name], self.shown[index][name]
        return [local] if shown is local else [local, shown]

    def take(self, index: int, values: dict[str, Any], progress: Progress) -> None:
        """Sets a parameter's states to the given values. States without a given value get their initial values. The arena
        must have no native step, so call `retire_all` first.
        """
        param, hyper = self.params[index], self.hyper_of(index)
        if self.held(param).shape != self.shapes[index]:
            old, new = tuple(self.shapes[index]), tuple(param.shape)
            raise ValueError(f"parameter of {new}: its states are of {old}; put a new parameter into its group")
        self.progress[index] = progress
        self.goes_on.discard(index)
        if progress[0] == 0 and goes_on_from(self.key, hyper, values):
            self.goes_on.add(index)
        self.unsure.discard(index)
        self.hidden.discard(index)
        if progress[0] == 0 and values.keys().isdisjoint(self.shown[index]):
            self.hidden.add(index)
        for vector, number in zip(self.vectors.values(), progress):
            vector[index] = number
        for name, view in self.local[index].items():
            # The user may have moved the parameter to other memory.
            if view.data_ptr() != self.marks[index].get(name, (view.data_ptr(),))[0]:
                fresh = self._views(index)[name]
                view.data = fresh
            if name in self.numbers:
                continue
            if isinstance(values.get(name), Tensor):
                value = values[name]
                if name.endswith("_scales") and not is_distributed(value):
                    value = value.reshape(self.shown[index][name].shape)
                view.copy_(sharded_as(value, param))
            elif name == "master" and view.is_floating_point():
                view.copy_(self.held(param).detach())
            else:
                view.zero_()
        self.marks[index] = {name: self._mark(index, name) for name in self.local[index]}
        if self.master_word == "float32" and isinstance(values.get("master"), Tensor):
            self.seen[index] = UNSEEN  # The parameter may differ from its master by now. The next step compares them.
        else:
            self.note([index])

    def hyper_of(self, index: int) -> Hyper:
        """The hyperparameters that the native steps use for a parameter."""
        return self.hypers[id(self.groups[index])]

    def keeps(self, hyper: Hyper) -> bool:
        """Whether a group with these hyperparameters needs the states that this arena has."""
        return (self.kind.names, self.kind.word) == states_of(self.key, self.formats, self.dtype, hyper)

    def regroup(self, changed: dict[int, tuple[dict[str, Any], Hyper]]) -> None:
        """Updates the groups and hyperparameters of parameters after a state dict was loaded."""
        if any(self.groups[index] is not group for index, (group, _) in changed.items()):
            self.retire_all()
            for index, (group, hyper) in changed.items():
                self.groups[index] = group
                self.hypers.setdefault(id(group), hyper)
            self.hypers = {id(group): self.hypers[id(group)] for group in self.groups}
        for group, hyper in changed.values():
            self.set_hyper(group, hyper)

    def set_hyper(self, group: dict[str, Any], hyper: Hyper) -> None:
        """Passes a param group's hyperparameters to the native steps, if they have changed."""
        of = id(group)
        if self.hypers.get(of, hyper) is hyper:
            return
        if self.goes_on:
            self.retire_all()
        for step, number in self.stepped_by.get(of, {}).values():
            step.set_hyper(number, self.key, hyper)
        self.hypers[of] = hyper

    def use_threads(self, threads: int) -> None:
        """Sets the number of threads of later steps."""
        if threads != self.threads:
            self.retire_all()
            self.threads = threads

    def leave_gradients(self, after: str) -> None:
        """Sets what later steps do to the gradients that they have used."""
        if after != self.after:
            self.retire_all()
            self.after = after

    def follow(self, indices: tuple[int, ...]) -> tuple[list[Tensor], Forms]:
        """Returns this rank's shards of parameters and their current properties. If the properties of a parameter have
        changed, this method adopts the change or raises.
        """
        params, forms = self.known.get(indices, (None, None))
        if params is None:
            params = [self.params[index] for index in indices]
        shards = params if not self.is_apart else [self.held(param) for param in params]
        # This does not compare devices: if a shard's address has not changed, its device has not changed.
        seen = forms_of(shards)
        if seen != forms:
            for index in indices:
                self._follow_one(index)
            self.known[indices] = params, seen
        if self.master is not None:
            for index in indices:
                self._follow_master(index)
        return shards, seen

    def _follow_one(self, index: int) -> None:
        """Checks that a parameter still fits its states. If its strides have changed, the states are moved."""
        param = self.held(self.params[index])
        if param.shape != self.shapes[index]:
            raise RuntimeError(
                f"parameter of {tuple(self.shapes[index])}: it is {tuple(param.shape)} now; make a new optimizer"
            )
        if param.dtype != self.dtype or param.device != self.device:
            raise RuntimeError(
                f"parameter of {self.dtype} on {self.device}: it is {param.dtype} on {param.device} now; "
                "move the model before the first step, or make a new optimizer and load the old one's state"
            )
        self.has_gaps = self.has_gaps or not is_dense(param)
        strides = dense_strides(param)
        if strides == self.strides[index] or param.numel() == 0:
            return
        if self.scales:
            raise NotImplementedError("parameter: its strides have changed, and 8-bit states cannot follow")
        self.strides[index] = strides
        for name, view in self.local[index].items():
            if name not in self.numbers:
                old = view.clone()
                view.as_strided_(view.shape, strides).copy_(old)
        self.marks[index] = {name: self._mark(index, name) for name in self.local[index]}

    def instead_of(self, index: int) -> tuple[int, int]:
        """The addresses of a spare element and of its gradient, which both have the value 0. A step updates this element
        instead of an empty parameter, so that the parameter's updates are counted.
        """
        assert self.instead is not None, "there are empty parameters"
        start = self.instead.data_ptr() + 2 * ELEMENT * index
        return start, start + ELEMENT

    def step_over(self, indices: tuple[int, ...], grad_dtype: torch.dtype) -> _native.Step:
        """Returns the native step over these parameters. A new native step takes over the parameters' counts from
        earlier native steps.
        """
        key = indices, grad_dtype
        step = self.live.get(key)
        if step is None:
            wanted = set(indices)
            for other in [other for other in self.live if not wanted.isdisjoint(other[0])]:
                self._retire(other)
            step = self.live[key] = self._native(*key)
            step.set_progress([self.progress[index] for index in indices])
        return step

    def _retire(self, key: tuple[tuple[int, ...], torch.dtype]) -> None:
        indices, _ = key
        for index, progress in zip(indices, self.live.pop(key).progress()):
            self.progress[index] = progress
        for of in {id(self.groups[index]) for index in indices}:
            del self.stepped_by[of][key]
        self.known.pop(indices, None)

    def retire_all(self) -> None:
        """Copies the counts of all native steps back, and then drops the steps."""
        for key in list(self.live):
            self._retire(key)

    def _native(self, indices: tuple[int, ...], grad_dtype: torch.dtype) -> _native.Step:
        numbers: dict[int, int] = {}
        for index in indices:
            numbers.setdefault(id(self.groups[index]), len(numbers))
        params = [
            (self.lengths[i], numbers[id(self.groups[i])], self.offsets[i], i, self._ahead(i), *self._rows_from(i))
            for i in indices
        ]
        step = _native.Step(
            [(self.key, self.hypers[of]) for of in numbers],
            params,
            self.len,
            (WORDS[self.dtype], WORDS[grad_dtype], self.master_word, self.kind.word),
            self.formats.seed_of(self.dtype, self.kind.word),
            self.after,
            self.threads,
            self.team(),
            self.device.index if self.device.type == "cuda" else None,
        )
        for of, number in numbers.items():
            self.stepped_by.setdefault(of, {})[indices, grad_dtype] = (step, number)
        return step

    def _rows_from(self, index: int) -> tuple[int, int]:
        """The length of a row, and the index of this shard's first element among the elements of all full parameters."""
        row = self.rows[index].row if self._has_rows(index) and index not in self.empty else self.lengths[index]
        return row, self.firsts[index] + self.rows[index].first

    def _ahead(self, index: int) -> int:
        """How much higher a parameter's step count is in its native step than in ``progress``."""
        return int(index in self.goes_on and self.progress[index][0] == 0)

    def note(self, indices: Iterable[int]) -> None:
        """Records, after a step or a load, that the parameters have the values of their masters."""
        if self.master is not None:
            for index in indices:
                self.seen[index] = self._look(index)

    def _look(self, index: int) -> tuple[int, int, int]:
        """Address and versions of a parameter's values. A write to a ``DTensor`` changes the version of the
        ``DTensor``, and not the version of its shard.
        """
        param = self.params[index]
        shard = self.held(param) if self.is_apart else param
        return shard.data_ptr(), shard._version, param._version if self.has_dtensors and is_distributed(param) else 0

    def _follow_master(self, index: int) -> None:
        """Copies a parameter's value into its master, if other code than a step has written the parameter."""
        param, master = self.held(self.params[index]), self.local[index]["master"]
        if self.seen[index] == self._look(index):
            return
        if self.master_word == "float32":
            # If the master still rounds to the parameter, it is kept, because it has bits that the parameter lacks.
            master.copy_(torch.where(master.to(param.dtype) == param, master, param.detach().float()))
        elif self.seen[index] != UNSEEN:
            master.zero_()
        self.note([index])

    def counts(self) -> list[Progress]:
        """The progress of all parameters."""
        counts = list(self.progress)
        for (indices, _), step in self.live.items():
            for index, progress in zip(indices, step.progress()):
                counts[index] = progress
        return counts

    def write_numbers(self) -> None:
        """Waits for a GPU's counts and writes them into the vectors. On the CPU, each step writes the vectors."""
        if self.device.type == "cuda":
            for vector, values in zip(self.vectors.values(), zip(*self.counts())):
                vector.copy_(torch.tensor(values, dtype=vector.dtype, device="cpu"))

            counts = self.vectors["step"].tolist()
            for index in self.unsure:
                if counts[index] == 0:
                    self._hide(index)
            self.unsure.clear()

    def show(self, index: int) -> None:
        """Puts a parameter's tensors into ``state``, unless the parameter is hidden. The user's own entries remain in
        ``state``.
        """
        owner, param = self.owners[index](), self.params[index]
        if owner is not None and self.shown[index] and index not in self.hidden:
            held = held_in(owner.state, param)
            held.update(self.shown[index])
            owner.state[param] = held

    def show_begun(self, indices: Iterable[int]) -> None:
        """Puts the states of hidden parameters into ``state`` after their first step, unless the step was skipped."""
        given = [index for index in indices if index in self.hidden]
        if self.device.type == "cuda":
            self.unsure.update(given)
        else:
            counts = self.vectors["step"].tolist()
            given = [index for index in given if counts[index] > 0]
        self.hidden.difference_update(given)
        for index in given:
            self.show(index)

    def show_hidden(self) -> None:
        """Puts the states of all hidden parameters into ``state``. Apart from masters, these states are zeros of either
        sign, and a first step does not read them.
        """
        hidden, self.hidden = self.hidden, set()
        for index in hidden:
            for name in () if "step" in self.numbers else (*self.states, *(f"{name}_scales" for name in self.scales)):
                if self.local[index][name].is_floating_point():
                    self.local[index][name].fill_(NO_UPDATE)
            self.show(index)

    def _hide(self, index: int) -> None:
        owner, param = self.owners[index](), self.params[index]
        self.hidden.add(index)
        if owner is not None:
            for name in self.own_names(index, held_in(owner.state, param)):
                del owner.state[param][name]
            if owner.state.get(param) == {}:
                del owner.state[param]


def forms_of(tensors: Sequence[Tensor]) -> Forms:
    """The properties of these tensors, as one list per property. A comprehension over the tensors would be slower."""
    addresses, strides = list(map(Tensor.data_ptr, tensors)), list(map(Tensor.stride, tensors))
    return list(map(shape_of, tensors)), strides, list(map(dtype_of, tensors)), addresses


def held_in(state: State, param: Tensor) -> dict[str, Any]:
    """The dict in ``state`` for a parameter, or an empty dict."""
    held = state.get(param)
    return held if isinstance(held, dict) else {}
