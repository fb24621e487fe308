"""Offloaded training allocates the bytes that `instep plan --offload=torch` predicts.

The tests of that command compare its predictions with the same file of figures. `benches/offload.py --plan` compares
times.
"""

import json
from pathlib import Path

import pytest
import torch
from offload_cases import kept_bytes
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
    dtypes = config["dtypes"]
    named = {name: value for name, value in zip(given, [*given[1:], ""]) if name.startswith("--")}
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


def is_sharded(plan):
    return "fsdp" in plan["options"]


def named(plans):
    return pytest.mark.parametrize("plan", plans, ids=lambda plan: " ".join(plan["options"]) or "all unset")


@named([plan for plan in PLANS if not is_sharded(plan)])
def test_page_locked_memory_and_states_have_the_bytes_of_the_plan(plan):
    config, given = plan["config"], plan["options"]
    dtypes = config["dtypes"]
    model = nn.ParameterList(torch.zeros(shape, dtype=TYPES[dtypes["param"]]) for shape in params_of(config))
    for param in model:
        param.grad_dtype = TYPES[dtypes["grad"]]
    device = Simulated()
    optimizer = offload(model, config.get("optimizer", "adamw"), device=device, **options_of(config, given))
    assert optimizer.page_locked_bytes() == device.page_locked_bytes == plan["page_locked_bytes"]
    assert kept_bytes(optimizer) == plan["kept_bytes"]
    optimizer.close()


@named([plan for plan in PLANS if is_sharded(plan)])
def test_shards_of_fsdp_have_the_bytes_of_the_plan(groups, plan):
    config, given = plan["config"], plan["options"]
    options = {"dtype": TYPES[config["dtypes"]["param"]], **options_of(config, [*given])}
    options["scales"] = options.pop("grad_scaler", None) is not None
    ranks = int(given[given.index("--world-size") + 1])
    groups_of_ranks = ranks // int(given[given.index("--shard-size") + 1]) if "--shard-size" in given else 1
    optimizer = config.get("optimizer", "adamw")
    entries = [
        (entry.get("repeat"), [param["shape"] for param in entry.get("params", [entry])]) for entry in config["params"]
    ]
    found = groups(ranks).run(
        "offload_cases", "held", entries=entries, optimizer=optimizer, replicas=groups_of_ranks, **options
    )
    assert found[0] == {name: plan[name] for name in found[0]}
    for other in found[1:]:  # The first rank's shards are the longest, and all are padded to its length.
        assert other["page_locked_bytes"] == plan["page_locked_bytes"]
        assert other["gradient_bytes"] <= plan["gradient_bytes"] and other["kept_bytes"] <= plan["kept_bytes"]
