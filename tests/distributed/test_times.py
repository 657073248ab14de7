"""Two processes time their steps, and what they wait for one another in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import assert_all_ok, launch

CASES = ("a_late_host_is_named",)
CASES_LONG = (
    "all_reduces_are_timed_with_accumulation",
    "all_reduces_are_timed",
    "the_slowest_is_named",
)


@pytest.mark.long
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(CASES, id="some"),
        pytest.param(CASES_LONG, id="more"),
    ],
)
def test_processes_time_their_steps(tmp_path: Path, accelerator: str, cases: tuple[str, ...]) -> None:
    assert_all_ok(launch(tmp_path, cases, accelerator, timeout_s=240, to_its_end=False), cases)
