"""What processes do together only on GPUs."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.launch import assert_all_ok, launch

CASES = (
    "same_numbers_compressed",
    "same_numbers_in_fp16",
    "same_numbers_with_shared_batch_norm",
    "same_numbers_with_a_static_graph",
)


def test_gpus_train_as_without_the_callback(tmp_path: Path) -> None:
    assert_all_ok(launch(tmp_path, CASES, "gpu", timeout_s=240), CASES)
