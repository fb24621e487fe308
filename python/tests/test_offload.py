"""Offloaded training has the same bits as ordinary training, however late the device is. Wrong calls are refused."""

import copy
import gc
import os
import threading
import time
import weakref

import pytest
import torch
from models import make
from offload_programs import Program, Strays, judge, refuse_differences
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.utils.checkpoint import checkpoint

from instep.torch import FusedOptimizer, _offload_engine, offload
from instep.torch._offload_ring import Ring
from instep.torch._offload_simulated import Simulated
from instep.torch._offload_threads import Lane

PROGRAMS, IN_EACH_RUN = 200, 25
TURN = int(os.environ.get("INSTEP_CI_TURN", "0"))


@pytest.mark.parametrize("k", range(IN_EACH_RUN))
def test_random_programs_have_the_bits_of_one_memory(k):
    refuse_differences(Program((TURN * IN_EACH_RUN + k) % PROGRAMS))


def _too_early(monkeypatch, name):
    """Plants a fault: removes one wait."""
    if name == "a copy for the work that writes its gradient":
        real = Simulated._copy
        monkeypatch.setattr(Simulated, "_copy", lambda self, which, pairs, _, label: real(self, which, pairs, (), label))
    elif name == "a step for its copy":
        real = _offload_engine.Offload._take_in

        def take_in(self, current, arrival):
            arrival.copied = ()
            real(self, current, arrival)

        monkeypatch.setattr(_offload_engine.Offload, "_take_in", take_in)
    elif name == "a forward pass for its steps":
        monkeypatch.setattr(_offload_engine.Offload, "gate", lambda self, buckets: None)
        on_time = _offload_engine.Offload._step

        def late(self, *given):
            time.sleep(0.02)
            on_time(self, *given)

        monkeypatch.setattr(_offload_engine.Offload, "_step", late)
    elif name == "a forward pass for its uploads":
        monkeypatch.setattr(Simulated, "wait", lambda self, event: None)
    elif name == "a download for its place in the ring":
        monkeypatch.setattr(Ring, "_place", lambda self, size: 0)
    elif name == "a step for the decision":
        real = _offload_engine.Offload._arrived

        def arrived(self, current, arrival):
            real(self, current, arrival)
            if self.decider is not None:
                norm = self.decider.norm().decide(1.0, False, ())
                self._step_decided(current, arrival.bucket, norm)

        monkeypatch.setattr(_offload_engine.Offload, "_arrived", arrived)


@pytest.mark.parametrize(
    "fault",
    [
        "a copy for the work that writes its gradient",
        "a step for its copy",
        "a forward pass for its steps",
        "a forward pass for its uploads",
        "a download for its place in the ring",
        "a step for the decision",
        "nothing",
    ],
)
def test_what_does_not_wait_is_found(monkeypatch, fault):
    _too_early(monkeypatch, fault)
    found = 0
    for seed in range(8):
        program = Program(seed)
        program.accumulate, program.micro_batches, program.late, program.bucket_bytes = "device", 1, 0.01, 3000
        program.decision = "clip" if fault == "a step for the decision" else "none"
        try:
            refuse_differences(program)
        except (AssertionError, RuntimeError):  # Another error would be the plant's own.
            found += 1
    assert (found > 0) == (fault != "nothing")


def test_the_judge_refuses_races():
    good = [
        ("taken", ((1, 0), 0, 64)),
        ("down begins", (1, 0)),
        ("down ends", (1, 0)),
        ("step begins", (1, 0)),
        ("step ends", (1, 0)),
        ("given back", (0, 0, 64)),
        ("up begins", (1, 0)),
        ("up ends", (1, 0)),
        ("read", (1, 0)),
    ]
    judge(good, decides=False)
    for one, two in ((0, 1), (2, 3), (4, 6), (7, 8), (6, 8)):
        bad = list(good)
        bad[one], bad[two] = bad[two], bad[one]
        with pytest.raises(AssertionError):
            judge(bad, decides=False)


