"""A class for each optimizer, with the signature of ``torch.optim``, so that only the name changes in a program.

scripts/named-optimizers.py writes this file. If torch has the optimizer, the class is a subclass of torch's class,
for ``isinstance``. It uses no code of torch except that of ``torch.optim.Optimizer``.
"""

# fmt: off
from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn, Optional, Union

import torch
from torch import Tensor

from .optimizer import FusedOptimizer

__all__ = [
    "AdEMAMix", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "LAMB", "Lion", "NAdam", "RAdam", "RMSprop",
    "Rprop", "SGD",
]

Number = Union[float, Tensor]
Pair = tuple[float, float]
Triple = tuple[float, float, float]


class Named(FusedOptimizer):
    """The common base of the classes. No step uses the internals of torch's classes."""

    def _init_group(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"_init_group: torch's own; {type(self).__name__} has one fused step, call step()")

    def share_memory(self) -> NoReturn:
        """Always raises, because states are views of the library's memory."""
        raise NotImplementedError("share_memory: states lie over memory of this process; make one optimizer in each")



class SGD(Named, torch.optim.SGD):
    """SGD in one fused launch.

    Behaves as ``torch.optim.SGD``. Arguments from ``max_norm`` to ``threads`` are those of :class:`FusedOptimizer`.

    Source: Sutskever et al., ICML 2013, in the variant of `torch.optim.SGD`: a parameter's first buffer is a copy of
    its gradient, without dampening.
    """

    key = "sgd"

    def __init__(
        self, params: Iterable[Any], lr: Number = 0.001, momentum: float = 0.0, dampening: float = 0.0,
        weight_decay: Number = 0.0, nesterov: bool = False, *, maximize: bool = False, foreach: Optional[bool] = None,
        differentiable: bool = False, fused: Optional[bool] = None, capturable: bool = False,
        max_norm: Optional[float] = None, states: Optional[str] = None, master: Optional[str] = None,
        seed: Optional[int] = None, threads: Optional[int] = None,
    ) -> None:
        hyper: dict[str, Any] = {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov,
            "maximize": maximize, "foreach": foreach, "differentiable": differentiable, "fused": fused,
        }
        if capturable:
            hyper["capturable"] = capturable
        self._make(params, "sgd", hyper, max_norm, states, master, seed, threads)


class Adam(Named, torch.optim.Adam):
    """Adam in one fused launch.

    Behaves as ``torch.optim.Adam``. Arguments from ``max_norm`` to ``threads`` are those of :class:`FusedOptimizer`.

    Source: Kingma & Ba, ICLR 2015; amsgrad: Reddi, Kale & Kumar, ICLR 2018.
    """

    key = "adam"

    def __init__(
        self, params: Iterable[Any], lr: Number = 0.001, betas: Pair = (0.9, 0.999), eps: float = 1e-08,
        weight_decay: Number = 0.0, amsgrad: bool = False, *, foreach: Optional[bool] = None, maximize: bool = False,
        capturable: bool = False, differentiable: bool = False, fused: Optional[bool] = None,
        decoupled_weight_decay: bool = False, max_norm: Optional[float] = None, states: Optional[str] = None,
        master: Optional[str] = None, seed: Optional[int] = None, threads: Optional[int] = None,
    ) -> None:
        hyper: dict[str, Any] = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad, "foreach": foreach,
            "maximize": maximize, "capturable": capturable, "differentiable": differentiable, "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        self._make(params, "adam", hyper, max_norm, states, master, seed, threads)


class AdamW(Named, torch.optim.AdamW):
    """AdamW in one fused launch.

    Behaves as ``torch.optim.AdamW``. Arguments from ``max_norm`` to ``threads`` are those of :class:`FusedOptimizer`.

    Source: Loshchilov & Hutter, ICLR 2019; amsgrad: Reddi, Kale & Kumar, ICLR 2018.
    """

    key = "adamw"

    def __init__(
        self, params: Iterable[Any], lr: Number = 0.001, betas: Pair = (0.9, 0.999), eps: float = 1e-08,
        weight_decay: Number = 0.01, amsgrad: bool = False, *, maximize: bool = False, foreach: Optional[bool] = None,
        capturable: bool = False, differentiable: bool = False, fused: Optional[bool] = None,
        max_norm: Optional[float] = None, states: Optional[str] = None, master: Optional[str] = None,
        seed: Optional[int] = None, threads: Optional[int] = None,
    ) -> None:
        hyper: dict[str, Any] = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad,
            "maximize": maximize, "foreach": foreach, "capturable": capturable, "differentiable": differentiable,
            "fused": fused,
        }
        self._make(params, "adamw", hyper, max_norm, states, master, seed, threads)


