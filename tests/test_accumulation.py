"""Gradients accumulated over several batches: a graph for each place in the window.

`tests/gpu/test_accumulation.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_cudagraph import CUDAGraphCallback
from tests.harness import FULL_BATCHES, Net, assert_same, loader, make, train

O = torch.optim  # noqa: E741

FORMS: dict[str, Callable[[Any], O.Optimizer]] = {
    "AdamW-fused": lambda p: O.AdamW(p, lr=1e-2, fused=True),
    "SGD-momentum": lambda p: O.SGD(p, lr=0.1, momentum=0.9),
    "Adagrad": lambda p: O.Adagrad(p, lr=0.1),  # steps behind the graph
}


@pytest.mark.spread(3, first=1)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("window", "batches", "ragged"), [(2, 7, True), (3, 9, False), (4, 10, True)])
def test_windows(
    tmp_path: Path, accelerator: str, form: str, window: int, batches: int, ragged: bool
) -> None:
    """Leftover windows at the end of an epoch, and ragged batches in the middle of one, included."""
    kwargs: dict[str, Any] = {
        "accelerator": accelerator,
        "accumulate_grad_batches": window,
        "train_loader": loader(ragged, batches=batches),
        "max_epochs": 5,
        "gradient_clip_val": 0.1,
    }

    def build() -> Net:
        return Net(FORMS[form])

    plain = train(make(build), tmp_path / "plain", **kwargs)
    graph = train(make(build), tmp_path / "graph", CUDAGraphCallback(), **kwargs)
    assert_same(plain, graph)
    assert graph.counts.captures >= 2
    assert graph.counts.recaptures == ()
    assert graph.counts.replayed >= 20


@pytest.mark.spread(2)
@pytest.mark.parametrize("timings", [True, False])
def test_validation_in_the_middle_of_a_window(tmp_path: Path, accelerator: str, timings: bool) -> None:
    """Lightning drops the gradients then; the graphs go on adding where they were."""
    kwargs: dict[str, Any] = {
        "accelerator": accelerator,
        "accumulate_grad_batches": 4,
        "val_check_interval": 3,
        "max_epochs": 5,
    }
    plain = train(make(Net), tmp_path / "plain", **kwargs)
    callback = CUDAGraphCallback() if timings else CUDAGraphCallback(timings=None)
    graph = train(make(Net), tmp_path / "graph", callback, **kwargs)
    assert_same(plain, graph)
    assert graph.counts.replayed >= 20


@pytest.mark.long
def test_a_window_that_changes(tmp_path: Path, accelerator: str) -> None:
    kwargs: dict[str, Any] = {"accelerator": accelerator, "max_epochs": 6}
    schedule = {0: 1, 2: 3}
    plain = train(
        make(Net), tmp_path / "plain", callbacks=(GradientAccumulationScheduler(schedule),), **kwargs
    )
    graph = train(
        make(Net),
        tmp_path / "graph",
        CUDAGraphCallback(),
        callbacks=(GradientAccumulationScheduler(schedule),),
        **kwargs,
    )
    assert_same(plain, graph)
    assert graph.counts.recaptures == ("`accumulate_grad_batches` of the trainer changed from 1 to 3",)
    assert graph.counts.captures >= 4


class StepsNowAndThen(Net):
    """Accumulates by hand: an optimizer step on two of three batches, else only the closure."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        if batch_idx % 3 == 1:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)


class ClosureThenStep(Net):
    """Calls the closure, and then the optimizer without it."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        optimizer_closure()
        optimizer.step()


@pytest.mark.long
@pytest.mark.parametrize("cls", [StepsNowAndThen, ClosureThenStep])
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_closures_called_by_hand(tmp_path: Path, accelerator: str, cls: type[Net], window: int) -> None:
    kwargs: dict[str, Any] = {
        "accelerator": accelerator,
        "accumulate_grad_batches": window,
        "max_epochs": 6,
    }
    plain = train(make(cls), tmp_path / "plain", **kwargs)
    graph = train(make(cls), tmp_path / "graph", CUDAGraphCallback(), **kwargs)
    assert_same(plain, graph)
    assert graph.counts.replayed >= 10


def test_a_step_apart_from_its_closure_is_counted_once(tmp_path: Path, accelerator: str) -> None:
    callback = CUDAGraphCallback()
    graph = train(make(ClosureThenStep), tmp_path, callback, accelerator=accelerator, max_epochs=2)
    counts = graph.counts
    assert counts.replayed > 4
    batches = 2 * (FULL_BATCHES + 1)
    assert counts.replayed + counts.warmed_up + sum(counts.eager.values()) == batches
    whose = r"`ClosureThenStep.optimizer_step` \(.*test_accumulation.py:\d+\)"
    note = (
        rf"the optimizer steps eagerly in {batches} step\(s\), because {whose} calls the closure before"
    )
    assert re.search(note, str(callback.summary))


class StepsTwice(Net):
    """Steps the optimizer with the closure, and once more in a hook."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.optimizers().step()  # type: ignore[union-attr]


@pytest.mark.parametrize("window", [1, 2])
def test_steps_in_a_hook_are_counted(tmp_path: Path, accelerator: str, window: int) -> None:
    callback = CUDAGraphCallback()
    kwargs: dict[str, Any] = {"accelerator": accelerator, "accumulate_grad_batches": window}
    graph = train(make(StepsTwice), tmp_path, callback, max_epochs=2, **kwargs)
    batches = 2 * (FULL_BATCHES + 1)
    assert sum(graph.counts.eager.values()) >= batches
    assert "calls the closure before" not in str(callback.summary)


@pytest.mark.long
def test_fp16_in_windows(tmp_path: Path, accelerator: str) -> None:
    from tests.test_fp16 import Overflows, run

    def build() -> Net:
        return Overflows(FORMS["SGD-momentum"])

    kwargs: dict[str, Any] = {"accumulate_grad_batches": 2, "max_epochs": 8, "init_scale": 2.0**12}
    plain, one = run(tmp_path / "plain", accelerator, build, None, **kwargs)
    graph, other = run(tmp_path / "graph", accelerator, build, CUDAGraphCallback(), **kwargs)
    assert len(one.history) == len(other.history)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(one.history, other.history, strict=True))
    assert_same(plain, graph)
    assert graph.counts.replayed >= 30
