"""Pictures of times: what is on them, and that drawing leaves nothing behind."""

from __future__ import annotations

import ast
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import pyplot, rcParams
from matplotlib.colors import to_rgb

from lightning_cudagraph.timing.readings.spans import Reading, Span, SpanLayout
from lightning_cudagraph.timing.readings.windows import WindowSummary
from lightning_cudagraph.timing.sinks import dashboard as dashboard_module
from lightning_cudagraph.timing.sinks import figures
from lightning_cudagraph.timing.sinks.dashboard import Dashboard
from lightning_cudagraph.timing.sinks.figures import layer_bars, step_timeline
from tests.readings import gpt_readings

pytestmark = pytest.mark.pictures


def texts(figure: Any) -> list[str]:
    """All that is written on a picture."""
    (axes,) = figure.axes
    labels = [*axes.get_yticklabels(), *axes.texts, axes.xaxis.label, axes.title, axes._left_title]
    return [label.get_text() for label in labels if label.get_text().strip()]


def bars(figure: Any) -> list[tuple[float, float, float]]:
    """Left end, width and place of all bars."""
    (axes,) = figure.axes
    return [
        (bar.get_x(), bar.get_width(), bar.get_y() + bar.get_height() / 2)
        for container in axes.containers
        for bar in getattr(container, "patches", ())
    ]


def test_bars_of_the_slowest_layers() -> None:
    summary = WindowSummary(gpt_readings(n=40))
    figure = layer_bars(summary, "CharGPT", "NVIDIA H200")
    assert figure is not None
    (axes,) = figure.axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert sorted(names) == [f"blocks.{i}" for i in range(6)]
    written = texts(figure)
    assert "CharGPT: the 6 slowest of 9 layers\n" in written
    assert "NVIDIA H200, median of 40 timed steps" in written
    assert "ms per step, whiskers p05 to p95" in written
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["forward", "backward"]
    forward, backward = axes.containers[1], axes.containers[3]
    for container, prefix in ((forward, "layer_forward_ms/"), (backward, "layer_backward_ms/")):
        medians = [summary[prefix + name].p50_ms for name in names]
        assert [bar.get_width() for bar in container.patches] == pytest.approx(medians)
        (whiskers,) = container.errorbar.lines[2]
        ends = [(segment[0][0], segment[1][0]) for segment in whiskers.get_segments()]
        expected = [(summary[prefix + name].p05_ms, summary[prefix + name].p95_ms) for name in names]
        assert np.array(ends) == pytest.approx(np.array(expected))


def test_of_many_layers_the_slowest_are_drawn() -> None:
    summary = WindowSummary(gpt_readings(n=5, n_blocks=75, with_members=True))
    figure = layer_bars(summary, "CharGPT", "NVIDIA H200")
    assert figure is not None
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert len(names) == 6
    assert all(name.endswith(".attention") for name in names)
    assert "CharGPT: the 6 slowest of 303 layers\n" in texts(figure)


def test_whiskers_that_reach_far_are_cut_off() -> None:
    *readings, last = gpt_readings(n=10)
    slow = Reading(last.layout, last.step, last.walltime_s, [100 * ms for ms in last.offsets_ms])
    figure = layer_bars(WindowSummary([*readings, slow]), "CharGPT", "NVIDIA H200")
    assert figure is not None
    widest_ms = max(width for _, width, _ in bars(figure))
    right_ms = figure.axes[0].get_xlim()[1]
    assert right_ms < 3 * widest_ms
    label = figure.axes[0].xaxis.label.get_text()
    assert label.endswith("whiskers p05 to p95, cut off")
    for whiskers in (figure.axes[0].containers[index].errorbar.lines[2][0] for index in (1, 3)):
        # Before the numbers behind them.
        assert all(segment[:, 0].max() < 0.95 * right_ms for segment in whiskers.get_segments())


