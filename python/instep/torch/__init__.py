"""instep for PyTorch: an optimizer, and its fusion into DistributedDataParallel's buckets, FSDP's units and backward."""

from .ddp import DDPOptimizer, register_ddp
from .fsdp import FSDPOptimizer, register_fsdp
from .in_backward import InBackwardOptimizer, apply_optimizer_in_backward, get_in_backward_optimizers
from .optimizer import FusedOptimizer
from .overlapped import OverlappedOptimizer, as_overlapped_optim, register_overlapped

__all__ = [
    "DDPOptimizer",
    "FSDPOptimizer",
    "FusedOptimizer",
    "InBackwardOptimizer",
    "OverlappedOptimizer",
    "apply_optimizer_in_backward",
    "as_overlapped_optim",
    "get_in_backward_optimizers",
    "register_ddp",
    "register_fsdp",
    "register_overlapped",
]
