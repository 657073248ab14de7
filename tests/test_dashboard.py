"""Whole runs, as TensorBoard and other loggers show them."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event

from lightning_cudagraph import CUDAGraphCallback, LayerTimings
from lightning_cudagraph.timing.readings.spans import Reading
from lightning_cudagraph.timing.sinks.tensorboard.writer import TensorBoardWriter
from tests.harness import Net, assert_same, loader, make, train
from tests.test_event_files import (
    NullExperiment,
    Tracker,
    accumulated,
    chart_layout,
    points,
    said,
)

# Of the layers that are timed, the members of `features` have no curves.
LAYERS = ["features", "head"]
# Three epochs of eight batches: warm-up takes the first three, the ragged last ones are eager.
REPLAYED = [step for step in range(24) if step > 2 and step % 8 != 7]


class Keeps:
    """Beside the writer under test: what it was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.readings: list[Reading] = []
        add = TensorBoardWriter.add

        def keep(writer: TensorBoardWriter, reading: Reading) -> None:
            self.readings.append(reading)
            add(writer, reading)

        monkeypatch.setattr(TensorBoardWriter, "add", keep)


def texts(accumulator: EventAccumulator, tag: str) -> list[tuple[int, str]]:
    return [
        (event.step, event.tensor_proto.string_val[0].decode())
        for event in accumulator.Tensors(f"{tag}/text_summary")
    ]


