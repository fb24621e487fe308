"""Tests the op of DeepSpeed's CPU Adam. Without DeepSpeed, a replacement builder keeps loaded ops as the real builder
does.
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


def test_it_is_installed_where_deepspeed_keeps_loaded_ops_and_other_names_are_passed_on(monkeypatch):
    class OpBuilder:
        _loaded_ops: dict = {}
        NAME = "cpu_adam"

        def load(self):
            return self._loaded_ops.setdefault(self.NAME, types.SimpleNamespace(zenflow_adam_create="DeepSpeed's own"))

    parent, module = types.ModuleType("deepspeed.ops"), types.ModuleType("deepspeed.ops.op_builder")
    module.CPUAdamBuilder = OpBuilder
    for name, one in (("deepspeed", types.ModuleType("deepspeed")), (parent.__name__, parent), (module.__name__, module)):
        monkeypatch.setitem(sys.modules, name, one)
    installed = deepspeed.install()
    assert OpBuilder().load() is installed is deepspeed.install()
    assert installed.zenflow_adam_create == "DeepSpeed's own"
    assert OpBuilder().load() is installed
    with pytest.raises(AttributeError):
        _ = installed.unknown
    OpBuilder._loaded_ops["cpu_adam"] = object()
    with pytest.raises(RuntimeError, match="has loaded its own"):
        deepspeed.install()


TRAINING = """
    import sys, torch, deepspeed
    # Compiled for sums over ranks of one machine, and here is one rank.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    if {installs}:
        import instep.deepspeed
        instep.deepspeed.install()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    config = {{"train_micro_batch_size_per_gpu": 4, "bf16": {{"enabled": True}}, "gradient_clipping": 1.0,
              "zero_optimization": {{"stage": 2, "offload_optimizer": {{"device": "cpu"}}}}, **{config}}}
    optimizer = {optimizer}
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer,
                                      model_parameters=model.parameters() if optimizer is None else None)
    torch.manual_seed(1)
    x, losses = torch.randn(4, 8).bfloat16(), []
    for _ in range(30):
        loss = (engine(x) - 1).square().mean()
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    print("losses", losses[0], losses[-1], type(engine.optimizer.optimizer).__name__)
    assert losses[-1] < 0.2 * losses[0], losses
"""


@pytest.mark.skipif(not HAS_DEEPSPEED, reason="needs deepspeed")
@pytest.mark.parametrize("kind", ["op", "class"])
def test_zero_offload_trains_without_a_compiler(kind, tmp_path):
    adamw = {"optimizer": {"type": "AdamW", "params": {"lr": 0.02}}}
    allowed = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    text = TRAINING.format(
        installs=kind == "op",
        config=adamw if kind == "op" else allowed,
        optimizer="None" if kind == "op" else "__import__('instep.torch').torch.AdamW(model.parameters(), lr=0.02)",
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    tools = tmp_path / "tools"
    tools.mkdir()
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    variables = {**os.environ, **ranks, "PATH": str(tools), "DS_ACCELERATOR": "cpu", "CXX": "none", "CC": "none"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(text)], env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert ("DeepSpeedCPUAdam" if kind == "op" else "AdamW") in done.stdout
