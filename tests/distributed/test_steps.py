"""`GraphedStep` in several processes: under Fabric, and in loops of one's own."""

from __future__ import annotations

import os
import signal
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_cudagraph.graphed_step.processes import StepProcesses
from lightning_cudagraph.processes.at_exit import uncaught_error
from tests.distributed.launch import AT_ONCE_S, assert_cases_of, launch

SAME = ("plain_loop_in_buckets", "accumulated", "a_step_of_one_process", "fabric_accumulated")
SAME_LONG = (
    "plain_loop",
    "accumulated_inside",
    "validated",
    "a_teacher_without_gradients",
    "fabric_in_one",
    "the_example_of_fabric",
    "steps_where_unused_are_looked_for",
)
AGREED = (
    "an_error_in_one_process",
    "another_shape",
    "a_capture_that_one_refuses",
)
AGREED_LONG = (
    "different_arguments",
    "another_backend_in_one",
    "buffers_that_move_are_refused",
    "averages_on_the_host_are_refused",
    "fewer_batches_in_one",
    "an_error_before_the_first_call",
    "an_error_in_the_step",
    "an_error_in_the_capture",
    "ctrl_c_in_one_process",
    "a_number_that_alternates_in_one_process",
    "wrappers_that_are_refused",
    "a_hook_in_the_middle_of_the_loop",
    "unequal_batches",
    "manual_optimization_is_refused",
    "a_guard_in_one_process",
    "collectives_that_are_refused",
)
HOOKS = ("of_low_rank",)
HOOKS_LONG = ("state_on_the_device", "options_of_the_host", "under_the_callback", "refused")
OVER_SOCKETS = (
    "another_shape_over_sockets",
    "an_error_in_one_process_over_sockets",
)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(SAME, id="same numbers"),
        pytest.param(SAME_LONG, id="more", marks=pytest.mark.long),
    ],
)
def test_processes_train_as_without_graphs(
    tmp_path: Path, accelerator: str, cases: tuple[str, ...]
) -> None:
    assert_cases_of("step_cases", tmp_path, cases, accelerator, timeout_s=400, to_its_end=False)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(HOOKS, id="same numbers"),
        pytest.param(HOOKS_LONG, id="more", marks=pytest.mark.long),
    ],
)
def test_communication_hooks(tmp_path: Path, accelerator: str, cases: tuple[str, ...]) -> None:
    assert_cases_of("hook_cases", tmp_path, cases, accelerator, timeout_s=400, to_its_end=False)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(AGREED, id="on a page", marks=pytest.mark.long),
        pytest.param(AGREED_LONG, id="more on a page", marks=pytest.mark.long),
        pytest.param(OVER_SOCKETS, id="over sockets", marks=pytest.mark.long),
    ],
)
def test_processes_decide_together_at_once(
    tmp_path: Path, accelerator: str, cases: tuple[str, ...]
) -> None:
    assert_cases_of("step_cases", tmp_path, cases, accelerator, timeout_s=400, limit_s=AT_ONCE_S)


@pytest.mark.parametrize(
    ("name", "statuses", "reason"),
    [
        pytest.param(
            *("an_error_in_the_step_before_averages", {1}, "ValueError: no more cheese"),
            marks=pytest.mark.long,
        ),
        # Python forgets that it was Ctrl-C once anything executes a string while it ends.
        pytest.param(
            *("ctrl_c_over_sockets", {1, -signal.SIGINT}, "KeyboardInterrupt"),
            marks=pytest.mark.long,
        ),
    ],
    ids=["an error", "Ctrl-C"],
)
def test_a_process_that_ends_in_a_call_ends_all(
    tmp_path: Path, accelerator: str, name: str, statuses: set[int], reason: str
) -> None:
    case = f"step_cases.{name}"
    ended = launch(tmp_path, [case], accelerator, timeout_s=240)
    assert ended[0].status == 1, ended
    assert ended[1].status in statuses, ended
    assert reason in ended[1].cases.get(case, "") + ended[1].said, ended[1]
    # In a collective, the connection is what it misses; then the reason is told beside it.
    told = ended[0].cases.get(case, "") + ended[0].said
    assert f"rank 1: {reason}" in told, ended[0]
    assert abs(ended[0].ended_s - ended[1].ended_s) < AT_ONCE_S


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("an_uncaught_error_without_with", marks=pytest.mark.long),
        pytest.param("an_uncaught_error_before_the_first_call", marks=pytest.mark.long),
        pytest.param("an_uncaught_error_between_two_steps", marks=pytest.mark.long),
        pytest.param("an_uncaught_error_well_before_another_step", marks=pytest.mark.long),
    ],
)
def test_an_error_that_nobody_catches_is_no_good_end(
    tmp_path: Path, accelerator: str, name: str
) -> None:
    case = f"step_cases.{name}"
    ended = launch(tmp_path, [case], accelerator, timeout_s=240)
    assert [process.status for process in ended] == [1, 1], ended
    assert "UncaughtError: no more cheese" in ended[1].said, ended[1]
    assert "PeerError: Another process of the run has" in ended[0].cases[case], ended[0]
    assert "rank 1: UncaughtError: no more cheese" in ended[0].cases[case], ended[0]


@pytest.mark.parametrize("name", ["last_exc", "last_value"])  # since Python 3.12, and before
def test_what_ended_the_program_is_known(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for other in ("last_exc", "last_value"):
        monkeypatch.delattr(sys, other, raising=False)
    assert uncaught_error() is None
    error = ValueError("no more cheese")
    monkeypatch.setattr(sys, name, error, raising=False)
    assert uncaught_error() is error


class _Step:
    """Takes the place of a `GraphedStep`, and notes how it is ended."""

    def __init__(self) -> None:
        self.ended: list[BaseException | None] = []

    def end(self, error: BaseException | None) -> None:
        self.ended.append(error)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _processes(end: weakref.WeakMethod[Any]) -> Iterator[StepProcesses]:
    made = StepProcesses(torch.device("cpu"), end)
    try:
        yield made
    finally:
        made.close()


def _is_told(processes: StepProcesses) -> bool:
    """True if the other processes can know that this one has ended."""
    return bool(processes._peers._store.check(["ended"]))


def test_a_step_that_was_dropped_has_come_to_its_end(group: None) -> None:
    step = _Step()
    with _processes(weakref.WeakMethod(step.end)) as processes:
        assert not _is_told(processes)
        del step
        processes._at_exit()
        assert _is_told(processes)


def test_an_error_of_before_has_not_ended_the_program(
    monkeypatch: pytest.MonkeyPatch, group: None
) -> None:
    name = "last_exc" if sys.version_info >= (3, 12) else "last_value"
    monkeypatch.setattr(sys, name, ValueError("a typo in an earlier cell"), raising=False)
    step, error = _Step(), ValueError("no more cheese")
    with _processes(weakref.WeakMethod(step.end)) as processes:
        processes._at_exit()
        monkeypatch.setattr(sys, name, error)
        processes._at_exit()
    assert step.ended == [None, error]


def test_a_fork_ends_nothing(monkeypatch: pytest.MonkeyPatch, group: None) -> None:
    step = _Step()
    with _processes(weakref.WeakMethod(step.end)) as processes:
        pid = os.getpid()
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: pid + 1)
            processes._at_exit()
    assert step.ended == []
