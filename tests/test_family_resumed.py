"""Optimizers over many steps, with a checkpoint in the middle that the other kind of run goes on from.

`tests/gpu/test_family_resumed.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_cudagraph import CUDAGraphCallback
from tests.family import CLIPS, FORMS, SCHEDULES, quiet, run
from tests.harness import differences

STEPS = 200
# All that step in the graph, by the published table.
_TABLE = json.loads((Path(__file__).parent / "family.json").read_text())
IN_GRAPH = [form for form, outcomes in _TABLE["cpu"].items() if outcomes.startswith("=")]


@pytest.mark.spread(7)
@pytest.mark.parametrize("form", IN_GRAPH)
@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "64-true"])
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.filterwarnings("ignore")  # of Lightning, about each of many small runs
def test_resumed_in_both_directions(
    tmp_path: Path, accelerator: str, form: str, precision: str, clip: str, schedule: str
) -> None:
    assert form in FORMS
    if _TABLE["gpu" if accelerator == "gpu" else "cpu"][form].startswith("x"):
        pytest.skip("fails without the callback too")
    is_fused = "fused" in form
    if is_fused and clip != "no clip" and precision == "16-mixed":
        pytest.skip("Lightning itself does not clip for fused optimizers in mixed precision")
    if is_fused and (schedule == "OneCycle" or precision == "64-true"):
        pytest.skip("its kernel takes momentum as a number, and steps behind the graph")
    if form == "SGD(fused, momentum)" and precision == "16-mixed":
        pytest.skip("its first step overflows, and torch then reads uninitialized memory")
    quiet()
    cell = (precision, clip, schedule)
    of_plain, of_graph = tmp_path / "plain.ckpt", tmp_path / "graph.ckpt"
    callback = CUDAGraphCallback()
    try:
        plain = run(form, cell, accelerator, None, STEPS, of_plain)
    except ValueError as error:
        if "must support momentum" not in str(error):
            raise
        pytest.skip("OneCycleLR cycles a momentum that it does not have")
    graph = run(form, cell, accelerator, callback, STEPS, of_graph)
    assert differences(plain, graph) == []
    counts = callback.summary.fit
    assert counts is not None
    assert counts.replayed > STEPS / 2
    assert "optimizer steps eagerly" not in str(callback.summary)
    ends = [
        run(form, cell, accelerator, maker and maker(), STEPS, ckpt_path=path)
        for maker in (None, CUDAGraphCallback)
        for path in (of_plain, of_graph)
    ]
    assert len(ends[0]["losses"]) == STEPS / 2
    for end in ends[1:]:
        assert differences(ends[0], end) == []
