"""Tests random loops in which backward raises, sums are dropped and parameters change. Their bits equal those of
ordinary training.
"""

import contextlib
import copy
import os
import random

import pytest
import torch
from test_offload import Fails, Stack

from instep.torch import FusedOptimizer, offload
from instep.torch._offload_simulated import Simulated

LOOPS, IN_EACH_RUN = 96, 12
TURN = int(os.environ.get("INSTEP_CI_TURN", "0"))
ACTS = ("train", "add up", "raise", "raise, then go on", "drop a sum", "save", "lower lr", "freeze", "add a layer", "copy")


class Loop:
    """An offloaded model, and an equal one that is not offloaded."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        torch.manual_seed(seed)
        options = draw.choice(({}, {"states": "8bit"}, {"states": "bfloat16"}))
        max_norm = draw.choice((None, 0.5))
        self.device = Simulated(seed, draw.choice((0.0, 0.001, 0.004)))
        ours, theirs = (Stack() for _ in range(2))
        theirs.load_state_dict(ours.state_dict())
        self.stepped = offload(
            ours,
            "adamw",
            lr=0.01,
            max_norm=max_norm,
            skip_nonfinite=max_norm is None,
            accumulate=draw.choice(("device", "host")),
            bucket_bytes=draw.choice((1, 300, 700, 1 << 20)),
            device=self.device,
            **options,
        )
        wanted = FusedOptimizer(theirs.parameters(), "adamw", lr=0.01, max_norm=max_norm, **options)
        self.sides = ((ours, self.stepped), (theirs, wanted))

    def act(self, what: str) -> None:
        x, y = torch.randn(2, 4, 8)
        k = self.draw.randrange(6)
        for model, optimizer in self.sides:
            loss, other = (model(batch).pow(2).mean() for batch in (x, y))
            if what in ("add up", "drop a sum"):
                with optimizer.no_sync() if optimizer is self.stepped else contextlib.nullcontext():
                    loss.backward()
            if what.startswith("raise"):
                Fails.now = True
                with pytest.raises(ValueError, match="on purpose"):
                    loss.backward()
                Fails.now = False
            if what in ("raise", "raise, then go on", "drop a sum"):
                optimizer.zero_grad()
            if what in ("raise", "drop a sum"):
                continue
            if what == "save":
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                continue
            if what == "lower lr":
                optimizer.param_groups[0]["lr"] *= 0.7
            elif what == "freeze":
                model.layers[k].requires_grad_(False)
                other = model(y).pow(2).mean()
            elif what in ("add a layer", "copy") and optimizer is self.stepped:
                optimizer.wait()
            if what == "copy":
                assert torch.equal(copy.deepcopy(model)(x), model(x))
            elif what == "add a layer":
                model.layers.append(copy.deepcopy(model.layers[k]))
                optimizer.add_param_group({"params": list(model.layers[-1].parameters())})
                other = model(y).pow(2).mean()
            other.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.requires_grad_(True)


@pytest.mark.parametrize("k", range(IN_EACH_RUN))
def test_loops_that_fail_have_the_bits_of_one_memory(k):
    loop = Loop((TURN * IN_EACH_RUN + k) % LOOPS)
    for _ in range(8):
        what = loop.draw.choice(ACTS)
        loop.act(what)
        x = torch.randn(4, 8)
        ours, theirs = (model(x) for model, _ in loop.sides)
        assert torch.equal(ours, theirs), what
    loop.stepped.wait()
    for one, two in zip(*(model.parameters() for model, _ in loop.sides)):
        assert torch.equal(one, two)
    assert loop.device.page_locked_bytes == loop.stepped.page_locked_bytes()
    loop.stepped.close()
