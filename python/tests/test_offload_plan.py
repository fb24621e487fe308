"""Offloaded training holds the bytes that `instep plan --offload=torch` foresees.

The command's tests hold it to the same file of figures. `benches/offload.py --plan` compares times.
"""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from instep.torch import offload
from instep.torch._offload_simulated import Simulated

PLANS = json.loads((Path(__file__).parents[2] / "cli/tests/offload_plans.json").read_text())
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
WORDS = {"f32": "float32", "bf16": "bfloat16"}


def params_of(config):
    for entry in config["params"]:
        for _ in range(entry.get("repeat", 1)):
            yield from (param["shape"] for param in entry.get("params", [entry]))


def options_of(config, given):
    dtypes, named = config["dtypes"], dict(zip(given[::2], given[1::2]))
    options = {"states": WORDS.get(dtypes.get("moments", "f32"), dtypes.get("moments"))}
    if "master" in dtypes:
        options["master"] = WORDS.get(dtypes["master"], dtypes["master"])
    if "--max-norm" in named:
        options["max_norm"] = float(named["--max-norm"])
    if "--grad-scaler" in given:
        options["grad_scaler"] = torch.amp.GradScaler("cpu")
    if "--ring-mib" in named:
        options["ring_bytes"] = int(named["--ring-mib"]) << 20
    if "--bucket-cap-mib" in named:
        options["bucket_bytes"] = int(named["--bucket-cap-mib"]) << 20
    return options


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: " ".join(plan["options"]) or "all unset")
def test_page_locked_memory_and_states_have_the_bytes_of_the_plan(plan):
    config, given = plan["config"], [*plan["options"]]
    if "--grad-scaler" in given:  # It has no value.
        given.insert(given.index("--grad-scaler") + 1, None)
    dtypes = config["dtypes"]
    model = nn.ParameterList(torch.zeros(shape, dtype=TYPES[dtypes["param"]]) for shape in params_of(config))
    for param in model:
        param.grad_dtype = TYPES[dtypes["grad"]]
    device = Simulated()
    optimizer = offload(model, config.get("optimizer", "adamw"), device=device, **options_of(config, given))
    assert optimizer.page_locked_bytes() == device.page_locked_bytes == plan["page_locked_bytes"]
    kept = 0
    for arena in optimizer._engine.arenas:
        masters = [] if arena.master is None else [arena.master]
        kept += sum(run.numel() * run.itemsize for run in [*arena.states.values(), *arena.scales.values(), *masters])
    assert kept == plan["kept_bytes"]
    optimizer.close()
