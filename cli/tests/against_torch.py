"""Compares `instep replay` with torch.optim in f64, for groups, clipping, states resumed from a checkpoint, and bf16
parameters.

torch has neither Lion nor LAMB, so algorithm 2 of their papers is in this file (Lion) and in tests/numerics/papers.py (LAMB).
Lion's steps are signs, and rounding may flip a sign if the average is close to zero. The comparison leaves such an element
out, and the output counts these elements. Rprop's signs come from gradients in the file, and no rounding changes these
gradients.

    python -m venv venv && venv/bin/pip install torch==2.15.0 numpy safetensors
    cargo build --release && venv/bin/python cli/tests/against_torch.py target/release/instep

Prints for each case the largest |difference| / (1e-6 + 5e-6 * |value|) over parameters and states after 7 steps. The
exit status is 1 if one of these ratios is above 1. Each case is run again with bf16 parameters and gradients, once with
f32 masters and once with remainders. The f32 values of this run's parameters must have the bits of an f32 run on the
same gradients. The bf16 parameters must equal these values as rounded by torch. With remainders, ties may differ,
because remainders round ties away from zero. This file must not compute an update itself if torch has the optimizer.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests/numerics"))
from papers import Lamb

STEPS = 7
SHAPES = {"layer.0.weight": (64, 33), "layer.0.bias": (64,), "scalar": (), "empty": (0, 3), "head": (5, 7, 11)}
OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "rprop": torch.optim.Rprop,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
}
# A bound on the error of Lion's average in f32, relative to the largest gradient. Each of the 7 steps has five
# roundings: of the mean gradient, the difference, the weight, the product and the sum.
LION_ROUNDING = 5 * 7 * 2.0**-24
# In torch, a scalar of a state, such as NAdam's mu_product, has the default type.
torch.set_default_dtype(torch.float64)
FILES = {"config": "C.json", "input": "IN", "output": "OUT"}
FIRST, SECOND = ["layer.0.weight", "empty", "scalar"], ["head", "layer.0.bias"]

CASES = [
    # optimizer, options of both groups, top-level keys
    ("sgd", {}, {"lr": 0.1}, {}),
    ("sgd", {"momentum": 0.9}, {"weight_decay": 0.1, "lr": 0.05}, {"world_size": 8}),
    ("sgd", {"momentum": 0.9, "nesterov": True}, {"momentum": 0.5, "dampening": 0.3},
     {"world_size": 3, "clip": {"global": 0.5}}),
    ("sgd", {"maximize": True, "momentum": 0.8, "weight_decay": 0.05}, {"lr": 0.0}, {"loss_scale": 1024.0}),
    ("adam", {}, {"betas": [0.5, 0.9]}, {"world_size": 8}),
    ("adam", {"amsgrad": True, "weight_decay": 0.1}, {"eps": 1e-3, "maximize": True}, {"clip": {"global": 1.0}}),
    ("adam", {"lr": 0.05, "betas": [0.0, 0.5]}, {"amsgrad": True, "betas": [0.9, 0.7]},
     {"world_size": 5, "loss_scale": 0.5}),
    ("adamw", {}, {"lr": 0.0005}, {"world_size": 8}),
    ("adamw", {"lr": 0.01, "betas": [0.9, 0.95], "weight_decay": 0.1}, {"amsgrad": True},
     {"clip": {"global": 0.1}, "world_size": 6}),
    ("adamw", {"amsgrad": True, "maximize": True, "eps": 1e-2}, {"weight_decay": 0.0}, {"loss_scale": 65536.0}),
    ("adagrad", {}, {"lr_decay": 0.2}, {"world_size": 8}),
    ("adagrad", {"initial_accumulator_value": 0.3}, {"initial_accumulator_value": 0.3}, {"loss_scale": 2.0}),
    ("adagrad", {"weight_decay": 0.1, "maximize": True}, {"eps": 1e-2, "lr": 0.05}, {"clip": {"global": 0.5}}),
    ("rmsprop", {}, {"momentum": 0.9, "alpha": 0.5}, {"world_size": 8}),
    ("rmsprop", {"momentum": 0.5, "weight_decay": 0.1}, {"centered": True, "alpha": 0.9}, {"loss_scale": 1024.0}),
    ("rmsprop", {"momentum": 0.9, "centered": True, "alpha": 0.6}, {"alpha": 0.4, "eps": 1e-3, "maximize": True}, {"clip": {"global": 1.0}}),
    ("adadelta", {}, {"rho": 0.4, "lr": 0.5}, {"world_size": 3}),
    ("adadelta", {"weight_decay": 0.1, "maximize": True}, {"eps": 1e-3}, {"clip": {"global": 0.5}}),
    ("adamax", {}, {"betas": [0.3, 0.45]}, {"world_size": 8}),
    ("adamax", {"weight_decay": 0.1, "maximize": True}, {"eps": 1e-2, "lr": 0.01}, {"loss_scale": 0.5}),
    ("rprop", {}, {"lr": 0.1}, {"world_size": 8}),
    ("rprop", {"etas": [0.3, 1.7], "maximize": True}, {"step_sizes": [0.005, 0.0125]}, {"clip": {"global": 1.0}, "world_size": 3}),
    ("lion", {}, {"lr": 0.001}, {"world_size": 8}),
    ("lion", {"weight_decay": 0.1, "lr": 0.01}, {"betas": [0.95, 0.98], "maximize": True}, {"loss_scale": 1024.0}),
    ("lion", {"betas": [0.3, 0.45]}, {"weight_decay": 1.0}, {"clip": {"global": 1.0}, "world_size": 6}),
    ("nadam", {}, {"betas": [0.5, 0.9]}, {"world_size": 8}),
    ("nadam", {"weight_decay": 0.1, "momentum_decay": 0.3}, {"eps": 1e-3, "maximize": True}, {"clip": {"global": 1.0}}),
    ("nadam", {"weight_decay": 0.1, "decoupled_weight_decay": True}, {"betas": [0.0, 0.5]}, {"loss_scale": 1024.0}),
    ("radam", {}, {"betas": [0.5, 0.9]}, {"world_size": 8}),
    ("radam", {"weight_decay": 0.1, "betas": [0.9, 0.95]}, {"eps": 1e-3, "maximize": True, "betas": [0.9, 0.8]},
     {"clip": {"global": 1.0}}),
    ("radam", {"weight_decay": 0.1, "decoupled_weight_decay": True}, {"betas": [0.0, 0.5]}, {"loss_scale": 1024.0}),
    ("lamb", {}, {"betas": [0.3, 0.45]}, {"world_size": 8}),
    ("lamb", {"weight_decay": 0.1, "lr": 0.01}, {"eps": 1e-3, "maximize": True, "weight_decay": 0.0}, {"clip": {"global": 1.0}}),
    ("lamb", {"lr": 0.05}, {"betas": [0.0, 0.5]}, {"loss_scale": 1024.0, "lr_multipliers": {"head": 0.25, "scalar": 3.0}}),
    ("sgd", {"momentum": 0.9}, {"lr": 0.1}, {"lr_multipliers": {"layer.0.weight": 0.3, "layer.0.bias": 0.0}}),
    ("adamw", {"weight_decay": 0.1}, {"lr": 0.0005}, {"clip": {"global": 1.0}, "lr_multipliers": {"head": 10.0, "scalar": 0.1}}),
]


class Lion(torch.optim.Optimizer):
    def __init__(self, params, foreach):
        super().__init__(params, dict(lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, maximize=False))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for p in group["params"]:
                g = -p.grad if group["maximize"] else p.grad
                state = self.state[p]
                m = state.setdefault("exp_avg", torch.zeros_like(p))
                largest = state["largest"] = torch.maximum(state.get("largest", torch.zeros_like(p)), g.abs())
                average = beta1 * m + (1 - beta1) * g
                near = average.abs() <= LION_ROUNDING * largest
                state["undecided"] = state.get("undecided", torch.zeros_like(p, dtype=bool)) | near
                p -= lr * (torch.sign(average) + group["weight_decay"] * p)
                m.copy_(beta2 * m + (1 - beta2) * g)


OPTIMIZERS["lion"], OPTIMIZERS["lamb"] = Lion, Lamb


def expected(config, params, gradients):
    """Returns torch's tensors in f64, NAdam's products, and the signs that rounding may flip, each by name."""
    leaves = {name: torch.nn.Parameter(torch.tensor(value, dtype=torch.float64)) for name, value in params.items()}
    # Each parameter has a separate group, so that it can have its own learning rate.
    owners = {name: group for group in config["groups"] for name in group["params"]}
    groups = [dict(group, params=[leaves[name]]) for name, group in owners.items()]
    # torch makes Adagrad's sum before it reads the groups, so all groups have the same first value.
    common = {key: value for key, value in groups[0].items() if key == "initial_accumulator_value"}
    optimizer = OPTIMIZERS[config["optimizer"]](groups, foreach=False, **common)
    for name, group in zip(owners, optimizer.param_groups):
        group["lr"] *= config.get("lr_multipliers", {}).get(name, 1.0)
    divisor = config.get("world_size", 1) * config.get("loss_scale", 1.0)
    for step in gradients:
        for name, leaf in leaves.items():
            leaf.grad = torch.tensor(step[name], dtype=torch.float64) / divisor
        if config.get("clip") is not None:
            torch.nn.utils.clip_grad_norm_(leaves.values(), config["clip"]["global"])
        optimizer.step()
    tensors = {f"param.{name}": leaf.detach().numpy() for name, leaf in leaves.items()}
    products, undecided = {}, {}
    for name, leaf in leaves.items():
        for state, value in optimizer.state[leaf].items():
            if state == "mu_product":
                products[f"mu_product.{name}"] = value.item()
            elif state == "undecided":
                undecided[f"param.{name}"] = value.numpy()
            elif state not in ("step", "largest") and value is not None:
                tensors[f"state.{name}.{state}"] = value.numpy()
    return tensors, products, undecided


def replay(binary, config, tensors, counts, folder):
    """Runs the command, and returns the tensors and the metadata of its output."""
    (folder / "C.json").write_text(json.dumps(config))
    save_file(tensors, folder / "IN", metadata=counts or None)
    paths = [argument for name in ("config", "input", "output") for argument in (f"--{name}", folder / FILES[name])]
    subprocess.run([binary, "replay", *paths], check=True, stdout=subprocess.DEVNULL)
    with safe_open(folder / "OUT", framework="pt") as out:
        return {name: out.get_tensor(name).float().numpy() for name in out.keys()}, out.metadata()


def draw(random, scale):
    return {name: numpy.asarray(random.normal(0, scale, shape), numpy.float32) for name, shape in SHAPES.items()}


def named(gradients):
    return {f"grad.{t}.{name}": value for t, step in enumerate(gradients) for name, value in step.items()}


def in_bf16(value):
    """The nearest bf16 to each value, as f32."""
    return torch.tensor(value).bfloat16().float().numpy()


def ratio_to_bound(have, want, undecided):
    worst = 0.0
    for name, value in want.items():
        ratios = numpy.abs(have[name] - value) / (1e-6 + 5e-6 * numpy.abs(value))
        compared = ~undecided.get(name, numpy.zeros(value.shape, bool))
        worst = max(worst, float(ratios[compared].max(initial=0.0)))
    return worst


def with_masters(binary, config, params, gradients, folder):
    """Runs the case on bf16 gradients: once in f32, and twice with bf16 parameters. Returns
    the f32 run's ratio to the bound.
    """
    gradients = [{name: in_bf16(value) for name, value in step.items()} for step in gradients]
    tensors = {**{f"param.{name}": value for name, value in params.items()}, **named(gradients)}
    plain, _ = replay(binary, config, tensors, {}, folder)
    for master in ("f32", "remainder16"):
        dtypes = {"param": "bf16", "grad": "bf16", "master": master}
        have, _ = replay(binary, {**config, "dtypes": dtypes}, tensors, {}, folder)
        for name, value in plain.items():
            kind, rest = name.split(".", 1)
            same = have[f"master.{rest}" if kind == "param" else name]
            assert same.tobytes() == value.tobytes(), (master, name)
            if kind == "param":
                # Halfway between two bf16, a parameter with a remainder is rounded away from zero, and torch rounds to
                # even.
                halfway = (value.view(numpy.uint32) & 0xFFFF == 0x8000) & (master == "remainder16")
                assert numpy.all((have[name] == in_bf16(value)) | halfway), (master, name)
    want, _, undecided = expected(config, params, gradients)
    return ratio_to_bound(plain, want, undecided)


def main(binary):
    worst = 0.0
    for seed, (optimizer, first, second, top) in enumerate(CASES):
        random = numpy.random.default_rng(seed)
        groups = [dict(first, params=FIRST), dict(second, params=SECOND)]
        config = {"optimizer": optimizer, "groups": groups, **top}
        scale = config.get("world_size", 1) * config.get("loss_scale", 1.0)
        params, gradients = draw(random, 1.0), [draw(random, 0.5 * scale) for _ in range(STEPS)]
        want, products, undecided = expected(config, params, gradients)
        named_params = {f"param.{name}": value for name, value in params.items()}
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            whole, counts = replay(binary, config, {**named_params, **named(gradients)}, {}, folder)
            part, part_counts = replay(binary, config, {**named_params, **named(gradients[:3])}, {}, folder)
            resumed, _ = replay(binary, config, {**part, **named(gradients[3:])}, part_counts, folder)
            narrow = with_masters(binary, config, params, gradients, folder)
        assert set(whole) == set(want), set(whole) ^ set(want)
        assert {count for key, count in counts.items() if key.startswith("step.")} == {str(STEPS)}, counts
        for name, value in want.items():
            assert whole[name].shape == value.shape and whole[name].tobytes() == resumed[name].tobytes(), name
        ratio, left_out = ratio_to_bound(whole, want, undecided), sum(int(signs.sum()) for signs in undecided.values())
        for key, product in products.items():
            # The command never steps a parameter without elements.
            if SHAPES[key.split(".", 1)[1]] != (0, 3):
                ratio = max(ratio, abs(float(counts[key]) - product) / (1e-14 * product + 1e-300))
        note = f"  {left_out} undecided signs left out" if undecided else ""
        print(f"{ratio:.3f}, and {narrow:.3f} in bf16  {json.dumps(config)}{note}")
        worst = max(worst, ratio, narrow)
    print(f"largest ratio to the bound: {worst:.3f}, torch {torch.__version__}")
    return worst > 1.0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
