"""Random trainings, with and without offload, on a device that runs late. A checker verifies the order of copies and
steps.

A program is a random model, formats, an optimizer and the events of a loop. The offloaded and the ordinary training run
the same loop, and must have the same bits after every forward pass. The checker reads only what the device recorded,
and uses no code of the engine.
"""

import copy
import random
from collections import defaultdict
from typing import Any

import torch
from models import make
from torch import Tensor, nn

from instep.torch import FusedOptimizer, offload
from instep.torch._offload_bucket import Bucket
from instep.torch._offload_simulated import Simulated
from instep.torch.offload import Memory

Record = list[tuple[str, Any]]


class Strays(nn.Module):
    """A model with branches, a transposed weight, a scalar, and attention that reads its output projection's weight
    without calling the projection.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.branches = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.last = nn.Linear(16, 4)
        self.last.weight = nn.Parameter(torch.randn(16, 4).t() * 0.1)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.first(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.branches[self.calls % 3 % 2](x).tanh()
        return self.last(x) * self.scale

    def batch(self) -> Tensor:
        return torch.randn(2, 5, 8)

    def loss(self, batch: Tensor) -> Tensor:
        return self(batch.to(self.scale.dtype)).float().pow(2).mean()


def build(name: str, dtype: torch.dtype) -> nn.Module:
    """Returns a model, always with the same values."""
    if name != "strays":
        return make(name, dtype)
    with torch.random.fork_rng():
        torch.manual_seed(6)
        return Strays().to(dtype)


class Program:
    """The choices that a seed determines."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.seed = seed
        self.dtype = draw.choice((torch.float32, torch.float32, torch.bfloat16))
        self.model = draw.choice(("gpt", "strays", "strays", "resnet" if self.dtype == torch.float32 else "gpt"))
        self.optimizer = draw.choice(("adamw", "adamw", "sgd", "lion", "adagrad", "nadam"))
        self.options: dict[str, Any] = {"lr": 0.01}
        if self.optimizer == "sgd":
            self.options["momentum"] = 0.9
        self.formats = draw.choice(({}, {"states": "bfloat16"}, {"states": "8bit"}, {"states": "float32"}))
        if self.dtype == torch.bfloat16:
            self.formats = {**self.formats, **draw.choice(({}, {"master": "float32"}, {"master": "remainder16"}))}
        if ("states" in self.formats or self.dtype == torch.bfloat16) and draw.random() < 0.4:
            self.formats = {**self.formats, "seed": 7}
        self.decision = draw.choice(("none", "none", "clip", "skip", "scaler", "clip and scaler"))
        self.accumulate = draw.choice(("device", "host"))
        self.micro_batches = draw.choice((1, 1, 2, 3))
        self.bucket_bytes = draw.choice((1, 3000, 20000, 1 << 20))
        self.ring = draw.choice(("all", "one bucket"))
        self.late = draw.choice((0.0005, 0.002, 0.006))
        self.groups = draw.choice((1, 2))
        self.steps = draw.choice((3, 5))
        self.threads = draw.choice((1, 2))
        self.acts = [
            draw.choice(("none", "none", "evaluate", "write", "lr", "state", "save", "wait")) for _ in range(self.steps)
        ]
        self.infinite = [draw.random() < 0.25 and self.decision not in ("none", "clip") for _ in range(self.steps)]

    def __repr__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in vars(self).items())

    def groups_of(self, model: nn.Module) -> list[dict[str, Any]]:
        params = list(model.parameters())
        if self.groups == 1:
            return [{"params": params}]
        return [{"params": params[1::2], "lr": 0.003}, {"params": params[::2]}]


def trained(program: Program, is_offloaded: bool, record: Record) -> tuple[list[Tensor], Any]:
    """Runs a program. Returns losses, parameters and norms, in order, and the device."""
    model = build(program.model, program.dtype)
    options = {**program.options, **program.formats, "threads": program.threads}
    scales = "scaler" in program.decision
    max_norm = 0.05 if "clip" in program.decision else None
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2) if scales else None
    device = None
    if is_offloaded:
        sizes = [Bucket(0, params).gradient_bytes for params in Memory(program.bucket_bytes).split(list(model.parameters()))]
        device = Simulated(program.seed, program.late, record=record)
        optimizer = offload(
            model,
            program.optimizer,
            params=program.groups_of(model),
            max_norm=max_norm,
            grad_scaler=scaler,
            skip_nonfinite=program.decision == "skip",
            accumulate=program.accumulate,
            bucket_bytes=program.bucket_bytes,
            ring_bytes=max(sizes) if program.ring == "one bucket" else None,
            device=device,
            **options,
        )
    else:
        optimizer = FusedOptimizer(program.groups_of(model), program.optimizer, max_norm=max_norm, fused=scales, **options)
    seen: list[Tensor] = []
    for step in range(program.steps):
        sums: dict[Tensor, Tensor] = {}
        for micro in range(program.micro_batches):
            torch.manual_seed(1000 * program.seed + 10 * step + micro)
            loss = model.loss(model.batch())
            seen.append(loss.detach().clone())
            if program.infinite[step] and micro == 0:
                loss = loss * float("inf")
            loss = loss if scaler is None else scaler.scale(loss)
            if is_offloaded and micro < program.micro_batches - 1:
                with optimizer.no_sync():
                    loss.backward()
            else:
                loss.backward()
            if not is_offloaded and program.accumulate == "host":
                for param in model.parameters():
                    if param.grad is not None:
                        grad, param.grad = param.grad.float(), None
                        sums[param] = sums[param] + grad if param in sums else grad
        for param, total in sums.items():
            param.grad_dtype = torch.float32
            param.grad = total
        if program.decision == "skip" and not is_offloaded:
            grads = [param.grad for param in model.parameters() if param.grad is not None]
            # As a scaler tells it: a step that is skipped takes over what the loop has written, too.
            optimizer.found_inf = torch.tensor(float(not all(bool(grad.isfinite().all()) for grad in grads)))
            optimizer.step()
        elif scaler is not None:
            scaler.step(optimizer)
            scaler.update()
            seen.append(torch.tensor(scaler.get_scale()))
        else:
            optimizer.step()
        optimizer.zero_grad()
        for param in sums:
            param.grad_dtype = param.dtype
        if program.decision == "clip":
            seen.append(torch.tensor(optimizer.last_norm()))
        act(program.acts[step], model, optimizer, seen, is_offloaded)
    if is_offloaded:
        optimizer.wait()
    seen += [param.detach().clone() for param in model.parameters()]
    for _, values in sorted(optimizer.state_dict()["state"].items()):
        seen += [value.clone() for name, value in sorted(values.items()) if isinstance(value, Tensor)]
    if is_offloaded:
        device.planned = optimizer.page_locked_bytes()
        optimizer.close()
    return seen, device


