"""Compares the speed of one AdamW step in instep, PyTorch, DeepSpeed, bitsandbytes and torchao on this machine.

``python -m instep.bench`` takes about a minute, and longer on a busy machine. Steps run on the CPU, on tensors that
already have gradients.
"""
