"""AdamW's step on this machine: instep beside PyTorch, DeepSpeed, bitsandbytes and torchao. ``python -m instep.bench``.

It takes less than a minute on two cores. Steps run on the CPU, on tensors whose gradients are there already.
"""