def act(what: str, model: nn.Module, optimizer: Any, seen: list[Tensor], is_offloaded: bool) -> None:
    """Does one event of a loop between two steps."""
    if what == "evaluate":
        with torch.no_grad():
            seen.append(model.loss(model.batch()))
    elif what == "write":
        if is_offloaded:
            optimizer.wait()
        with torch.no_grad():
            next(model.parameters()).mul_(0.5)
    elif what == "lr":
        optimizer.param_groups[0]["lr"] *= 0.5
    elif what == "state":
        for values in (optimizer.state.get(param, {}) for param in model.parameters()):
            seen += [value.clone() for name, value in sorted(values.items()) if isinstance(value, Tensor)]
    elif what == "save":
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        seen += [value for value in saved[0].values()]
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    elif what == "wait" and is_offloaded:
        optimizer.wait()


def refuse_differences(program: Program) -> None:
    """Raises if offload changes the bits of a program, if its record has a race, or if memory has grown."""
    record: Record = []
    wanted, _ = trained(program, False, [])
    found, device = trained(program, True, record)
    assert len(wanted) == len(found), program
    for k, (one, two) in enumerate(zip(wanted, found)):
        assert torch.equal(one.nan_to_num(-7.0), two.nan_to_num(-7.0)), f"value {k} differs in {program}"
    judge(record, decides=program.decision != "none")
    assert device.page_locked_bytes == device.planned, program


def judge(record: Record, decides: bool) -> None:
    """Raises if any work ran too early. This is a race even if no value changed."""
    at: dict[tuple[str, Any], list[int]] = defaultdict(list)
    taken: list[tuple[int, int]] = []
    asked: dict[int, list[int]] = defaultdict(list)
    steps: list[tuple[int, int]] = []
    for now, (what, label) in enumerate(record):
        if what == "taken":
            label, start, end = label
            clash = [other for other in taken if start < other[1] and other[0] < end]
            assert not clash, f"{label}: takes bytes {start} to {end}, and {clash} are not given back"
            taken.append((start, end))
        elif what == "given back":
            _, start, end = label
            assert (start, end) in taken, f"bytes {start} to {end}: given back twice"
            taken.remove((start, end))
            continue
        at[what, label].append(now)

        def last(of: str, label: Any = label) -> int:
            return at[of, label][-1] if at[of, label] else -1

        if what == "down begins":
            assert last("taken") > -1 or label[1] is None, f"{label}: goes down without a place"
        elif what in ("norm", "step begins"):
            assert label not in steps, f"{label}: stepped twice"
            assert last("down ends") > -1 or label[1] is not None, label
            downs = at["down begins", label], at["down ends", label]
            assert len(downs[0]) == len(downs[1]) == len(at["taken", label]), f"{label}: {what} before its copy has ended"
            if what == "step begins":
                steps.append(label)
                if decides:
                    number, bucket = label
                    assert at["decision", (number, None)], f"{label}: stepped before the decision"
                    assert last("norm") > -1, f"{label}: not in the norm"
                    last_asked = [asked[one] for one in sorted(asked) if one < number and asked[one]][-1:]
                    for order in last_asked:
                        rank = {bucket: k for k, bucket in enumerate(order)}
                        before = [rank.get(other, len(rank)) for one, other in steps if one == number]
                        assert before == sorted(before), f"{label}: not in the order of the last forward pass"
        elif what == "decision":
            late = [
                one
                for (of, one) in list(at)
                if of == "taken" and one[0] == label[0] and one[1] is not None and not at.get(("norm", one))
            ]
            assert not late, f"decision without the norms of {late}"
        elif what == "up begins":
            assert last("step ends") > -1, f"{label}: goes up before its step has ended"
            assert not at["read", label], f"{label}: goes up after it was read"
        elif what == "read":
            assert len(at["step begins", label]) == len(at["step ends", label]), f"{label}: read while it is stepped"
            assert len(at["up begins", label]) == len(at["up ends", label]), f"{label}: read while it goes up"
            begun = at["taken", label]
            assert not begun or at["step ends", label], f"{label}: read before its step"
            asked[label[0]].append(label[1])
    assert not taken, f"{taken}: never given back"
