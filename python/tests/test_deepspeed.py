"""Tests the op of DeepSpeed's CPU Adam. Most tests need no DeepSpeed, because a replacement builder caches loaded ops
as the real builder does.
"""

import importlib.util
import os
import socket
import subprocess
import sys
import textwrap
import types

import pytest
import torch

from instep import deepspeed

HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
NUMBERS = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
EPSILON = torch.finfo(torch.float32).eps


def op(adamw_mode=True):
    one = deepspeed.Op(None)
    assert one.create_adam(7, 1e-3, 0.9, 0.999, 1e-8, 0.0, adamw_mode, False) == 0
    return one


def tensors(dtype=torch.float32, states=torch.float32, size=1000):
    torch.manual_seed(0)
    return [torch.randn(size).to(dtype), torch.randn(size).to(dtype), torch.zeros(size, dtype=states)] + [
        torch.zeros(size, dtype=states)
    ]


@pytest.mark.parametrize("adamw_mode", [True, False])
def test_an_update_is_torchs(adamw_mode):
    one, own = op(adamw_mode), tensors()
    param = torch.nn.Parameter(own[0].clone())
    torchs = torch.optim.AdamW if adamw_mode else torch.optim.Adam
    wanted = torchs([param], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    for step in range(1, 6):
        own[1].copy_(torch.randn(1000))
        param.grad = own[1].clone()
        wanted.step()
        assert one.adam_update(7, step, *NUMBERS.values(), True, *own) == 0
        torch.testing.assert_close(own[0], param.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(own[3], wanted.state[param]["exp_avg_sq"], rtol=1e-5, atol=1e-8)


def test_without_bias_correction_moments_are_taken_as_they_are():
    one, own = op(), tensors()
    p, m, v = own[0].double(), torch.zeros(1000).double(), torch.zeros(1000).double()
    for step in range(1, 4):
        own[1].copy_(torch.randn(1000))
        g = own[1].double()
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        p = p * (1 - 0.001) - 0.01 * m / (v.sqrt() + 1e-8)
        one.adam_update(7, step, *NUMBERS.values(), False, *own)
        torch.testing.assert_close(own[0].double(), p, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.bfloat16,) * 2, (torch.float16, torch.float32)])
def test_parameters_of_16_bits_are_stepped(dtypes):
    one, own = op(), tensors(*dtypes)
    before = own[0].float()
    one.adam_update(7, 1, *NUMBERS.values(), True, *own)
    moved = own[0].float() - before
    # A first update moves every element by the rate, against its gradient, beside the decay.
    torch.testing.assert_close(moved, -0.01 * own[1].float().sign() - 0.001 * before, rtol=0.0, atol=0.02)
    assert moved.abs().sum() > 0


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("adamw_mode", [True, False])
def test_a_rollback_returns_the_old_values_within_its_tolerance(adamw_mode, bias_correction):
    one, own = op(adamw_mode), tensors(size=20_000)
    for step in range(1, 5):
        own[1].copy_(torch.randn(20_000) * 10 ** torch.randn(20_000))
        old = [tensor.clone() for tensor in own]
        one.adam_update(7, step, *NUMBERS.values(), bias_correction, *own)
        new = [tensor.clone() for tensor in own]
        one.adam_rollback(7, step, *NUMBERS.values(), bias_correction, *own)
        gradient = own[1].abs() + (0.0 if adamw_mode else 0.1 * old[0].abs())
        for place, added in ((0, (old[0] - new[0]).abs()), (2, gradient), (3, gradient.square())):
            size = torch.maximum(torch.maximum(old[place].abs(), new[place].abs()), added)
            assert ((own[place] - old[place]).abs() <= 4 * EPSILON * size).all(), (step, place)
        assert not torch.equal(new[0], old[0])
        for tensor, value in zip(own, new):
            tensor.copy_(value)


