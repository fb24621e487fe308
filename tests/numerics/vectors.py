"""Writes tests/numerics/vectors.txt, the updates of torch.optim itself for a few f64 numbers, for
tests/numerics/golden.rs.

    python -m venv venv && venv/bin/pip install torch==2.15.0
    venv/bin/python tests/numerics/vectors.py > tests/numerics/vectors.txt

Inputs are formulas, so a new run changes only what torch changes. The script must not compute an update itself if torch
has the optimizer: torch then computes every number after `start`. Torch lacks Lion, LAMB and AdEMAMix; their classes in
papers.py follow their papers line by line. Numbers are written with repr, which reads back to the same bits.
"""

import torch

from papers import AdEmaMix, Lamb, Lion

# Zero and tiny gradients are where eps, signs and a first second moment of zero show.
START = [0.5, -1.25, 3.0, 1e-3, 0.0]
GRADIENTS = [
    [0.3, -0.7, 1e-3, 2.5, 0.0],
    [-0.2, 0.4, 5e-4, -1.5, 0.0],
    [0.9, 0.1, -2e-3, 0.25, 1e-9],
    [-1.1, -0.6, 4e-3, 3.5, -2e-9],
    [0.05, 0.0, -1e-3, -0.125, 0.5],
    [0.0, 1.3, 7e-3, 0.75, -0.25],
    [2.2, -0.9, -6e-3, -4.0, 0.125],
]

SGD = dict(lr=0.05, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, maximize=False)
ADAM = dict(lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, amsgrad=False, maximize=False)
ADAGRAD = dict(lr=0.01, lr_decay=0.0, weight_decay=0.0, initial_accumulator_value=0.0, eps=1e-10, maximize=False)
RMSPROP = dict(lr=0.01, alpha=0.99, eps=1e-8, weight_decay=0.0, momentum=0.0, centered=False, maximize=False)
ADADELTA = dict(lr=1.0, rho=0.9, eps=1e-6, weight_decay=0.0, maximize=False)
ADAMAX = dict(lr=0.002, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, maximize=False)
RPROP = dict(lr=0.05, eta_minus=0.5, eta_plus=1.2, step_size_min=1e-6, step_size_max=50.0, maximize=False)
LION = dict(lr=0.01, beta1=0.9, beta2=0.99, weight_decay=0.0, maximize=False)
RADAM = dict(lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, decoupled_weight_decay=False, maximize=False)
NADAM = dict(RADAM, momentum_decay=4e-3)
ADEMAMIX = dict(lr=0.01, beta1=0.9, beta2=0.999, beta3=0.9999, alpha=5.0, eps=1e-8, weight_decay=0.0, maximize=False)
LAMB = dict(lr=0.01, beta1=0.9, beta2=0.999, eps=1e-6, weight_decay=0.01, maximize=False)
CASES = [
    ("sgd", SGD, {}),
    ("sgd", SGD, dict(weight_decay=0.04)),
    ("sgd", SGD, dict(maximize=True, weight_decay=0.04)),
    ("sgd", SGD, dict(momentum=0.9)),
    ("sgd", SGD, dict(momentum=0.9, dampening=0.3)),
    ("sgd", SGD, dict(momentum=0.9, nesterov=True)),
    ("sgd", SGD, dict(momentum=0.8, nesterov=True, weight_decay=0.04, maximize=True)),
    ("sgd", SGD, dict(momentum=0.5, dampening=0.6, weight_decay=0.1, maximize=True)),
    ("adam", ADAM, {}),
    ("adam", ADAM, dict(weight_decay=0.04)),
    ("adam", ADAM, dict(maximize=True, eps=1e-3)),
    ("adam", ADAM, dict(beta1=0.0, beta2=0.5)),
    ("adam", ADAM, dict(amsgrad=True, beta1=0.5, beta2=0.7)),
    ("adam", ADAM, dict(amsgrad=True, weight_decay=0.04, maximize=True, beta2=0.8)),
    ("adamw", ADAM, dict(weight_decay=0.01)),
    ("adamw", ADAM, dict(weight_decay=0.3, maximize=True, beta1=0.4, beta2=0.3)),
    ("adamw", ADAM, dict(weight_decay=0.1, amsgrad=True, beta1=0.9, beta2=0.8)),
    ("adamw", ADAM, dict(weight_decay=0.3, amsgrad=True, maximize=True, beta1=0.3, beta2=0.45, eps=1e-2)),
    ("adagrad", ADAGRAD, {}),
    ("adagrad", ADAGRAD, dict(lr_decay=0.1, initial_accumulator_value=0.5)),
    ("adagrad", ADAGRAD, dict(weight_decay=0.04, maximize=True, eps=1e-2)),
    ("rmsprop", RMSPROP, {}),
    ("rmsprop", RMSPROP, dict(weight_decay=0.04, alpha=0.3)),
    ("rmsprop", RMSPROP, dict(momentum=0.9, maximize=True)),
    ("rmsprop", RMSPROP, dict(centered=True, eps=1e-3)),
    ("rmsprop", RMSPROP, dict(centered=True, momentum=0.5, weight_decay=0.04, maximize=True)),
    ("adadelta", ADADELTA, {}),
    ("adadelta", ADADELTA, dict(lr=0.5, rho=0.4, eps=1e-3)),
    ("adadelta", ADADELTA, dict(weight_decay=0.04, maximize=True)),
    ("adamax", ADAMAX, {}),
    ("adamax", ADAMAX, dict(beta1=0.3, beta2=0.45)),
    ("adamax", ADAMAX, dict(weight_decay=0.04, maximize=True, eps=1e-3)),
    ("adamax", ADAMAX, dict(beta1=0.0, beta2=0.0, lr=0.05)),
    ("rprop", RPROP, {}),
    ("rprop", RPROP, dict(lr=0.3, eta_minus=0.3, eta_plus=1.7, step_size_min=0.02, step_size_max=0.4, maximize=True)),
    ("lion", LION, {}),
    ("lion", LION, dict(weight_decay=0.3, maximize=True)),
    ("lion", LION, dict(beta1=0.3, beta2=0.45, weight_decay=0.04)),
    ("nadam", NADAM, {}),
    ("nadam", NADAM, dict(weight_decay=0.04, momentum_decay=0.5)),
    ("nadam", NADAM, dict(weight_decay=0.3, decoupled_weight_decay=True, maximize=True, eps=1e-3)),
    ("nadam", NADAM, dict(beta1=0.0, beta2=0.5)),
    ("radam", RADAM, {}),
    ("radam", RADAM, dict(weight_decay=0.04, maximize=True, beta2=0.9)),
    ("radam", RADAM, dict(weight_decay=0.3, decoupled_weight_decay=True, beta1=0.5, beta2=0.8, eps=1e-3)),
    ("radam", RADAM, dict(beta1=0.3, beta2=0.5)),
    ("lamb", LAMB, {}),
    ("lamb", LAMB, dict(weight_decay=0.3, maximize=True)),
    ("lamb", LAMB, dict(beta1=0.3, beta2=0.45)),
    ("lamb", LAMB, dict(weight_decay=0.0, eps=0.1)),
    ("ademamix", ADEMAMIX, {}),
    ("ademamix", ADEMAMIX, dict(weight_decay=0.3, maximize=True, beta3=0.99, alpha=8.0)),
    ("ademamix", ADEMAMIX, dict(beta1=0.3, beta2=0.45, beta3=0.4, eps=1e-3)),
]