class Fails(torch.autograd.Function):
    """Raises in backward if `now` is set."""

    now = False
    first = staticmethod(lambda: None)
    """What it does before."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Fails.now:
            Fails.first()
            raise ValueError("on purpose")
        return grad


class Stack(nn.Module):
    """A model of layers, with a point in the middle where backward may raise."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x):
        for k, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if k == 2:
                x = Fails.apply(x)
        return x


def pair(model=None, **options):
    """Returns an offloaded model, and an equal one that is not offloaded."""
    torch.manual_seed(3)
    ours = model or Stack()
    theirs = copy.deepcopy(ours)
    device = options.pop("device", None) or Simulated(1, 0.002)
    stepped = offload(ours, "adamw", lr=0.01, bucket_bytes=300, device=device, **options)
    wanted = FusedOptimizer(theirs.parameters(), "adamw", lr=0.01, max_norm=options.get("max_norm"))
    return ours, theirs, stepped, wanted


def train(sides, optimizers, steps=2):
    for step in range(steps):
        x = torch.randn(4, 8)
        for side in sides:
            side(x).pow(2).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def assert_same(ours, theirs, stepped):
    stepped.wait()
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters()):
        assert torch.equal(p, q), name


def test_no_step_runs_on_the_thread_of_autograd(monkeypatch):
    threads = set()
    from instep.torch._engine import Engine

    real = Engine._run
    monkeypatch.setattr(
        Engine, "_run", lambda self, *given: (threads.add(threading.current_thread().name), real(self, *given))
    )
    model = Stack()
    optimizer = offload(model, "adamw", lr=0.01, device=Simulated())
    train([model], [optimizer])
    optimizer.wait()
    assert threads == {"instep steps"}


@pytest.mark.parametrize("options", [{}, {"max_norm": 0.5}, {"accumulate": "host"}], ids=str)
def test_memory_is_allocated_once(options):
    device = Simulated(2, 0.001)
    ours, theirs, stepped, wanted = pair(device=device, **options)
    made, planned = device.allocations, stepped.page_locked_bytes()
    train([ours], [stepped], 1)
    stepped.wait()
    arenas = list(map(id, stepped._engine.arenas))
    train([ours], [stepped], 4)
    stepped.wait()
    assert (device.allocations, device.page_locked_bytes) == (made, planned)
    assert list(map(id, stepped._engine.arenas)) == arenas


def test_a_ring_that_is_too_small_is_refused():
    with pytest.raises(ValueError, match="ring_bytes = 64: the largest bucket has"):
        offload(Stack(), "adamw", ring_bytes=64, device=Simulated())


@pytest.mark.parametrize("options", [{"max_norm": 0.5}, {"skip_nonfinite": True}], ids=str)
def test_a_backward_that_raises_steps_nothing_where_something_decides(options):
    ours, theirs, stepped, wanted = pair(**options)
    train([ours, theirs], [stepped, wanted])
    Fails.now = True
    with pytest.raises(ValueError, match="on purpose"):
        ours(torch.randn(4, 8)).sum().backward()
    Fails.now = False
    ours.zero_grad()
    train([ours, theirs], [stepped, wanted])
    assert_same(ours, theirs, stepped)


def test_a_backward_that_raises_names_what_was_stepped():
    ours, theirs, stepped, wanted = pair()
    train([ours], [stepped])
    stepped.wait()
    worker = stepped._offload.worker
    Fails.now = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fails, "first", staticmethod(worker.wait))
        with pytest.raises(ValueError, match="on purpose"):
            ours(torch.randn(4, 8)).sum().backward()
    Fails.now = False
    with pytest.raises(RuntimeError, match=r"backward: ended with an error after 2 of 4 buckets \(layers.[45]."):
        ours(torch.randn(4, 8))
    ours.zero_grad()
    train([ours], [stepped])
    stepped.wait()


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_a_backward_that_raises_leaves_nothing_to_one_over_an_older_graph(max_norm):
    ours, theirs, stepped, wanted = pair(max_norm=max_norm)
    train([ours, theirs], [stepped, wanted])
    lost, x = torch.randn(2, 4, 8)
    first, second, third = ours(lost).sum(), ours(x).pow(2).sum(), theirs(x).pow(2).sum()
    Fails.now = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fails, "first", staticmethod(stepped._offload.worker.wait))
        with pytest.raises(ValueError, match="on purpose"):
            first.backward()
    Fails.now = False
    if max_norm is None:
        with pytest.raises(RuntimeError, match="after 2 of 4 buckets"):
            second.backward()
        return
    second.backward()
    third.backward()
    for optimizer in (stepped, wanted):
        optimizer.step()
        optimizer.zero_grad()
    assert_same(ours, theirs, stepped)


