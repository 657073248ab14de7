"""`GraphedStep` in several processes: the same on NCCL; and what there is only on GPUs."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.launch import assert_all_ok, launch
from tests.distributed.test_steps import *  # noqa: F403

CASES = (
    "fabric_in_fp16",
    "plain_loop_compressed",
    "plain_loop_with_shared_batch_norm",
    "a_wrapper_on_the_default_stream",
)


def test_gpus_train_as_without_graphs(tmp_path: Path) -> None:
    named = [f"step_cases.{case}" for case in CASES]
    assert_all_ok(launch(tmp_path, named, "gpu", timeout_s=240), named)
