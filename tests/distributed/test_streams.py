"""Processes of one run choose the number of streams together."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import assert_cases_of

CASES = ("streams_are_chosen_by_the_slowest", "a_trial_that_one_cannot_capture")


@pytest.mark.long
def test_processes_choose_streams_together(tmp_path: Path, accelerator: str) -> None:
    assert_cases_of("stream_cases", tmp_path, CASES, accelerator, timeout_s=400, to_its_end=False)
