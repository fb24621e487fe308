"""Reads ``optimizer.state`` and the param groups, and detects what a user has changed since the last read.

A step compares only identities, addresses and versions, never values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import Tensor

from .. import _native
from ._arena import Arena, Progress, State, held_in
from ._engine import Engine
from ._groups import TOGETHER, Hyper, Settings, clips_of, limit_of
from ._loading import progress_of

Place = tuple[Arena, int]
version_of = attrgetter("_version")


@dataclass
class Entry:
    """The entry of ``state`` for a parameter."""

    values: dict[str, Any]
    progress: Progress


class Reader:
    """Reads the entries of parameters, and refuses entries that cannot be loaded."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._counts: dict[int, list[Progress]] = {}

    def entry(self, state: State, param: Tensor, names: Sequence[str], hyper: Hyper) -> Entry:
        """The entry of a parameter, for a group that needs the states ``names``."""
        values = dict(held_in(state, param))
        arena, index = self.engine.places.get(param, (None, 0))
        if arena is not None:
            # A state starts at zero if the group did not need it before.
            names = [name for name in names if name in arena.kind.names or values.get(name) is not None]
        count, carried = progress_of(self.engine.key, self.engine.formats, param, names, hyper, values)
        if arena is not None and "step" in arena.own_names(index, values):
            # The count in ``state`` is float32, so it may be rounded.
            count = self._counts_of(arena)[index][0]
        return Entry(values, (count, carried))

    def _counts_of(self, arena: Arena) -> list[Progress]:
        if id(arena) not in self._counts:
            self._counts[id(arena)] = arena.counts()
        return self._counts[id(arena)]


def let_go(state: State, param: Tensor, old: Place, new: Place) -> None:
    """If a parameter no longer needs a state, replaces the state's tensor by a copy. The original would keep the old
    arena's memory alive.
    """
    held = held_in(state, param)
    for name in old[0].own_names(old[1], held) - new[0].shown[new[1]].keys():
        held[name] = held[name].clone()


def replaced(state: State, places: Mapping[Tensor, Place]) -> list[Tensor]:
    """The parameters with an entry in ``state`` that a user has replaced or changed."""
    found, seen = [], set()
    for param, (arena, index) in places.items():
        held = held_in(state, param)
        if held and id(held) in seen:
            held = state[param] = dict(held)
        if held:
            seen.add(id(held))
        if index in arena.hidden and held.keys().isdisjoint(arena.shown[index]):
            continue
        if len(arena.own_names(index, held)) < len(arena.shown[index]):
            found.append(param)
    return found


class GroupSnapshot:
    """A snapshot of the param groups: the dicts, their parameters and their hyperparameters."""

    def __init__(self, groups: Iterable[dict[str, Any]], settings: Settings) -> None:
        self.groups = list(groups)
        lists = [group["params"] for group in self.groups]
        self.params, self.sizes = list(chain.from_iterable(lists)), list(map(len, lists))
        self.hypers = list(map(settings.of, self.groups))
        self.clips = clips_of(self.groups)
        # The limits of groups that are clipped alone, in the same order on all ranks.
        self.limits = {clip: limit_of(group) for clip, group in zip(self.clips, self.groups) if clip != TOGETHER}

    def has_members_of(self, other: GroupSnapshot) -> bool:
        """Whether both snapshots have the same dicts with the same parameters, and each group is clipped in the same
        way.
        """
        is_same = _are_same(self.groups, other.groups) and self.sizes == other.sizes and self.clips == other.clips
        return is_same and _are_same(self.params, other.params)

    def changed_since(self, other: GroupSnapshot) -> list[tuple[dict[str, Any], Hyper]]:
        """The groups with changed hyperparameters."""
        return [(group, hyper) for group, hyper, old in zip(self.groups, self.hypers, other.hypers) if hyper is not old]


class StateSnapshot:
    """A snapshot of ``state``: its objects, the addresses of the arenas' tensors, and the versions of watched tensors."""

    def __init__(self, state: State, places: Iterable[Place]) -> None:
        self.objects = _native.objects_of(_as_dict(state))
        places = list(places)
        self.tensors = [view for arena, index in places for view in arena.local[index].values()]
        self.watched = [view for arena, index in places for name in arena.watched for view in arena.watched_as(index, name)]
        self.addresses, self.versions = self._addresses(), self._versions()

    def holds(self, state: State) -> bool:
        """Whether the state still has the snapshot's objects in the same order, and since the snapshot no tensor has moved
        and no watched tensor was written.
        """
        return (
            _native.has_objects(_as_dict(state), self.objects)
            and self.addresses == self._addresses()
            and self.versions == self._versions()
        )

    def _addresses(self) -> list[int]:
        return list(map(Tensor.data_ptr, self.tensors))

    def _versions(self) -> list[int]:
        return list(map(version_of, self.watched))


def _as_dict(state: State) -> dict[Any, Any]:
    return state if isinstance(state, dict) else dict(state)


def _are_same(known: Sequence[Any], now: Sequence[Any]) -> bool:
    return len(known) == len(now) and all(map(is_, known, now))
