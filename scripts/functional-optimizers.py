#!/usr/bin/env python3
"""Writes python/instep/torch/functional.py: a step over lists of tensors for each optimizer.

    scripts/functional-optimizers.py          prints the file
    scripts/functional-optimizers.py --bless  writes it

It needs the package and torch. States, hyperparameters and sources come from the library.
python/tests/test_functional.py compares the file with this output.
"""

import argparse, textwrap
from pathlib import Path

from instep import OPTIMIZERS
from instep.torch._lists import RULES

PAGE = Path(__file__).resolve().parent.parent / "python/instep/torch/functional.py"

HEAD = '''"""Steps over lists of the caller's tensors, one function for each optimizer. No function has a state of its own.

scripts/functional-optimizers.py writes this file. A call reads addresses, counts and values from the tensors, checks all
of them, and steps them without the GIL, in one launch for each combination of element types. Tensors are dense and on the
CPU:

- ``params``: float32, bfloat16 or float16, in any mix.
- ``grads``: any of these types, with the parameter's shape and strides. A call does not write gradients, and skips a
  parameter if its gradient is None.
- states: float32 or bfloat16, one type for all states of a parameter. States are zeros before the first step.
- ``state_steps``: float32 scalar tensors with the number of steps so far, which is 0 before the first step. A step
  increments these numbers.
- ``copies``: tensors, or None, to which the stepped parameters are written in the copy's own type. If ``params`` are float32
  masters, ``copies`` can be a model's bfloat16 parameters.

Gradients are multiplied by ``gradient_scale``. If a check fails, the call raises before it writes anything. Two calls
must not step the same tensors at the same time.
"""

# fmt: off
from __future__ import annotations

from collections.abc import Sequence
from typing import Optional, Union

from torch import Tensor

from ._lists import RULES, Clipped, Gradients, TensorList, add_, clip_, copy_, norm_, prepare

'''

TAIL = '''
Number = Union[float, Tensor]
Copies = Optional[Sequence[Optional[Tensor]]]
'''

FIRST = {"sum": "initial_accumulator_value", "step_size": "lr"}
"""States whose first value is a hyperparameter."""


def function_of(key, descriptor):
    rule = RULES[key]
    lists = ["params: TensorList", "grads: Gradients", *(f"{name}: TensorList" for name in rule.always)]
    lists += [f"{rule.carried}: TensorList"] if rule.carried else []
    numbers, flags = [], []
    for (name, default), parts in zip(descriptor.defaults.items(), rule.hyper):
        if isinstance(default, bool):
            flags.append(f"{name}: bool = {default}")
        else:
            numbers += [f"{part}: {'Number' if part in ('lr', 'weight_decay') else 'float'}" for part in parts]
    taken = [*lists, "state_steps: TensorList", "copies: Copies = None", "*", *numbers, "gradient_scale: float = 1.0", *flags]
    taken += [f"{name}: Optional[TensorList] = None" for name in rule.sometimes] + ["threads: Optional[int] = None"]
    handed = [str(name) for name in rule.lists]
    hyper = [f"({', '.join(parts)})" if len(parts) > 1 else parts[0] for parts in rule.hyper]
    notes = [f"The first step initialises {state}s from ``{source}``."
             for state, source in FIRST.items() if f"{state}s" in rule.always]
    names = " and ".join(f"``{name}``" for name in rule.sometimes)
    notes += [f"Pass {names} only if the hyperparameters need them."] if names else []
    notes += [f"``{rule.carried}`` are float64 or float32 tensors of one element, initially 1."] if rule.carried else []
    return "\n".join([
        f'_{key} = RULES["{key}"].native.step',
        "",
        "",
        f"def {key}_(",
        wrapped(", ".join(taken) + ",", 4),
        ") -> None:",
        f'    """Steps with {descriptor.name}, as :class:`FusedOptimizer` does.',
        *([""] + [wrapped(" ".join(notes), 4)] if notes else []),
        "",
        wrapped(f"Source: {descriptor.source}", 4),
        '    """',
        f"    _{key}(",
        wrapped(f"({', '.join(handed)}),", 8),
        wrapped(f"({', '.join(hyper)}), gradient_scale, threads,", 8),
        "    )",
        "",
    ])


def wrapped(text, indent):
    """Lines of at most 120 columns. An argument is never broken over two lines."""
    whole = text.replace(": ", ":\0").replace(" = ", "\0=\0") if " = " in text else text
    lines = textwrap.wrap(whole, 120 - indent, break_long_words=False, break_on_hyphens=False)
    return textwrap.indent("\n".join(lines), " " * indent).replace("\0", " ")


def file():
    """The text of the file."""
    names = sorted([f"{key}_" for key in OPTIMIZERS] + ["Clipped", "add_", "clip_", "copy_", "norm_", "prepare"])
    listed = "__all__ = [\n" + wrapped(", ".join(f'"{name}"' for name in names) + ",", 4) + "\n]\n"
    return HEAD + listed + TAIL + "\n" + "\n\n".join(function_of(*item) for item in OPTIMIZERS.items())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bless", action="store_true", help="write the file")
    if parser.parse_args().bless:
        PAGE.write_text(file())
    else:
        print(file(), end="")
