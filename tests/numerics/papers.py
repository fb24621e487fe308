"""Optimizers that torch.optim lacks, as their papers define them, for vectors.py and against_torch.py.

This file must follow the papers, not kernels/rules/<name>.h, and must compute in the type that the tensors have.
"""

import torch


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr, betas, weight_decay, maximize, foreach):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay, maximize=maximize))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for p in group["params"]:
                g = -p.grad if group["maximize"] else p.grad
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                update = torch.sign(beta1 * m + (1 - beta1) * g)
                p -= lr * (update + group["weight_decay"] * p)
                m.copy_(beta2 * m + (1 - beta2) * g)


class Lamb(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01, maximize=False, foreach=False):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for x in group["params"]:
                g = -x.grad if group["maximize"] else x.grad
                state = self.state[x]
                t = state["step"] = state.get("step", 0) + 1
                m = state.setdefault("exp_avg", torch.zeros_like(x))
                v = state.setdefault("exp_avg_sq", torch.zeros_like(x))
                m.copy_(beta1 * m + (1 - beta1) * g)
                v.copy_(beta2 * v + (1 - beta2) * g**2)
                r = (m / (1 - beta1**t)) / (torch.sqrt(v / (1 - beta2**t)) + group["eps"])
                update = r + group["weight_decay"] * x
                # The paper's phi is the identity. It leaves open what 0 / 0 is.
                sizes = torch.linalg.vector_norm(x), torch.linalg.vector_norm(update)
                ratio = sizes[0] / sizes[1] if all(size > 0 for size in sizes) else 1.0
                x -= group["lr"] * ratio * update


class AdEmaMix(torch.optim.Optimizer):
    """Algorithm 1, with constant alpha and beta3."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), beta3=0.9999, alpha=5.0, eps=1e-8, weight_decay=0.0, maximize=False, foreach=False):
        options = dict(lr=lr, betas=betas, beta3=beta3, alpha=alpha, eps=eps, weight_decay=weight_decay, maximize=maximize)
        super().__init__(params, options)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            (beta1, beta2), beta3 = group["betas"], group["beta3"]
            for x in group["params"]:
                g = -x.grad if group["maximize"] else x.grad
                state = self.state[x]
                t = state["step"] = state.get("step", 0) + 1
                m1 = state.setdefault("exp_avg_fast", torch.zeros_like(x))
                m2 = state.setdefault("exp_avg_slow", torch.zeros_like(x))
                v = state.setdefault("exp_avg_sq", torch.zeros_like(x))
                m1.copy_(beta1 * m1 + (1 - beta1) * g)
                m2.copy_(beta3 * m2 + (1 - beta3) * g)
                v.copy_(beta2 * v + (1 - beta2) * g**2)
                averages = m1 / (1 - beta1**t) + group["alpha"] * m2
                direction = averages / (torch.sqrt(v / (1 - beta2**t)) + group["eps"])
                x -= group["lr"] * (direction + group["weight_decay"] * x)