MAKE = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "rprop": torch.optim.Rprop,
    "lion": Lion,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "lamb": Lamb,
    "ademamix": AdEmaMix,
}
PAIRS = [("betas", "beta1", "beta2"), ("etas", "eta_minus", "eta_plus"), ("step_sizes", "step_size_min", "step_size_max")]
# A scalar of a state, like NAdam's mu_product, has the default type.
torch.set_default_dtype(torch.float64)


def line(key, values):
    print(key, "=", *[repr(float(v)) if not isinstance(v, bool) else str(v).lower() for v in values])


def case(name, hyper):
    print(f"\noptimizer = {name}")
    for key, value in hyper.items():
        line(key, [value])
    # Neither foreach nor fused: the spelling that the documentation states.
    options = dict(hyper, foreach=False)
    for pair, first, second in PAIRS:
        if first in options:
            options[pair] = (options.pop(first), options.pop(second))
    param = torch.nn.Parameter(torch.tensor(START, dtype=torch.float64))
    optimizer = MAKE[name]([param], **options)
    for gradient in GRADIENTS:
        param.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
        line("param", param.detach().tolist())
        for key, state in optimizer.state[param].items():
            if key != "step" and state is not None:
                assert state.dtype == torch.float64
                line(key, state.flatten().tolist())


print("# What torch.optim computes in f64; made by tests/numerics/vectors.py, whose header says how. Never edit by hand.")
print("# A block per case: hyperparameters, then after each step the parameter and every state that torch keeps.")
print(f"torch = {torch.__version__}")
line("start", START)
for gradient in GRADIENTS:
    line("gradient", gradient)
for name, base, changed in CASES:
    case(name, dict(base, **changed))
