"""`GraphedStep` in several processes: under Fabric, and in loops of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import AT_ONCE_S, assert_all_ok, launch

SAME = (
    "plain_loop",
    "plain_loop_in_buckets",
    "accumulated",
    "accumulated_inside",
    "validated",
    "a_step_of_one_process",
)
FABRIC = ("fabric_accumulated", "fabric_in_one", "the_example_of_fabric")
AGREED = (
    "another_shape",
    "a_guard_in_one_process",
    "a_capture_that_one_refuses",
    "wrappers_that_are_refused",
    "collectives_that_are_refused",
    "unequal_batches",
    "manual_optimization_is_refused",
    "different_arguments",
    "fewer_batches_in_one",
    "an_error_in_one_process",
)


@pytest.mark.parametrize("cases", [SAME, FABRIC], ids=["same numbers", "fabric"])
def test_processes_train_as_without_graphs(
    tmp_path: Path, accelerator: str, cases: tuple[str, ...]
) -> None:
    named = [f"step_cases.{case}" for case in cases]
    assert_all_ok(launch(tmp_path, named, accelerator, timeout_s=240), named)


def test_processes_decide_together_at_once(tmp_path: Path, accelerator: str) -> None:
    named = [f"step_cases.{case}" for case in AGREED]
    ended = launch(tmp_path, named, accelerator, timeout_s=240, limit_s=AT_ONCE_S)
    assert_all_ok(ended, named)
