"""Steps over lists of the caller's tensors, one function for each optimizer. No function has a state of its own.

scripts/functional-optimizers.py writes this file. A call reads addresses, counts and values from the tensors, checks all
of them, and steps them without the GIL, in one launch for each combination of element types. Tensors are dense and on the
CPU:

- ``params``: float32, bfloat16 or float16, in any mix.
- ``grads``: any of these types, with the parameter's shape and strides. A call does not write gradients, and skips a
  parameter if its gradient is None.
- states: float32 or bfloat16, one type for all states of a parameter. States are zeros before the first step.
- ``state_steps``: float32 scalar tensors with the number of steps so far, which is 0 before the first step. A step
  increments these numbers.
- ``copies``: tensors, or None, to which the stepped parameters are written in the copy's own type. If ``params`` are float32
  masters, ``copies`` can be a model's bfloat16 parameters.

Gradients are multiplied by ``gradient_scale``. If a check fails, the call raises before it writes anything. Two calls
must not step the same tensors at the same time.
"""

# fmt: off
from __future__ import annotations

from collections.abc import Sequence
from typing import Optional, Union

from torch import Tensor

from ._lists import RULES, Clipped, Gradients, TensorList, add_, clip_, copy_, norm_, prepare

__all__ = [
    "Clipped", "adadelta_", "adagrad_", "adam_", "adamax_", "adamw_", "add_", "ademamix_", "clip_", "copy_", "lamb_",
    "lion_", "nadam_", "norm_", "prepare", "radam_", "rmsprop_", "rprop_", "sgd_",
]

Number = Union[float, Tensor]
Copies = Optional[Sequence[Optional[Tensor]]]

_sgd = RULES["sgd"].native.step


def sgd_(
    params: TensorList, grads: Gradients, state_steps: TensorList, copies: Copies = None, *, lr: Number,
    momentum: float, dampening: float, weight_decay: Number, gradient_scale: float = 1.0, nesterov: bool = False,
    maximize: bool = False, momentum_buffers: Optional[TensorList] = None, threads: Optional[int] = None,
) -> None:
    """Steps with SGD, as :class:`FusedOptimizer` does.

    Pass ``momentum_buffers`` only if the hyperparameters need them.

    Source: Sutskever et al., ICML 2013, in the variant of `torch.optim.SGD`: a parameter's first buffer is a copy of
    its gradient, without dampening.
    """
    _sgd(
        (params, grads, state_steps, copies, None, momentum_buffers),
        (lr, momentum, dampening, weight_decay, nesterov, maximize), gradient_scale, threads,
    )


_adam = RULES["adam"].native.step


def adam_(
    params: TensorList, grads: Gradients, exp_avgs: TensorList, exp_avg_sqs: TensorList, state_steps: TensorList,
    copies: Copies = None, *, lr: Number, beta1: float, beta2: float, eps: float, weight_decay: Number,
    gradient_scale: float = 1.0, amsgrad: bool = False, maximize: bool = False,
    max_exp_avg_sqs: Optional[TensorList] = None, threads: Optional[int] = None,
) -> None:
    """Steps with Adam, as :class:`FusedOptimizer` does.

    Pass ``max_exp_avg_sqs`` only if the hyperparameters need them.

    Source: Kingma & Ba, ICLR 2015; amsgrad: Reddi, Kale & Kumar, ICLR 2018.
    """
    _adam(
        (params, grads, state_steps, copies, None, exp_avgs, exp_avg_sqs, max_exp_avg_sqs),
        (lr, (beta1, beta2), eps, weight_decay, amsgrad, maximize), gradient_scale, threads,
    )


_adamw = RULES["adamw"].native.step


def adamw_(
    params: TensorList, grads: Gradients, exp_avgs: TensorList, exp_avg_sqs: TensorList, state_steps: TensorList,
    copies: Copies = None, *, lr: Number, beta1: float, beta2: float, eps: float, weight_decay: Number,
    gradient_scale: float = 1.0, amsgrad: bool = False, maximize: bool = False,
    max_exp_avg_sqs: Optional[TensorList] = None, threads: Optional[int] = None,
) -> None:
    """Steps with AdamW, as :class:`FusedOptimizer` does.

    Pass ``max_exp_avg_sqs`` only if the hyperparameters need them.

    Source: Loshchilov & Hutter, ICLR 2019; amsgrad: Reddi, Kale & Kumar, ICLR 2018.
    """
    _adamw(
        (params, grads, state_steps, copies, None, exp_avgs, exp_avg_sqs, max_exp_avg_sqs),
        (lr, (beta1, beta2), eps, weight_decay, amsgrad, maximize), gradient_scale, threads,
    )