class Adagrad(Named, torch.optim.Adagrad):
    """Adagrad in one fused launch.

    Behaves as ``torch.optim.Adagrad``. Arguments from ``max_norm`` to ``threads`` are those of :class:`FusedOptimizer`.

    Source: Duchi, Hazan & Singer, JMLR 12, 2011, in the variant of `torch.optim.Adagrad`.
    """

    key = "adagrad"

    def __init__(
        self, params: Iterable[Any], lr: Number = 0.01, lr_decay: float = 0.0, weight_decay: Number = 0.0,
        initial_accumulator_value: float = 0.0, eps: float = 1e-10, foreach: Optional[bool] = None, *,
        maximize: bool = False, differentiable: bool = False, fused: Optional[bool] = None, capturable: bool = False,
        max_norm: Optional[float] = None, states: Optional[str] = None, master: Optional[str] = None,
        seed: Optional[int] = None, threads: Optional[int] = None,
    ) -> None:
        hyper: dict[str, Any] = {
            "lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value, "eps": eps, "foreach": foreach,
            "maximize": maximize, "differentiable": differentiable, "fused": fused,
        }
        if capturable:
            hyper["capturable"] = capturable
        self._make(params, "adagrad", hyper, max_norm, states, master, seed, threads)


class RMSprop(Named, torch.optim.RMSprop):
    """RMSprop in one fused launch.

    Behaves as ``torch.optim.RMSprop``. Arguments from ``max_norm`` to ``threads`` are those of :class:`FusedOptimizer`.

    Source: Tieleman & Hinton, lecture 6.5, 2012; centered: Graves, 2013; in the variant of `torch.optim.RMSprop`.
    """

    key = "rmsprop"

    def __init__(
        self, params: Iterable[Any], lr: Number = 0.01, alpha: float = 0.99, eps: float = 1e-08,
        weight_decay: Number = 0.0, momentum: float = 0.0, centered: bool = False, capturable: bool = False,
        foreach: Optional[bool] = None, maximize: bool = False, differentiable: bool = False, *,
        fused: Optional[bool] = None, max_norm: Optional[float] = None, states: Optional[str] = None,
        master: Optional[str] = None, seed: Optional[int] = None, threads: Optional[int] = None,
    ) -> None:
        hyper: dict[str, Any] = {
            "lr": lr, "alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum,
            "centered": centered, "capturable": capturable, "foreach": foreach, "maximize": maximize,
            "differentiable": differentiable,
        }
        if fused:
            hyper["fused"] = fused
        self._make(params, "rmsprop", hyper, max_norm, states, master, seed, threads)


class Adadelta(Named, torch.optim.Adadelta):
    """Adadelta in one fused launch.

    Behaves as ``torch.optim.Adadelta``. Arguments from ``max_norm`` to ``threads`` are those of :class:`FusedOptimizer`.

    Source: Zeiler, 2012, in the variant of `torch.optim.Adadelta`, which adds a learning rate.
    """

    key = "adadelta"

    def __init__(
        self, params: Iterable[Any], lr: Number = 1.0, rho: float = 0.9, eps: float = 1e-06, weight_decay: Number = 0.0,
        foreach: Optional[bool] = None, *, capturable: bool = False, maximize: bool = False,
        differentiable: bool = False, fused: Optional[bool] = None, max_norm: Optional[float] = None,
        states: Optional[str] = None, master: Optional[str] = None, seed: Optional[int] = None,
        threads: Optional[int] = None,
    ) -> None:
        hyper: dict[str, Any] = {
            "lr": lr, "rho": rho, "eps": eps, "weight_decay": weight_decay, "foreach": foreach,
            "capturable": capturable, "maximize": maximize, "differentiable": differentiable,
        }
        if fused:
            hyper["fused"] = fused
        self._make(params, "adadelta", hyper, max_norm, states, master, seed, threads)