def test_zero_grad_drops_sums_on_the_host():
    ours, theirs, stepped, wanted = pair(accumulate="host")
    train([ours, theirs], [stepped, wanted])
    x = torch.randn(4, 8)
    with stepped.no_sync():
        ours(x).sum().backward()
    theirs(x).sum().backward()
    for optimizer in (stepped, wanted):
        optimizer.zero_grad()
    train([ours, theirs], [stepped, wanted])
    assert_same(ours, theirs, stepped)


def test_sums_on_the_host_that_are_dropped_leave_the_last_norm_and_no_work_for_a_closed_optimizer():
    ours, theirs, stepped, wanted = pair(accumulate="host", max_norm=1.0)
    train([ours, theirs], [stepped, wanted])
    norm = stepped.last_norm()
    assert norm is not None
    for closes in (False, True):
        with stepped.no_sync():
            ours(torch.randn(4, 8)).sum().backward()
        if closes:
            stepped.close()
        stepped.zero_grad()
        assert stepped.last_norm() == norm
    assert_same(ours, theirs, stepped)


def test_a_backward_after_close_is_refused():
    ours, theirs, stepped, wanted = pair()
    train([ours, theirs], [stepped, wanted])
    stepped.close()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="optimizer: closed, so nothing steps this gradient"):
            ours(torch.randn(4, 8)).sum().backward()
    assert_same(ours, theirs, stepped)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3e38], ids=str)
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_gradients_that_are_not_finite_are_stepped_with_as_in_one_memory(value, max_norm):
    ours, theirs, stepped, wanted = pair(max_norm=max_norm)
    train([ours, theirs], [stepped, wanted])
    x = torch.randn(4, 8)
    for side, optimizer in ((ours, stepped), (theirs, wanted)):
        (side(x).sum() * value).backward()
        optimizer.step()
    if max_norm is not None:
        norms = torch.tensor([stepped.last_norm(), wanted.last_norm()])
        assert torch.equal(*norms.nan_to_num(-1.0)) and not norms.isfinite().all()
    stepped.wait()
    for p, q in zip(ours.parameters(), theirs.parameters()):
        assert torch.equal(p.nan_to_num(-1.0), q.nan_to_num(-1.0))


def test_two_models_in_one_backward_are_stepped_by_two_optimizers():
    sides = [pair(max_norm=0.5), pair()]
    for _ in range(4):
        x = torch.randn(4, 8)
        for k in (0, 1):
            sides[1][k](sides[0][k](x)).pow(2).sum().backward()
        for _, _, stepped, wanted in sides:
            for optimizer in (stepped, wanted):
                optimizer.step()
                optimizer.zero_grad()
    for ours, theirs, stepped, _ in sides:
        assert_same(ours, theirs, stepped)


def test_an_optimizer_that_nobody_holds_steps_until_its_model_is_gone():
    ours, theirs, stepped, wanted = pair(device=Simulated(1, 0.02))
    train([ours, theirs], [stepped, wanted])
    alive = weakref.ref(stepped)
    del stepped
    gc.collect()
    train([ours, theirs], [wanted])
    x = torch.randn(4, 8)
    assert torch.equal(ours(x), theirs(x))
    del ours
    gc.collect()
    assert alive() is None


def test_a_copy_of_a_model_is_an_ordinary_one():
    ours, theirs, stepped, wanted = pair()
    train([ours, theirs], [stepped, wanted])
    stepped.wait()
    other = copy.deepcopy(ours)
    other(torch.randn(4, 8)).sum().backward()
    assert all(param.grad is not None for param in other.parameters())
    assert_same(ours, theirs, stepped)
    with pytest.raises(TypeError, match="so it has no copy"):
        copy.deepcopy(stepped)