_adagrad = RULES["adagrad"].native.step


def adagrad_(
    params: TensorList, grads: Gradients, sums: TensorList, state_steps: TensorList, copies: Copies = None, *,
    lr: Number, lr_decay: float, weight_decay: Number, initial_accumulator_value: float, eps: float,
    gradient_scale: float = 1.0, maximize: bool = False, threads: Optional[int] = None,
) -> None:
    """Steps with Adagrad, as :class:`FusedOptimizer` does.

    The first step initialises sums from ``initial_accumulator_value``.

    Source: Duchi, Hazan & Singer, JMLR 12, 2011, in the variant of `torch.optim.Adagrad`.
    """
    _adagrad(
        (params, grads, state_steps, copies, None, sums),
        (lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize), gradient_scale, threads,
    )


_rmsprop = RULES["rmsprop"].native.step


def rmsprop_(
    params: TensorList, grads: Gradients, square_avgs: TensorList, state_steps: TensorList, copies: Copies = None, *,
    lr: Number, alpha: float, eps: float, weight_decay: Number, momentum: float, gradient_scale: float = 1.0,
    centered: bool = False, maximize: bool = False, momentum_buffers: Optional[TensorList] = None,
    grad_avgs: Optional[TensorList] = None, threads: Optional[int] = None,
) -> None:
    """Steps with RMSprop, as :class:`FusedOptimizer` does.

    Pass ``momentum_buffers`` and ``grad_avgs`` only if the hyperparameters need them.

    Source: Tieleman & Hinton, lecture 6.5, 2012; centered: Graves, 2013; in the variant of `torch.optim.RMSprop`.
    """
    _rmsprop(
        (params, grads, state_steps, copies, None, square_avgs, momentum_buffers, grad_avgs),
        (lr, alpha, eps, weight_decay, momentum, centered, maximize), gradient_scale, threads,
    )


_adadelta = RULES["adadelta"].native.step


def adadelta_(
    params: TensorList, grads: Gradients, square_avgs: TensorList, acc_deltas: TensorList, state_steps: TensorList,
    copies: Copies = None, *, lr: Number, rho: float, eps: float, weight_decay: Number, gradient_scale: float = 1.0,
    maximize: bool = False, threads: Optional[int] = None,
) -> None:
    """Steps with Adadelta, as :class:`FusedOptimizer` does.

    Source: Zeiler, 2012, in the variant of `torch.optim.Adadelta`, which adds a learning rate.
    """
    _adadelta(
        (params, grads, state_steps, copies, None, square_avgs, acc_deltas),
        (lr, rho, eps, weight_decay, maximize), gradient_scale, threads,
    )


_adamax = RULES["adamax"].native.step


def adamax_(
    params: TensorList, grads: Gradients, exp_avgs: TensorList, exp_infs: TensorList, state_steps: TensorList,
    copies: Copies = None, *, lr: Number, beta1: float, beta2: float, eps: float, weight_decay: Number,
    gradient_scale: float = 1.0, maximize: bool = False, threads: Optional[int] = None,
) -> None:
    """Steps with Adamax, as :class:`FusedOptimizer` does.

    Source: Kingma & Ba, ICLR 2015, section 7.1, in the variant of `torch.optim.Adamax`, which adds eps to the
    gradient's size inside the maximum.
    """
    _adamax(
        (params, grads, state_steps, copies, None, exp_avgs, exp_infs),
        (lr, (beta1, beta2), eps, weight_decay, maximize), gradient_scale, threads,
    )


_rprop = RULES["rprop"].native.step


def rprop_(
    params: TensorList, grads: Gradients, prevs: TensorList, step_sizes: TensorList, state_steps: TensorList,
    copies: Copies = None, *, lr: Number, etaminus: float, etaplus: float, step_size_min: float, step_size_max: float,
    gradient_scale: float = 1.0, maximize: bool = False, threads: Optional[int] = None,
) -> None:
    """Steps with Rprop, as :class:`FusedOptimizer` does.

    The first step initialises step_sizes from ``lr``.

    Source: Riedmiller & Braun, ICNN 1993, in the variant of `torch.optim.Rprop`: an element is not updated in a step in
    which its gradient changes sign.
    """
    _rprop(
        (params, grads, state_steps, copies, None, prevs, step_sizes),
        (lr, (etaminus, etaplus), (step_size_min, step_size_max), maximize), gradient_scale, threads,
    )


