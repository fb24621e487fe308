"""The threads that torch's own loops run on, for steps on the CPU.

Torch's OpenMP threads spin for milliseconds after each of its loops. A step with threads of its own would find their cores
taken, so it runs on them instead. In a child by fork those threads do not exist, and GNU's runtime waits for them without
end; a step there has threads of its own.
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
            # A library's handle finds what the libraries that it needs export: torch's runtime, and no other one.
            function = ctypes.CDLL(str(path)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0
