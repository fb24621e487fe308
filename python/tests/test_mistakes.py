"""Loops that torch accepts and that do something else here: each is refused or causes a warning, on real processes. The
tests take 11 s.
"""

import pytest
from mistakes_cases import CHANGES, ENTRIES, SHARDED, WRAPPERS

BOTH = pytest.mark.parametrize("wrapper", WRAPPERS)


@BOTH
@pytest.mark.parametrize("change", [None, *CHANGES])
def test_a_gradient_that_is_changed_after_its_step_is_refused(two, wrapper, change):
    two.run("mistakes_cases", "late_change", wrapper=wrapper, change=change)


@BOTH
@pytest.mark.parametrize("change", [None, "clip", "clip one by one", "clear", "none"])
def test_a_clip_in_a_loop_without_step_is_warned_of_where_the_gradient_is_cleared(two, wrapper, change):
    two.run("mistakes_cases", "late_change_without_step", wrapper=wrapper, change=change)


@BOTH
def test_a_gradient_that_a_closure_changes_is_refused(two, wrapper):
    two.run("mistakes_cases", "closure_change", wrapper=wrapper)


@BOTH
def test_a_second_division_by_the_scale_is_refused(two, wrapper):
    two.run("mistakes_cases", "unscaled", wrapper=wrapper)


@pytest.mark.parametrize("wrapper", [*WRAPPERS, "in-backward"])
def test_a_rank_with_another_rate_stops_all_ranks(two, wrapper):
    two.run("mistakes_cases", "settings_apart", wrapper=wrapper)


@BOTH
def test_ranks_with_other_options_stop_in_the_second_pass(two, wrapper):
    two.run("mistakes_cases", "options_apart", wrapper=wrapper)


@BOTH
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_rank_with_a_wrong_rate_hangs_no_other(two, wrapper, max_norm):
    two.run("mistakes_cases", "wrong_on_one_rank", wrapper=wrapper, max_norm=max_norm)


@BOTH
@pytest.mark.parametrize("clears", [False, True], ids=["keeps", "clears"])
def test_gradients_that_are_added_to_stepped_ones_are_warned_of(two, wrapper, clears):
    two.run("mistakes_cases", "kept", wrapper=wrapper, clears=clears)


@BOTH
def test_zeros_and_passes_without_sync_are_not_warned_of(two, wrapper):
    two.run("mistakes_cases", "zeros_kept", wrapper=wrapper)


@BOTH
def test_another_optimizer_over_the_same_parameters_is_refused(two, wrapper):
    two.run("mistakes_cases", "another", wrapper=wrapper)


def test_a_parameter_is_stepped_in_one_way_inside_backward(two):
    two.run("mistakes_cases", "claimed")


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("wrapper", ["ddp", "ddp-view", "fsdp1"])
def test_a_model_that_is_converted_after_registration_is_refused(two, wrapper, steps):
    two.run("mistakes_cases", "converted", wrapper=wrapper, steps=steps)


@pytest.mark.parametrize("wrapper", ["ddp", "ddp-view", "in-backward", "offload"])
def test_a_model_that_is_converted_and_back_after_it_was_wrapped_is_refused(two, wrapper):
    two.run("mistakes_cases", "there_and_back", wrapper=wrapper)


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("entry", ["ddp", "offload"])
def test_a_model_that_was_converted_between_wrapping_and_registration_is_refused(two, entry, back):
    two.run("mistakes_cases", "converted_before", entry=entry, back=back)


def test_parameters_whose_sum_ddp_delays_are_refused(two):
    two.run("mistakes_cases", "delayed")


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_model_keeps_its_optimizer_and_takes_it_along_when_it_goes(two, entry):
    two.run("mistakes_cases", "freed", entry=entry)


@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if not entry.startswith("in-backward")])
def test_states_have_torchs_numbers_in_a_model_with_parameters_of_its_own(two, entry):
    two.run("mistakes_cases", "in_order", entry=entry)


@pytest.mark.parametrize("entry, max_norm", [(e, n) for e in ENTRIES for n in (None, 0.5) if n is None or "in-b" not in e])
def test_passes_of_checkpoints_inside_a_backward_pass_belong_to_its_step(two, entry, max_norm):
    two.run("mistakes_cases", "recomputed", entry=entry, max_norm=max_norm)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("wrapper", ["ddp", "ddp-view", "in-backward"])
def test_a_model_that_gets_another_memory_format_after_it_was_wrapped_is_refused(two, wrapper, steps):
    two.run("mistakes_cases", "restrided", wrapper=wrapper, steps=steps)


def test_a_model_that_is_converted_with_optimizers_in_backward_is_refused(two):
    two.run("mistakes_cases", "converted_in_backward")


def test_shards_are_stepped_where_torch_has_moved_them(two):
    two.run("mistakes_cases", "moved_shards")


@BOTH
def test_a_parameter_that_takes_a_gradient_too_late_is_refused_by_name(two, wrapper):
    two.run("mistakes_cases", "unfrozen", wrapper=wrapper)


def test_a_copy_of_a_model_has_no_hooks(two):
    two.run("mistakes_cases", "copied")


@pytest.mark.parametrize("entry", ["register_fsdp", "FusedOptimizer"])
def test_every_dimension_of_a_mesh_counts_in_the_norm(four, entry):
    four.run("mistakes_cases", "norm_over_two_dimensions", entry=entry)


@pytest.mark.parametrize("scales", [False, True])
def test_every_dimension_of_a_mesh_counts_where_a_step_is_skipped(four, scales):
    four.run("mistakes_cases", "skipped_over_two_dimensions", scales=scales)


@pytest.mark.turns(4)
@pytest.mark.parametrize("key", SHARDED)
def test_fsdp_over_tensor_parallelism_steps_as_one_process(four, key):
    for max_norm in (None, 0.5):
        four.run("mistakes_cases", "fsdp_and_tensor_parallel", key=key, max_norm=max_norm)


def test_what_a_shard_cannot_step_is_refused_when_the_optimizer_is_made(two):
    two.run("mistakes_cases", "unfit_shards")


def test_ddp_takes_no_norm_over_tensor_parallelism(four):
    four.run("mistakes_cases", "ddp_over_tensor_parallelism")


def test_a_module_that_is_not_sharded_itself_is_told_apart(two):
    two.run("mistakes_cases", "texts")
