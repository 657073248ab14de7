"""Whole steps of manual optimization, on CUDA."""

from __future__ import annotations

from pathlib import Path

from tests.test_manual_training import *  # noqa: F403
from tests.test_manual_training import BATCHES, WARMUP, Accumulates, both


def test_fp16(tmp_path: Path, accelerator: str) -> None:
    run = both(tmp_path, accelerator, Accumulates, precision="16-mixed")
    assert run.counts.replayed == 3 * BATCHES - WARMUP
