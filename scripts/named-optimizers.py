#!/usr/bin/env python3
"""Writes python/instep/torch/named.py: a class for each optimizer, with the signature that torch.optim gives it.

    scripts/named-optimizers.py          prints the file
    scripts/named-optimizers.py --bless  writes it

It needs the package and torch. Names, defaults and sources come from the library. The order of arguments is torch's, or
the library's if torch has no such optimizer. python/tests/test_named.py compares the file with this output.
"""

import argparse, inspect, textwrap
from pathlib import Path

import torch

from instep import OPTIMIZERS

PAGE = Path(__file__).resolve().parent.parent / "python/instep/torch/named.py"
RUNNING = {"foreach": "Optional[bool] = None", "capturable": "bool = False", "differentiable": "bool = False",
           "fused": "Optional[bool] = None"}
OWN = {"max_norm": "Optional[float] = None", "states": "Optional[str] = None", "master": "Optional[str] = None",
       "seed": "Optional[int] = None", "threads": "Optional[int] = None"}

HEAD = '''"""A class for each optimizer, with the signature of ``torch.optim``, so that only the name changes in a program.

scripts/named-optimizers.py writes this file. If torch has the optimizer, the class is a subclass of torch's class,
for ``isinstance``. It uses no code of torch except that of ``torch.optim.Optimizer``.
"""

# fmt: off
from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn, Optional, Union

import torch
from torch import Tensor

from .optimizer import FusedOptimizer

Number = Union[float, Tensor]
Pair = tuple[float, float]
Triple = tuple[float, float, float]


class Named(FusedOptimizer):
    """The common base of the classes. No step uses the internals of torch's classes."""

    def _init_group(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"_init_group: torch's own; {type(self).__name__} has one fused step, call step()")

    def share_memory(self) -> NoReturn:
        """Always raises, because states are views of the library's memory."""
        raise NotImplementedError("share_memory: states lie over memory of this process; make one optimizer in each")


'''

NOTES = {
    "ademamix": "The authors' code has ``betas`` of three numbers instead of ``beta3``, and its default of ``alpha`` is 2. "
    "Here ``betas`` may have three numbers too. Arguments after ``betas`` are in another order, so give them by name. For a "
    "warmup, set ``alpha`` and ``beta3`` in ``param_groups`` before each step.",
}
"""Further sentences for the docstring of a class, by the optimizer's key."""
FIRST_LINES = {
    "ademamix": [
        "if isinstance(betas, (tuple, list)) and len(betas) == 3:",
        f"    if beta3 != {OPTIMIZERS['ademamix'].defaults['beta3']!r}:",
        '        raise TypeError(f"beta3 = {beta3!r}: betas has three numbers; leave beta3 out, and give alpha by name")',
        "    beta3, betas = betas[2], betas[:2]",
    ]
}
"""The first lines of a constructor, by the optimizer's key."""


def typed(name, default):
    """The annotation of a hyperparameter, and its default."""
    if isinstance(default, bool):
        return f"bool = {default}"
    if isinstance(default, tuple):
        return f"Pair = {tuple(map(float, default))}"
    return f"{'Number' if name in ('lr', 'weight_decay') else 'float'} = {float(default)!r}"


def arguments_of(key, descriptor):
    """The positional arguments after `params`, and the others, each with its annotation and default."""
    torchs = getattr(torch.optim, descriptor.name, None)
    positional, others = {}, {}
    if torchs is None:
        positional = {name: typed(name, default) for name, default in descriptor.defaults.items() if name != "maximize"}
        if key == "ademamix":
            positional["betas"] = positional["betas"].replace("Pair", "Union[Pair, Triple]")
        others = {"maximize": typed("maximize", False)} if "maximize" in descriptor.defaults else {}
    else:
        for name, given in list(inspect.signature(torchs).parameters.items())[1:]:
            kind = positional if given.kind is given.POSITIONAL_OR_KEYWORD else others
            kind[name] = RUNNING.get(name) or typed(name, given.default)
    missing = [name for name in RUNNING if name not in positional and name not in others]
    return positional, others, missing


def class_of(key, descriptor):
    torchs = getattr(torch.optim, descriptor.name, None)
    positional, others, missing = arguments_of(key, descriptor)
    bases = f"Named, torch.optim.{descriptor.name}" if torchs else "Named"
    like = f"Behaves as ``torch.optim.{descriptor.name}``" if torchs else "Follows the publication"
    keywords = {**others, **{name: RUNNING[name] for name in missing}, **OWN}
    taken = [f"{name}: {kind}" for name, kind in positional.items()] + ["*"]
    taken += [f"{name}: {kind}" for name, kind in keywords.items()]
    handed = [f'"{name}": {name}' for name in (*positional, *others)]
    return "\n".join([
        f"class {descriptor.name}({bases}):",
        f'    """{descriptor.name} in one fused launch.',
        "",
        f"    {like}. Arguments from ``max_norm`` to ``threads`` are those of :class:`FusedOptimizer`.",
        *(["", wrapped(NOTES[key], 4)] if key in NOTES else []),
        "",
        wrapped(f"Source: {descriptor.source}", 4),
        '    """',
        "",
        f'    key = "{key}"',
        "",
        "    def __init__(",
        wrapped(", ".join(["self, params: Iterable[Any]", *taken]) + ",", 8),
        "    ) -> None:",
        *(f"        {line}" for line in FIRST_LINES.get(key, [])),
        "        hyper: dict[str, Any] = {",
        wrapped(", ".join(handed) + ",", 12),
        "        }",
        *(line for name in missing for line in (f"        if {name}:", f'            hyper["{name}"] = {name}')),
        f'        self._make(params, "{key}", hyper, {", ".join(OWN)})',
        "",
    ])


def wrapped(text, indent):
    """Lines of at most 120 columns. An argument is never broken over two lines."""
    whole = text.replace(": ", ":\0").replace(" = ", "\0=\0").replace("] ", "]\0") if indent > 4 else text
    lines = textwrap.wrap(whole, 120 - indent, break_long_words=False, break_on_hyphens=False)
    return textwrap.indent("\n".join(lines), " " * indent).replace("\0", " ")


def file():
    """The text of the file."""
    names = sorted(descriptor.name for descriptor in OPTIMIZERS.values())
    listed = "__all__ = [\n" + wrapped(", ".join(f'"{name}"' for name in names) + ",", 8).replace("        ", "    ") + "\n]\n"
    head = HEAD.replace("Number = Union", listed + "\nNumber = Union", 1)
    return head + "\n" + "\n\n".join(class_of(*item) for item in OPTIMIZERS.items())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bless", action="store_true", help="write the file")
    if parser.parse_args().bless:
        PAGE.write_text(file())
    else:
        print(file(), end="")
