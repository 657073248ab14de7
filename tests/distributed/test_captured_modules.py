"""Processes with captured modules train as without the callback."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import AT_ONCE_S, assert_cases_of

CASES = ("experts_that_get_no_samples",)
LONG = ("same_parts", "same_parts_accumulated_in_buckets")


@pytest.mark.parametrize(
    "cases", [pytest.param(CASES, id="some"), pytest.param(LONG, id="more", marks=pytest.mark.long)]
)
def test_processes_train_as_without_the_callback(
    tmp_path: Path, accelerator: str, cases: tuple[str, ...]
) -> None:
    kwargs = {"limit_s": AT_ONCE_S, "to_its_end": False}
    assert_cases_of("module_cases", tmp_path, cases, accelerator, timeout_s=400, **kwargs)
