"""Two processes train as they do without the callback, and decide together."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import AT_ONCE_S, assert_all_ok, launch

SAME = (
    "same_numbers_in_buckets_accumulated",
    "same_numbers_over_sockets",
    "same_numbers_where_one_uses_a_layer",
)
# One part of what is together in a case of `SAME`, or another setting or callback.
SAME_LONG = (
    "same_numbers",
    "same_numbers_accumulated_with_sampled_times",
    "same_numbers_on_the_fast_path",
    "same_numbers_stopped_early",
    "same_numbers_with_sampled_times",
    "same_numbers_accumulated",
    "same_numbers_in_buckets",
    "same_numbers_in_buckets_of_later_graphs",
    "same_numbers_with_the_optimizer_behind",
    "same_numbers_with_averaged_weights",
    "same_numbers_with_learning_rates_logged",
    "same_numbers_stopped_by_the_clock",
    "same_numbers_without_broadcasts",
    "same_numbers_on_several_streams",
    "same_numbers_with_plain_steps",
    "same_numbers_with_scheduled_accumulation",
    "same_numbers_with_shared_logs",
    "same_numbers_where_unused_are_looked_for",
    "unused_parameters_of_several_batches",
    "same_numbers_with_a_static_graph",
    "same_numbers_with_unused_parameters",
)
AGREED = (
    "another_shape",
    "a_guard_in_one_process_over_sockets",
    "a_check_that_one_fails_alone",
)
AGREED_LONG = (
    "two_paths_in_all",
    "a_value_that_recurs",
    "a_value_that_recurs_in_one",
    "two_shapes_in_all",
    "two_shapes_apart",
    "a_guard_in_one_process",
    "a_later_capture_that_one_refuses",
    "another_shape_over_sockets",
    "a_capture_that_one_refuses_over_sockets",
    "a_check_that_one_fails_alone_goes_on",
    "an_effect_that_begins_later_on_one",
    "a_generator_that_one_begins_to_draw_from",
    "a_shorter_stream_over_sockets",
    "another_shape_on_the_fast_path",
    "a_capture_that_one_refuses_goes_on",
    "a_check_that_one_fails",
    "a_capture_that_one_refuses",
    "sent_back_to_one_stream",
    "a_capture_that_fails_in_the_backward_pass",
)
DIFFERENT = (
    "different_arguments",
    "odd_steps_where_unused_are_looked_for",
    "other_parameters_each_time",
    "a_shorter_loader",
)
DIFFERENT_LONG = (
    "switched_off_in_one",
    "different_accumulation",
    "a_shorter_stream",
)
SIGNALS = (
    "a_signal_before_and_in_an_evaluation",
    "a_signal_at_the_end_of_one",
)
SIGNALS_LONG = (
    "a_signal_in_an_evaluation_of_one",
    "a_signal_at_the_end_of_an_epoch_of_one",
    "a_signal_before_what_all_need",
    "a_signal_in_an_evaluation",
    "a_signal_where_all_share_each_batch",
    "a_signal_in_an_evaluation_of_one_over_sockets",
)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(SAME, id="same numbers"),
        pytest.param(SIGNALS, id="signals", marks=pytest.mark.long),
        pytest.param((*SAME_LONG, *SIGNALS_LONG), id="more", marks=pytest.mark.long),
    ],
)
def test_processes_train_as_without_the_callback(
    tmp_path: Path, accelerator: str, cases: tuple[str, ...]
) -> None:
    assert_all_ok(launch(tmp_path, cases, accelerator, timeout_s=600, to_its_end=False), cases)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(AGREED, id="agreed"),
        pytest.param(DIFFERENT, id="different from the start", marks=pytest.mark.long),
        pytest.param((*AGREED_LONG, *DIFFERENT_LONG), id="more", marks=pytest.mark.long),
    ],
)
def test_processes_decide_together_at_once(
    tmp_path: Path, accelerator: str, cases: tuple[str, ...]
) -> None:
    ended = launch(tmp_path, cases, accelerator, timeout_s=600, limit_s=AT_ONCE_S, to_its_end=False)
    assert_all_ok(ended, cases)


@pytest.mark.long
def test_a_group_that_is_there_already(tmp_path: Path, accelerator: str) -> None:
    cases = ["same_numbers_in_a_group_made_before"]
    assert_all_ok(launch(tmp_path, cases, accelerator, timeout_s=400), cases)


@pytest.mark.long
def test_a_process_alone(tmp_path: Path, accelerator: str) -> None:
    cases = ["same_numbers_of_one", "sent_back_to_one_stream"]
    assert_all_ok(launch(tmp_path, cases, accelerator, timeout_s=400, size=1), cases)