def summary_of(**times_ms: tuple[float, float]) -> WindowSummary:
    """One reading of layers, by when their forward passes begin and end."""
    offsets_ms = [0.0]
    spans = []
    for name, between_ms in times_ms.items():
        begin = len(offsets_ms)
        offsets_ms += between_ms
        tag = f"layer_forward_ms/{name.replace('__', '.')}"
        spans.append(Span(tag, "forward", ((begin, begin + 1),)))
    return WindowSummary([Reading(SpanLayout(tuple(spans), len(offsets_ms)), 0, 0.0, offsets_ms)])


def test_a_container_that_works_itself_is_a_layer() -> None:
    """As one whose members are the projections of an attention that is a function."""
    summary = summary_of(
        attention=(0.0, 20.0), attention__q=(0.0, 0.2), mlp=(20.0, 22.0), mlp__up=(20.0, 21.9)
    )
    figure = layer_bars(summary, "GPT", "NVIDIA H200")
    assert figure is not None
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == ["attention", "mlp.up", "attention.q"]


def test_letters_have_the_size_of_those_around_them_in_tensorboard() -> None:
    """It shows a picture 350 pixels wide in one tab, and 210 high in another."""
    summary = WindowSummary(gpt_readings(n=5, with_members=True))
    for draw in (layer_bars, step_timeline):
        figure = draw(summary, "CharGPT", "NVIDIA H100 80GB HBM3")
        assert figure is not None
        figure.canvas.draw()
        pixels_per_point = min(350 / figure.get_figwidth(), 210 / figure.get_figheight()) / 72
        (axes,) = figure.axes
        written = [*axes.get_yticklabels(), *axes.texts, axes._left_title]
        sizes = [text.get_fontsize() for text in (*written, *axes.get_xticklabels(), axes.xaxis.label)]
        assert min(sizes) * pixels_per_point > 7
        assert max(text.get_window_extent().x1 for text in written) <= figure.bbox.x1, "cut off"


def test_letters_that_mean_something_to_matplotlib() -> None:
    names = ("price_$_in", "m$\\frac{$", "p$x_1$q")
    summary = summary_of(**{name: (float(n), n + 1.0) for n, name in enumerate(names)})
    for draw in (layer_bars, step_timeline):
        figure = draw(summary, "Net$\\frac{$", "NVIDIA H200")
        assert figure is not None
        figure.canvas.draw()
        assert set(names) <= set(texts(figure))


def test_the_step_as_a_timeline() -> None:
    readings = gpt_readings(n=40, with_members=True)
    summary = WindowSummary(readings)
    figure = step_timeline(summary, "CharGPT", "NVIDIA H200")
    assert figure is not None
    (axes,) = figure.axes
    tracks = [label.get_text() for label in axes.get_yticklabels()]
    names = ["host gap", "copy", "forward", "backward", "optimizer"]
    assert [track.rsplit(" ", 2)[0] for track in tracks] == names
    assert tracks[2] == f"forward {summary['step_ms/forward'].p50_ms:.3f} ms"
    written = texts(figure)
    assert f"NVIDIA H200, median of 40 timed steps, {summary.step.p50_ms:.3f} ms each" in written  # type: ignore[union-attr]
    assert "ms after the beginning of the step" in written
    assert {"forward", "backward", "blocks", "3"} <= set(written)
    drawn = bars(figure)
    # Gap in two, copy, clipping, optimizer, and in each pass the whole, 4 layers, 6 blocks, 24 members.
    assert len(drawn) == 2 + 1 + 2 + 2 * (1 + 4 + 6 + 24)
    assert len({place for _, _, place in drawn}) == 1 + 1 + 4 + 4 + 1
    # The forward pass begins with the step and is as long as its median.
    left, width, _ = next(bar for bar in drawn if bar[0] == 0.0)
    assert left == 0.0
    assert width == pytest.approx(summary["step_ms/forward"].p50_ms, abs=0.001)
    # Members lie within what contains them, one row below.
    names = {"forward", "backward", "blocks", *map(str, range(6))}
    rows = defaultdict(set)
    for text in axes.texts:
        if text.get_text() in names:
            middle, place = text.get_position()
            rows[text.get_text()].add(place)
            assert any(
                left <= middle <= left + width and place == pytest.approx(row)
                for left, width, row in drawn
            ), text.get_text()
    assert {place + 1 for place in rows["forward"] | rows["backward"]} == rows["blocks"]
    assert {place + 1 for place in rows["blocks"]} >= rows["3"]


