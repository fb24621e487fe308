"""Trains a model under DistributedDataParallel with its optimizer inside backward, and compares the parameters with
those of torch's optimizer after backward.

torchrun --nproc-per-node 2 python/examples/ddp.py
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from instep.torch import register_ddp

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1))
ours = DistributedDataParallel(model, bucket_cap_mb=0.1)
theirs = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=0.1)

optimizer = register_ddp(ours, "adamw", lr=1e-3)  # in the place of an optimizer's step
reference = torch.optim.AdamW(theirs.parameters(), lr=1e-3)

torch.manual_seed(1 + dist.get_rank())
for step in range(100):
    x = torch.randn(64, 32)
    y = x[:, :1].sin() + x[:, 1:2] * x[:, 2:3]
    loss = nn.functional.mse_loss(ours(x), y)
    loss.backward()  # sums each bucket over the ranks, and steps it while backward goes on
    optimizer.zero_grad()

    nn.functional.mse_loss(theirs(x), y).backward()
    reference.step()
    reference.zero_grad()

difference = max((p - q).abs().max().item() for p, q in zip(ours.parameters(), theirs.parameters()))
if dist.get_rank() == 0:
    print(f"loss {loss.item():.4f}; parameters differ from torch's by at most {difference:.1e}")
dist.destroy_process_group()
