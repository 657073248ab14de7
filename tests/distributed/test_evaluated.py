"""Processes of one run evaluate as without the callback, each with graphs of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import AT_ONCE_S, assert_cases_of

CASES = ("other_numbers_of_batches", "shared_logs")
LONG = ("no_buffers", "without_a_fit", "a_collective_in_the_step")


@pytest.mark.parametrize(
    "cases",
    [pytest.param(CASES, id="evaluated"), pytest.param(LONG, id="more", marks=pytest.mark.long)],
)
def test_processes_evaluate_as_without_the_callback(
    tmp_path: Path, accelerator: str, cases: tuple[str, ...]
) -> None:
    kwargs = {"limit_s": AT_ONCE_S, "to_its_end": False}
    assert_cases_of("evaluation_cases", tmp_path, cases, accelerator, timeout_s=400, **kwargs)
