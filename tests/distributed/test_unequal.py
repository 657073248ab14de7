"""Two processes of which one has what the other has not, or whose strategy does not tell all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import AT_ONCE_S, assert_cases_of

IN_ONE = ("the_optimizer_is_behind_in_one", "processes_that_part")
IN_ONE_LONG = (
    "a_turn_before_the_backward_pass_of_one",
    "a_turn_before_gradients_are_dropped_of_one",
    "the_optimizer_is_behind_in_one_and_cannot_be_captured_in_others",
    "a_trace_in_one",
    "times_after_a_refusal_in_one",
    "a_trace_and_a_refusal_in_one",
    "an_eager_clock_in_one",
)
UNTOLD = ("hooks_by_hand", "a_known_hook_in_mid_fit", "a_strategy_that_wraps_by_itself")
# Makes the group that the others' strategies would make.
ALONE = ("a_group_that_the_strategy_does_not_know",)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(IN_ONE, id="in one"),
        pytest.param(IN_ONE_LONG, id="more in one", marks=pytest.mark.long),
        pytest.param(UNTOLD, id="untold", marks=pytest.mark.long),
        pytest.param(ALONE, id="alone", marks=pytest.mark.long),
    ],
)
def test_processes_train_as_without_the_callback(
    tmp_path: Path, accelerator: str, cases: tuple[str, ...]
) -> None:
    kwargs = {"limit_s": AT_ONCE_S, "to_its_end": False}
    assert_cases_of("unequal_cases", tmp_path, cases, accelerator, timeout_s=400, **kwargs)
