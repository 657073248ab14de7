"""What writers make of readings: records and charts in event files, medians for trackers."""

from __future__ import annotations

import gc
import re
import struct
import time
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

from lightning_cudagraph.timing.output.metrics import MetricNames, MetricsWriter
from lightning_cudagraph.timing.output.tensorboard import TensorBoardWriter
from lightning_cudagraph.timing.output.tensorboard.logger_writer import LoggerWriter
from lightning_cudagraph.timing.output.tensorboard.records import ReadingRecords, ScalarRecords, n_bytes
from lightning_cudagraph.timing.readings.spans import Reading, Span, SpanLayout

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
        assert points(accumulator, tag) == said(readings, tag), tag
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
        assert [point for part in parts for point in points(part, tag)] == said(readings, tag), tag


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
    writer = TensorBoardWriter([Other(tmp_path)])
    readings = readings_of(layout_of("a"), range(70))
    for reading in readings:
        writer.add(reading)
    writer.close()
    for tag in readings[0].layout.tags:
        found = [(step, walltime, value) for t, value, step, walltime in plain.scalars if t == tag]
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
    assert len(points(accumulated(working.log_dir), "step_ms/total")) == 200


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
    assert points(accumulator, "step_ms/total") == said(readings, "step_ms/total")
    (image,) = accumulator.Images("cudagraph/timeline")
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


def test_a_long_run_has_fewer_points_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "lightning_cudagraph.timing.output.tensorboard.writer._BYTES_BEFORE_THINNING", 40_000
    )
    monkeypatch.setattr("lightning_cudagraph.timing.output.tensorboard.writer._READINGS_PER_FLUSH", 64)
    logger = TensorBoardLogger(tmp_path)
    whole, part = layout_of("a", "b"), layout_of("a", "b", optimizer=False)
    writer = TensorBoardWriter([logger], window_steps=500)
    readings = []
    for step in range(2000):
        readings += readings_of(part, range(step, step + 1), step)
        readings += readings_of(whole, range(step, step + 1), step)
    feed(writer, readings)
    logger.finalize("success")
    accumulator = accumulated(logger.log_dir)
    told = accumulator.Tensors("cudagraph/events/text_summary")
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
    assert n_bytes(expected) == sum(map(len, ReadingRecords().of(expected))) >= 40_000 * len(begins)
    assert points(accumulator, "layer_forward_ms/a") == said(expected, "layer_forward_ms/a")
    for nth, event in enumerate(told):
        text = " ".join(event.tensor_proto.string_val[0].decode().split())
        assert f"at most one step in {2 ** (nth + 1)};" in text
    # The bands are those of all steps.
    assert [step for step, _, _ in points(accumulator, "step_band_ms/p50")] == [499, 999, 1499, 1999]


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
        server = [(datum.step, datum.wall_time, datum.value) for datum in found[tag]]
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
    assert points(accumulator, "step_ms/total") == said(readings[:64], "step_ms/total")
    assert len(points(accumulator, "loss")) == 1