def test_a_source_that_is_freed_before_its_copy_is_not_copied():
    device, place, gradients = Simulated(), torch.zeros(2), [torch.ones(2)]
    begun = threading.Event()
    device._stream("down").put(begun.wait)
    copied = device.down([(place, gradients[0])], (), None)
    gradients.clear()
    begun.set()
    copied.wait()
    assert place.isnan().all()


def test_what_the_worker_raises_is_raised_until_states_are_loaded(monkeypatch):
    ours, theirs, stepped, wanted = pair()
    train([ours], [stepped])
    saved = copy.deepcopy((ours.state_dict(), stepped.state_dict()))
    from instep.torch._engine import Engine

    def fails(*_):
        raise ValueError("no such kernel")

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_run", fails)
        with pytest.raises(RuntimeError, match="ValueError after 0 of 4 buckets were stepped: no such kernel"):
            train([ours], [stepped], 2)
        with pytest.raises(RuntimeError, match="load a checkpoint"):
            stepped.wait()
    stepped.load_state_dict(saved[1])
    ours.load_state_dict(saved[0])
    theirs.load_state_dict(saved[0])
    wanted.load_state_dict(saved[1])
    for side in (ours, theirs):
        side.zero_grad()
    train([ours, theirs], [stepped, wanted])
    assert_same(ours, theirs, stepped)


def test_what_is_out_of_range_is_raised_by_backward_before_anything_is_stepped():
    ours, theirs, stepped, wanted = pair()
    train([ours, theirs], [stepped, wanted])
    stepped.param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match="lr"):
        ours(torch.randn(4, 8)).sum().backward()
    stepped.param_groups[0]["lr"] = 0.01
    ours.zero_grad()
    train([ours, theirs], [stepped, wanted])
    assert_same(ours, theirs, stepped)


def test_parameters_that_come_late_are_offloaded_too():
    device = Simulated(1, 0.002)
    ours, theirs, stepped, wanted = pair(params=None, max_norm=0.5, device=device)
    for side in (ours, theirs):
        side.layers.append(copy.deepcopy(side.layers[0]))
    for side, optimizer in ((ours, stepped), (theirs, wanted)):
        optimizer.add_param_group({"params": list(side.layers[-1].parameters()), "lr": 0.1})
    train([ours, theirs], [stepped, wanted], 3)
    assert_same(ours, theirs, stepped)
    assert device.page_locked_bytes == stepped.page_locked_bytes()


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_activations_are_recomputed_with_the_values_of_the_forward_pass(max_norm):
    class Recomputed(Stack):
        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(lambda x, layer=layer: layer(x).tanh(), x, use_reentrant=False)
            return x

    ours, theirs, stepped, wanted = pair(Recomputed(), max_norm=max_norm)
    train([ours, theirs], [stepped, wanted], 4)
    assert_same(ours, theirs, stepped)


def test_a_weight_that_another_module_begins_to_read_is_named():
    class Turns(Stack):
        reads = False

        def forward(self, x):
            y = super().forward(x)
            return y + x @ self.extra.weight if self.reads else y

    model = Turns()
    model.extra = nn.Linear(8, 8, bias=False)
    optimizer = offload(model, "adamw", lr=0.01, bucket_bytes=1, device=Simulated(1, 0.002))
    for step in range(3):
        model(torch.randn(4, 8)).sum().backward()
        model.extra(torch.randn(4, 8)).sum().backward()
    model.reads = True
    with pytest.raises(RuntimeError, match="extra.weight: read without a call of its module"):
        model(torch.randn(4, 8)).sum().backward()
    optimizer.wait()


def test_states_are_whole_whenever_they_are_read():
    ours, theirs, stepped, wanted = pair(device=Simulated(1, 0.02))
    train([ours, theirs], [stepped, wanted], 1)
    for p, q in zip(ours.parameters(), theirs.parameters()):
        assert torch.equal(stepped.state[p]["exp_avg"], wanted.state[q]["exp_avg"])
    saved = get_optimizer_state_dict(ours, stepped)["state"]
    assert {float(values["step"]) for values in saved.values()} == {1.0}
    train([ours, theirs], [stepped, wanted], 1)
    torchs = torch.optim.AdamW(theirs.parameters(), lr=0.01)
    torchs.load_state_dict(copy.deepcopy(stepped.state_dict()))
    stepped.load_state_dict(torchs.state_dict())
    train([ours, theirs], [stepped, wanted], 1)
    assert_same(ours, theirs, stepped)


