"""From the loader to the launch, a batch passes at most six files, which the page on it names."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_cudagraph import CUDAGraphCallback, GraphedStep
from lightning_cudagraph.device.emulator.emulated_graph import EmulatedGraph
from lightning_cudagraph.tensors.static import StaticBatch
from tests.harness import Net, loader, make
from tests.sources import ROOT

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
MOST_FILES = 6
# The emulator in place of CUDA.
LAUNCH = "device/cuda/graph_parts.py"


def _files_on_the_stack() -> set[str]:
    """The files of the package with functions under way, but for the patches of other packages."""
    files: set[str] = set()
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT):
            files.add(str(path.relative_to(ROOT)))
        frame = frame.f_back  # type: ignore[assignment]
    return {
        LAUNCH if name.startswith("device/emulator/") else name
        for name in files
        if not name.startswith("compat/")
    }


class Way:
    """The files on the way of the latest batch: of the call stacks of its copy and of its launch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files: set[str] = set()
        self._copied: set[str] = set()
        launch, fill = EmulatedGraph.replay, StaticBatch.fill

        def noting_launch(graph: Any, *args: Any) -> None:
            launch(graph, *args)
            self.files = self._copied | _files_on_the_stack() | {LAUNCH}

        def noting_fill(static: Any, *args: Any) -> None:
            fill(static, *args)
            self._copied = _files_on_the_stack() | {"tensors/static.py"}

        monkeypatch.setattr(EmulatedGraph, "replay", noting_launch)
        monkeypatch.setattr(StaticBatch, "fill", noting_fill)


def _trainer(**kwargs: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[CUDAGraphCallback(timings=None, evaluation=kwargs.pop("evaluation", False))],
        **kwargs,
    )


def _fit(build: type[Net]) -> None:
    batches = loader(ragged=False, batches=10)
    _trainer(limit_val_batches=0).fit(make(build), batches, batches)


def _validate() -> None:
    _trainer(evaluation=True).validate(make(Net), loader(ragged=False, batches=10), verbose=False)


def _call() -> None:
    layer = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = layer(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    with GraphedStep(step, modules=layer, optimizers=optimizer) as graphed:
        for _ in range(10):
            graphed(torch.randn(2, 4))


class OwnStep(Net):
    """A hook with a closure: Lightning's own loop runs around the replay."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)


def test_the_page_names_the_files_of_the_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    way = Way(monkeypatch)
    _fit(Net)
    section = PAGE.read_text().partition("## A replay on the fast path")[2].partition("way back")[0]
    named = re.findall(r"^\d\. `([\w/]+\.py)`", section, re.MULTILINE)
    assert len(named) <= MOST_FILES
    assert set(named) == way.files


@pytest.mark.parametrize("run", [lambda: _fit(OwnStep), _validate, _call], ids=["loop", "eval", "call"])
def test_other_ways_are_no_longer(monkeypatch: pytest.MonkeyPatch, run: Callable[[], None]) -> None:
    way = Way(monkeypatch)
    run()
    assert {"capture/engine.py", "capture/graph.py", "tensors/static.py", LAUNCH} < way.files
    assert len(way.files) <= MOST_FILES