def test_a_layer_is_called_the_same_in_both_passes() -> None:
    """Also where there is more room for its name in one of them."""
    figure = step_timeline(WindowSummary(gpt_readings(n=5)), "CharGPT", "NVIDIA H200")
    assert figure is not None
    written = [text.get_text() for text in figure.axes[0].texts]
    for block in range(6):
        of_block = [name for name in written if name in (str(block), f"blocks.{block}")]
        assert len(of_block) == 2
        assert len(set(of_block)) == 1


def test_a_long_gap_does_not_squeeze_the_step() -> None:
    summary = WindowSummary(gpt_readings(n=5, gap_ms=50.0))
    figure = step_timeline(summary, "CharGPT", "NVIDIA H200")
    assert figure is not None
    left, right = figure.axes[0].get_xlim()
    assert -0.6 * right < left < 0
    assert any("is cut off" in text for text in texts(figure))


def test_names_are_dark_on_light_and_light_on_dark() -> None:
    figure = step_timeline(WindowSummary(gpt_readings(n=3)), "CharGPT", "NVIDIA H200")
    assert figure is not None
    (axes,) = figure.axes
    named = [text for text in axes.texts if text.get_text() in {"forward", "blocks", "blocks.0"}]
    assert named
    for text in named:
        middle, place = text.get_position()
        under = next(
            bar
            for container in axes.containers
            for bar in container.patches
            if abs(bar.get_y() + bar.get_height() / 2 - place) < 0.1
            and bar.get_x() <= middle <= bar.get_x() + bar.get_width()
        )
        ink, paper = to_rgb(text.get_color()), under.get_facecolor()[:3]
        light, dark = sorted((luminance(ink), luminance(paper)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) > 3.5, text.get_text()


def luminance(colour: Any) -> float:
    """As the guidelines for accessible web pages have it."""
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_nothing_to_draw() -> None:
    for summary in (WindowSummary([]), WindowSummary([Reading(SpanLayout((), 1), 0, 0.0, [0.0])])):
        assert layer_bars(summary, "Net", "CPU") is None
        assert step_timeline(summary, "Net", "CPU") is None


def test_drawing_leaves_pyplot_alone_and_matplotlib_is_imported_late() -> None:
    open_before = pyplot.get_fignums()
    backend, settings = pyplot.get_backend(), dict(rcParams)
    step_timeline(WindowSummary(gpt_readings(n=2)), "Net", "CPU")
    layer_bars(WindowSummary(gpt_readings(n=2)), "Net", "CPU")
    assert pyplot.get_fignums() == open_before
    assert (pyplot.get_backend(), dict(rcParams)) == (backend, settings)
    for path in Path(figures.__file__).parent.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:  # of the module itself
            assert "matplotlib" not in ast.dump(node) or not isinstance(
                node, (ast.Import, ast.ImportFrom)
            ), path


class _Wall:
    def __init__(self, is_shown: bool = True) -> None:
        self.is_shown = is_shown
        self.shown: list[tuple[str, int]] = []
        self.text = ""

    def add_text(self, tag: str, text: str, step: int) -> None:
        self.shown.append((tag, step))
        self.text = text

    def add_figure(self, tag: str, figure: Any, step: int) -> None:
        self.shown.append((tag, step))


def test_windows_are_shown_in_pauses_and_pictures_once_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wall, clock = _Wall(), [0.0]
    monkeypatch.setattr(dashboard_module, "monotonic", lambda: clock[0])
    dashboard = Dashboard(wall, 4, "Net", "CPU")
    layers, pictures = "cudagraph/layers", ("cudagraph/slowest_layers", "cudagraph/timeline")
    readings = gpt_readings(n=20)

    def added(first: int, end: int) -> list[tuple[str, int]]:
        wall.shown.clear()
        for reading in readings[first:end]:
            dashboard.add(reading)
        assert wall.shown == []  # nothing on the step's path
        dashboard.pause()
        return list(wall.shown)

    assert added(0, 3) == []
    assert added(3, 4) == [(layers, 3), *((tag, 3) for tag in pictures)]
    assert wall.text.startswith("4 timed steps, 0 to 3\n")
    clock[0] = 59.0
    assert added(4, 10) == [(layers, 9)]
    assert wall.text.startswith("4 timed steps, 6 to 9\n")
    clock[0] = 60.0
    assert added(10, 12) == []
    assert added(12, 14) == [(layers, 13), *((tag, 13) for tag in pictures)]
    assert added(14, 15) == []
    dashboard.close()
    assert wall.shown == [(layers, 14), *((tag, 14) for tag in pictures)]
    wall.shown.clear()
    dashboard.close()
    assert wall.shown == []


def test_pictures_that_were_put_off_are_drawn_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard_module, "monotonic", lambda: 0.0)
    wall = _Wall()
    dashboard = Dashboard(wall, 2, "Net", "CPU")
    for reading in gpt_readings(n=4):
        dashboard.add(reading)
        dashboard.pause()
    wall.shown.clear()
    dashboard.close()
    assert wall.shown == [("cudagraph/slowest_layers", 3), ("cudagraph/timeline", 3)]