def test_schedules_count_from_the_next_backward():
    ours, theirs, stepped, wanted = pair(max_norm=0.5)
    schedules = [torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in (stepped, wanted)]
    for _ in range(4):
        train([ours, theirs], [stepped, wanted], 1)
        for schedule in schedules:
            schedule.step()
    assert_same(ours, theirs, stepped)


def test_a_child_by_fork_is_told():
    ours, theirs, stepped, wanted = pair()
    train([ours], [stepped])
    stepped.wait()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            ours(torch.randn(4, 8)).sum().backward()
            text = "no error"
        except RuntimeError as error:
            text = str(error)
        os.write(write, text.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert "made by a process that has forked since" in os.read(read, 1000).decode()


@pytest.mark.parametrize(
    "model, options, text",
    [
        (Stack(), {"accumulate": "disk"}, "accumulate = 'disk': not known"),
        (nn.Embedding(4, 4, sparse=True), {}, "gives sparse gradients"),
        (Stack(), {"params": [nn.Parameter(torch.ones(3))]}, "not a parameter of this module"),
        (nn.Linear(4, 4, device="meta"), {}, "meta"),
    ],
    ids=str,
)
def test_what_cannot_be_offloaded_is_refused(model, options, text):
    with pytest.raises((ValueError, NotImplementedError), match=text):
        offload(model, "adamw", **options)


def test_an_ordinary_optimizer_beside_it_is_refused():
    model = Strays()
    offload(model, "adamw", device=Simulated())
    with pytest.raises(RuntimeError, match="stepped inside backward"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_a_unit_of_work_that_ends_late_is_not_there_before():
    stream, seen = Lane("test"), []
    gradient = torch.ones(3)
    device = Simulated(0, 0.001)
    device._delay = lambda: 0.01
    event = device.mark([gradient])
    assert gradient.isnan().all()
    event.wait()
    assert torch.equal(gradient, torch.ones(3))
    stream.put(lambda: seen.append(1))
    stream.close()
    assert seen == [1]


def test_a_gpt_trains_with_a_weight_that_two_modules_share():
    ours, theirs, stepped, wanted = pair(make("gpt"), max_norm=0.1)
    for _ in range(3):
        batch = ours.batch()
        losses = [side.loss(batch) for side in (ours, theirs)]
        for loss, optimizer in zip(losses, (stepped, wanted)):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(*losses)


def test_what_is_sent_while_steps_wait_is_stepped_before_them_if_forward_needs_it_first(monkeypatch):
    # Three buckets have come down when the first step begins, and it ends after all others have come down.
    some_sent, begun, all_sent, record, copies = (*(threading.Event() for _ in range(3)), [], [])
    core = _offload_engine.Offload
    begin, send, step, end = core.begin, core.send, core._step, core.end

    def late_begin(self, *given):
        begin(self, *given)
        self.worker.put(some_sent.wait)

    def late_send(self, bucket, *given, **named):
        if bucket.index == 3:
            for copied in copies:
                copied.wait()
            some_sent.set()
            begun.wait()
        send(self, bucket, *given, **named)

    def late_step(self, *given):
        begun.set()
        all_sent.wait()
        for copied in copies:
            copied.wait()
        step(self, *given)

    for name, late in (("begin", late_begin), ("send", late_send), ("_step", late_step)):
        monkeypatch.setattr(core, name, late)
    monkeypatch.setattr(core, "end", lambda self, *given, **named: (end(self, *given, **named), all_sent.set()))
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(8)))
    device = Simulated(record=record)
    down = device.down

    def known_down(*given):
        copies.append(down(*given))
        return copies[-1]

    monkeypatch.setattr(device, "down", known_down)
    optimizer = offload(model, "adamw", bucket_bytes=1, device=device)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.wait()
    optimizer.close()
    assert [label[1] for what, label in record if what == "step begins"] == [2, 7, 6, 5, 4, 3, 1, 0]
