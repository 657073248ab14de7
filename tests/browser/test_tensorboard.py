"""What a user sees: a real fit, TensorBoard on its folder, and the texts in the tabs of a browser."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_cudagraph import CUDAGraphCallback, LayerTimings, LayerTimingsMonitor
from tests.browser.tabs import show_filtered, show_time_series, tensorboard_on
from tests.harness import Net, loader

GROUPS = ("~layer_backward_ms", "~layer_forward_ms", "~step_band_ms", "~step_count", "~step_ms")
TEXTS = ("~cudagraph/events", "~cudagraph/layers", "~cudagraph/report", "~layer_timings/report")
IMAGES = ("~cudagraph/slowest_layers", "~cudagraph/timeline")
CHARTS = "tf-custom-scalar-multi-line-chart-card, tf-custom-scalar-margin-chart-card"
# So few that all of them are in sight: others are not drawn.
FILTER = "(head|features)$|step_ms/(optimizer|total)"
TAGS = (
    "~layer_backward_ms/head",
    "~layer_forward_ms/head",
    "~layer_forward_ms/features",
    "~step_ms/optimizer",
    "~step_ms/total",
)


@dataclass
class Run:
    """A finished run.

    Attributes:
        address: that of TensorBoard on its folder.
        report: what the callback reported at its end.
    """

    address: str
    report: str


@pytest.fixture(scope="module")
def run(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run with graphs, and one without them beside it."""
    folder = tmp_path_factory.mktemp("runs")
    timings = LayerTimings(window_steps=20)
    callback = CUDAGraphCallback(timings=timings)
    for name, timed in (("graph", callback), ("eager", LayerTimingsMonitor(timings))):
        torch.manual_seed(0)
        trainer = pl.Trainer(
            accelerator="cpu",
            max_epochs=3,
            logger=TensorBoardLogger(folder, name="", version=name),
            callbacks=[timed],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Net(), loader(batches=30), loader())
    assert callback.summary.fit.replayed > 80
    with tensorboard_on(folder) as address:
        yield Run(address, str(callback.summary))


def test_time_series(tab: Any, run: Run, keep: Callable[[str], None]) -> None:
    tab.goto(f"{run.address}#timeseries")
    for group in GROUPS:
        tab.get_by_text(group, exact=True).first.wait_for()
    groups = tab.locator("metrics-card-group-toolbar .group-title").all_inner_texts()
    first = next(place for place, group in enumerate(groups) if group.startswith("~"))
    assert {"loss_step", "loss_epoch", "val_loss"} <= set(groups[:first]), "the user's come first"
    assert all(group.startswith("~") for group in groups[first:])
    show_time_series(tab, run.address, FILTER)
    cards = tab.locator("metrics-filtered-view card-view")
    for tag in TAGS:
        cards.filter(has_text=tag).wait_for()
    assert cards.filter(has_text="features.0").count() == 0
    keep("time_series")
    tab.get_by_role("combobox", name="Filter tags").fill("layer_")
    cards.filter(has_text="~step_ms/total").wait_for(state="detached")
    assert cards.count() == 4, "of containers and outer layers alone"


def test_scalars(tab: Any, run: Run, keep: Callable[[str], None]) -> None:
    tab.goto(f"{run.address}#scalars")
    for group in GROUPS:
        tab.get_by_text(group, exact=True).first.wait_for()
    show_filtered(tab, run.address, "scalars", FILTER, TAGS)
    keep("scalars")


def test_custom_scalars(tab: Any, run: Run, keep: Callable[[str], None]) -> None:
    show_filtered(tab, run.address, "custom_scalars", "", ["CUDA graph"])
    titles = ["step, replayed and eager", "step on the device", "forward", "backward", "optimizer"]
    titles = [f"{title} [ms]" for title in (*titles, "gap before the step")]
    for title in titles:
        # One for both runs: so they overlay.
        card = tab.locator(CHARTS, has_text=title).first
        card.get_by_text(re.compile(r"Matches \([1-9]")).wait_for()
    headings = tab.locator("tf-card-heading")
    assert headings.evaluate_all("all => all.map(one => one.displayName)") == titles
    keep("custom_scalars")


def test_text(tab: Any, run: Run, keep: Callable[[str], None]) -> None:
    tags = [f"tag: {tag}/text_summary" for tag in TEXTS]
    show_filtered(tab, run.address, "text", "", tags)
    shown = tab.locator("pre", has_text="ms replayed").first.inner_text()
    # In a fixed width, line by line as it was written.
    assert [line.rstrip() for line in shown.strip().splitlines()] == run.report.splitlines()
    assert re.search(r"^ +head +\d", shown, re.MULTILINE)
    tab.locator("pre", has_text=re.compile("captured")).first.wait_for()
    keep("text")


def test_images(tab: Any, run: Run, keep: Callable[[str], None]) -> None:
    show_filtered(tab, run.address, "images", "", IMAGES)
    for image in IMAGES:
        card = tab.locator("tf-image-loader", has_text=image).first
        loaded = card.locator("img").first
        loaded.wait_for()
        # Drawn, and not what a browser shows for a picture that it cannot read.
        assert loaded.evaluate("image => image.decode().then(() => image.naturalWidth)") > 200
    keep("images")
