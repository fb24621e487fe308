"""instep for PyTorch: optimizers, and functions that run their steps in DDP's buckets, in FSDP's units and in
backward.
"""

from ._offload_simulated import Simulated
from .ddp import DDPOptimizer, register_ddp
from .eight_bit import AdamW8bit
from .fsdp import FSDPOptimizer, register_fsdp
from .in_backward import InBackwardOptimizer, apply_optimizer_in_backward, get_in_backward_optimizers
from .named import (
    LAMB,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    AdEMAMix,
    Lion,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
)
from .offload import OffloadedDDPOptimizer, OffloadedOptimizer, offload
from .optimizer import FusedOptimizer
from .overlapped import OverlappedOptimizer, as_overlapped_optim, register_overlapped

__all__ = [
    "AdEMAMix",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "AdamW8bit",
    "Adamax",
    "DDPOptimizer",
    "FSDPOptimizer",
    "FusedOptimizer",
    "InBackwardOptimizer",
    "LAMB",
    "Lion",
    "NAdam",
    "OffloadedDDPOptimizer",
    "OffloadedOptimizer",
    "OverlappedOptimizer",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
    "Simulated",
    "apply_optimizer_in_backward",
    "as_overlapped_optim",
    "get_in_backward_optimizers",
    "offload",
    "register_ddp",
    "register_fsdp",
    "register_overlapped",
]
