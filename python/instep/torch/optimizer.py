"""An ordinary ``torch.optim.Optimizer`` whose step is one fused launch for all parameters of a type.

States are tensors with their parameter's shape, as in ``torch.optim``, so its state dicts load here and ours load there.
They are made at the first step. The native steps count updates; ``state[p]["step"]`` is written when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain
from math import inf
from operator import is_
from typing import Any, Optional, Union

import torch
from torch import Tensor

from .. import OPTIMIZERS, _native
from ._arena import Arena
from ._engine import Batch, Engine
from ._formats import Formats
from ._groups import hyper_of, refuse_misspelt
from ._loading import Saved, carried_of, count_of, refuse_unfit, with_defaults
from ._norm import GlobalNorm
from ._sharded import Holders, cut_as, holders_of, refuse_unsteppable, shard_of

EXACT_IN_FLOAT32 = 1 << 24


class FusedOptimizer(torch.optim.Optimizer):
    """Steps parameters with an optimizer of the library.

    Arguments:
        params: parameters, named parameters or param groups, as any ``torch.optim`` optimizer takes them.
        optimizer: a key of ``instep.OPTIMIZERS``, or a class of ``torch.optim`` of that name.
        max_norm: clips the gradients of all parameters by their exact global norm before the step.
        states: element type of the states: ``"float32"``, ``"bfloat16"`` or ``"8bit"``; unset, the parameter's own.
        master: masters of 16-bit parameters: ``"float32"``, ``"remainder16"`` or ``"remainder8"``.
        seed: rounds stochastically, with this seed, what is kept in fewer bits than float32.
        threads: threads of a step on the CPU; unset, ``torch.get_num_threads()``.
        hyperparameters: as ``torch.optim`` names them; those of param groups come first.

    Gradients may be of any strides and may move between steps. A parameter without a gradient is passed over.

    """

    _step_supports_amp_scaling = True
    _runs_in_backward = False

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
        **hyperparameters: Any,
    ) -> None:
        self._key = key_of(optimizer)
        known = OPTIMIZERS[self._key].defaults
        ignored = hyperparameters.keys() & IGNORED
        unknown = hyperparameters.keys() - known.keys() - ignored
        if unknown:
            raise TypeError(
                f"{', '.join(sorted(unknown))}: {OPTIMIZERS[self._key].name} has no such hyperparameter; "
                f"use {', '.join(known)}"
            )
        hyper = {name: value for name, value in hyperparameters.items() if name in known}
        self._max_norm = _number("max_norm", max_norm, float, lambda norm: 0 < norm < inf, "a finite number above 0")
        seed = _number("seed", seed, int, lambda number: 0 <= number < 1 << 64, "a whole number from 0 to 2^64 - 1")
        self._formats = Formats(states, master, seed)
        self._threads = _number(
            "threads", threads, int, lambda count: 0 < count <= _native.MAX_THREADS, f"1 to {_native.MAX_THREADS}"
        )
        self._reset()
        super().__init__(params, {**known, **hyper})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Steps further parameters, with hyperparameters of their own, from the next step on."""
        refuse_misspelt(self._key, param_group)
        super().add_param_group(param_group)
        try:
            _native.state_names(self._key, hyper_of(self._key, self.param_groups[-1]))
            for param in self.param_groups[-1]["params"]:
                refuse_unsteppable(self._key, self._formats, param, self._holders_of(param))
        except Exception:
            self.param_groups.pop()
            raise

    def _reset(self) -> None:
        self._engine = self._new_engine()
        self._norms: dict[torch.device, GlobalNorm] = {}
        self._followed = Snapshot({})
        self._grouped: list[tuple[dict[str, Any], list[Tensor]]] = []

    def _new_engine(self) -> Engine:
        return Engine(self._key, self._formats, self._after(), self._threads)

    def _after(self) -> str:
        """What becomes of gradients in a step."""
        return "keep"

    @torch.compiler.disable
    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Steps every parameter that has a gradient. Returns what ``closure`` returns, which it calls first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_now()
        return loss

    def _step_now(self) -> None:
        params = self._listed()
        grads = [param.grad for param in params]
        if all(grad is None for grad in grads):
            return
        self._adopt(param for param, grad in zip(params, grads) if grad is not None)
        self._follow_states()
        self._engine.follow_settings(self.param_groups)
        batches = self._engine.route(params).batches(grads)
        factors = (1, 1.0, address(getattr(self, "grad_scale", None)), address(getattr(self, "found_inf", None)))
        if self._max_norm is None:
            self._engine.step_all(batches, factors)
            return
        self._step_clipped(batches, factors)

    def _listed(self) -> list[Tensor]:
        """All parameters, each once though it be listed twice."""
        listed = list(chain.from_iterable(group["params"] for group in self.param_groups))
        if len(set(map(id, listed))) == len(listed):
            return listed
        return list(dict.fromkeys(listed))

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
            self._norms[device] = GlobalNorm(device)
        return self._norms[device]

    def last_norm(self) -> Optional[float]:
        """The norm of the last step's gradients, if a clip or a scaler asked for it. On a GPU it waits."""
        return next((norm.last() for norm in self._norms.values()), None)

    def _holders_of(self, param: Tensor) -> Holders:
        """The ranks that hold the rest of a parameter."""
        return holders_of(param)

    def _adopt(self, params: Iterable[Tensor]) -> None:
        """Makes states for parameters that have none yet."""
        new = self._engine.without_place(params)
        if new:
            groups = {param: group for group in self.param_groups for param in group["params"]}
            self._engine.add(new, [groups[param] for param in new], [self._holders_of(param) for param in new])
            self._show_states()

    def _placed(self) -> Iterator[tuple[Tensor, Arena, int]]:
        """This optimizer's parameters that have states."""
        for param in chain.from_iterable(group["params"] for group in self.param_groups):
            if param in self._engine.places:
                yield (param, *self._engine.places[param])

    def _show_states(self) -> None:
        """Lets ``state`` show the states."""
        for param, arena, index in self._placed():
            self.state[param] = arena.show(index)

    def _write_counts(self) -> None:
        """Writes the counts into the states, as ``torch.optim`` has them."""
        carried_name = OPTIMIZERS[self._key].carried
        counts = {of: arena.counts() for of, arena in {id(arena): arena for _, arena, _ in self._placed()}.items()}
        for param, arena, index in self._placed():
            count, carried = counts[id(arena)][index]
            dtype = torch.float32 if count <= EXACT_IN_FLOAT32 else torch.float64
            if count == 0 and self._key == "adagrad":
                self.state[param]["sum"].fill_(arena.hypers_of(index)["initial_accumulator_value"])
            numbers = {"step": torch.tensor(float(count), dtype=dtype, device="cpu")}
            if carried_name is not None:
                numbers[carried_name] = torch.tensor(carried, dtype=torch.float64, device="cpu")
            arena.written[index] = numbers
            self.state[param].update(numbers)

    def state_dict(self) -> dict[str, Any]:
        """The state in ``torch.optim``'s format, which its optimizer of this name loads."""
        if self._key == "adagrad":
            # torch makes its states at once, not at a parameter's first step, and expects them so.
            self._adopt(chain.from_iterable(group["params"] for group in self.param_groups))
        self._write_counts()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a state dict of this class, or of ``torch.optim``'s optimizer of this name, in any device and type."""
        given: dict[str, Any] = {}

        def take(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            given.update(state_dict)
            refuse_unfit(self._key, self._formats, given["param_groups"], self._saved(given))
            return {**state_dict, "state": {}}

        # The base class would round the states to their parameter's type. The last hook sees what all others have made.
        handle = self.register_load_state_dict_pre_hook(take)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        self._fill({param: values for param, _, values in self._saved(given)})

    def _saved(self, state_dict: dict[str, Any]) -> list[Saved]:
        """Finds the parameter of each saved state by its place in the groups."""
        groups = [(number, group) for group in state_dict["param_groups"] for number in group["params"]]
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        saved = state_dict["state"]
        return [(param, group, saved[number]) for (number, group), param in zip(groups, params) if saved.get(number)]

    def _fill(self, saved: dict[Tensor, dict[str, Any]]) -> None:
        """Makes the states what was saved, and as new where nothing was."""
        self._adopt(saved)
        self._follow_groups()
        for param, arena, index in self._placed():
            self._fill_one(arena, index, saved.get(param, {}))
        self._show_states()

    def _fill_one(self, arena: Arena, index: int, values: dict[str, Any], keeps: tuple[bool, bool] = (False, False)) -> None:
        """Makes the states of a parameter what these values say, and its count and carried number unless it keeps them."""
        param = arena.params[index]
        # A live step would go on with the counts that it has.
        arena.retire_all()
        count, carried = arena.progress[index]
        arena.progress[index] = (
            count if keeps[0] else count_of(arena.names, values),
            carried if keeps[1] else carried_of(self._key, values),
        )
        for name, view in arena.views(index).items():
            if isinstance(values.get(name), Tensor):
                view.copy_(values[name] if name.endswith("_scales") else cut_as(values[name], param))
            elif name == "master" and view.is_floating_point():
                view.copy_(shard_of(param).detach())
            else:
                view.zero_()
        arena.note([index])

    def _follow_groups(self) -> None:
        """Takes over what the user has put in the place of param groups, or of parameters in them."""
        known, now = self._grouped, self.param_groups
        if len(known) == len(now) and all(one is two and _are_same(a, two["params"]) for (one, a), two in zip(known, now)):
            return
        changed: dict[int, tuple[Arena, dict[int, dict[str, Any]]]] = {}
        for group in now:
            for param in group["params"]:
                if param in self._engine.places:
                    arena, index = self._engine.places[param]
                    changed.setdefault(id(arena), (arena, {}))[1][index] = group
        if self._runs_in_backward and sum(len(groups) for _, groups in changed.values()) < len(self._engine.places):
            raise RuntimeError("param_groups: lack a parameter that backward steps; put it back, with lr=0 if it is to stay")
        for arena, groups in changed.values():
            arena.regroup(groups)
        self._grouped = [(group, list(group["params"])) for group in now]

    def _follow_states(self) -> None:
        """Takes over what the user has put in the place of states."""
        self._follow_groups()
        if self._followed.holds(self.state):
            return
        replaced = []
        for param, arena, index in self._placed():
            held = self.state.get(param)
            # A number in the dict is as old as the last state dict, unless somebody else has put it there.
            count, carried = (
                held is not None and arena.is_number_own(index, held, name)
                for name in ("step", OPTIMIZERS[self._key].carried)
            )
            if held is None or not (arena.is_shown(index, held) and count and carried):
                # What is put here may be shown elsewhere, so all of it is copied before any state changes.
                values = {name: value.clone() if isinstance(value, Tensor) else value for name, value in (held or {}).items()}
                replaced.append((param, arena, index, values, (count, carried)))
        for param, arena, index, values, keeps in replaced:
            self._fill_one(arena, index, values, keeps)
            self.state[param] = arena.show_anew(index)
        self._followed = Snapshot(self.state)

    def __getstate__(self) -> dict[str, Any]:
        self._write_counts()
        options = (self._key, self._max_norm, self._formats, self._threads)
        return {**super().__getstate__(), "_options": options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        options = state.pop("_options", None)
        if options is not None:
            self._key, self._max_norm, self._formats, self._threads = options
        super().__setstate__(state)
        for group in self.param_groups:
            group.update(with_defaults(self._key, group))
        if options is None:
            return  # The base class has loaded param groups; `load_state_dict` fills the states.
        saved = {param: values for param, values in self.state.items() if values}
        self.state.clear()
        self._reset()
        self._fill(saved)


class Snapshot:
    """The objects of a ``state`` at one time: whether they are still the same takes a comparison of identities."""

    def __init__(self, state: Mapping[Tensor, dict[str, Any]]) -> None:
        self.params, self.held = list(state), list(state.values())
        self.names, self.values = list(chain.from_iterable(self.held)), self._values(self.held)

    def holds(self, state: Mapping[Tensor, dict[str, Any]]) -> bool:
        """Whether the state has the same parameters and dicts, and these the same values, in the same order."""
        return (
            _are_same(self.params, state)
            and _are_same(self.held, state.values())
            and _are_same(self.values, self._values(self.held))
            and self.names == list(chain.from_iterable(self.held))
        )

    @staticmethod
    def _values(held: Iterable[dict[str, Any]]) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, held)))