class Adamax(Named, torch.optim.Adamax):
    """Adamax in one fused launch.

    Behaves as ``torch.optim.Adamax``. Arguments from ``max_norm`` to ``threads`` are those of :class:`FusedOptimizer`.

    Source: Kingma & Ba, ICLR 2015, section 7.1, in the variant of `torch.optim.Adamax`, which adds eps to the
    gradient's size inside the maximum.
    """

    key = "adamax"

    def __init__(
        self, params: Iterable[Any], lr: Number = 0.002, betas: Pair = (0.9, 0.999), eps: float = 1e-08,
        weight_decay: Number = 0.0, foreach: Optional[bool] = None, *, maximize: bool = False,
        differentiable: bool = False, capturable: bool = False, fused: Optional[bool] = None,
        max_norm: Optional[float] = None, states: Optional[str] = None, master: Optional[str] = None,
        seed: Optional[int] = None, threads: Optional[int] = None,
    ) -> None:
        hyper: dict[str, Any] = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "foreach": foreach,
            "maximize": maximize, "differentiable": differentiable, "capturable": capturable,
        }
        if fused:
            hyper["fused"] = fused
        self._make(params, "adamax", hyper, max_norm, states, master, seed, threads)


class Rprop(Named, torch.optim.Rprop):
    """Rprop in one fused launch.

    Behaves as ``torch.optim.Rprop``. Arguments from ``max_norm`` to ``threads`` are those of :class:`FusedOptimizer`.

    Source: Riedmiller & Braun, ICNN 1993, in the variant of `torch.optim.Rprop`: an element is not updated in a step in
    which its gradient changes sign.
    """

    key = "rprop"

    def __init__(
        self, params: Iterable[Any], lr: Number = 0.01, etas: Pair = (0.5, 1.2), step_sizes: Pair = (1e-06, 50.0), *,
        capturable: bool = False, foreach: Optional[bool] = None, maximize: bool = False, differentiable: bool = False,
        fused: Optional[bool] = None, max_norm: Optional[float] = None, states: Optional[str] = None,
        master: Optional[str] = None, seed: Optional[int] = None, threads: Optional[int] = None,
    ) -> None:
        hyper: dict[str, Any] = {
            "lr": lr, "etas": etas, "step_sizes": step_sizes, "capturable": capturable, "foreach": foreach,
            "maximize": maximize, "differentiable": differentiable,
        }
        if fused:
            hyper["fused"] = fused
        self._make(params, "rprop", hyper, max_norm, states, master, seed, threads)


class Lion(Named):
    """Lion in one fused launch.

    Follows the publication. Arguments from ``max_norm`` to ``threads`` are those of :class:`FusedOptimizer`.

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023.
    """

    key = "lion"

    def __init__(
        self, params: Iterable[Any], lr: Number = 0.0001, betas: Pair = (0.9, 0.99), weight_decay: Number = 0.0, *,
        maximize: bool = False, foreach: Optional[bool] = None, capturable: bool = False, differentiable: bool = False,
        fused: Optional[bool] = None, max_norm: Optional[float] = None, states: Optional[str] = None,
        master: Optional[str] = None, seed: Optional[int] = None, threads: Optional[int] = None,
    ) -> None:
        hyper: dict[str, Any] = {
            "lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize,
        }
        if foreach:
            hyper["foreach"] = foreach
        if capturable:
            hyper["capturable"] = capturable
        if differentiable:
            hyper["differentiable"] = differentiable
        if fused:
            hyper["fused"] = fused
        self._make(params, "lion", hyper, max_norm, states, master, seed, threads)


class NAdam(Named, torch.optim.NAdam):
    """NAdam in one fused launch.

    Behaves as ``torch.optim.NAdam``. Arguments from ``max_norm`` to ``threads`` are those of :class:`FusedOptimizer`.

    Source: Dozat, "Incorporating Nesterov Momentum into Adam", ICLR 2016 workshop, in the variant of
    `torch.optim.NAdam`.
    """

    key = "nadam"

    def __init__(
        self, params: Iterable[Any], lr: Number = 0.002, betas: Pair = (0.9, 0.999), eps: float = 1e-08,
        weight_decay: Number = 0.0, momentum_decay: float = 0.004, decoupled_weight_decay: bool = False, *,
        foreach: Optional[bool] = None, maximize: bool = False, capturable: bool = False, differentiable: bool = False,
        fused: Optional[bool] = None, max_norm: Optional[float] = None, states: Optional[str] = None,
        master: Optional[str] = None, seed: Optional[int] = None, threads: Optional[int] = None,
    ) -> None:
        hyper: dict[str, Any] = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "momentum_decay": momentum_decay,
            "decoupled_weight_decay": decoupled_weight_decay, "foreach": foreach, "maximize": maximize,
            "capturable": capturable, "differentiable": differentiable,
        }
        if fused:
            hyper["fused"] = fused
        self._make(params, "nadam", hyper, max_norm, states, master, seed, threads)


