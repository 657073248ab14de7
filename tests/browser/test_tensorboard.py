"""What a user sees: a real fit, TensorBoard on its folder, and the texts in the tabs of a browser."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_cudagraph import CUDAGraphCallback
from tests.harness import Net, loader, make, train

GROUPS = ("layer_backward_ms", "layer_forward_ms", "step_ms")
# So few that all of them are in sight: others are not drawn.
FILTER = "(head|features)$|step_ms/(optimizer|total)"
TAGS = (
    "layer_backward_ms/head",
    "layer_forward_ms/head",
    "layer_forward_ms/features",
    "step_ms/optimizer",
    "step_ms/total",
)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, serve: Callable[[Path], str]) -> dict[str, str]:
    """A finished run: the address of its TensorBoard, and the report of the callback."""
    folder = tmp_path_factory.mktemp("runs")
    torch.manual_seed(0)
    callback = CUDAGraphCallback()
    train(
        make(Net),
        tmp_path_factory.mktemp("checkpoints"),
        callback,
        accelerator="cpu",
        train_loader=loader(batches=30),
        logger=TensorBoardLogger(folder, name="net"),
    )
    assert callback.counts is not None
    assert callback.counts.replayed > 80
    assert callback.report is not None
    return {"address": serve(folder), "text": callback.report}


def test_time_series(page: Any, report: dict[str, str], picture: Callable[[str], None]) -> None:
    page.goto(f"{report['address']}#timeseries")
    for group in GROUPS:
        page.get_by_text(group, exact=True).first.wait_for()
    page.get_by_text("Enable step selection and data table").click()  # off
    page.get_by_role("button", name="Settings").click()  # folded away
    tags = page.get_by_role("combobox", name="Filter tags")
    tags.fill(FILTER)
    tags.press("Escape")  # the list of suggestions
    page.get_by_text("Tags matching filter").wait_for()
    for tag in TAGS:
        page.locator("metrics-filtered-view card-view", has_text=tag).wait_for()
    page.locator("metrics-filtered-view line-chart canvas").first.wait_for()
    assert page.locator("metrics-filtered-view card-view", has_text="features.0").count() == 0
    page.wait_for_load_state("networkidle")
    picture("time_series")


def test_scalars(page: Any, report: dict[str, str], picture: Callable[[str], None]) -> None:
    page.goto(f"{report['address']}#scalars")
    for group in GROUPS:
        page.get_by_text(group, exact=True).first.wait_for()
    page.goto(f"{report['address']}?filtered#scalars&tagFilter={quote(FILTER)}")
    for tag in TAGS:
        page.get_by_text(tag, exact=True).first.wait_for()
    page.wait_for_load_state("networkidle")
    picture("scalars")


def test_custom_scalars(page: Any, report: dict[str, str], picture: Callable[[str], None]) -> None:
    page.goto(f"{report['address']}#custom_scalars")
    page.get_by_text("CUDA graph", exact=True).first.wait_for()
    for chart, title in (
        ("margin", "step: p05, p50, p95 [ms]"),
        ("multi-line", "parts of the step [ms]"),
        ("multi-line", "slowest layers, forward [ms]"),
        ("multi-line", "slowest layers, backward [ms]"),
    ):
        card = page.locator(f"tf-custom-scalar-{chart}-chart-card", has_text=title)
        card.get_by_text(re.compile(r"Matches \([1-9]")).wait_for()
    picture("custom_scalars")


def test_text(page: Any, report: dict[str, str], picture: Callable[[str], None]) -> None:
    page.goto(f"{report['address']}#text")
    page.get_by_text("tag: cudagraph/report/text_summary").wait_for()
    shown = page.locator("pre", has_text="slowest layers").first.inner_text()
    # In a fixed width, line by line as it was written.
    assert [line.rstrip() for line in shown.strip().splitlines()] == report["text"].splitlines()
    assert re.search(r"^ +head +\d", shown, re.MULTILINE)
    picture("text")