def test_a_run_in_tensorboard(tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every value of every replay, in the file of the module's own."""
    kept = Keeps(monkeypatch)
    logger = TensorBoardLogger(tmp_path / "graph")
    callback = CUDAGraphCallback()
    graph = train(make(Net), tmp_path / "graph", callback, accelerator=accelerator, logger=logger)
    train(
        make(Net),
        tmp_path / "plain",
        accelerator=accelerator,
        logger=TensorBoardLogger(tmp_path / "plain"),
    )
    assert graph.counts.replayed == len(REPLAYED) == len(kept.readings)
    (folder,) = {path.parent for path in (tmp_path / "graph").rglob("events*")}
    assert len(list(folder.glob("events*"))) == 1
    accumulator = accumulated(folder)
    tags = {tag for reading in kept.readings for tag in reading.layout.tags}
    expected = {f"step_ms/{part}" for part in ("forward", "backward", "optimizer", "total")}
    expected |= {f"layer_{way}_ms/{layer}" for layer in LAYERS for way in ("forward", "backward")}
    assert expected <= tags
    members = {tag for tag in tags if "features." in tag}
    assert len(members) == 8
    tags -= members
    for tag in tags:
        assert points(accumulator, f"~{tag}") == said(kept.readings, tag), tag
    for tag in expected:
        assert [step for step, _, _ in points(accumulator, f"~{tag}")] == REPLAYED, tag
    # What Lightning has written stands between them, as in the plain run.
    plain = accumulated(next((tmp_path / "plain").rglob("events*")).parent)
    for tag in plain.Tags()["scalars"]:
        assert [(s, v) for s, _, v in points(accumulator, tag)] == [
            (s, v) for s, _, v in points(plain, tag)
        ]
    ours = {tag for tag in accumulator.Tags()["scalars"] if tag not in plain.Tags()["scalars"]}
    counts = {"step_count/replayed", "step_count/eager"}
    bands = {"total", "forward", "backward", "optimizer", "gap"}
    percentiles = {f"step_band_ms/{band}/{p}" for band in bands for p in ("p05", "p50", "p95")}
    assert ours == {f"~{tag}" for tag in tags | counts | percentiles | {"step_time_ms/replayed"}}
    # After each epoch of eight steps: its last batch has another shape and is eager, as is the warm-up.
    for tag, wanted in (("replayed", [4, 11, 18]), ("eager", [4, 5, 6])):
        found = {step: value for step, _, value in points(accumulator, f"~step_count/{tag}")}
        assert [found[step] for step in (7, 15, 23)] == wanted
    (category,) = chart_layout(accumulator).category
    (lines,) = (regex for chart in category.chart for regex in chart.multiline.tag)
    assert [tag for tag in ours if re.match(lines, tag)] == ["~step_time_ms/replayed"]
    assert len(category.chart) == 1 + len(bands)
    ((step, report),) = texts(accumulator, "~cudagraph/report")
    assert step == graph.final["global_step"]
    assert str(callback.summary) in report


def test_captures_are_told(tmp_path: Path, accelerator: str) -> None:
    class Widens(Net):
        """Changes what is baked in, in the second epoch."""

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.features[3].p = 0.5

    logger = TensorBoardLogger(tmp_path)
    trace = train(make(Widens), tmp_path, CUDAGraphCallback(), accelerator=accelerator, logger=logger)
    assert trace.counts.captures == 2
    (reason,) = trace.counts.recaptures
    told = texts(accumulated(logger.log_dir), "~cudagraph/events")
    assert [step for step, _ in told] == [3, 8, 11]
    assert all(len(line) <= 110 for _, text in told for line in text.splitlines())
    first, stale, second = (" ".join(text.split()) for _, text in told)
    for text in (first, second):
        assert re.search(r"Captured in \d+ ms: a step on `batch\[0\]` \(8, 12\) float32, `batch", text)
        assert re.search(r"[\d.]+ MiB taken so far", text)
    assert "captured again" in stale
    assert reason in stale


@pytest.mark.long
@pytest.mark.parametrize("batches", [2, 4])
def test_a_point_for_each_batch_of_a_window(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch, batches: int
) -> None:
    kept = Keeps(monkeypatch)
    logger = TensorBoardLogger(tmp_path)
    trace = train(
        make(Net),
        tmp_path,
        CUDAGraphCallback(),
        accelerator=accelerator,
        logger=logger,
        accumulate_grad_batches=batches,
        max_epochs=6,
    )
    assert trace.counts.replayed == len(kept.readings) > 10
    accumulator = accumulated(logger.log_dir)
    for tag in {tag for reading in kept.readings for tag in reading.layout.tags if "es." not in tag}:
        assert points(accumulator, f"~{tag}") == said(kept.readings, tag), tag
    of_batches = [step for step, _, _ in points(accumulator, "~layer_forward_ms/head")]
    of_optimizer = [step for step, _, _ in points(accumulator, "~step_ms/optimizer")]
    assert of_batches == sorted(of_batches)
    assert max(of_batches.count(step) for step in of_batches) == batches
    assert len(set(of_optimizer)) == len(of_optimizer), "the optimizer's time is there once a step"
    # As those of Lightning's own values, whose x is the number of steps before.
    loss = [step for step, _, _ in points(accumulator, "loss_step")]
    assert set(of_batches) <= set(loss)


@pytest.mark.long
def test_two_fits_in_one_folder(tmp_path: Path, accelerator: str) -> None:
    for _ in range(2):
        logger = TensorBoardLogger(tmp_path, version=0)
        train(make(Net), tmp_path / "x", CUDAGraphCallback(), accelerator=accelerator, logger=logger)
    files = sorted(Path(logger.log_dir).glob("events*"))
    assert len(files) == 2
    for file in files:
        accumulator = accumulated(file)
        assert [step for step, _, _ in points(accumulator, "~step_ms/total")] == REPLAYED
        assert len(chart_layout(accumulator).category) == 1
    whole = accumulated(logger.log_dir)
    assert len(points(whole, "~step_ms/total")) == 2 * len(REPLAYED)


@pytest.mark.long
def test_one_trainer_that_fits_twice(tmp_path: Path, accelerator: str) -> None:
    logger = TensorBoardLogger(tmp_path)

    def fit(trainer: Any, *args: Any, **kwargs: Any) -> None:
        trainer.fit(*args, **kwargs)
        trainer.fit_loop.epoch_progress.reset()
        trainer.fit(*args, **kwargs)

    callback = CUDAGraphCallback()
    trace = train(make(Net), tmp_path, callback, accelerator=accelerator, logger=logger, fit=fit)
    assert trace.counts.replayed > 10
    whole = accumulated(logger.log_dir)
    assert len(points(whole, "~step_ms/total")) > len(REPLAYED)
    assert len(texts(whole, "~cudagraph/report")) == 2


_EMPTY_LAYOUT = Event()
_EMPTY_LAYOUT.summary.value.add(tag="custom_scalars__config__")


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    "record",
    [b"\xff\x13 custom_scalars__config__ \xff\xff", _EMPTY_LAYOUT.SerializeToString()],
    ids=["no event", "no layout"],
)
def test_the_file_of_a_run_beside_is_damaged(tmp_path: Path, accelerator: str, record: bytes) -> None:
    """Its charts are looked at for the layers that they show."""
    loggers = [TensorBoardLogger(tmp_path, version=version) for version in range(2)]
    other = Path(loggers[0].log_dir) / "events.out.tfevents.1"
    other.parent.mkdir(parents=True)
    other.write_bytes(struct.pack("<Q4x", len(record)) + record + bytes(4))
    callback = CUDAGraphCallback()
    train(make(Net), tmp_path / "x", callback, accelerator=accelerator, logger=loggers[1])
    accumulator = accumulated(loggers[1].log_dir)
    (category,) = chart_layout(accumulator).category
    assert len(category.chart) == 6
    assert [step for step, _, _ in points(accumulator, "~step_ms/total")] == REPLAYED
    assert texts(accumulator, "~cudagraph/layers")
    ((_, report),) = texts(accumulator, "~cudagraph/report")
    assert str(callback.summary) in report


