"""What a run shows of its times at the end: tables, pictures, the trace file and the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_cudagraph import CUDAGraphCallback, LayerTimings, LayerTimingsMonitor
from tests.harness import Net, assert_same, make, train
from tests.test_event_files import Tracker
from tests.test_trace import assert_nests, slices, threads

LAYERS = ["features", "features.0", "features.1", "features.2", "features.3", "head"]


def run(tmp_path: Path, accelerator: str, callback: Any, **kwargs: Any) -> Any:
    return train(
        make(Net),
        tmp_path,
        callback,
        accelerator=accelerator,
        logger=TensorBoardLogger(tmp_path),
        **kwargs,
    )


def shown(tmp_path: Path) -> EventAccumulator:
    folder = next(tmp_path.rglob("events.out.tfevents*")).parent
    accumulator = EventAccumulator(str(folder), size_guidance={"tensors": 0, "images": 0})
    accumulator.Reload()
    return accumulator


@pytest.mark.pictures
def test_a_fit_shows_tables_pictures_and_a_trace(tmp_path: Path, accelerator: str) -> None:
    timings = LayerTimings(window_steps=6, trace_steps=4)
    callback = CUDAGraphCallback(timings=timings)
    trace = run(tmp_path / "timed", accelerator, callback)
    assert trace.counts.replayed == 18
    found = shown(tmp_path / "timed")

    # A pause shows a window, when one has been read; how soon that is depends on the device. The end
    # shows what is left.
    tables = found.Tensors("~cudagraph/layers/text_summary")
    assert 1 < len(tables) <= 4
    assert tables[-1].step == 22
    text = tables[-1].tensor_proto.string_val[0].decode()
    assert "6 timed steps, 17 to 22" in text
    rows = [line.split()[0] for line in text.splitlines() if "%" in line]
    members = [layer.split(".")[-1] for layer in LAYERS]
    assert rows[-len(LAYERS) :] == members
    assert {"forward", "backward", "optimizer", "whole"} <= set(rows)

    for tag in ("~cudagraph/slowest_layers", "~cudagraph/timeline"):
        images = found.Images(tag)
        # Once, because a minute has not passed, and at the end.
        assert [image.step for image in images] == [tables[0].step, 22]
        assert images[-1].width == 880
        assert len(images[-1].encoded_image_string) > 5000

    path = next((tmp_path / "timed").rglob("layer_trace.json"))
    written = json.loads(path.read_text())
    assert_nests(written)
    steps = [event["name"] for event in slices(written) if event["cat"] == "step"]
    assert steps == ["step 19", "step 20", "step 21", "step 22"]
    names = {event["name"] for event in slices(written)}
    assert {"forward", "backward", "optimizer", "gap", *LAYERS} <= names
    assert {"forward", "backward", "optimizer"} <= set(threads(written).values())
    layer = next(event for event in slices(written) if event["name"] == "features.0")
    whole = next(event for event in slices(written) if event["name"] == "features")
    assert whole["ts"] <= layer["ts"]
    assert layer["ts"] + layer["dur"] <= whole["ts"] + whole["dur"]

    assert f"the last timed steps are in {str(path)!r}: open it at" in str(callback.summary)


def test_showing_changes_no_number(tmp_path: Path, accelerator: str) -> None:
    plain = train(make(Net), tmp_path / "plain", None, accelerator=accelerator)
    timings = LayerTimings(window_steps=2, trace_steps=2, every_n_steps=2)
    timed = train(
        make(Net), tmp_path / "timed", CUDAGraphCallback(timings=timings), accelerator=accelerator
    )
    assert timed.counts.replayed == 18
    assert_same(timed, plain)


@pytest.mark.long
@pytest.mark.pictures
def test_an_eager_run_shows_the_same(tmp_path: Path, accelerator: str) -> None:
    timings = LayerTimingsMonitor(LayerTimings(window_steps=6, trace_steps=2))
    run(tmp_path, accelerator, None, callbacks=[timings])
    found = shown(tmp_path)
    assert "~cudagraph/timeline" in found.Tags()["images"]
    assert_nests(json.loads(next(tmp_path.rglob("layer_trace.json")).read_text()))


@pytest.mark.long
@pytest.mark.parametrize("graphed", [False, True])
def test_the_trace_of_a_run_whose_logger_has_a_path(
    tmp_path: Path, accelerator: str, graphed: bool
) -> None:
    class Local(Tracker):
        save_dir = tmp_path / "logs"  # type: ignore[assignment]

    timings = LayerTimings(trace_steps=2)
    train(
        make(Net),
        tmp_path,
        CUDAGraphCallback(timings=timings) if graphed else None,
        accelerator=accelerator,
        callbacks=() if graphed else (LayerTimingsMonitor(timings),),
        logger=Local(),
    )
    written = json.loads((tmp_path / "logs" / "layer_trace.json").read_text())
    steps = [event["name"] for event in slices(written) if event["cat"] == "step"]
    assert len(steps) == 2


def test_a_trace_that_cannot_be_written_does_no_harm(tmp_path: Path, accelerator: str) -> None:
    logger = TensorBoardLogger(tmp_path)
    (Path(logger.log_dir) / "layer_trace.json").mkdir(parents=True)  # a folder is in its place
    callback = CUDAGraphCallback(timings=LayerTimings(trace_steps=2))
    with pytest.warns(RuntimeWarning, match="last 2 timed steps was not written"):
        trace = train(make(Net), tmp_path, callback, accelerator=accelerator, logger=logger)
    assert trace.counts.replayed == 18
