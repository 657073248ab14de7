"""Notes on settings that would make a run faster: the size of DDP's buckets, a fused optimizer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from lightning_cudagraph.timing.readings.spans import EXPOSED_TAG, TOTAL_TAG, Reading, Span, SpanLayout
from lightning_cudagraph.timing.readings.windows import WindowSummary
from lightning_cudagraph.trainer.training.times.advice import bucket_notes, fused_notes


def step_that_waits(waits_ms: float | None) -> WindowSummary:
    """Two steps of 10 ms each, which wait so long for their all-reduces; None: they have none."""
    spans = [Span(TOTAL_TAG, "step", ((0, 1),))]
    offsets_ms = [0.0, 10.0]
    if waits_ms is not None:
        spans.append(Span(EXPOSED_TAG, "communication", ((2, 3),)))
        offsets_ms += [8.0, 8.0 + waits_ms]
    layout = SpanLayout(tuple(spans), len(offsets_ms))
    return WindowSummary([Reading(layout, step, 0.0, offsets_ms) for step in range(2)])


def test_a_step_that_waits_is_told_of_smaller_buckets() -> None:
    (note,) = bucket_notes(DDPStrategy(), step_that_waits(1.5))
    assert note.startswith("15% of a step is the wait for all-reduces")
    assert "`DDPStrategy(bucket_cap_mb=5, gradient_as_bucket_view=True)`" in note


@pytest.mark.parametrize(
    ("strategy", "waits_ms"),
    [
        pytest.param(DDPStrategy(), 0.4, id="it waits little"),
        pytest.param(DDPStrategy(), None, id="no all-reduces"),
        pytest.param(DDPStrategy(bucket_cap_mb=25), 1.5, id="the user has chosen"),
        pytest.param(SingleDeviceStrategy(), 1.5, id="another strategy"),
    ],
)
def test_no_note_on_buckets(strategy: Strategy, waits_ms: float | None) -> None:
    assert bucket_notes(strategy, step_that_waits(waits_ms)) == []


def step_that_steps(optimizer_ms: float | None) -> WindowSummary:
    """Two steps of 10 ms each, with so much for the optimizer; None: it is not in the graph."""
    spans = [Span(TOTAL_TAG, "step", ((0, 1),))]
    offsets_ms = [0.0, 10.0]
    if optimizer_ms is not None:
        spans.append(Span("step_ms/optimizer", "optimizer", ((2, 1),)))
        offsets_ms.append(10.0 - optimizer_ms)
    layout = SpanLayout(tuple(spans), len(offsets_ms))
    return WindowSummary([Reading(layout, step, 0.0, offsets_ms) for step in range(2)])


def parameters(dtype: torch.dtype = torch.float32) -> Any:
    return nn.Linear(2, 2, dtype=dtype).parameters()


def trainer_with(optimizer: Optimizer, clip: float | None = None, precision: Any = "32-true") -> Any:
    plugin = MixedPrecision("bf16-mixed", "cpu") if precision == "bf16-mixed" else Precision()
    return SimpleNamespace(optimizers=[optimizer], gradient_clip_val=clip, precision_plugin=plugin)


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_an_optimizer_that_takes_long_is_told_of_its_fused_form(kind: type[Any]) -> None:
    (note,) = fused_notes(trainer_with(kind(parameters(), lr=0.1)), step_that_steps(2.0))
    assert note.startswith(f"the optimizer takes 20% of a step; `{kind.__name__}(..., fused=True)`")


def cycled() -> Optimizer:
    optimizer = SGD(parameters(), lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    return optimizer


class Twofold(nn.Parameter):
    """A parameter of a class of its own, as a `DTensor` is."""


@pytest.mark.parametrize(
    ("make", "optimizer_ms"),
    [
        pytest.param(lambda: Adam(parameters()), 0.4, id="it takes little"),
        pytest.param(lambda: Adam(parameters()), None, id="it steps after the replay"),
        pytest.param(lambda: Adam(parameters(), fused=True), 2.0, id="fused already"),
        pytest.param(lambda: Adam(parameters(), differentiable=True), 2.0, id="differentiable"),
        pytest.param(lambda: RMSprop(parameters()), 2.0, id="no fused form"),
        pytest.param(lambda: Adam(parameters(torch.float64)), 2.0, id="64 bits"),
        pytest.param(lambda: SGD([Twofold(torch.zeros(2))]), 2.0, id="of a class of its own"),
        pytest.param(cycled, 2.0, id="a cycled momentum"),
    ],
)
def test_no_note_on_the_optimizer(make: Any, optimizer_ms: float | None) -> None:
    assert fused_notes(trainer_with(make()), step_that_steps(optimizer_ms)) == []


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("clip", [None, 0.0, 1.0])
def test_no_note_where_lightning_clips_no_fused_optimizer(precision: str, clip: float | None) -> None:
    trainer = trainer_with(Adam(parameters()), clip, precision)
    is_refused = precision == "bf16-mixed" and bool(clip)
    assert bool(fused_notes(trainer, step_that_steps(2.0))) is not is_refused