def test_nobody_sees_it() -> None:
    wall = _Wall(is_shown=False)
    dashboard = Dashboard(wall, 1, "Net", "CPU")
    dashboard.add(gpt_readings(n=1)[0])
    dashboard.pause()
    dashboard.close()
    assert wall.shown == []
    assert len(dashboard) == 1


def test_letters_that_the_font_lacks_are_no_warning() -> None:
    class Drawn(_Wall):
        def add_figure(self, tag: str, figure: Any, step: int) -> None:
            super().add_figure(tag, figure, step)
            figure.canvas.draw()
            warnings.warn("of somebody else's", UserWarning, stacklevel=1)

    wall = Drawn()
    dashboard = Dashboard(wall, 1, "Net", "CPU")
    spans = tuple(
        Span(tag, "forward", ((0, 1),)) for tag in ("layer_forward_ms/\u5c42\u4e00", "step_ms/forward")
    )
    dashboard.add(Reading(SpanLayout(spans, 2), 0, 0.0, [0.0, 1.0]))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        dashboard.pause()
    assert [tag for tag, _ in wall.shown][1:] == ["cudagraph/slowest_layers", "cudagraph/timeline"]
    assert [str(warning.message) for warning in heard] == ["of somebody else's"] * 2


def test_a_picture_that_fails_is_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard_module, "monotonic", iter(range(0, 10_000, 100)).__next__)

    class Broken(_Wall):
        def add_figure(self, tag: str, figure: Any, step: int) -> None:
            raise RuntimeError("no fonts")

    wall = Broken()
    dashboard = Dashboard(wall, 1, "Net", "CPU")
    reading = gpt_readings(n=1)[0]
    dashboard.add(reading)
    with pytest.warns(RuntimeWarning, match=r"not drawn: RuntimeError: no fonts\. Tables and training"):
        dashboard.pause()
    dashboard.add(reading)
    dashboard.pause()
    dashboard.close()
    assert [tag for tag, _ in wall.shown] == ["cudagraph/layers"] * 2
