"""AdamW's step on this machine: instep compared with PyTorch, DeepSpeed, bitsandbytes and torchao. ``python -m
instep.bench``.

The benchmark takes about a minute, and longer on a busy machine. Steps run on the CPU, on tensors that already have
gradients.
"""
