"""Strategies that split weights between processes."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.launch import assert_all_ok, launch

CASES = ("fully_sharded", "tensor_parallel", "sharded_steps")


def test_split_weights_are_refused_or_trained_eagerly(tmp_path: Path, accelerator: str) -> None:
    # Lightning has FSDP1 on GPUs alone.
    cases = CASES if accelerator == "cpu" else (*CASES, "fully_sharded_as_one")
    named = [f"sharded_cases.{case}" for case in cases]
    assert_all_ok(launch(tmp_path, named, accelerator, timeout_s=240), named)
