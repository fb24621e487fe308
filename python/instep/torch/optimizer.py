"""An ordinary ``torch.optim.Optimizer`` whose step is one fused launch for all parameters of a type.

States are tensors with their parameter's shape, as in ``torch.optim``, so its state dicts load here and ours load there.
They are made at the first step. The native steps count updates; ``state[p]["step"]`` is written when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain
from operator import is_
from typing import Any, Optional, Union

import torch
from torch import Tensor

from .. import OPTIMIZERS, _native
from ._arena import Arena, hyper_of
from ._engine import Batch, Engine
from ._formats import MASTER_TYPES, Formats
from ._norm import GlobalNorm
from ._sharded import Holders, cut_as, holders_of, shard_of

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
        self._max_norm = max_norm
        self._formats = Formats(states, master, seed)
        self._threads = threads
        self._reset()
        super().__init__(params, {**known, **hyper})
        self._refuse_wrong_groups()

    def _refuse_wrong_groups(self) -> None:
        for group in self.param_groups:
            _native.state_names(self._key, hyper_of(self._key, group))

    def _reset(self) -> None:
        self._engine = Engine(self._key, self._formats, self._after(), self._threads)
        self._norms: dict[torch.device, GlobalNorm] = {}
        self._followed = Snapshot({})

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
            for batch in batches:
                self._engine.step(batch, factors)
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
        present = [batch for batch in (batch.of_gradients() for batch in batches) if batch.indices]
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
        counts = {id(arena): arena.counts() for _, arena, _ in self._placed()}
        for param, arena, index in self._placed():
            count, carried = counts[id(arena)][index]
            dtype = torch.float32 if count <= EXACT_IN_FLOAT32 else torch.float64
            if count == 0 and self._key == "adagrad":
                self.state[param]["sum"].fill_(arena.hypers_of(index)["initial_accumulator_value"])
            self.state[param]["step"] = arena.written[index] = torch.tensor(float(count), dtype=dtype)
            if carried_name is not None:
                self.state[param][carried_name] = torch.tensor(carried, dtype=torch.float64)

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
            self._check(given)
            return {**state_dict, "state": {}}

        # The base class would round the states to their parameter's type. The last hook sees what all others have made.
        handle = self.register_load_state_dict_pre_hook(take)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        self._fill(self._by_param(given))

    def _by_param(self, state_dict: dict[str, Any]) -> dict[Tensor, dict[str, Any]]:
        """Finds the parameter of each saved state by its place in the groups."""
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        saved = state_dict["state"]
        return {param: saved[number] for number, param in zip(numbers, params) if saved.get(number)}

    def _check(self, given: dict[str, Any]) -> None:
        """Refuses what would be stepped differently here: half a state, another size, format or rule."""
        known = OPTIMIZERS[self._key].defaults
        for group in given["param_groups"]:
            is_own = self._key == "adamw"
            for name in ("decoupled_weight_decay", "differentiable"):
                if group.get(name) and name not in known and not (is_own and name == "decoupled_weight_decay"):
                    raise ValueError(
                        f"{name} = True: {OPTIMIZERS[self._key].name} has no such option here; it is another rule"
                    )
        kept = _native.state_names(self._key, hyper_of(self._key, self.param_groups[0]))
        for param, values in self._by_param(given).items():
            found = [name for name in kept if isinstance(values.get(name), Tensor)]
            if found and len(found) < len(kept):
                missing = ", ".join(name for name in kept if name not in found)
                raise ValueError(f"state of a parameter: has {', '.join(found)}, but no {missing}; load a whole state")
            for name, value in values.items():
                is_whole = name != "step" and not name.endswith("_scales") and isinstance(value, Tensor)
                if is_whole and value.dim() > 0 and value.shape != param.shape:
                    raise ValueError(
                        f"state {name!r} of {tuple(value.shape)}: its parameter is {tuple(param.shape)}; "
                        "load the state of the same model"
                    )
            is_coded = self._formats.states_of(param.dtype) == "8bit"
            for name in found:
                if values[name].is_floating_point() == is_coded or is_coded and f"{name}_scales" not in values:
                    raise ValueError(f"state {name!r} of {values[name].dtype}: saved with other states=; use the same")
            word = self._formats.master_of(param.dtype)
            if "master" in values and word != "none" and values["master"].dtype != MASTER_TYPES[word]:
                raise ValueError(f"state 'master' of {values['master'].dtype}: saved with another master=; use the same")

    def _fill(self, saved: dict[Tensor, dict[str, Any]]) -> None:
        """Makes the states what was saved, and as new where nothing was."""
        self._adopt(saved)
        groups = {param: group for group in self.param_groups for param in group["params"]}
        for param, arena, index in self._placed():
            arena.retire_all()
            arena.regroup(index, groups[param])
            self._fill_one(arena, index, saved.get(param, {}))
        self._show_states()

    def _fill_one(self, arena: Arena, index: int, values: dict[str, Any]) -> None:
        carried_name = OPTIMIZERS[self._key].carried
        param = arena.params[index]
        for name, view in arena.views(index).items():
            if isinstance(values.get(name), Tensor):
                view.copy_(values[name] if name.endswith("_scales") else cut_as(values[name], param))
            elif name == "master" and view.is_floating_point():
                view.copy_(shard_of(param).detach())
            else:
                view.zero_()
        arena.note([index])
        # SGD's momentum has no count in torch: a buffer is there after the first update.
        count = int(values.get("step", any(name in values for name in arena.names)))
        carried = float(values.get(carried_name, 1.0)) if carried_name else 1.0
        arena.progress[index] = (count, carried)

    def _follow_states(self) -> None:
        """Takes over what the user has put in the place of states."""
        if self._followed.holds(self.state):
            return
        replaced = []
        for param, arena, index in self._placed():
            held = self.state.get(param)
            if held is None or not arena.is_shown(index, held):
                # What is put here may be shown elsewhere, so all of it is copied before any state changes.
                values = {name: value.clone() if isinstance(value, Tensor) else value for name, value in (held or {}).items()}
                # A count in the dict is as old as the last state dict, unless somebody else has put it there.
                replaced.append((param, arena, index, values, held is not None and arena.is_count_own(index, held)))
        for param, arena, index, values, keeps_count in replaced:
            arena.retire_all()
            progress = arena.progress[index]
            self._fill_one(arena, index, values)
            if keeps_count:
                arena.progress[index] = progress
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


def key_of(optimizer: Union[str, type]) -> str:
    """The key of an optimizer that is given by name or as a class of ``torch.optim``."""
    key = (optimizer if isinstance(optimizer, str) else optimizer.__name__).lower()
    if key not in OPTIMIZERS:
        raise ValueError(f"optimizer {key!r}: not known; use one of {', '.join(OPTIMIZERS)}")
    return key


def address(tensor: Optional[Tensor]) -> int:
    """The address of a tensor, or 0."""
    return 0 if tensor is None else tensor.data_ptr()