def test_what_does_not_fit_is_refused_before_anything_is_written():
    one, own = op(), tensors()
    before = own[0].clone()
    for call, kind, text in (
        (lambda: one.adam_update(8, 1, *NUMBERS.values(), True, *own), ValueError, "optimizer 8: not created"),
        (lambda: one.adam_update(7, 0, *NUMBERS.values(), True, *own), ValueError, "step = 0"),
        (lambda: one.adam_update(7, 1, *NUMBERS.values(), True, *own[:3], own[3][:5]), ValueError, r"exp_avg_sqs\[0\]"),
        (lambda: one.adam_rollback(7, 1, *NUMBERS.values(), True, *tensors(torch.bfloat16)), NotImplementedError, "params"),
        (lambda: one.adam_rollback(7, 1, 0.1, 0.0, 0.9, 0.0, 0.0, True, *own), ValueError, "no inverse"),
    ):
        with pytest.raises(kind, match=text):
            call()
        assert torch.equal(own[0], before)
    one.destroy_adam(7)
    with pytest.raises(ValueError, match="optimizer 7: not created"):
        one.adam_update(7, 1, *NUMBERS.values(), True, *own)


class OwnOp:
    """Imitates DeepSpeed's own op. Stores optimizers by id, as the real op does."""

    def __init__(self):
        self.created = {}

    def create_adam(self, optimizer_id, *arguments):
        self.created[optimizer_id] = arguments
        return 0

    def destroy_adam(self, optimizer_id):
        del self.created[optimizer_id]
        return 0

    def zenflow_adam_create(self, optimizer_id):
        return self.created[optimizer_id]


@pytest.fixture
def builder(monkeypatch):
    """A builder that caches loaded ops as DeepSpeed's builder does, and counts the loads of its own op."""

    class OpBuilder:
        _loaded_ops: dict = {}
        NAME = "cpu_adam"
        loads = 0

        def load(self):
            if self.NAME not in self._loaded_ops:
                OpBuilder.loads += 1
                self._loaded_ops[self.NAME] = OwnOp()
            return self._loaded_ops[self.NAME]

    parent, module = types.ModuleType("deepspeed.ops"), types.ModuleType("deepspeed.ops.op_builder")
    module.CPUAdamBuilder = OpBuilder
    for name, one in (("deepspeed", types.ModuleType("deepspeed")), (parent.__name__, parent), (module.__name__, module)):
        monkeypatch.setitem(sys.modules, name, one)
    return OpBuilder


def test_it_is_installed_where_deepspeed_keeps_loaded_ops(builder):
    installed = deepspeed.install()
    assert builder().load() is installed is deepspeed.install() and builder.loads == 0
    with pytest.raises(AttributeError):
        _ = installed._private
    builder._loaded_ops["cpu_adam"] = object()
    with pytest.raises(RuntimeError, match="has loaded its own"):
        deepspeed.install()


def test_other_names_are_of_deepspeeds_own_op_which_is_loaded_once(builder):
    installed = deepspeed.install()
    installed.create_adam(1, 0.5, 0.8, 0.9, 1e-6, 0.25, False)
    installed.create_adam(2)
    installed.destroy_adam(2)
    for _ in range(3):
        assert installed.zenflow_adam_create(1) == (0.5, 0.8, 0.9, 1e-6, 0.25, False, False)
    with pytest.raises(AttributeError):
        _ = installed.unknown
    assert builder.loads == 1 and builder().load() is installed


def test_deepspeeds_own_op_has_the_optimizers_that_exist(builder):
    installed = deepspeed.install()
    installed.create_adam(1)
    create = installed.zenflow_adam_create
    installed.create_adam(2, 0.5)
    assert create(2)[0] == 0.5 and create(1)[-2] is True
    installed.destroy_adam(1)
    with pytest.raises(KeyError):
        create(1)


