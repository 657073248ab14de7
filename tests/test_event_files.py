"""What writers make of readings: records and charts in event files, medians for trackers."""

from __future__ import annotations

import gc
import re
import struct
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c as by_tensorboard
from tensorboard.context import RequestContext
from tensorboard.data import server_ingester
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.util import grpc_util

from lightning_cudagraph.timing.readings.sink import Sinks
from lightning_cudagraph.timing.readings.spans import Reading, Span, SpanLayout
from lightning_cudagraph.timing.readings.whole_steps import WholeSteps
from lightning_cudagraph.timing.sinks import logged_medians
from lightning_cudagraph.timing.sinks.curves import tags_without_curves
from lightning_cudagraph.timing.sinks.logged_medians import MediansWriter, MetricNames
from lightning_cudagraph.timing.sinks.tensorboard.charts import StepBand
from lightning_cudagraph.timing.sinks.tensorboard.logger_writer import LoggerWriter
from lightning_cudagraph.timing.sinks.tensorboard.records import (
    ReadingRecords,
    ScalarRecords,
    behind,
    curves_of,
)
from lightning_cudagraph.timing.sinks.tensorboard.writer import TensorBoardWriter
from lightning_cudagraph.trainer.training.times.run_times import other_loggers_writer

PARTS = ("forward", "backward", "clipping", "optimizer")


def layout_of(*layers: str, optimizer: bool = True) -> SpanLayout:
    """The spans of a step whose layers are called one after the other."""
    n = len(layers)
    spans = [
        Span("step_ms/forward", "forward", ((0, n),)),
        Span("step_ms/backward", "backward", ((n, n + 1),)),
    ]
    if optimizer:
        spans.append(Span("step_ms/optimizer", "optimizer", ((n + 1, n + 2),)))
        spans.append(Span("step_ms/total", "host", ((0, n + 2),)))
    for i, layer in enumerate(layers):
        spans.append(Span(f"layer_forward_ms/{layer}", "forward", ((i, i + 1),)))
        spans.append(Span(f"layer_backward_ms/{layer}", "backward", ((i, i + 1), (n, n + 1))))
    if optimizer:
        spans.append(Span("step_ms/clipping", "optimizer", ((n + 1, n + 2),)))
    return SpanLayout(tuple(spans), n + 3 if optimizer else n + 2)


def readings_of(layout: SpanLayout, steps: range, seed: int = 0) -> list[Reading]:
    generator = np.random.default_rng(seed)
    offsets_ms = np.cumsum(generator.random((len(steps), layout.n_marks)), axis=1).tolist()
    return [
        Reading(layout, step, 1.5e9 + step / 7, row) for step, row in zip(steps, offsets_ms, strict=True)
    ]


def with_bands(writer: TensorBoardWriter, window_steps: int) -> Sinks:
    """The writer beside the bands that it shows, as in a run."""
    return Sinks([writer, WholeSteps([StepBand(window_steps, writer.add_scalars)])])


def feed(writer: Any, readings: list[Reading]) -> None:
    for reading in readings:
        writer.add(reading)
    writer.close()


def accumulated(folder: str | Path) -> EventAccumulator:
    """All that is in the event files of a folder, each record's checksums verified."""
    sizes = {"scalars": 0, "tensors": 0, "images": 0}
    return EventAccumulator(str(folder), size_guidance=sizes).Reload()


def points(accumulator: EventAccumulator, tag: str) -> list[tuple[int, float, float]]:
    return [(event.step, event.wall_time, event.value) for event in accumulator.Scalars(tag)]


def said(readings: list[Reading], tag: str) -> list[tuple[int, float, float]]:
    """The points that readings make, as floats of 32 bits."""
    return [
        (r.step, r.walltime_s, float(np.float32(r.durations_ms[r.layout.tags.index(tag)])))
        for r in readings
        if tag in r.layout.tags
    ]


def chart_layout(accumulator: EventAccumulator) -> Layout:
    """The custom scalars that TensorBoard shows: the last that were written."""
    tensor = accumulator.Tensors("custom_scalars__config__")[-1].tensor_proto
    return Layout.FromString(tensor.string_val[0])


# What is written, byte for byte.