class RAdam(Named, torch.optim.RAdam):
    """RAdam in one fused launch.

    Behaves as ``torch.optim.RAdam``. Arguments from ``max_norm`` to ``threads`` are those of :class:`FusedOptimizer`.

    Source: Liu et al., "On the Variance of the Adaptive Learning Rate and Beyond", ICLR 2020, in the variant of
    `torch.optim.RAdam`.
    """

    key = "radam"

    def __init__(
        self, params: Iterable[Any], lr: Number = 0.001, betas: Pair = (0.9, 0.999), eps: float = 1e-08,
        weight_decay: Number = 0.0, decoupled_weight_decay: bool = False, *, foreach: Optional[bool] = None,
        maximize: bool = False, capturable: bool = False, differentiable: bool = False, fused: Optional[bool] = None,
        max_norm: Optional[float] = None, states: Optional[str] = None, master: Optional[str] = None,
        seed: Optional[int] = None, threads: Optional[int] = None,
    ) -> None:
        hyper: dict[str, Any] = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay, "foreach": foreach, "maximize": maximize,
            "capturable": capturable, "differentiable": differentiable,
        }
        if fused:
            hyper["fused"] = fused
        self._make(params, "radam", hyper, max_norm, states, master, seed, threads)


class LAMB(Named):
    """LAMB in one fused launch.

    Follows the publication. Arguments from ``max_norm`` to ``threads`` are those of :class:`FusedOptimizer`.

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", ICLR 2020, algorithm
    2.
    """

    key = "lamb"

    def __init__(
        self, params: Iterable[Any], lr: Number = 0.001, betas: Pair = (0.9, 0.999), eps: float = 1e-06,
        weight_decay: Number = 0.01, *, maximize: bool = False, foreach: Optional[bool] = None,
        capturable: bool = False, differentiable: bool = False, fused: Optional[bool] = None,
        max_norm: Optional[float] = None, states: Optional[str] = None, master: Optional[str] = None,
        seed: Optional[int] = None, threads: Optional[int] = None,
    ) -> None:
        hyper: dict[str, Any] = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize,
        }
        if foreach:
            hyper["foreach"] = foreach
        if capturable:
            hyper["capturable"] = capturable
        if differentiable:
            hyper["differentiable"] = differentiable
        if fused:
            hyper["fused"] = fused
        self._make(params, "lamb", hyper, max_norm, states, master, seed, threads)


class AdEMAMix(Named):
    """AdEMAMix in one fused launch.

    Follows the publication. Arguments from ``max_norm`` to ``threads`` are those of :class:`FusedOptimizer`.

    The authors' code has ``betas`` of three numbers instead of ``beta3``, and its default of ``alpha`` is 2. Here
    ``betas`` may have three numbers too. Arguments after ``betas`` are in another order, so give them by name. For a
    warmup, set ``alpha`` and ``beta3`` in ``param_groups`` before each step.

    Source: Pagliardini, Ablin & Grangier, "The AdEMAMix Optimizer: Better, Faster, Older", 2024, algorithm 1.
    """

    key = "ademamix"

    def __init__(
        self, params: Iterable[Any], lr: Number = 0.001, betas: Union[Pair, Triple] = (0.9, 0.999),
        beta3: float = 0.9999, alpha: float = 5.0, eps: float = 1e-08, weight_decay: Number = 0.0, *,
        maximize: bool = False, foreach: Optional[bool] = None, capturable: bool = False, differentiable: bool = False,
        fused: Optional[bool] = None, max_norm: Optional[float] = None, states: Optional[str] = None,
        master: Optional[str] = None, seed: Optional[int] = None, threads: Optional[int] = None,
    ) -> None:
        if isinstance(betas, (tuple, list)) and len(betas) == 3:
            if beta3 != 0.9999:
                raise TypeError(f"beta3 = {beta3!r}: betas has three numbers; leave beta3 out, and give alpha by name")
            beta3, betas = betas[2], betas[:2]
        hyper: dict[str, Any] = {
            "lr": lr, "betas": betas, "beta3": beta3, "alpha": alpha, "eps": eps, "weight_decay": weight_decay,
            "maximize": maximize,
        }
        if foreach:
            hyper["foreach"] = foreach
        if capturable:
            hyper["capturable"] = capturable
        if differentiable:
            hyper["differentiable"] = differentiable
        if fused:
            hyper["fused"] = fused
        self._make(params, "ademamix", hyper, max_norm, states, master, seed, threads)
