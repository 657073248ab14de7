"""`GraphedStep` in several processes: the same on NCCL; and what there is only on GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    ("case", "variables"),
    [("expandable_segments", {"NCCL_GRAPH_REGISTER": "0"}), ("expandable_segments_alone", {})],
    ids=["told", "not told"],
)
def test_expandable_segments(tmp_path: Path, case: str, variables: dict[str, str]) -> None:
    """Buffers of captures are not registered then, or there is no capture."""
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **variables}
    named = [f"step_cases.{case}"]
    assert_all_ok(launch(tmp_path, named, "gpu", timeout_s=240, environment=environment), named)


def test_a_group_of_another_kind(tmp_path: Path) -> None:
    named = ["step_cases.a_group_that_averages_on_the_host"]
    assert_all_ok(launch(tmp_path, named, "gpu", timeout_s=240), named)