def test_a_failed_load_of_deepspeeds_own_op_leaves_ours(builder, monkeypatch):
    installed = deepspeed.install()
    monkeypatch.setattr(builder, "load", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        _ = installed.zenflow_adam_create
    assert builder._loaded_ops == {"cpu_adam": installed}


@pytest.mark.parametrize("adamw_mode", [True, False])
def test_an_update_of_many_parameters_has_the_bits_of_one_update_each(adamw_mode):
    one = op(adamw_mode)
    own, others = [tensors(size=size) for size in (1, 1000, 7)], [tensors(size=size) for size in (1, 1000, 7)]
    stale = [torch.full_like(lists[0], float("nan")) for lists in own]
    for step, parallel, bias_correction in ((1, True, True), (2, False, True), (3, True, False)):
        numbers = *NUMBERS.values(), bias_correction
        assert one.adam_update_multi(7, step, *numbers, *map(list, zip(*own)), stale, parallel) == 0
        for lists in others:
            one.adam_update(7, step, *numbers, *lists)
        assert all(torch.equal(a, b) for lists, other in zip(own, others) for a, b in zip(lists, other))
        assert all(torch.equal(copy, lists[0]) for copy, lists in zip(stale, own))
    one.adam_update_multi(7, 4, *NUMBERS.values(), True, *map(list, zip(*own)), [])
    assert not torch.equal(stale[1], own[1][0])


TRAINING = """
    import sys, torch, deepspeed
    import instep.deepspeed, instep.torch
    from judged import assert_close_runs, judged

    # Compiled for sums over ranks of one machine, and here is one rank.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    adamw = {"lr": 0.02, "weight_decay": 0.01}

    def train(make, **config):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        config |= {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "gradient_clipping": 1.0,
                   "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
        params = {"optimizer": make(model.parameters(), **adamw)} if make else {"model_parameters": model.parameters()}
        engine, *_ = deepspeed.initialize(model=model, config=config, **params)
        torch.manual_seed(1)
        x, losses = torch.randn(4, 8).bfloat16(), []
        for _ in range(30):
            loss = (engine(x) - 1).square().mean()
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        assert losses[-1] < 0.2 * losses[0], losses
        [masters] = engine.optimizer.single_partition_of_fp32_groups
        flat = torch.cat([param.detach().flatten() for param in model.parameters()])
        assert torch.equal(masters.detach()[: flat.numel()].bfloat16(), flat)
        return {"masters": masters.detach().clone()}, type(engine.optimizer.optimizer)

    untested = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    before, _ = train(torch.optim.AdamW, **untested)
    AFTER
    assert verdict.steps == 30
    assert_close_runs(before, after, has_16_bits=True)
    print("trained with", kind.__name__)
"""

AFTERS = {
    "op": """
    instep.deepspeed.install()
    with judged(deepspeed.ops.adam.DeepSpeedCPUAdam) as verdict:
        after, kind = train(None, optimizer={"type": "AdamW", "params": adamw})
    """,
    "class": """
    with judged() as verdict:
        after, kind = train(instep.torch.AdamW, **untested)
    """,
}


@pytest.mark.skipif(not HAS_DEEPSPEED, reason="needs deepspeed")
@pytest.mark.parametrize("kind", AFTERS)
def test_zero_offload_trains_to_the_same_parameters_without_a_compiler(kind, tmp_path):
    """The reference run uses torch's AdamW under ZeRO-Offload, because DeepSpeed's own op needs a compiler.

    Every step on the f32 masters is judged within a derived bound. The tolerance between the two complete runs is
    chosen, not derived.
    """
    text = TRAINING.replace("AFTER", AFTERS[kind].strip())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    tools = tmp_path / "tools"
    tools.mkdir()
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    variables = {**os.environ, **ranks, "PATH": str(tools), "DS_ACCELERATOR": "cpu", "CXX": "none", "CC": "none"}
    variables["PYTHONPATH"] = os.path.dirname(__file__)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(text)], env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert ("DeepSpeedCPUAdam" if kind == "op" else "AdamW") in done.stdout