_lion = RULES["lion"].native.step


def lion_(
    params: TensorList, grads: Gradients, exp_avgs: TensorList, state_steps: TensorList, copies: Copies = None, *,
    lr: Number, beta1: float, beta2: float, weight_decay: Number, gradient_scale: float = 1.0, maximize: bool = False,
    threads: Optional[int] = None,
) -> None:
    """Steps with Lion, as :class:`FusedOptimizer` does.

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023.
    """
    _lion(
        (params, grads, state_steps, copies, None, exp_avgs),
        (lr, (beta1, beta2), weight_decay, maximize), gradient_scale, threads,
    )


_nadam = RULES["nadam"].native.step


def nadam_(
    params: TensorList, grads: Gradients, exp_avgs: TensorList, exp_avg_sqs: TensorList, mu_products: TensorList,
    state_steps: TensorList, copies: Copies = None, *, lr: Number, beta1: float, beta2: float, eps: float,
    weight_decay: Number, momentum_decay: float, gradient_scale: float = 1.0, decoupled_weight_decay: bool = False,
    maximize: bool = False, threads: Optional[int] = None,
) -> None:
    """Steps with NAdam, as :class:`FusedOptimizer` does.

    ``mu_products`` are float64 or float32 tensors of one element, initially 1.

    Source: Dozat, "Incorporating Nesterov Momentum into Adam", ICLR 2016 workshop, in the variant of
    `torch.optim.NAdam`.
    """
    _nadam(
        (params, grads, state_steps, copies, mu_products, exp_avgs, exp_avg_sqs),
        (lr, (beta1, beta2), eps, weight_decay, momentum_decay, decoupled_weight_decay, maximize), gradient_scale,
        threads,
    )


_radam = RULES["radam"].native.step


def radam_(
    params: TensorList, grads: Gradients, exp_avgs: TensorList, exp_avg_sqs: TensorList, state_steps: TensorList,
    copies: Copies = None, *, lr: Number, beta1: float, beta2: float, eps: float, weight_decay: Number,
    gradient_scale: float = 1.0, decoupled_weight_decay: bool = False, maximize: bool = False,
    threads: Optional[int] = None,
) -> None:
    """Steps with RAdam, as :class:`FusedOptimizer` does.

    Source: Liu et al., "On the Variance of the Adaptive Learning Rate and Beyond", ICLR 2020, in the variant of
    `torch.optim.RAdam`.
    """
    _radam(
        (params, grads, state_steps, copies, None, exp_avgs, exp_avg_sqs),
        (lr, (beta1, beta2), eps, weight_decay, decoupled_weight_decay, maximize), gradient_scale, threads,
    )


_lamb = RULES["lamb"].native.step


def lamb_(
    params: TensorList, grads: Gradients, exp_avgs: TensorList, exp_avg_sqs: TensorList, state_steps: TensorList,
    copies: Copies = None, *, lr: Number, beta1: float, beta2: float, eps: float, weight_decay: Number,
    gradient_scale: float = 1.0, maximize: bool = False, threads: Optional[int] = None,
) -> None:
    """Steps with LAMB, as :class:`FusedOptimizer` does.

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", ICLR 2020, algorithm
    2.
    """
    _lamb(
        (params, grads, state_steps, copies, None, exp_avgs, exp_avg_sqs),
        (lr, (beta1, beta2), eps, weight_decay, maximize), gradient_scale, threads,
    )


_ademamix = RULES["ademamix"].native.step


def ademamix_(
    params: TensorList, grads: Gradients, exp_avg_fasts: TensorList, exp_avg_slows: TensorList, exp_avg_sqs: TensorList,
    state_steps: TensorList, copies: Copies = None, *, lr: Number, beta1: float, beta2: float, beta3: float,
    alpha: float, eps: float, weight_decay: Number, gradient_scale: float = 1.0, maximize: bool = False,
    threads: Optional[int] = None,
) -> None:
    """Steps with AdEMAMix, as :class:`FusedOptimizer` does.

    Source: Pagliardini, Ablin & Grangier, "The AdEMAMix Optimizer: Better, Faster, Older", 2024, algorithm 1.
    """
    _ademamix(
        (params, grads, state_steps, copies, None, exp_avg_fasts, exp_avg_slows, exp_avg_sqs),
        (lr, (beta1, beta2), beta3, alpha, eps, weight_decay, maximize), gradient_scale, threads,
    )