class WithoutExperiment(TensorBoardLogger):
    @property
    def experiment(self) -> Any:
        raise AttributeError("no experiment")


@pytest.mark.spread(2)
@pytest.mark.parametrize("kind", [WithoutExperiment, NullExperiment])
def test_a_run_whose_logger_has_no_writer(tmp_path: Path, accelerator: str, kind: Any) -> None:
    """It gets nothing, which is said once, and the run is the same."""

    class Mute(kind):
        """Lightning's own values are dropped, and times cannot be written."""

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            pass

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
            pass

        def log_graph(self, *args: Any, **kwargs: Any) -> None:
            pass

        def save(self) -> None:
            pass

        def finalize(self, status: str) -> None:
            pass

    def run(name: str, callback: CUDAGraphCallback | None) -> Any:
        folder = tmp_path / name
        logger = Mute(folder)
        return train(make(Net), folder, callback, accelerator=accelerator, logger=logger)

    with pytest.warns(UserWarning, match="Mute` could not write times") as caught:
        graph = run("graph", CUDAGraphCallback())
    assert len([w for w in caught if "could not write" in str(w.message)]) == 1
    assert graph.counts.replayed == len(REPLAYED)
    assert_same(run("plain", None), graph)


@pytest.mark.long
@pytest.mark.parametrize("kwargs", [{"logger": False}, {"fast_dev_run": 12}], ids=["none", "dummy"])
def test_a_run_without_loggers(tmp_path: Path, accelerator: str, kwargs: Any) -> None:
    def run(name: str, callback: CUDAGraphCallback | None) -> Any:
        return train(
            make(Net),
            tmp_path / name,
            callback,
            accelerator=accelerator,
            train_loader=loader(batches=12),
            **kwargs,
        )

    graph = run("graph", CUDAGraphCallback())
    assert graph.counts.replayed > 8
    assert_same(run("plain", None), graph)
    assert not list(tmp_path.rglob("events*"))


@pytest.mark.long
def test_a_run_with_a_tracker_and_a_csv(tmp_path: Path, accelerator: str) -> None:
    """The tracker gets medians; the file of rows is what it is without."""

    def run(name: str, callback: CUDAGraphCallback | None) -> tuple[Any, Tracker]:
        folder, tracker = tmp_path / name, Tracker()
        loggers = [CSVLogger(folder, flush_logs_every_n_steps=1), tracker]
        return train(make(Net), folder, callback, accelerator=accelerator, logger=loggers), tracker

    plain, plainly_seen = run("plain", None)
    graph, seen = run("graph", CUDAGraphCallback(timings=LayerTimings(window_steps=10)))
    assert_same(plain, graph)
    assert plain.csv
    ours = [(values, step) for values, step in seen.seen if "step_ms/total" in values]
    assert [entry for entry in seen.seen if entry not in ours] == plainly_seen.seen
    # In a pause when ten have come in, and at the end; no step is over by then.
    steps = [step for _, step in ours]
    assert len(steps) == 2
    assert REPLAYED[9] < steps[0] < steps[1] == graph.final["global_step"]
    order = [step for _, step in seen.seen]
    assert order == sorted(order)
    for values, _ in ours:
        assert {f"layer_forward_ms/{layer.replace('.', '_')}" for layer in LAYERS} <= set(values)
        assert all(re.fullmatch(r"[a-zA-Z0-9_]+/[a-zA-Z0-9_]+", name) for name in values)
        assert all(0 <= value < 10_000 for value in values.values())
