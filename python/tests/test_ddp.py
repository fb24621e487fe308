"""Compares our optimizer inside backward with torch.optim after backward, under DistributedDataParallel on real
processes.
"""

import pytest
import torch


@pytest.mark.turns(8)
@pytest.mark.parametrize("view", [False, True], ids=["copied", "view"])
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("model", ["gpt", "resnet"])
@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
def test_parameters_are_those_of_ddp_and_torch(two, optimizer, model, static, view):
    two.run("ddp_cases", "compare", model=model, optimizer=optimizer, static_graph=static, gradient_as_bucket_view=view)


@pytest.mark.turns(4)
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.bfloat16},
        {"dtype": torch.bfloat16, "gradient_as_bucket_view": True, "optimizer": "sgd"},
        {"max_norm": 0.1},
        {"max_norm": 0.1, "gradient_as_bucket_view": True},
        {"max_norm": 0.1, "gradients": "clear"},
        {"gradients": "clear"},
        {"gradients": "clear", "gradient_as_bucket_view": True},
        {"gradients": "sum"},
        {"micro_batches": 3},
        {"micro_batches": 2, "gradient_as_bucket_view": True},
        {"micro_batches": 2, "max_norm": 0.1, "gradients": "clear"},
        {"schedule": True},
        {"find_unused_parameters": True},
    ],
    ids=str,
)
def test_every_configuration_is_that_of_ddp_and_torch(two, options):
    two.run("ddp_cases", "compare", **options)


@pytest.mark.turns(3)
@pytest.mark.parametrize("options", [{}, {"max_norm": 0.1}, {"optimizer": "sgd", "static_graph": True}], ids=str)
def test_four_ranks_do_as_two(four, options):
    four.run("ddp_cases", "compare", steps=6, **options)


@pytest.mark.turns(4)
@pytest.mark.parametrize("options", [{}, {"max_norm": 0.1, "gradient_as_bucket_view": True}], ids=str)
def test_a_number_of_ranks_that_is_no_power_of_two_does_as_two(three, options):
    # DDP divides before it sums, and a third rounds. SGD's step moves by as little as the gradient. AdamW's divides it by its
    # own magnitude, and so shows the rounding of ranks' gradients that nearly cancel.
    three.run("ddp_cases", "compare", steps=6, optimizer="sgd", **options)


def test_gradients_that_nothing_steps_are_the_exact_mean(two):
    two.run("ddp_cases", "averages")


@pytest.mark.parametrize("in_backward", [False, True], ids=["registered", "in-backward"])
def test_a_parameter_that_ddp_ignores_is_each_ranks_own(two, in_backward):
    two.run("ddp_cases", "ignored", in_backward=in_backward)


@pytest.mark.parametrize("view", [False, True], ids=["copied", "view"])
@pytest.mark.parametrize("chosen", ["first", "none"])
def test_parameters_outside_the_subset_keep_the_mean(two, chosen, view):
    two.run("ddp_cases", "subset", chosen=chosen, view=view)


@pytest.mark.parametrize("view", [False, True], ids=["copied", "view"])
@pytest.mark.parametrize("in_backward", [False, True], ids=["registered", "in-backward"])
def test_parameters_that_no_rank_used_stay_as_they_are(two, in_backward, view):
    two.run("ddp_cases", "unused", view=view, in_backward=in_backward)


def test_an_infinite_gradient_on_one_rank_skips_the_step_everywhere(two):
    two.run("ddp_cases", "scaler")


@pytest.mark.turns(4)
@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("view", [False, True], ids=["copied", "view"])
@pytest.mark.parametrize("model, optimizer", [("gpt", "sgd"), ("resnet", "adam")])
def test_optimizers_in_backward_work_as_the_originals(two, model, optimizer, view, before):
    two.run("ddp_cases", "in_backward", model=model, optimizer=optimizer, view=view, before=before)


@pytest.mark.parametrize("view", [False, True], ids=["copied", "view"])
def test_parameters_without_an_optimizer_in_backward_keep_the_mean(two, view):
    two.run("ddp_cases", "mixed_ownership", view=view)


def test_the_registry_registers(two):
    two.run("ddp_cases", "overlapped")


def test_a_training_goes_on_from_torch_and_to_torch(two):
    two.run("ddp_cases", "resume")


def test_a_second_hook_is_refused(two):
    for text in two.run("ddp_refusals", "hook_is_taken"):
        assert "another register_ddp steps one of them" in text


def test_a_bad_hyperparameter_is_raised_by_backward(two):
    for text, goes_on in two.run("ddp_refusals", "bad_gradient"):
        assert "lr = -1" in text and goes_on


def test_a_hook_of_the_users_own_sums(two):
    two.run("ddp_cases", "own_sum")


def test_types_may_mix_in_one_model(two):
    two.run("ddp_cases", "mixed_types")


@pytest.mark.parametrize("divide", [True, False], ids=["initial", "effective"])
def test_uneven_inputs_end_with_the_same_parameters_everywhere(two, divide):
    two.run("ddp_cases", "join", divide=divide)


@pytest.mark.parametrize("view", [False, True], ids=["copied", "view"])
@pytest.mark.parametrize("in_backward", [False, True], ids=["registered", "in-backward"])
def test_parameters_of_any_strides_step_as_under_torch(two, in_backward, view):
    two.run("ddp_cases", "strides", in_backward=in_backward, view=view)


@pytest.mark.parametrize("in_backward", [False, True], ids=["registered", "in-backward"])
def test_float16_gradients_whose_sum_overflows_are_averaged_first(two, in_backward):
    two.run("ddp_cases", "overflow", in_backward=in_backward)


def test_groups_come_later_and_loading_keeps_hyperparameters_alive(two):
    two.run("ddp_cases", "changes")


def test_a_frozen_parameter_and_a_saved_model_go_on(two):
    two.run("ddp_cases", "frozen_and_saved")


def test_an_error_on_one_rank_ends_its_sum_on_the_others(two):
    texts = two.run("ddp_refusals", "error_on_one_rank")
    assert "lr = -1" in texts[1] and texts[0] == "stepped"


def test_what_backward_finds_wrong_is_raised_by_backward(two):
    for group, hook in two.run("ddp_refusals", "in_the_pass"):
        assert "whose step failed:\nRuntimeError: param_groups: lack a parameter" in group
        assert hook == "hook: returned int; return the Future of the sum"


def test_misuse_is_refused_by_name(two):
    two.run("ddp_refusals", "misuse")
