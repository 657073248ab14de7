"""Collectives beside other ops of a step, on two GPUs."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.launch import assert_cases_of

CASES = (
    "parts_wait_for_their_collectives",
    "thousands_of_replays_under_load",
    "memory_of_collectives_is_kept",
    "collectives_that_are_not_followed",
    "optimizers_on_several_streams",
)


def test_collectives_on_several_streams(tmp_path: Path) -> None:
    assert_cases_of("overlap_cases", tmp_path, CASES, "gpu", timeout_s=400)
