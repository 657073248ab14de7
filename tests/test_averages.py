"""Averages of weights in hooks: their updates are replayed, and have the numbers of a run without us.

`tests/gpu/test_averages.py` collects these tests again, on CUDA. `test_rows_weights.py` has Lightning's
callbacks with their options, resumed runs and validation; here are averages that the user's code keeps.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from lightning_cudagraph import CUDAGraphCallback, GraphedStep
from tests.harness import Net, Trace, assert_same, make, train
from tests.rows import became, row

# The step at which the surroundings of an update change.
AT = 14


def replays(trace: Trace) -> int:
    """The number of replayed updates, by the report."""
    found = re.findall(r"replayed for (\d+) updates", str(trace.summary))
    assert len(found) == 1, str(trace.summary)
    return int(found[0])


class Averaging(Callback):
    """An average that is updated after each step."""

    def __init__(self, **kwargs: Any) -> None:
        self.kwargs = kwargs or {"avg_fn": get_ema_avg_fn(0.9), "use_buffers": True}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        # The device of the counter; without, it is on the host, and each update copies it.
        self.average = AveragedModel(pl_module, device=pl_module.device, **self.kwargs)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == AT:
            self.change(pl_module)
        self.average.update_parameters(pl_module)

    def change(self, pl_module: Any) -> None:
        """Change something before an update."""

    def state_dict(self) -> dict[str, Any]:
        return dict(self.average.state_dict())


class OtherFunction(Averaging):
    """Another averaging function from some step on."""

    def change(self, pl_module: Any) -> None:
        self.average.avg_fn = get_ema_avg_fn(0.5)


class BeginsAgain(Averaging):
    """The counter is set to zero: the next update is a first one, which copies."""

    def change(self, pl_module: Any) -> None:
        self.average.n_averaged.zero_()


class OtherWeight(Averaging):
    """A weight of the average is another tensor from some step on."""

    def change(self, pl_module: Any) -> None:
        self.average.module.head.weight = nn.Parameter(torch.ones_like(pl_module.head.weight))


class OfTwo(Averaging):
    """Another model is averaged in, and one more time in a copy of the average."""

    def change(self, pl_module: Any) -> None:
        copy.deepcopy(self.average).update_parameters(pl_module)
        with torch.no_grad():
            other = copy.deepcopy(pl_module)
            other.head.weight.fill_(3.0)
        self.average.update_parameters(other)


def warming(averaged: Tensor, current: Tensor, number: Tensor) -> Tensor:
    """A decay that grows with the number of updates, computed on the device."""
    decay = torch.where(number > 8, 0.9, (1 + number) / (10 + number))
    return decay * averaged + (1 - decay) * current


# How, and the number of replays: 24 steps, at the end of the fifth of which the step has its first
# replay; then the average is warmed up for as many.
KINDS: dict[str, tuple[Callable[[], Averaging], int]] = {
    "plain": (Averaging, 17),
    "foreach": (lambda: Averaging(multi_avg_fn=get_ema_multi_avg_fn(0.9)), 17),
    "decay-from-the-count": (lambda: Averaging(avg_fn=warming), 17),
    "other-function": (OtherFunction, 14),
    "begins-again": (BeginsAgain, 16),
    "other-weight": (OtherWeight, 14),
    "of-two": (OfTwo, 17),
}


@pytest.mark.spread
@pytest.mark.parametrize("name", KINDS)
def test_averages_of_user_code(tmp_path: Path, accelerator: str, name: str) -> None:
    build, expected = KINDS[name]
    done = row(tmp_path, accelerator, setting=lambda folder: {"callbacks": (build(),)})
    became(done.graph, replayed=18, eager={"signature": 3})
    assert replays(done.graph) == expected
    (average,) = (c.average for c in done.graph.trainer.callbacks if isinstance(c, Averaging))  # type: ignore[union-attr]
    assert "update_parameters" not in vars(average)


class OtherUpdate(Averaging):
    """Another method on the class of averages from some step on."""

    def change(self, pl_module: Any) -> None:
        update = AveragedModel.update_parameters
        self.patch.setattr(AveragedModel, "update_parameters", _twice(update))

    patch: pytest.MonkeyPatch


def _twice(update: Any) -> Any:
    def twice(average: AveragedModel, model: Any) -> None:
        update(average, model)
        update(average, model)

    return twice


def test_another_update_in_the_middle(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    for ours in (None, CUDAGraphCallback()):
        with monkeypatch.context() as patch:
            averaging = OtherUpdate()
            averaging.patch = patch
            folder = tmp_path / str(len(runs))
            runs.append(train(make(Net), folder, ours, accelerator=accelerator, callbacks=(averaging,)))
    assert_same(*runs)
    assert 0 < replays(runs[1]) < 17


def asks(averaged: Tensor, current: Tensor, number: Tensor) -> Tensor:
    return torch.lerp(averaged, current, 1 / (1 + number.item()))


def test_an_average_that_no_graph_can_hold(tmp_path: Path, accelerator: str) -> None:
    done = row(tmp_path, accelerator, setting=lambda folder: {"callbacks": (Averaging(avg_fn=asks),)})
    became(done.graph, replayed=18, eager={"signature": 3})
    assert "the average of weights in `Averaging` is updated eagerly" in str(done.graph.summary)


class Student(Net):
    """The step reads an average of the module, which a hook of the module updates after it."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = AveragedModel(self.head, avg_fn=get_ema_avg_fn(0.9)).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = super().training_step(batch, batch_idx)
        hidden = self.features(batch[0])
        found["loss"] = found["loss"] + (self.head(hidden) - self.teacher(hidden)).square().mean()
        return found

    def on_train_batch_end(self, *args: Any) -> None:
        self.teacher.update_parameters(self.head)


@pytest.mark.spread
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_average_that_the_step_reads(tmp_path: Path, accelerator: str, accumulate: int) -> None:
    done = row(tmp_path, accelerator, Student, accumulate_grad_batches=accumulate)
    assert done.graph.counts.replayed == {1: 18, 2: 15}[accumulate]
    assert replays(done.graph) == {1: 17, 2: 14}[accumulate]


class ByHand(Callback):
    """An average by hand, whose update is a `GraphedStep`, or a plain function."""

    def __init__(self, is_graphed: bool) -> None:
        self.is_graphed = is_graphed

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        weights = [*pl_module.parameters()]
        self.averages = averages = [weight.detach().clone() for weight in weights]

        @torch.no_grad()
        def update() -> None:
            for average, weight in zip(averages, weights, strict=True):
                average.lerp_(weight, 0.1)

        self.update: Any = GraphedStep(update, modules=pl_module) if self.is_graphed else update

    def on_train_batch_end(self, *args: Any) -> None:
        self.update()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if self.is_graphed:
            self.update.close()

    def state_dict(self) -> dict[str, Any]:
        return dict(enumerate(self.averages))


def test_an_average_by_hand(tmp_path: Path, accelerator: str) -> None:
    plain, graph = (
        train(
            make(Net),
            tmp_path / str(ours is None),
            ours,
            accelerator=accelerator,
            callbacks=(by_hand := ByHand(ours is not None),),
        )
        for ours in (None, CUDAGraphCallback())
    )
    assert_same(plain, graph)
    became(graph, replayed=18, eager={"signature": 3})
    counts = by_hand.update.summary.calls
    assert counts.replayed == 20, str(by_hand.update.summary)
