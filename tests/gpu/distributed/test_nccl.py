"""What processes do together only on GPUs."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.launch import assert_all_ok, launch

CASES = (
    "same_numbers_compressed",
    "same_numbers_in_fp16",
    "same_numbers_with_shared_batch_norm",
    "captures_around_the_hundredth_iteration",
    "a_wide_capture_that_fails_in_the_backward_pass",
)


def test_gpus_train_as_without_the_callback(tmp_path: Path) -> None:
    assert_all_ok(launch(tmp_path, CASES, "gpu", timeout_s=240), CASES)


EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def test_expandable_segments(tmp_path: Path) -> None:
    """NCCL was told not to register the buffers of captures."""
    cases = ["same_numbers_with_expandable_segments"]
    environment = {**EXPANDABLE, "NCCL_GRAPH_REGISTER": "0"}
    assert_all_ok(launch(tmp_path, cases, "gpu", timeout_s=240, environment=environment), cases)


def test_expandable_segments_alone(tmp_path: Path) -> None:
    cases = ["expandable_segments_alone"]
    assert_all_ok(launch(tmp_path, cases, "gpu", timeout_s=240, environment=EXPANDABLE), cases)


def test_expandable_segments_and_registered_buffers(tmp_path: Path) -> None:
    cases = ["registered_buffers_that_move"]
    environment = {**EXPANDABLE, "NCCL_GRAPH_REGISTER": "1"}
    assert_all_ok(launch(tmp_path, cases, "gpu", timeout_s=240, environment=environment), cases)


def test_a_group_of_another_kind(tmp_path: Path) -> None:
    cases = ["a_group_that_averages_on_the_host"]
    assert_all_ok(launch(tmp_path, cases, "gpu", timeout_s=240), cases)
