"""Processes with captured modules train as without the callback."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.launch import AT_ONCE_S, assert_cases_of

CASES = ("same_parts", "same_parts_accumulated_in_buckets", "experts_that_get_no_samples")


def test_processes_train_as_without_the_callback(tmp_path: Path, accelerator: str) -> None:
    kwargs = {"limit_s": AT_ONCE_S, "to_its_end": False}
    assert_cases_of("part_cases", tmp_path, CASES, accelerator, timeout_s=400, **kwargs)
