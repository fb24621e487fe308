"""Runs the tests of overlapped optimizers in ``torch.testing._internal.distributed.distributed_test`` with our
optimizers. The tests take 28 s.
"""

import pytest
from torchs_cases import HOOK_OPTIONS

IN_BACKWARD = [
    "test_ddp_apply_optim_in_backward",
    "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false",
    "test_ddp_apply_optim_in_backward_ignored_params",
]


def test_the_list_has_all_of_them(two):
    found = two.run("torchs_cases", "names")[0]
    assert sorted(found) == sorted(
        [*IN_BACKWARD, "_test_ddp_apply_optim_in_backward", "_test_ddp_hook_with_optimizer_parity"]
    )


@pytest.mark.parametrize("name", IN_BACKWARD)
def test_their_optimizers_in_backward_may_be_ours(two, name):
    two.run("torchs_cases", "in_backward", case_name=name)


@pytest.mark.turns(8)
@pytest.mark.parametrize("subset", [False, True], ids=["all", "subset"])
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("view", [False, True], ids=["copied", "view"])
@pytest.mark.parametrize("optimizer", HOOK_OPTIONS)
def test_their_optimizers_in_hooks_may_be_ours(two, optimizer, view, static, subset):
    two.run("torchs_cases", "hook_parity", view=view, static=static, optimizer=optimizer, subset=subset)
