"""The shapes of torch_gpu.py, and how many buckets of each a pass has. This file needs no PyTorch.

A pass has at least eight buckets. The work that our stepper does once per pass (Begin, waits, status) would otherwise
be a large part of each bucket's time. The shapes run in the order of `SHAPES`, the most useful first, because a run may
be cut off.
"""

import math

# Per bucket its number of parameters and the elements of each. 256Mi is eight buckets of 32 Mi elements.
SHAPES = {"bucket": (50, 131072), "256Mi": (1, 32 << 20), "16Mi": (1, 16 << 20)}
FEWEST_BUCKETS = 8
F32_BYTES = 4


def bucket_count(shape, l2_bytes, states, most):
    """Returns how many f32 buckets fill the cache four times: at most `most`, but never fewer than eight."""
    segments, length = SHAPES[shape]
    arrays = 2 + states  # gradient, parameter and states
    beyond = math.ceil(4 * l2_bytes / (F32_BYTES * arrays * segments * length))
    return max(FEWEST_BUCKETS, min(beyond, most))
