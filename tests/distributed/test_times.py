"""Two processes time their steps, and what they wait for one another in them."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.launch import assert_all_ok, launch

CASES = (
    "all_reduces_are_timed",
    "all_reduces_are_timed_with_accumulation",
    "the_slowest_is_named",
    "a_late_host_is_named",
)


def test_processes_time_their_steps(tmp_path: Path, accelerator: str) -> None:
    assert_all_ok(launch(tmp_path, CASES, accelerator, timeout_s=240), CASES)
