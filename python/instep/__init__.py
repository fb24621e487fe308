"""Fused optimizer steps over whole gradient buckets, overlapped with backward.

``instep.torch`` is for PyTorch users, ``instep.deepspeed`` replaces the op of DeepSpeed's CPU Adam, and
``instep.bench`` times steps. Only these three import torch. This module lists the optimizers of the library.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Union

from . import _native

__version__: str = _native.VERSION
__all__ = ["Descriptor", "GPU_ARCHITECTURES", "OPTIMIZERS", "__version__"]

GPU_ARCHITECTURES: tuple[str, ...] = _native.GPU_ARCHITECTURES
"""The GPUs that this package has kernels for, such as ``"sm_90"``. The last entry is the PTX, which a driver compiles
for other GPUs. Empty in a package without kernels."""

Hyperparameter = Union[float, bool, tuple[float, float]]


def __getattr__(name: str) -> object:
    """Imports ``instep.torch`` at its first use, so that programs that do not use it need no torch."""
    if name == "torch":
        return importlib.import_module("instep.torch")
    raise AttributeError(f"module 'instep' has no attribute {name!r}")


@dataclass(frozen=True)
class Descriptor:
    """One optimizer of the library."""

    name: str
    """Its name, as in ``torch.optim`` or in its paper."""
    defaults: Mapping[str, Hyperparameter]
    """Its hyperparameters with their defaults, the learning rate first."""
    carried: Union[str, None]
    """The name of the number that the optimizer carries from step to step besides the step count."""
    needs_float32_states: Union[str, None]
    """The hyperparameter that requires float32 states if it is on."""
    scales_by_norms: bool
    """Whether the parameter's change is scaled by norms of the full parameter."""
    source: str
    """The publication of the algorithm."""


OPTIMIZERS: Mapping[str, Descriptor] = MappingProxyType(
    {
        key: Descriptor(name, MappingProxyType(dict(defaults)), carried, needs, scales, source)
        for name, key, defaults, carried, needs, scales, source in _native.descriptors()
    }
)
"""Every optimizer by its key, such as ``"adamw"``."""
