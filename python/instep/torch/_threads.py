"""The threads of torch's own loops, used for steps on the CPU.

Torch's OpenMP threads spin for milliseconds after each of torch's loops. If a step had its own threads, they would
compete with the spinning threads for the cores. A step therefore runs on torch's threads. In a forked child torch's
threads do not exist, and GNU's runtime would wait for them forever. A step in a child therefore has its own threads.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

import torch

_home = os.getpid()


def openmp() -> int:
    """The address of ``GOMP_parallel`` in the OpenMP runtime that torch has loaded, or 0 if it must not be used."""
    return _loaded() if os.getpid() == _home else 0


@functools.cache
def _loaded() -> int:
    if "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return 0
    libraries = sorted(Path(torch.__file__).parent.glob("lib/libtorch_cpu.*"))
    for path in libraries:
        try:
            # A lookup through a library's handle searches only the library and its dependencies, so it finds torch's
            # runtime.
            function = ctypes.CDLL(str(path)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0
