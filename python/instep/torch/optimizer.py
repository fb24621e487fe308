"""An ordinary ``torch.optim.Optimizer`` that steps parameters of the same kind together, in a fused launch.

States are tensors with their parameter's shape, as in ``torch.optim``, so each library loads the other's state dicts. The
tensors in ``state`` are views of the memory that steps write. If a user replaces a tensor, the next step detects this by
identity and address, and copies the new values into the memory that steps write.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from math import inf
from typing import Any, ClassVar, Optional, Union

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import OPTIMIZERS, _native
from ._arena import Arena
from ._engine import Batch, Engine
from ._formats import formats
from ._groups import TOGETHER, Hyper, Settings, clips_of, completed, defaults_of, kept_states, settings_of
from ._kinds import adagrads_first_state, kind_of, refuse_group
from ._listed import refuse_repeated, refuse_shared
from ._loading import Saved, refuse_unfit, with_defaults
from ._norm import GlobalNorm
from ._sharded import PLAIN, Holders, elements_of, holders_of, refuse_unsteppable, shard_of
from ._state import GroupSnapshot, Place, Reader, StateSnapshot, let_go, replaced

Check = tuple[Callable[[Any], bool], str]
"""A function that checks a number, and a text that names the valid numbers."""

MAX_NORM: Check = (lambda norm: 0 < norm < inf, "a finite number above 0")
SEED: Check = (lambda number: 0 <= number < 1 << 64, "a whole number from 0 to 2^64 - 1")
SIZE: Check = (lambda size: size >= 0, "0 or more")
THREADS: Check = (lambda count: 0 < count <= _native.MAX_THREADS, f"1 to {_native.MAX_THREADS}")


class FusedOptimizer(Optimizer):
    """Steps parameters with an optimizer of the library.

    Arguments:
        params: parameters, named parameters or param groups, as for any ``torch.optim`` optimizer.
        optimizer: a key of ``instep.OPTIMIZERS``, or the class of ``torch.optim`` with the same name.
        max_norm: clips the gradients of all parameters by their exact global norm before the step. If a param group has
            its own ``max_norm``, the group is clipped alone, by the norm of its own gradients. A group with
            ``max_norm=None`` is not clipped.
        states: element type of the states: ``"float32"``, ``"bfloat16"`` or ``"8bit"``. The default is the parameter's type.
        master: masters of 16-bit parameters: ``"float32"``, ``"remainder16"`` or ``"remainder8"``.
        seed: turns on stochastic rounding, with this seed, of states of 8 or 16 bits, ``"remainder8"`` masters, and
            bfloat16 parameters without a master.
        threads: number of threads of a step on the CPU, by default ``torch.get_num_threads()``.
        min_8bit_size: with 8-bit states, parameters with fewer elements than this have float32 states.
        hyperparameters: named as in ``torch.optim``. The hyperparameters of a param group take precedence.

    Gradients may have any strides and may move between steps. A parameter without a gradient is not stepped.

    """

    key: ClassVar[str] = ""
    """In a named class such as `AdamW`, the optimizer's key in ``instep.OPTIMIZERS``."""
    _runs_in_backward = False
    _has_built = False
    _grouped: Optional[GroupSnapshot] = None
    _followed: Optional[StateSnapshot] = None

    def __init__(
        self,
        params: Iterable[Any],
        optimizer: Union[str, type] = "adamw",
        *,
        max_norm: Optional[float] = None,
        states: Optional[str] = None,
        master: Optional[str] = None,
        seed: Optional[int] = None,
        threads: Optional[int] = None,
        min_8bit_size: int = 0,
        **hyperparameters: Any,
    ) -> None:
        key = key_of(optimizer)
        if not hyperparameters.keys() <= settings_of(key):
            known = OPTIMIZERS[key].defaults
            unknown = sorted(hyperparameters.keys() - settings_of(key))
            raise TypeError(
                f"{', '.join(unknown)}: {OPTIMIZERS[key].name} has no such hyperparameter; use {', '.join(known)}"
            )
        self._make(params, key, hyperparameters, max_norm, states, master, seed, threads, min_8bit_size)

    def _make(
        self,
        params: Iterable[Any],
        key: str,
        hyperparameters: dict[str, Any],
        max_norm: Optional[float],
        states: Optional[str],
        master: Optional[str],
        seed: Optional[int],
        threads: Optional[int],
        min_8bit_size: int = 0,
    ) -> None:
        """Initialises the optimizer. Callers pass positional arguments, because keyword arguments would take a fifth of
        the constructor's time.
        """
        self._key = key
        self._max_norm = None if max_norm is None else _number("max_norm", max_norm, float, *MAX_NORM)
        seed = None if seed is None else _number("seed", seed, int, *SEED)
        if type(min_8bit_size) is not int or min_8bit_size < 0:
            min_8bit_size = 0 if min_8bit_size is None else _number("min_8bit_size", min_8bit_size, int, *SIZE)
        self._formats = formats(states, master, seed, min_8bit_size)
        self._threads = None if threads is None else _number("threads", threads, int, *THREADS)
        self._reset()
        # A named class also has a base class of torch.optim. That class's constructor takes other arguments.
        Optimizer.__init__(self, params, defaults_of(key) | hyperparameters)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters with their own hyperparameters. The next step includes them."""
        if self.param_groups or not completed(param_group, self.defaults):
            super().add_param_group(param_group)
        else:
            self.param_groups.append(param_group)
        try:
            refuse_group(self._key, self._formats, param_group)
            self._refuse_params(param_group["params"])
        except Exception:
            self.param_groups.pop()
            raise
        if self._key != "adagrad":
            return
        for param in param_group["params"]:
            # torch makes these states when the optimizer is made, not at the first step.
            first = adagrads_first_state(self._formats, param, param_group)
            if first:
                self.state[param] = first

    def _refuse_params(self, params: list[Tensor]) -> None:
        """Refuses a group's parameters if one of them cannot be stepped."""
        if len(params) > 1:
            refuse_repeated(params)
        for param in params:
            holders = self._holders_of(param)
            if holders or type(param) not in PLAIN:
                refuse_unsteppable(self._key, self._formats, param, holders)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether GradScaler leaves its scale in gradients: True with ``fused=True``, as in torch, or if steps run in
        backward.
        """
        return self._runs_in_backward or bool(self.defaults.get("fused"))

    def last_norm(self) -> Optional[float]:
        """The norm of the mean gradients in the last step, or None if no clip or scaler needed it. On a GPU this waits.

        The norm leaves out the gradients of groups that have their own ``max_norm``.
        """
        return next((norm.last() for norm in self._norms.values()), None)

    def _reset(self) -> None:
        """Drops the objects that steps have built. A program may make an optimizer for each parameter, so to save time,
        each object is built again only at its next use.
        """
        if self._has_built:  # Python makes an object slower once its ``__dict__`` was read.
            for built in ("_engine", "_norms", "_settings", "_grouped", "_followed"):
                self.__dict__.pop(built, None)

    @cached_property
    def _engine(self) -> Engine:
        self._has_built = True
        return self._new_engine()

    @cached_property
    def _norms(self) -> dict[torch.device, GlobalNorm]:
        return {}

    @cached_property
    def _settings(self) -> Settings:
        self._has_built = True
        return Settings(self._key)

    def _new_engine(self) -> Engine:
        return Engine(self._key, self._formats, self._after(), self._threads)

    def _after(self) -> str:
        """What a step does to the gradients that it has used."""
        return "keep"

    @torch.compiler.disable
    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Calls ``closure``, steps every parameter that has a gradient, and returns the closure's result."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_now()
        return loss

    def _step_now(self) -> None:
        groups = self._follow_states()
        params = groups.params
        grads = [param.grad for param in params]
        given = [param for param, grad in zip(params, grads) if grad is not None]
        if not given:
            return
        self._adopt(given)
        batches = self._engine.route(params).batches(grads)
        scale = getattr(self, "grad_scale", None)
        # Like torch's fused step, this step leaves the unscaled gradients in `.grad`.
        self._engine.leave_gradients(self._after() if scale is None else "average")
        factors = (1, 1.0, address(scale), address(getattr(self, "found_inf", None)))
        if self._max_norm is None and all(limit is None for limit in groups.limits.values()):
            self._engine.step_all(batches, factors)
            return
        self._step_clipped(batches, factors)

    def _listed(self) -> Iterable[Tensor]:
        """All parameters."""
        return chain.from_iterable(group["params"] for group in self.param_groups)

    def _step_clipped(self, batches: list[Batch], factors: _native.Factors) -> None:
        norm = self._norm({batch.arena.device for batch in batches})
        norm.begin(factors)
        present = [batch for batch in batches if batch.has_any]
        prepared = [norm.add(self._engine, batch) for batch in present]
        decided = norm.decide(self._max_norm, False, self._engine.holders)
        for batch, ready in zip(present, prepared):
            self._engine.step_decided(batch, ready, decided)

    def _norm(self, devices: set[torch.device]) -> GlobalNorm:
        if len(devices) > 1:
            raise NotImplementedError("max_norm: gradients lie on several devices; clip them yourself, or use one device")
        [device] = devices
        if device not in self._norms:
            self._norms[device] = self._new_norm(device)
            self._norms[device].of_groups = self._limits
        return self._norms[device]

    def _limits(self) -> Mapping[int, Optional[float]]:
        """The limits of groups that are clipped alone, as they were when the groups were last read."""
        return {} if self._grouped is None else self._grouped.limits

    def _new_norm(self, device: torch.device) -> GlobalNorm:
        return GlobalNorm(device)

    def _holders_of(self, param: Tensor) -> Holders:
        """The process groups over which a parameter is sharded, or an empty tuple if this rank has the full parameter."""
        return holders_of(param)

    def _family(self) -> Sequence[FusedOptimizer]:
        """The optimizers that share this optimizer's engine."""
        return (self,)

    def _adopt(self, params: Iterable[Tensor]) -> None:
        """Makes states for parameters that have none yet."""
        new = self._engine.without_place(params)
        if new:
            self._place(new)

    @torch.inference_mode(False)  # A step in inference mode makes states that later steps use outside it.
    @torch.no_grad()
    def _place(self, params: Iterable[Tensor], gone: Collection[Tensor] = ()) -> None:
        """Allocates the states of parameters, and puts these states into ``state``. Frees the states of the parameters
        in ``gone``.
        """
        engine, reader, params = self._engine, Reader(self._engine), list(params)
        owners = {
            p: (one, group, clip)
            for one in self._family()
            for group, clip in zip(one.param_groups, clips_of(one.param_groups))
            for p in group["params"]
        }
        firsts = dict(zip(owners, accumulate(map(elements_of, owners), initial=0)))
        members, entries = [], []
        for param in params:
            # A parameter that has left its group keeps its hyperparameters.
            owner, group, clip = owners.get(param) or (self, engine.group_of(param), TOGETHER)
            hyper = owner._settings.of(group)
            kind = kind_of(self._key, self._formats, param, engine.held(param), owner._holders_of(param), hyper, clip)
            members.append((kind, (param, group, hyper, owner, firsts.get(param, 0))))
            entries.append((owner, param, reader.entry(owner.state, param, kind.names, hyper), engine.places.get(param)))
        # This follows the checks of single parameters, because parameters without memory seem to share an address.
        refuse_shared({param: shard_of(param) for param in chain(engine.places, params)}.values())
        arenas = engine.build(members)
        places = {param: (arena, index) for arena in arenas for index, param in enumerate(arena.params)}
        for _, param, entry, _ in entries:
            arena, index = places[param]
            arena.take(index, entry.values, entry.progress)
        engine.register(places, gone)
        for owner, param, _, old in entries:
            if old is not None:
                let_go(owner.state, param, old, places[param])
            places[param][0].show(places[param][1])
            owner._followed = None

    def _own_places(self) -> dict[Tensor, Place]:
        """The parameters of this optimizer's groups and of its ``state`` for which states are allocated."""
        known, places = self._engine.known, self._engine.places
        return {param: places[param] for param in chain(self._listed(), list(self.state)) if id(param) in known}

    def _gone(self, own: Collection[Tensor]) -> list[Tensor]:
        """The parameters that are no longer in a group or in ``state``."""
        places = self._engine.places
        return [] if len(own) == len(places) else [param for param in places if param not in own]

    def _follow_states(self) -> GroupSnapshot:
        """Takes over the user's changes to param groups and ``state``. No step may be running."""
        self._engine.follow_threads()
        groups, known = GroupSnapshot(self.param_groups, self._settings), self._grouped
        is_held = self._followed is not None and self._followed.holds(self.state)
        if known is not None and is_held and groups.has_members_of(known):
            known.limits = groups.limits
            changed = groups.changed_since(known)
            if not changed:
                return known
            if self._take_hypers(changed):
                self._grouped = groups
                return groups
        refuse_repeated(groups.params)
        own = self._own_places()
        moved, gone = self._take_groups(groups), self._gone(own)
        if moved or gone:
            away = set(map(id, gone))
            self._place([param for param in self._engine.places if id(param) not in away], gone)
            own = self._own_places()
        self._take_replaced(own)
        self._settings.forget_others(groups.groups)
        self._grouped, self._followed = groups, StateSnapshot(self.state, own.values())
        return groups

    def _take_hypers(self, changed: list[tuple[dict[str, Any], Hyper]]) -> bool:
        """Takes over changed hyperparameters, and returns True. If an arena would need other states for the new values,
        changes nothing and returns False.
        """
        arenas = self._engine.arenas
        if not all(arena.keeps(hyper) for group, hyper in changed for arena in arenas if id(group) in arena.hypers):
            return False
        for arena in arenas:
            for group, hyper in changed:
                arena.set_hyper(group, hyper)
        return True

    def _take_groups(self, groups: GroupSnapshot) -> bool:
        """Takes over changed groups, and returns False. If a parameter's arena no longer has the states or the clip that
        the parameter needs, nothing changes, and the result is True.
        """
        places = self._engine.places
        changed: dict[int, tuple[Arena, dict[int, tuple[dict[str, Any], Hyper]]]] = {}
        is_clipped_otherwise = False
        for group, hyper, clip in zip(groups.groups, groups.hypers, groups.clips):
            kept_states(self._key, hyper)  # Refuses what is out of range before anything has changed.
            for param in group["params"]:
                if id(param) in self._engine.known:
                    arena, index = places[param]
                    changed.setdefault(id(arena), (arena, {}))[1][index] = group, hyper
                    is_clipped_otherwise |= arena.kind.clip != clip
        if self._runs_in_backward and sum(len(members) for _, members in changed.values()) < len(places):
            raise RuntimeError("param_groups: lack a parameter that backward steps; put it back, with lr=0 if it is to stay")
        if is_clipped_otherwise:
            self._refuse_other_clip()
            return True
        if not all(arena.keeps(hyper) for arena, members in changed.values() for _, hyper in members.values()):
            return True
        for arena, members in changed.values():
            arena.regroup(members)
        return False

    def _refuse_other_clip(self) -> None:
        """Is called when a group has changed its kind of clip (its own, the common one, or none). A subclass that forbids
        such a change raises here.
        """

    def _take_replaced(self, places: dict[Tensor, Place]) -> None:
        """Copies states that the user has replaced into the memory that steps write."""
        reader = Reader(self._engine)
        entries = []
        for param in replaced(self.state, places):
            arena, index = places[param]
            entry = reader.entry(self.state, param, arena.kind.names, arena.hyper_of(index))
            # The user's tensor may be another parameter's state, so all are copied before any state changes.
            values = {name: value.clone() if isinstance(value, Tensor) else value for name, value in entry.values.items()}
            entries.append((arena, index, values, entry.progress))
        for arena, index, values, progress in entries:
            arena.retire_all()
            arena.take(index, values, progress)
            arena.show(index)

    def state_dict(self) -> dict[str, Any]:
        """The state in ``torch.optim``'s format, so that torch's optimizer of this name can load it. The tensors are
        not copies.
        """
        self._count_on_gpu()
        return super().state_dict()

    def _count_on_gpu(self) -> None:
        """Writes the GPU's step counts into ``state``."""
        if any(arena.device.type == "cuda" for arena in self._engine.arenas):
            self._follow_states()
            for arena in self._engine.arenas:
                arena.write_numbers()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class, or of torch's optimizer of this name, on any device and in any type."""

        def take(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            saved_groups = [
                _clipped_as(own, saved if saved["params"] or own["params"] else {**own, **saved})
                for own, saved in zip(self.param_groups, given["param_groups"])
            ] + given["param_groups"][len(self.param_groups) :]
            refuse_unfit(self._key, self._formats, saved_groups, self._saved(given))
            state = {key: Kept(values) if isinstance(values, dict) else values for key, values in given["state"].items()}
            return {**given, "param_groups": saved_groups, "state": state}

        # The last hook sees the results of all others.
        handle = self.register_load_state_dict_pre_hook(take)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def _saved(self, state_dict: dict[str, Any]) -> list[Saved]:
        """Finds the parameter of each saved state by its position in the groups."""
        groups = [(number, group) for group in state_dict["param_groups"] for number in group["params"]]
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        saved = state_dict["state"]
        return [(param, group, saved[number]) for (number, group), param in zip(groups, params) if saved.get(number)]

    def __getstate__(self) -> dict[str, Any]:
        self._count_on_gpu()
        options = (self._key, self._max_norm, self._formats, self._threads)
        return {**super().__getstate__(), "_options": options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        options = state.pop("_options", None)
        if options is not None:
            self._key, self._max_norm, self._formats, self._threads = options
            self._reset()
        Optimizer.__setstate__(self, state)
        for group in self.param_groups:
            group.update(with_defaults(self._key, group))
        # Every parameter gets a new dict, so the loaded one stays the caller's.
        for param, held in self.state.items():
            if isinstance(held, (Kept, dict)):
                self.state[param] = dict(held.values if isinstance(held, Kept) else held)
        self._follow_states()
        self._adopt(param for param in self._listed() if self.state.get(param))


def _clipped_as(own: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a saved group with the clip of the optimizer's own group. Loading does not change a group's clip or the
    optimizer's ``max_norm=``.
    """
    clip = {name: own[name] for name in ("max_norm",) if name in own}
    return {name: value for name, value in saved.items() if name != "max_norm"} | clip


@dataclass(frozen=True)
class Kept:
    """A wrapper of a parameter's states, so that the base class does not convert them to the parameter's dtype."""

    values: dict[str, Any]


def _number(name: str, value: Any, convert: Callable[[Any], Any], fits: Callable[[Any], bool], allowed: str) -> Any:
    """Checks an option that is a number. Without this check, only the first step would raise for a wrong number."""
    try:
        number = convert(value)
        if number == value and fits(number):
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"{name} = {value!r}: out of range; use {allowed}, or None")


def key_of(optimizer: Union[str, type]) -> str:
    """The key of an optimizer, given its name, or a class of ``torch.optim`` or of this package."""
    if not isinstance(optimizer, (str, type)):
        raise TypeError(f"optimizer = {optimizer!r}: neither a name nor a class; use one of {', '.join(OPTIMIZERS)}")
    if type(optimizer) is str and optimizer in OPTIMIZERS:
        return optimizer
    name = optimizer if isinstance(optimizer, str) else optimizer.__name__
    if isinstance(optimizer, type) and issubclass(optimizer, FusedOptimizer) and optimizer.key:
        if name != OPTIMIZERS[optimizer.key].name or optimizer.__module__ != f"{__package__}.named":
            raise TypeError(f"{name}: a class with defaults or code of its own; give {optimizer.key!r}, and its options")
        return optimizer.key
    if isinstance(optimizer, type) and getattr(torch.optim, name, None) is not optimizer:
        raise ValueError(f"{optimizer.__module__}.{name}: not a class of torch.optim; use one of {', '.join(OPTIMIZERS)}")
    key = name.lower()
    if key not in OPTIMIZERS:
        raise ValueError(f"optimizer {key!r}: not known; use one of {', '.join(OPTIMIZERS)}")
    return key


def address(tensor: Optional[Tensor]) -> int:
    """The address of a tensor, or 0."""
    return 0 if tensor is None else tensor.data_ptr()
