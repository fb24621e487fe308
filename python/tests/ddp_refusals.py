"""Every rank makes these mistakes. Each error names its cause, and a later pass works."""

import copy

import torch
from ddp_cases import pair
from models import make
from torch import nn

from instep.torch import register_ddp


def hook_is_taken(rank: int, world: int) -> str:
    """A second hook of DDP is refused."""
    (ours, _) = pair(make("gpt"))
    register_ddp(ours, "sgd")
    try:
        register_ddp(ours, "sgd")
    except RuntimeError as error:
        return str(error)
    return "no error"


def bad_gradient(rank: int, world: int) -> tuple[str, bool]:
    """Backward raises the error of a step, which names its cause, and a later pass works."""
    (ours, _) = pair(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    stepped = register_ddp(ours, "sgd", lr=0.1)
    stepped.param_groups[0]["lr"] = -1.0
    x = torch.ones(2, 4)
    try:
        ours(x).sum().backward()
        text = "no error"
    except (ValueError, RuntimeError) as error:
        text = str(error)
    stepped.param_groups[0]["lr"] = 0.1
    ours.zero_grad()
    before = [p.detach().clone() for p in ours.parameters()]
    ours(x).sum().backward()
    return text, all(not torch.equal(p, q) for p, q in zip(ours.parameters(), before))


def error_on_one_rank(rank: int, world: int) -> str:
    """If one rank has an invalid learning rate, only that rank raises, and the other rank's all-reduce still ends."""
    (ours, _) = pair(nn.Linear(4, 4))
    stepped = register_ddp(ours, "sgd", lr=0.1)
    if rank == 1:
        stepped.param_groups[0]["lr"] = -1.0
    try:
        ours(torch.ones(2, 4)).sum().backward()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "stepped"


def scaled(optimizer: torch.optim.Optimizer) -> None:
    """The optimizer was not registered with this scaler, so the scaler's step is refused."""
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    scaler.step(optimizer)


def in_the_pass(rank: int, world: int) -> list[str]:
    """Backward names two mistakes that only it can find: a param group that was removed, and a hook without a future."""
    (ours, _) = pair(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    stepped = register_ddp(ours, "sgd", params=[{"params": layer.parameters()} for layer in ours.module], lr=0.1)
    ours(torch.ones(2, 4)).sum().backward()
    del stepped.param_groups[1]
    (other, _) = pair(nn.Linear(4, 4))
    register_ddp(other, "sgd", hook=lambda bucket: 3)
    texts = []
    for side in (ours, other):
        before = [p.detach().clone() for p in side.parameters()]
        try:
            side(torch.ones(2, 4)).sum().backward()
        except (TypeError, RuntimeError) as error:
            texts.append(str(error))
        assert all(torch.equal(p, q) for p, q in zip(side.parameters(), before))
    return texts


def misuse(rank: int, world: int) -> None:
    """Each wrong call is refused with an error that names the mistake."""
    (ours, _) = pair(nn.Linear(4, 4))
    stepped = register_ddp(ours, "sgd", params=[ours.module.weight])
    for wrong, error, text in [
        (lambda: register_ddp(nn.Linear(2, 2), "sgd"), TypeError, "wrap it first"),
        (lambda: stepped.add_param_group({"params": [nn.Parameter(torch.ones(1))]}), ValueError, "not a parameter"),
        (lambda: copy.deepcopy(stepped), TypeError, "save its state_dict()"),
        (lambda: register_ddp(pair(nn.Embedding(4, 4, sparse=True))[0]), NotImplementedError, "use sparse=False"),
        (lambda: register_ddp(ours, max_norm=float("inf")), ValueError, "max_norm = inf"),
        (lambda: scaled(stepped), RuntimeError, "register with grad_scaler="),
    ]:
        try:
            wrong()
            raise AssertionError("not refused")
        except error as raised:
            assert text in str(raised), raised
    assert len(stepped.param_groups) == 1
