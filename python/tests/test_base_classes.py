"""No class of the package inherits two private methods of one name.

Python takes the first one without an error. If the other one is a check, mistakes are then no longer refused.
"""

import importlib
import inspect
import itertools
import pkgutil

import instep.torch


def test_no_base_class_replaces_the_private_method_of_an_unrelated_one():
    pairs = 0
    for info in pkgutil.iter_modules(instep.torch.__path__, "instep.torch."):
        for found in vars(importlib.import_module(info.name)).values():
            if not inspect.isclass(found) or found.__module__ != info.name:
                continue
            bases = [base for base in found.__mro__[1:] if base.__module__.startswith("instep.")]
            for one, other in itertools.combinations(bases, 2):
                if issubclass(one, other):
                    continue
                pairs += 1
                methods = {name for name, value in vars(one).items() if callable(value)} & set(vars(other))
                private = [name for name in methods if name.startswith("_") and not name.startswith("__")]
                assert not private, f"{found.__name__}: {one.__name__} and {other.__name__} both have {private}"
    assert pairs > 0, "some class has unrelated base classes"