def _are_same(known: Collection[Any], now: Collection[Any]) -> bool:
    return len(known) == len(now) and all(map(is_, known, now))


IGNORED = frozenset({"foreach", "fused", "capturable"})
"""How torch.optim should run a step: another program with the same result."""


def _number(name: str, value: Any, convert: Callable[[Any], Any], fits: Callable[[Any], bool], allowed: str) -> Any:
    """An option that is None or a number. Without this check, the first step would be the one to raise."""
    if value is None:
        return None
    try:
        number = convert(value)
        if number == value and fits(number):
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"{name} = {value!r}: out of range; use {allowed}, or None")


def key_of(optimizer: Union[str, type]) -> str:
    """The key of an optimizer that is given by name or as a class of ``torch.optim``."""
    if not isinstance(optimizer, (str, type)):
        raise TypeError(f"optimizer = {optimizer!r}: neither a name nor a class; use one of {', '.join(OPTIMIZERS)}")
    name = optimizer if isinstance(optimizer, str) else optimizer.__name__
    if isinstance(optimizer, type) and getattr(torch.optim, name, None) is not optimizer:
        raise ValueError(f"{optimizer.__module__}.{name}: not a class of torch.optim; use one of {', '.join(OPTIMIZERS)}")
    key = name.lower()
    if key not in OPTIMIZERS:
        raise ValueError(f"optimizer {key!r}: not known; use one of {', '.join(OPTIMIZERS)}")
    return key


def address(tensor: Optional[Tensor]) -> int:
    """The address of a tensor, or 0."""
    return 0 if tensor is None else tensor.data_ptr()
