"""Strategies that split weights between processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import assert_cases_of


def _assert_all_ok(tmp_path: Path, accelerator: str, *cases: str) -> None:
    assert_cases_of("sharded_cases", tmp_path, cases, accelerator, timeout_s=600, to_its_end=False)


CAPTURED = ("fully_sharded", "fully_sharded_and_not_captured")
CAPTURED_LONG = (
    "fully_sharded_in_windows",
    "fully_sharded_always",
    "fully_sharded_never",
    "fully_sharded_in_windows_that_wait_once",
    "fully_sharded_with_a_switch_that_is_back",
    "fully_sharded_with_settings_that_change",
    "fully_sharded_in_two_ways",
    "a_torch_that_is_built_differently",
    "several_streams_of_sharded_weights",
    "fully_sharded_with_a_switch_in_the_step",
    "fully_sharded_and_meddled_with",
    "fully_sharded_in_mixed_precision",
    "fully_sharded_in_ways_of_ones_own",
    "evaluation_of_sharded_weights",
)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(CAPTURED, id="some"),
        pytest.param(CAPTURED_LONG, id="more", marks=pytest.mark.long),
    ],
)
def test_weights_that_are_split_train_as_without_the_callback(
    tmp_path: Path, accelerator: str, cases: tuple[str, ...]
) -> None:
    _assert_all_ok(tmp_path, accelerator, *cases)


def test_split_weights_are_refused_or_trained_eagerly(tmp_path: Path, accelerator: str) -> None:
    # Lightning has FSDP1 on GPUs alone.
    others = () if accelerator == "cpu" else ("fully_sharded_as_one",)
    _assert_all_ok(tmp_path, accelerator, "tensor_parallel", "sharded_steps", *others)
