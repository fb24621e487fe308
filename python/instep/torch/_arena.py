"""Parameters of one type on one device, their optimizer states, and the native steps over them.

States lie in the order in which parameters were registered, each at a multiple of 256 elements. So DDP may cut its
buckets anew and no state moves: a bucket's step names the same places. Step counts live in the native steps; when a
bucket of other parameters takes some over, they go along.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from .. import OPTIMIZERS, _native
from ._formats import MASTER_TYPES, STATE_TYPES, WORDS, Formats
from ._groups import Hyper, hyper_of
from ._memory import zeros_apart
from ._sharded import Holders, is_distributed, shard_of, spread_as
from ._threads import openmp

QUANTUM = 256
FRESH = (0, 1.0)
"""The progress of a parameter that has had no update."""


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill one run of memory, in any order of dimensions."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride()), key=lambda pair: (pair[1], pair[0])):
        if size == 1:
            continue
        if stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True


class Arena:
    """See the module."""

    def __init__(
        self,
        key: str,
        params: Sequence[Tensor],
        groups: Sequence[dict[str, Any]],
        formats: Formats,
        after: str,
        threads: int,
        holders: Holders = (),
    ) -> None:
        self.key, self.params = key, list(params)
        self.formats, self.after, self.threads, self.holders = formats, after, threads, holders
        shards = [shard_of(param) for param in params]
        self.dtype, self.device = shards[0].dtype, shards[0].device
        if self.dtype not in WORDS:
            raise NotImplementedError(f"parameter of {self.dtype}: no kernel has this type; use {', '.join(WORDS.values())}")
        if self.device.type not in ("cpu", "cuda"):
            raise NotImplementedError(f"parameter on {self.device}: no kernel runs there; use cpu or cuda")
        self.offsets: list[int] = []
        self.len = 0
        for shard in shards:
            if shard.numel() > 0 and (is_distributed(shard) or shard.data_ptr() == 0):
                raise NotImplementedError(
                    f"parameter of type {type(shard).__name__}: without memory of its own; give plain tensors or DTensors"
                )
            if shard.is_neg():
                raise NotImplementedError("parameter: a view whose memory has the other sign; give its resolve_neg()")
            self.offsets.append(self.len)
            self.len += -(-shard.numel() // QUANTUM) * QUANTUM
        self.strides = [shard.stride() for shard in shards]
        self.is_cut = any(is_distributed(param) for param in params)
        self.shapes = [shard.shape for shard in shards]
        self._read_groups(list(groups))
        self.names = max(self.kept.values(), key=len)
        self._allocate()
        self.shown: dict[int, dict[str, Tensor]] = {}
        self.present: dict[int, tuple[Tensor, ...]] = {}
        # Counts and carried numbers as they were last written into what is shown.
        self.written: dict[int, dict[str, Tensor]] = {}
        self.seen = [(0, 0)] * len(self.params)
        self.live: dict[tuple[int, ...], _native.Step] = {}
        # By the same, the parameters, and their shapes, strides, types and devices when they were last checked.
        self.known: dict[tuple[int, ...], tuple[list[Tensor], list[tuple[Any, ...]]]] = {}
        # By group, the live steps that know it and its number there.
        self.stepped_by: dict[int, dict[tuple[int, ...], tuple[_native.Step, int]]] = {}
        self.progress: list[tuple[int, float]] = [FRESH] * len(self.params)

    def _read_groups(self, groups: list[dict[str, Any]]) -> None:
        distinct = {id(group): group for group in groups}
        hypers = {of: hyper_of(self.key, group) for of, group in distinct.items()}
        self.kept = {of: _native.state_names(self.key, hyper) for of, hyper in hypers.items()}
        self.hypers, self.groups = hypers, groups

    def regroup(self, changed: dict[int, dict[str, Any]]) -> None:
        """Takes other dicts for the groups of these parameters, as loading a state dict makes them."""
        if all(self.groups[index] is group for index, group in changed.items()):
            return
        groups = [changed.get(index, group) for index, group in enumerate(self.groups)]
        self.retire_all()
        self._read_groups(groups)
        self._keep_names()

    def _allocate(self) -> None:
        made = itertools.count()

        def zeros(dtype: torch.dtype, length: int = self.len) -> Tensor:
            return zeros_apart(length, dtype, self.device, next(made))

        field = OPTIMIZERS[self.key].needs_float32_states
        needs_float32 = field is not None and any(hyper[field] for hyper in self.hypers.values())
        self.state_word = self.formats.states_of(torch.float32 if needs_float32 else self.dtype)
        self.master_word = self.formats.master_of(self.dtype)
        self.states = {name: zeros(STATE_TYPES[self.state_word]) for name in self.names}
        blocks = self.len // QUANTUM if self.state_word == "8bit" else 0
        self.scales = {name: zeros(torch.float32, blocks) for name in self.names} if blocks else {}
        self.master = None if self.master_word == "none" else zeros(MASTER_TYPES[self.master_word])
        if self.master is not None and self.master_word == "float32":
            for index, param in enumerate(self.params):
                self._strided(self.master, index).copy_(shard_of(param).detach())

    def _strided(self, run: Tensor, index: int) -> Tensor:
        """A parameter's part of a run, with the shape and strides of what this rank holds of it."""
        start = run.storage_offset() + self.offsets[index]
        return torch.as_strided(run, self.shapes[index], self.strides[index], start)

    def views(self, index: int) -> dict[str, Tensor]:
        """Everything that is kept for a parameter, by the names of a state dict."""
        views = {name: self._strided(run, index) for name, run in self.states.items()}
        first, count = self.offsets[index] // QUANTUM, -(-self.shapes[index].numel() // QUANTUM)
        views |= {f"{name}_scales": run[first : first + count] for name, run in self.scales.items()}
        if self.master is not None:
            views["master"] = self._strided(self.master, index)
        return views

    def hypers_of(self, index: int) -> Hyper:
        """A parameter's hyperparameters, as the native steps have them."""
        return self.hypers[id(self.groups[index])]

    @property
    def view_names(self) -> list[str]:
        """The names of `views`, in order."""
        scales = [f"{name}_scales" for name in self.scales]
        return [*self.states, *scales, *([] if self.master is None else ["master"])]

    def show(self, index: int) -> dict[str, Tensor]:
        """The same, cut as the parameter is, in a dict that always shows the present tensors."""
        return self.shown[index] if index in self.shown else self.show_anew(index)

    def show_anew(self, index: int) -> dict[str, Tensor]:
        """The same in a new dict."""
        self.shown[index] = self._spread(index)
        self.present[index] = tuple(self.shown[index].values())
        return self.shown[index]

    def _spread(self, index: int) -> dict[str, Tensor]:
        return {name: spread_as(view, self.params[index]) for name, view in self.views(index).items()}

    def is_shown(self, index: int, held: dict[str, Any]) -> bool:
        """Whether a dict still is the one that shows the states, with the tensors that it had."""
        is_same = held is self.shown.get(index) and len(held) >= len(self.present[index])
        return is_same and all(held.get(n) is t for n, t in zip(self.view_names, self.present[index]))

    def is_number_own(self, index: int, held: dict[str, Any], name: Optional[str]) -> bool:
        """Whether a dict is the one that shows the states, with no other number of this name than what was written there."""
        is_own = name not in held or held[name] is self.written.get(index, {}).get(name)
        return held is self.shown.get(index) and is_own

    def _refresh(self, indices: Iterable[int]) -> None:
        for index in indices:
            if index in self.shown:
                views = self._spread(index)
                self.shown[index].clear()
                self.shown[index].update(views)
                self.present[index] = tuple(views.values())

    def follow(self, indices: tuple[int, ...]) -> tuple[list[Tensor], list[int]]:
        """Returns what this rank holds of parameters, and the addresses. A change is followed or refused."""
        params, forms = self.known.get(indices, (None, None))
        if params is None:
            params = [self.params[index] for index in indices]
        shards = params if not self.is_cut else [shard_of(param) for param in params]
        seen = [(p.shape, p.stride(), p.dtype, p.device) for p in shards]
        if seen != forms:
            for index in indices:
                self._follow_one(index)
            self.known[indices] = params, seen
        if self.master is not None:
            for index in indices:
                self.follow_master(index)
        return shards, [shard.data_ptr() for shard in shards]

    def _follow_one(self, index: int) -> None:
        """Checks that a parameter still is what the states were made for; they move along if its strides have changed."""
        param = shard_of(self.params[index])
        if param.shape != self.shapes[index]:
            raise RuntimeError(
                f"parameter of {tuple(self.shapes[index])}: it is {tuple(param.shape)} now; make a new optimizer"
            )
        if param.dtype != self.dtype or param.device != self.device:
            raise RuntimeError(
                f"parameter of {self.dtype} on {self.device}: it is {param.dtype} on {param.device} now; "
                "move the model before the first step, or make a new optimizer and load the old one's state"
            )
        strides = param.stride()
        if strides == self.strides[index]:
            return
        if not is_dense(param):
            raise NotImplementedError("parameter: its elements do not fill one run of memory; make it contiguous")
        old = {name: view.clone() for name, view in self.views(index).items() if not name.endswith("_scales")}
        if self.scales:
            raise NotImplementedError("parameter: its strides have changed, and 8-bit states cannot follow")
        self.strides[index] = strides
        for name, view in self.views(index).items():
            view.copy_(old[name])
        self._refresh([index])

    def step_over(self, indices: tuple[int, ...]) -> _native.Step:
        """The native step over these parameters, with the counts that they have had elsewhere."""
        step = self.live.get(indices)
        if step is None:
            wanted = set(indices)
            for other in [key for key in self.live if not wanted.isdisjoint(key)]:
                self._retire(other)
            step = self.live[indices] = self._native(indices)
            step.set_progress([self.progress[index] for index in indices])
        return step

    def _retire(self, indices: tuple[int, ...]) -> None:
        for index, progress in zip(indices, self.live.pop(indices).progress()):
            self.progress[index] = progress
        for of in {id(self.groups[index]) for index in indices}:
            del self.stepped_by[of][indices]
        self.known.pop(indices, None)

    def retire_all(self) -> None:
        """Brings every count home."""
        for indices in list(self.live):
            self._retire(indices)

    def _native(self, indices: tuple[int, ...]) -> _native.Step:
        # Parameters that share a dict of options share a native group.
        numbers: dict[int, int] = {}
        for index in indices:
            numbers.setdefault(id(self.groups[index]), len(numbers))
        params = [(self.shapes[i].numel(), numbers[id(self.groups[i])], self.offsets[i]) for i in indices]
        word = WORDS[self.dtype]
        step = _native.Step(
            [(self.key, self.hypers[of]) for of in numbers],
            params,
            self.len,
            (word, word, self.master_word, self.state_word),
            self.formats.seed_of(self.dtype, self.state_word),
            self.after,
            self.threads,
            openmp(),
            self.device.index if self.device.type == "cuda" else None,
        )
        for of, number in numbers.items():
            self.stepped_by.setdefault(of, {})[indices] = (step, number)
        return step

    def use_threads(self, threads: int) -> None:
        """Steps on so many threads from now on."""
        if threads != self.threads:
            self.retire_all()
            self.threads = threads

    def update_hyper(self, group: dict[str, Any]) -> None:
        """Hands a param group's hyperparameters to the native steps, if they have changed."""
        of = id(group)
        if of not in self.hypers:
            return  # It has no parameter here.
        hyper = hyper_of(self.key, group)
        if hyper == self.hypers[of]:
            return
        kept = _native.state_names(self.key, hyper)
        if kept != self.kept[of]:
            self._keep(of, kept)
        self.hypers[of] = hyper
        for step, number in self.stepped_by.get(of, {}).values():
            step.set_hyper(number, self.key, hyper)

    def _keep(self, of: int, kept: list[str]) -> None:
        """Goes on with other states of a group: the old ones that remain, and zeros. Its native steps are made anew."""
        self.retire_all()
        self.kept[of] = kept
        self._keep_names()

    def _keep_names(self) -> None:
        names = max(self.kept.values(), key=len)
        if names == self.names:
            return
        states, scales, master = self.states, self.scales, self.master
        self.names = names
        self._allocate()
        for ours, theirs in ((self.states, states), (self.scales, scales)):
            for name in ours.keys() & theirs.keys():
                ours[name].copy_(theirs[name])
        self.master = master
        self._refresh(range(len(self.params)))

    def note(self, indices: Iterable[int]) -> None:
        """Notes the parameters' values as those of the masters, after a step or a load."""
        if self.master is not None:
            for index in indices:
                param = shard_of(self.params[index])
                self.seen[index] = (param.data_ptr(), param._version)

    def follow_master(self, index: int) -> None:
        """Takes a parameter's value into its master, where somebody else than a step has written it."""
        if self.master is None:
            return
        param = shard_of(self.params[index])
        if self.seen[index] == (param.data_ptr(), param._version):
            return
        master = self._strided(self.master, index)
        if self.master_word == "float32":
            # Where the master still rounds to the parameter, it has bits that the parameter lacks.
            master.copy_(torch.where(master.to(param.dtype) == param, master, param.detach().float()))
        elif self.seen[index] != (0, 0):
            master.zero_()
        self.note([index])

    def counts(self) -> list[tuple[int, float]]:
        """Updates and carried numbers of all parameters."""
        counts = list(self.progress)
        for indices, step in self.live.items():
            for index, progress in zip(indices, step.progress()):
                counts[index] = progress
        return counts
