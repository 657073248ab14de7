"""Two processes train with a compiled step as they do without the callback."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import assert_all_ok, launch


@pytest.mark.long
def test_a_compiled_step(tmp_path: Path, accelerator: str) -> None:
    cases = ["same_numbers_compiled"]
    assert_all_ok(launch(tmp_path, cases, accelerator, timeout_s=240), cases)