def test_records_are_what_protocol_buffers_read() -> None:
    tags = ["step_ms/total", "layer_forward_ms/é", *(f"x/{'y' * i}" for i in range(0, 400, 7))]
    steps = np.array([0, 1, 127, 128, 16_384, 10**9, 2**41])
    generator = np.random.default_rng(1)
    values = generator.standard_normal((len(steps), len(tags))) * 10.0 ** generator.integers(-9, 9)
    walltimes_s = generator.random(len(steps)) * 1e10
    rows = ScalarRecords(tags).serialised(steps, walltimes_s, values)
    for row, step, walltime_s, expected in zip(rows, steps, walltimes_s, values, strict=True):
        record = row.tobytes()
        length, length_crc = struct.unpack("<QI", record[:12])
        assert len(record) == 12 + length + 4
        assert length_crc == by_tensorboard(record[:8])
        assert struct.unpack("<I", record[-4:])[0] == by_tensorboard(record[12:-4])
        event = Event.FromString(record[12:-4])
        assert (event.step, event.wall_time) == (step, walltime_s)
        assert [value.tag for value in event.summary.value] == tags
        assert [value.simple_value for value in event.summary.value] == [
            float(np.float32(value)) for value in expected
        ]


def test_all_values_among_those_of_others(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    writer = TensorBoardWriter([logger])
    whole, part = layout_of("a", "a.0", "b"), layout_of("a", "a.0", "b", optimizer=False)
    readings = []
    # Windows of accumulation: several readings of one step, of two layouts.
    for step in range(200):
        readings += readings_of(part, range(step, step + 1), 3 * step)
        readings += readings_of(whole, range(step, step + 1), 3 * step + 1)
    for reading in readings:
        writer.add(reading)
        logger.log_metrics({"loss": reading.step / 3}, reading.step)
        if reading.step == 100:
            logger.experiment.flush()
    writer.close()
    logger.finalize("success")
    assert len(list(Path(logger.log_dir).glob("events*"))) == 1
    accumulator = accumulated(logger.log_dir)
    for tag in whole.tags:
        assert points(accumulator, f"~{tag}") == said(readings, tag), tag
    assert [step for step, _, _ in points(accumulator, "loss")] == [r.step for r in readings]


def _records_of(logger: TensorBoardLogger) -> Any:
    return logger.experiment.file_writer.event_writer._async_writer._writer


def test_one_event_a_step_and_nothing_left_patched(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    records = _records_of(logger)
    writer = TensorBoardWriter([logger])
    for reading in readings_of(layout_of("a"), range(70)):
        writer.add(reading)
    assert "write" in vars(records)
    writer.close()
    assert "write" not in vars(records)
    logger.finalize("success")
    (file,) = Path(logger.log_dir).glob("events*")
    events = [e for e in LegacyEventFileLoader(str(file)).Load() if len(e.summary.value) > 1]
    assert [event.step for event in events] == list(range(70))


def test_the_owner_closes_the_writer_in_the_middle(tmp_path: Path) -> None:
    """It makes another file then, as it does for the values of others."""
    logger = TensorBoardLogger(tmp_path)
    writer = TensorBoardWriter([logger])
    readings = readings_of(layout_of("a", "b"), range(200))
    for reading in readings:
        writer.add(reading)
        if reading.step in (64, 130):
            writer.flush()
            logger.experiment.close()
    writer.close()
    logger.finalize("success")
    files = sorted(Path(logger.log_dir).glob("events*"), key=lambda path: int(path.name.split(".")[-1]))
    assert len(files) == 3
    parts = [accumulated(file) for file in files]
    for tag in readings[0].layout.tags:
        assert [point for part in parts for point in points(part, f"~{tag}")] == said(readings, tag), tag


def test_a_writer_that_is_built_differently(tmp_path: Path) -> None:
    class Plain:
        """As tensorboardX: the public methods are the same, and nothing else."""

        def __init__(self) -> None:
            self.scalars: list[tuple[str, float, int, float | None]] = []
            self.charts: list[Any] = []

        def add_scalar(self, tag: str, value: float, step: int, walltime: Any = None) -> None:
            self.scalars.append((tag, value, step, walltime))

        def add_custom_scalars(self, layout: Any) -> None:
            self.charts.append(layout)

        def flush(self) -> None:
            pass

    class Other(TensorBoardLogger):
        @property
        def experiment(self) -> Any:
            return plain

    plain = Plain()
    writer = with_bands(TensorBoardWriter([Other(tmp_path)]), 200)
    readings = readings_of(layout_of("a"), range(70))
    for reading in readings:
        writer.add(reading)
    writer.close()
    for tag in readings[0].layout.tags:
        found = [(step, walltime, value) for t, value, step, walltime in plain.scalars if t == f"~{tag}"]
        assert found == [
            (r.step, r.walltime_s, float(r.durations_ms[r.layout.tags.index(tag)])) for r in readings
        ]
    assert len(plain.charts) == 1


class NoExperiment(TensorBoardLogger):
    @property
    def experiment(self) -> Any:
        raise OSError(28, "No space left on device")


class NullExperiment(TensorBoardLogger):
    @property
    def experiment(self) -> Any:
        return None


@pytest.mark.parametrize("kind", [NoExperiment, NullExperiment])
def test_a_logger_that_cannot_be_written_to_is_said_once(tmp_path: Path, kind: Any) -> None:
    working = TensorBoardLogger(tmp_path)
    writer = TensorBoardWriter([kind(tmp_path), working])
    readings = readings_of(layout_of("a"), range(200))
    with pytest.warns(UserWarning, match=f"`{kind.__name__}` could not write times: ") as caught:
        feed(writer, readings)
    assert len(caught) == 1
    working.finalize("success")
    assert len(points(accumulated(working.log_dir), "~step_ms/total")) == 200


def test_a_picture_that_cannot_be_drawn_leaves_the_times_alone(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    writer = TensorBoardWriter([logger])
    readings = readings_of(layout_of("a"), range(20))
    for reading in readings[:10]:
        writer.add(reading)
    figure = Figure((2, 1))
    figure.subplots().plot([1, 2], [3, 4])
    writer.add_figure("cudagraph/timeline", figure, 9)
    with pytest.raises(AttributeError):
        writer.add_figure("cudagraph/slowest_layers", "no figure", 9)
    feed(writer, readings[10:])
    logger.finalize("success")
    accumulator = accumulated(logger.log_dir)
    assert points(accumulator, "~step_ms/total") == said(readings, "step_ms/total")
    (image,) = accumulator.Images("~cudagraph/timeline")
    assert (image.step, image.width) == (9, 200)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_disk_that_is_full_is_said_once(tmp_path: Path) -> None:
    """TensorBoard's thread dies of it, and tells whoever writes next."""
    logger = TensorBoardLogger(tmp_path)
    file = _records_of(logger)._writer
    writer = TensorBoardWriter([logger])
    readings = readings_of(layout_of("a"), range(300))

    def full(data: bytes) -> None:
        raise OSError(28, "No space left on device")

    for reading in readings[:100]:
        writer.add(reading)
    logger.experiment.flush()
    file.write = full
    writer.flush()
    logger.experiment.file_writer.event_writer._async_writer._worker.join()
    with pytest.warns(UserWarning, match="No space left on device") as caught:
        feed(writer, readings[100:])
    assert len([w for w in caught if "lightning_cudagraph" in str(w.message)]) == 1
    assert "write" not in vars(_records_of(logger))


def test_the_only_reading_behind_a_close(tmp_path: Path) -> None:
    """It opens the file again, and nothing is left for the queue, which would be waited for."""
    logger = TensorBoardLogger(tmp_path)
    writer = TensorBoardWriter([logger])
    layout = layout_of("a")
    for step in range(3):
        writer.add(readings_of(layout, range(step, step + 1), step)[0])
        writer.flush()
        logger.experiment.close()
    logger.experiment.add_scalar("b", 1.0, 3)
    writer.close()
    logger.finalize("success")
    found = points(accumulated(logger.log_dir), "~layer_forward_ms/a")
    assert sorted(step for step, _, _ in found) == [0, 1, 2]  # of several files


def test_a_long_run_has_fewer_points_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "lightning_cudagraph.timing.sinks.tensorboard.writer._BYTES_BEFORE_THINNING", 40_000
    )
    monkeypatch.setattr("lightning_cudagraph.timing.sinks.tensorboard.writer._READINGS_PER_FLUSH", 64)
    logger = TensorBoardLogger(tmp_path)
    whole, part = layout_of("a", "b"), layout_of("a", "b", optimizer=False)
    writer = with_bands(TensorBoardWriter([logger]), 500)
    readings = []
    for step in range(2000):
        (before,) = readings_of(part, range(step, step + 1), step)
        (last,) = readings_of(whole, range(step, step + 1), step)
        readings += [replace(before, is_last=False), replace(last, batch=1)]
    feed(writer, readings)
    logger.finalize("success")
    accumulator = accumulated(logger.log_dir)
    told = accumulator.Tensors("~cudagraph/events/text_summary")
    begins = [event.step for event in told]
    assert len(begins) >= 3
    # They are written one, and then 64 at a time; what comes behind is thinned out.
    written = range(0, len(readings), 64)
    cuts = [next(last for last in written if readings[last].step == begin) for begin in begins]
    expected = [
        reading
        for index, reading in enumerate(readings)
        if (reading.step + 1) % 2 ** sum(index > cut for cut in cuts) == 0
    ]
    n_bytes = sum(map(len, ReadingRecords(curves_of()).of(expected)))
    assert n_bytes == pytest.approx(45 * sum(len(each.layout.spans) for each in expected), rel=0.3)
    assert n_bytes >= 0.7 * 40_000 * len(begins)
    assert points(accumulator, "~layer_forward_ms/a") == said(expected, "layer_forward_ms/a")
    for nth, event in enumerate(told):
        text = " ".join(event.tensor_proto.string_val[0].decode().split())
        assert f"at most one step in {2 ** (nth + 1)};" in text
    # The bands are those of all steps.
    assert [step for step, _, _ in points(accumulator, "~step_band_ms/total/p50")] == [
        499,
        999,
        1499,
        1999,
    ]


# It closes neither its process nor its folder.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_data_server_reads_them_too(tmp_path: Path) -> None:
    """TensorBoard reads with a program of its own where it can, which parses events by itself."""
    logger = TensorBoardLogger(tmp_path)
    readings = readings_of(layout_of("a"), range(300))
    feed(TensorBoardWriter([logger]), readings)
    logger.finalize("success")
    try:
        binary = server_ingester.get_server_binary()
    except server_ingester.NoDataServerError as error:
        pytest.skip(str(error))
    ingester = server_ingester.SubprocessServerDataIngester(
        server_binary=binary,
        logdir=str(tmp_path),
        reload_interval=0,
        channel_creds_type=grpc_util.ChannelCredsType.LOCAL,
    )
    ingester.start()
    found: dict[str, Any] = {}
    give_up_at_s = time.monotonic() + 30
    while not found and time.monotonic() < give_up_at_s:
        runs = ingester.data_provider.read_scalars(
            RequestContext(), experiment_id="", plugin_name="scalars", downsample=1000
        )
        found = next(iter(runs.values()), {})
    for tag in readings[0].layout.tags:
        server = [(datum.step, datum.wall_time, datum.value) for datum in found[f"~{tag}"]]
        assert server == said(readings, tag)
    ingester._stdin_handle.close()  # ends it
    del ingester
    gc.collect()


def test_an_error_of_ours_does_not_end_the_thread_of_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = TensorBoardLogger(tmp_path)
    writer = TensorBoardWriter([logger])
    readings = readings_of(layout_of("a"), range(300))
    for reading in readings[:64]:
        writer.add(reading)
    writer.flush()
    logger.experiment.flush()

    def fails(records: ReadingRecords, readings: list[Reading]) -> list[bytes]:
        raise ValueError("something of ours")

    monkeypatch.setattr(ReadingRecords, "of", fails)
    for reading in readings[64:100]:
        writer.add(reading)
    writer.flush()
    logger.experiment.flush()
    with pytest.warns(UserWarning, match="could not write times: ValueError: something") as caught:
        feed(writer, readings[100:])
    assert len(caught) == 1
    logger.log_metrics({"loss": 1.0}, 7)
    logger.finalize("success")
    accumulator = accumulated(logger.log_dir)
    assert points(accumulator, "~step_ms/total") == said(readings[:64], "step_ms/total")
    assert len(points(accumulator, "loss")) == 1


def test_an_error_of_the_last_rows_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written behind them that would come upon it."""

    def fails(records: ReadingRecords, readings: Any) -> list[bytes]:
        raise ValueError("something of ours")

    logger = TensorBoardLogger(tmp_path)
    writer = LoggerWriter(logger, curves_of())
    readings = readings_of(layout_of("a"), range(3))
    writer.write(readings)
    logger.experiment.flush()
    monkeypatch.setattr(ReadingRecords, "of", fails)
    writer.write(readings)
    with pytest.warns(UserWarning, match="could not write times: ValueError: something"):
        writer.close()
    writer.close()
    logger.finalize("success")
    assert points(accumulated(logger.log_dir), "~step_ms/total") == said(readings, "step_ms/total")


# Charts.


def test_charts(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    layout = layout_of("stem", "head")
    for fit in range(2):  # the second has charts that the first has written in the same file
        writer = TensorBoardWriter([logger])
        sinks = with_bands(writer, 50)
        for reading in readings_of(layout, range(fit * 120, fit * 120 + 120), fit):
            sinks.add(reading)
        if fit == 1:
            writer.add_scalars({"step_time_ms/replayed": 1.0, "step_time_ms/eager": 9.0}, 120)
        writer.add_scalars({"step_count/replayed": 110.0}, fit * 120)  # has no chart there
        sinks.close()
    logger.finalize("success")
    accumulator = accumulated(logger.log_dir)
    tags = accumulator.Tags()["scalars"]
    (ours,) = chart_layout(accumulator).category
    assert ours.title == "CUDA graph"
    step, *bands = ours.chart
    (lines,) = step.multiline.tag
    matched = {tag for tag in tags if re.match(lines, tag)}
    assert matched == {"~step_time_ms/replayed", "~step_time_ms/eager"}
    for band, part in zip(bands, ("optimizer", "clipping", "backward", "forward", "total"), strict=True):
        (series,) = band.margin.series
        shown = [series.lower, series.value, series.upper]
        assert shown == [f"~step_band_ms/{part}/{p}" for p in ("p05", "p50", "p95")]
        assert set(shown) <= set(tags)


def test_charts_of_the_user_stay(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.experiment.add_custom_scalars({"mine": {"loss": ["Multiline", ["loss", "val_loss"]]}})
    writer = TensorBoardWriter([logger])
    writer.add_event("A CUDA graph was captured.", 0)
    sinks = with_bands(writer, 50)
    for reading in readings_of(layout_of("stem"), range(60)):
        sinks.add(reading)
    writer.add_scalars({"step_time_ms/replayed": 1.0}, 60)
    sinks.close()
    logger.finalize("success")
    accumulator = accumulated(logger.log_dir)
    assert "~step_band_ms/total/p50" in accumulator.Tags()["scalars"]
    (mine,) = chart_layout(accumulator).category
    assert mine.title == "mine"
    assert list(mine.chart[0].multiline.tag) == ["loss", "val_loss"]


def test_bands_are_those_of_the_steps(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    writer = with_bands(TensorBoardWriter([logger]), 40)
    readings = readings_of(layout_of("a"), range(100))
    for reading in readings:
        writer.add(reading)
    writer.close()
    logger.finalize("success")
    accumulator = accumulated(logger.log_dir)
    for stage in ("total", "backward"):
        times_ms = [value for _, _, value in said(readings, f"step_ms/{stage}")]
        windows = [times_ms[:40], times_ms[40:80], times_ms[60:]]
        for name, percent in (("p05", 5), ("p50", 50), ("p95", 95)):
            found = points(accumulator, f"~step_band_ms/{stage}/{name}")
            assert [step for step, _, _ in found] == [39, 79, 99]
            expected = [np.percentile(window, percent) for window in windows]
            assert [value for _, _, value in found] == pytest.approx(expected, rel=1e-6)


def test_layers_without_curves(tmp_path: Path) -> None:
    logger, tracker = TensorBoardLogger(tmp_path), Tracker()
    inner = frozenset({"a.0"})
    readings = readings_of(layout_of("a", "a.0"), range(30))
    feed(TensorBoardWriter([logger], inner=inner), readings)
    feed(other_loggers_writer([tracker], 10, lambda: 29, inner), readings)
    logger.finalize("success")
    accumulator = accumulated(logger.log_dir)
    assert points(accumulator, "~layer_backward_ms/a") == said(readings, "layer_backward_ms/a")
    ((values, _),) = tracker.seen
    for tags in (accumulator.Tags()["scalars"], values):
        assert [tag.lstrip("~") for tag in tags if "layer_" in tag] == [
            "layer_forward_ms/a",
            "layer_backward_ms/a",
        ]


def test_members_of_a_container_that_is_not_called_have_curves() -> None:
    def shown(*layers: str) -> list[str]:
        inner = frozenset(name for name in layers if "." in name)
        tags = layout_of(*layers).tags
        without = tags_without_curves(tags, inner)
        return [tag.partition("/")[2] for tag in tags if "layer_forward" in tag and tag not in without]

    assert shown("aux", "net.0", "net.1") == ["aux", "net.0", "net.1"]
    assert shown("net", "net.0", "net.1", "net.1.a") == ["net"]
    assert shown("net", "net.list.0") == ["net"]  # in the forward of `net`
    tables = [f"tables.{number}" for number in range(26)]
    assert shown("top", *tables, "net.0") == ["top", "net.0"]  # no room for all of them
    assert shown("top", *tables[:11]) == ["top", *tables[:11]]
    assert shown(*(f"layer{number}" for number in range(12)), "net.0") == [
        f"layer{number}" for number in range(12)
    ]


def _in_order(tags: Iterable[str]) -> list[str]:
    """The tags as TensorBoard sorts them: by character, but `/`, `_` and digits first."""
    return sorted(tags, key=lambda tag: [(c not in "/_0123456789", c) for c in tag])


def test_tags_are_behind_those_of_users() -> None:
    users = [
        "train_loss",
        "loss",
        "val/acc",
        "epoch",
        "step_count",
        "Zebra",
        "zz",
        "lr-AdamW",
        "hp_metric",
    ]
    ours = [behind(tag) for tag in ("step_ms/total", "cudagraph/layers", "layer_forward_ms/a")]
    assert set(_in_order([*ours, *users])[: len(users)]) == set(users)


# Other loggers.


class Tracker(Logger):
    """A logger that keeps what it is given, and has no writer."""

    name = "tracker"
    version = 0

    def __init__(self, fails_after: int = 10**9) -> None:
        super().__init__()
        self.seen: list[tuple[dict[str, float], int | None]] = []
        self.fails_after = fails_after

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if len(self.seen) >= self.fails_after:
            raise ConnectionError("the tracker is away")
        self.seen.append((metrics, step))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


def test_names_that_trackers_allow() -> None:
    names = MetricNames()
    tags = [
        "step_ms/total",
        "layer_forward_ms/blocks.0.mlp",
        "layer_forward_ms/blocks_0_mlp",
        "layer_forward_ms/Blocks.0.mlp",
        "layer_forward_ms/ünïcode (1): x@y",
    ]
    found = [names[tag] for tag in tags]
    assert found == [
        "step_ms/total",
        "layer_forward_ms/blocks_0_mlp",
        "layer_forward_ms/blocks_0_mlp_2",
        "layer_forward_ms/Blocks_0_mlp_3",
        "layer_forward_ms/_n_code__1___x_y",
    ]
    assert [names[tag] for tag in tags] == found


def test_other_loggers_are_given_medians_in_pauses() -> None:
    working, failing = Tracker(), Tracker(fails_after=1)
    readings = readings_of(layout_of("blocks.0"), range(125))
    assert readings[0].layout.tags[4] == "layer_forward_ms/blocks.0"
    now = 0
    writer = MediansWriter([failing, working], window_steps=50, step_now=lambda: now)

    def feed_with_pauses() -> None:
        nonlocal now
        for reading in readings:
            now = reading.step + 3  # readings come some steps late
            writer.add(reading)
            if now % 40 == 0:
                writer.pause()
        now += 1
        writer.close()
        writer.close()

    with pytest.warns(UserWarning, match="`Tracker` could not take times: ConnectionError") as caught:
        feed_with_pauses()
    assert len(caught) == 1
    assert len(failing.seen) == 1
    # Pauses at 40, where no window is full, at 80, and at 120, 40 readings later; then the rest.
    assert [step for _, step in working.seen] == [80, 128]
    for (values, _), window in zip(working.seen, (readings[28:78], readings[78:]), strict=True):
        median_ms = np.median([reading.durations_ms[4] for reading in window])
        assert values["layer_forward_ms/blocks_0"] == pytest.approx(median_ms)


def test_other_loggers_in_an_epoch_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call of a logger on the step's path but once a minute."""
    tracker, now_s = Tracker(), 0.0
    readings = readings_of(layout_of("a"), range(130))
    monkeypatch.setattr(logged_medians, "monotonic", lambda: now_s)
    writer = MediansWriter([tracker], 10, step_now=lambda: int(now_s))
    for reading in readings:
        now_s += 1.0
        writer.add(reading)
    assert [step for _, step in tracker.seen] == [60, 120]
    median_ms = np.median([reading.durations_ms[4] for reading in readings[110:120]])
    assert tracker.seen[-1][0]["layer_forward_ms/a"] == pytest.approx(median_ms)