def test_an_error_of_the_last_rows_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written behind them that would come upon it."""

    def fails(records: ReadingRecords, readings: Any) -> list[bytes]:
        raise ValueError("something of ours")

    logger = TensorBoardLogger(tmp_path)
    writer = LoggerWriter(logger)
    readings = readings_of(layout_of("a"), range(3))
    writer.write(readings)
    logger.experiment.flush()
    monkeypatch.setattr(ReadingRecords, "of", fails)
    writer.write(readings)
    with pytest.warns(UserWarning, match="could not write times: ValueError: something"):
        writer.close()
    writer.close()
    logger.finalize("success")
    assert points(accumulated(logger.log_dir), "step_ms/total") == said(readings, "step_ms/total")


# Charts.


def test_charts(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    # The user's own charts stay; those of a fit before, in the same file, do not come again.
    logger.experiment.add_custom_scalars({"mine": {"loss": ["Multiline", ["loss", "val_loss"]]}})
    layers = ["stem", *(f"blocks.{i}" for i in range(12)), "blocks.3.inner", "head"]
    layout = layout_of(*layers)
    for fit in range(2):
        writer = TensorBoardWriter([logger], window_steps=50)
        for reading in readings_of(layout, range(fit * 120, fit * 120 + 120), fit):
            writer.add(reading)
        writer.close()
    logger.finalize("success")
    accumulator = accumulated(logger.log_dir)
    tags = accumulator.Tags()["scalars"]
    mine, ours = chart_layout(accumulator).category
    assert (mine.title, ours.title) == ("mine", "CUDA graph")
    assert list(mine.chart[0].multiline.tag) == ["loss", "val_loss"]
    band, parts, forward, backward = ours.chart
    (series,) = band.margin.series
    assert (series.lower, series.value, series.upper) == tuple(
        f"step_band_ms/{p}" for p in ("p05", "p50", "p95")
    )
    assert {series.lower, series.value, series.upper} <= set(tags)
    matched = {tag for tag in tags if re.match(parts.multiline.tag[0], tag)}
    assert matched == {f"step_ms/{part}" for part in PARTS}
    for chart, prefix in ((forward, "layer_forward_ms/"), (backward, "layer_backward_ms/")):
        lines = [[tag for tag in tags if re.match(regex, tag)] for regex in chart.multiline.tag]
        assert [len(line) for line in lines] == [1, 1, 1, 1], "each line is one layer"
        assert all(line[0].startswith(prefix) for line in lines)
        assert [f"{prefix}blocks.3"] not in lines, "a container would hide its members"


def test_the_band_is_that_of_the_steps(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    writer = TensorBoardWriter([logger], window_steps=40)
    whole, part = layout_of("a"), layout_of("a", optimizer=False)
    readings = readings_of(whole, range(100))
    for reading in readings:
        writer.add(readings_of(part, range(reading.step, reading.step + 1), reading.step)[0])
        writer.add(reading)
    writer.close()
    logger.finalize("success")
    accumulator = accumulated(logger.log_dir)
    totals_ms = [value for _, _, value in said(readings, "step_ms/total")]
    windows = [totals_ms[:40], totals_ms[40:80], totals_ms[80:]]
    for name, percent in (("p05", 5), ("p50", 50), ("p95", 95)):
        found = points(accumulator, f"step_band_ms/{name}")
        assert [step for step, _, _ in found] == [39, 79, 99]
        expected = [np.percentile(window, percent) for window in windows]
        assert [value for _, _, value in found] == pytest.approx(expected, rel=1e-6)


def of_times(times_ms: dict[str, float]) -> list[Reading]:
    """Readings in which layers take these times."""
    spans = tuple(
        Span(f"layer_forward_ms/{name}", "forward", ((0, i + 1),)) for i, name in enumerate(times_ms)
    )
    layout = SpanLayout(spans, len(times_ms) + 1)
    return [Reading(layout, step, time.time(), [0.0, *times_ms.values()]) for step in range(20)]


def lines_of(folder: Path, readings: list[Reading], version: str) -> list[str]:
    """The lines of the chart of slow layers after a run."""
    logger = TensorBoardLogger(folder, version=version)
    feed(TensorBoardWriter([logger]), readings)
    logger.finalize("success")
    (ours,) = chart_layout(accumulated(logger.log_dir)).category
    (chart,) = (chart for chart in ours.chart if "slowest layers, forward" in chart.title)
    return [re.sub(r"\\", "", line).removeprefix("layer_forward_ms/") for line in chart.multiline.tag]


def test_slowest_layers_are_those(tmp_path: Path) -> None:
    times_ms = {str(i): i + 1.0 for i in range(9)}
    assert lines_of(tmp_path, of_times(times_ms), "flat") == ["5$", "6$", "7$", "8$"]


def test_layers_of_one_kind_have_one_line(tmp_path: Path) -> None:
    times_ms = {"stem": 0.4, "head": 1.5}
    for block in range(12):
        times_ms |= {f"blocks.{block}": 0.9, f"blocks.{block}.norm": 0.01}
        times_ms |= {f"blocks.{block}.mlp.{i}": 0.2 + 0.1 * i for i in range(2)}
    expected = ["head$", "blocks.0.norm$", "blocks.0.mlp.0$", "blocks.0.mlp.1$"]
    assert lines_of(tmp_path, of_times({**times_ms, "stem": 0.05}), "a") == expected


def test_a_run_shows_its_own_layers(tmp_path: Path) -> None:
    """Files of other runs beside it are not read."""
    names = [f"layers.{i}" for i in range(9)]
    rising = of_times({name: 1.0 + i for i, name in enumerate(names)})
    falling = of_times({name: 9.0 - i for i, name in enumerate(names)})
    first = lines_of(tmp_path, rising, "first")
    assert first == [f"layers.{i}$" for i in (5, 6, 7, 8)]
    assert lines_of(tmp_path, falling, "second") == [f"layers.{i}$" for i in range(4)]


def test_the_first_replays_do_not_choose_the_layers(tmp_path: Path) -> None:
    """What is made lazily is slow at first; so the charts are written once more."""
    names = [str(i) for i in range(9)]
    first = of_times({name: 20.0 - i for i, name in enumerate(names)}) * 6
    later = of_times({name: 1.0 + i for i, name in enumerate(names)}) * 8
    assert lines_of(tmp_path / "a", [*first, *later], "long") == ["5$", "6$", "7$", "8$"]
    assert lines_of(tmp_path / "b", first, "short") == ["0$", "1$", "2$", "3$"]
    logger = TensorBoardLogger(tmp_path / "c")
    logger.experiment.add_custom_scalars({"mine": {"loss": ["Multiline", ["loss"]]}})
    writer = TensorBoardWriter([logger])
    feed(writer, [*first, *later])
    logger.finalize("success")
    found = accumulated(logger.log_dir)
    assert len(found.Tensors("custom_scalars__config__")) == 3
    assert [category.title for category in chart_layout(found).category] == ["mine", "CUDA graph"]


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
    found = [names.of(tag) for tag in tags]
    assert found == [
        "step_ms/total",
        "layer_forward_ms/blocks_0_mlp",
        "layer_forward_ms/blocks_0_mlp_2",
        "layer_forward_ms/Blocks_0_mlp_3",
        "layer_forward_ms/_n_code__1___x_y",
    ]
    assert [names.of(tag) for tag in tags] == found


def test_other_loggers_are_given_medians_in_pauses() -> None:
    working, failing = Tracker(), Tracker(fails_after=1)
    readings = readings_of(layout_of("blocks.0"), range(125))
    assert readings[0].layout.tags[4] == "layer_forward_ms/blocks.0"
    now = 0
    writer = MetricsWriter([failing, working], window_steps=50, step_now=lambda: now)

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


def test_other_loggers_in_an_epoch_without_a_pause() -> None:
    """No call of a logger on the step's path but once a minute."""
    tracker, now_s = Tracker(), 0.0
    readings = readings_of(layout_of("a"), range(130))
    writer = MetricsWriter([tracker], 10, step_now=lambda: int(now_s), now_s=lambda: now_s)
    for reading in readings:
        now_s += 1.0
        writer.add(reading)
    assert [step for _, step in tracker.seen] == [60, 120]
    median_ms = np.median([reading.durations_ms[4] for reading in readings[110:120]])
    assert tracker.seen[-1][0]["layer_forward_ms/a"] == pytest.approx(median_ms)
