"""Strategies that split weights between processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import assert_cases_of

STEPS = ("a_loop", "passes_in_between")
STEPS_LONG = (
    "windows",
    "windows_that_wait_once",
    "under_fabric",
    "a_weight_that_is_moved",
    "calls_without_gradients",
    "refused",
)


def _assert_all_ok(
    tmp_path: Path, accelerator: str, *cases: str, of: str = "sharded_cases", size: int = 2
) -> None:
    assert_cases_of(of, tmp_path, cases, accelerator, timeout_s=600, size=size, to_its_end=False)


CAPTURED = ("fully_sharded", "fully_sharded_and_not_captured", "evaluations_of_sharded_weights")

CAPTURED_LONG = (
    "fully_sharded_with_default_optimizers",
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
    "evaluations_that_release_all",
    "evaluations_of_other_weights",
    "evaluations_that_write_weights",
    "evaluations_with_prefetch",
    "evaluations_that_one_refuses",
    "evaluations_of_other_lengths",
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
    _assert_all_ok(tmp_path, accelerator, "tensor_parallel", *others)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(STEPS, id="some"),
        pytest.param(STEPS_LONG, id="more", marks=pytest.mark.long),
    ],
)
def test_steps_on_split_weights(tmp_path: Path, accelerator: str, cases: tuple[str, ...]) -> None:
    _assert_all_ok(tmp_path, accelerator, *cases, of="sharded_step_cases")


@pytest.mark.long
def test_split_weights_of_one_process(tmp_path: Path, accelerator: str) -> None:
    _assert_all_ok(tmp_path, accelerator, "alone", of="sharded_step_cases", size=1)


@pytest.mark.long
def test_evaluations_of_split_weights_without_a_fit(tmp_path: Path, accelerator: str) -> None:
    _assert_all_ok(tmp_path, accelerator, "evaluations_without_a_fit")
