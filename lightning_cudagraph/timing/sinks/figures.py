"""Pictures of a window: the slowest layers, and the step as a timeline.

Drawn with matplotlib's objects and not with pyplot, since its global state belongs to the user. The
import of matplotlib waits for the first picture, because it takes longer than all the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_cudagraph.timing.output.tables import layers_of, timed_steps
from lightning_cudagraph.timing.output.texts import shortened
from lightning_cudagraph.timing.readings.spans import OF_OPTIMIZER, STEP_TAG, Track
from lightning_cudagraph.timing.readings.step_gap import GAP_TAG
from lightning_cudagraph.timing.readings.timeline import (
    TICKS_PER_MS,
    TRACKS,
    PlacedCall,
    calls_of,
    step_end,
)
from lightning_cudagraph.timing.readings.windows import Times, WindowSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which is safe for colour-blind readers.
_COLOURS: dict[Track, str] = {
    "host": "#999999",
    "copy": "#56B4E9",
    "forward": "#0072B2",
    "backward": "#D55E00",
    "optimizer": "#009E73",
    "communication": "#CC79A7",
}
_TRACK_NAMES: dict[Track, str] = {"host": "host gap"}
_INK = "#333333"
# TensorBoard shows a picture 350 pixels wide in its tab Images, and 210 high in Time Series: a point of
# it is about a pixel. It has more pixels than these for those who enlarge it.
_WIDTH_INCHES = 4.4
_DPI = 200
_FONT_POINTS = 9.0
_NAME_WIDTH = 22
_MODEL_WIDTH = 20
# Share of the width.
_LEFT = 0.015
_MOST_BARS = 6
_LONGEST_WHISKER = 2.5  # of the longest bar
# Share of white by nesting level: members are lighter than their containers; deeper ones are not drawn.
_WHITE_BY_DEPTH = (0.0, 0.3, 0.5, 0.65, 0.75)
# A longer gap, in steps, is cut off, so that the step stays visible.
_LONGEST_LEAD_STEPS = 0.5


def _figure(height_inches: float) -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(_WIDTH_INCHES, height_inches), dpi=_DPI, facecolor="white", layout="constrained"
    )
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#BBBBBB")
    axes.tick_params(labelsize=_FONT_POINTS, colors=_INK, length=0)
    axes.set_axisbelow(True)
    axes.grid(axis="x", color="#E5E5E5", linewidth=0.8)
    return figure, axes


def _write_titles(axes: Axes, title: str, subtitle: str) -> None:
    """Write a title and a subtitle from the left edge of the picture on, where there is room."""
    from matplotlib.transforms import blended_transform_factory

    size = _FONT_POINTS + 2
    text = axes.set_title(
        f"{title}\n", loc="left", fontsize=size, color=_INK, fontweight="bold", parse_math=False
    )
    figure: Any = axes.figure
    from_left = blended_transform_factory(figure.transFigure, axes.transAxes)
    text.set_transform(from_left + axes.titleOffsetTrans)  # type: ignore[attr-defined]
    text.set_x(_LEFT)
    below = axes.annotate(
        subtitle,
        (_LEFT, 1),
        (0, 7),
        xycoords=("figure fraction", "axes fraction"),
        textcoords="offset points",
        fontsize=_FONT_POINTS,
        color="#666666",
    )
    below.set_in_layout(False)


def layer_bars(summary: WindowSummary, model: str, device: str) -> Figure | None:
    """The slowest layers, with a bar for each pass; None if no layer was timed.

    A container is left out if timed members take most of its time.
    """
    layers = [layer for layer in layers_of(summary) if not layer.is_sum]
    if not layers:
        return None
    slowest = sorted(layers, key=lambda layer: -layer.median_ms)[:_MOST_BARS]
    figure, axes = _figure(1.2 + 0.27 * len(slowest))
    shown = [
        times for layer in slowest for times in (layer.forward, layer.backward) if times is not None
    ]
    # Whiskers far beyond all bars are cut off, so that the bars stay comparable.
    highest_ms = max(times.p95_ms for times in shown)
    farthest_ms = min(highest_ms, _LONGEST_WHISKER * max(times.p50_ms for times in shown))
    # Said below: the ends of such whiskers look like others.
    cut = ", cut off" if farthest_ms < highest_ms else ""
    for track, shift in (("forward", -0.19), ("backward", 0.19)):
        bars: list[tuple[float, Times]] = [
            (place + shift, times)
            for place, layer in enumerate(slowest)
            if (times := getattr(layer, track)) is not None
        ]
        if not bars:
            continue
        below_ms = [times.p50_ms - times.p05_ms for _, times in bars]
        above_ms = [max(min(times.p95_ms, farthest_ms) - times.p50_ms, 0.0) for _, times in bars]
        axes.barh(
            [middle for middle, _ in bars],
            [times.p50_ms for _, times in bars],
            height=0.34,
            color=_COLOURS[track],  # type: ignore[index]
            label=track,
            xerr=[below_ms, above_ms],
            error_kw={"ecolor": _INK, "elinewidth": 0.9, "capsize": 1.8, "capthick": 0.9},
        )
        for (middle, times), whisker_ms in zip(bars, above_ms, strict=True):
            axes.annotate(
                f"{times.p50_ms:.3f}",
                (times.p50_ms + whisker_ms, middle),
                (3, 0),
                textcoords="offset points",
                va="center",
                fontsize=_FONT_POINTS - 1.5,
                color="#666666",
            )
    names = [shortened(layer.name, _NAME_WIDTH) for layer in slowest]
    axes.set_yticks(range(len(slowest)), names, parse_math=False)  # a `$` is a letter
    axes.set_ylim(len(slowest) - 0.45, -0.55)
    axes.set_xlim(0, farthest_ms * 1.1 or 1.0)
    axes.set_xlabel(f"ms per step, whiskers p05 to p95{cut}", fontsize=_FONT_POINTS, color=_INK)
    is_cut = len(slowest) < len(layers)
    what = f"the {len(slowest)} slowest of {len(layers)} layers" if is_cut else "slowest layers"
    _write_titles(axes, f"{shortened(model, _MODEL_WIDTH)}: {what}", _about(summary, device))
    figure.legend(
        loc="outside lower center", ncols=2, fontsize=_FONT_POINTS, frameon=False, labelcolor=_INK
    )
    return figure


def _about(summary: WindowSummary, device: str) -> str:
    return f"{device}, median of {timed_steps(summary.n_readings)}"


def step_timeline(summary: WindowSummary, model: str, device: str) -> Figure | None:
    """The step as a timeline of gap, copy, passes, layers and optimizer; None if no step was timed."""
    if (typical := summary.typical()) is None:
        return None
    calls = [one for one in calls_of(typical) if one.depth < len(_WHITE_BY_DEPTH)]
    if not calls:
        return None
    # The line of the picture for each track, row and depth, and the lines of each track.
    lines = sorted({(TRACKS.index(one.span.track), one.row, one.depth) for one in calls})
    places = {(TRACKS[track], row, depth): place for place, (track, row, depth) in enumerate(lines)}
    track_places: dict[Track, list[int]] = {}
    for (track, _, _), place in places.items():
        track_places.setdefault(track, []).append(place)
    figure, axes = _figure(1.05 + 0.16 * len(places))
    total_ms = step_end(typical) / TICKS_PER_MS
    first_ms = min(min(one.begin for one in calls) / TICKS_PER_MS, 0.0)
    left_ms = max(first_ms, -_LONGEST_LEAD_STEPS * total_ms) if total_ms > 0 else first_ms
    margin_ms = 0.005 * (total_ms - left_ms)
    axes.set_xlim(left_ms - margin_ms, total_ms + margin_ms)
    axes.set_ylim(len(places) - 0.4, -0.6)
    axes.set_yticks(
        [sum(rows) / len(rows) for rows in track_places.values()],
        [_track_label(summary, track) for track in track_places],
    )
    for rows in list(track_places.values())[1:]:
        axes.axhline(rows[0] - 0.5, color="#E5E5E5", linewidth=0.8, zorder=0)
    axes.axvline(0.0, color="#BBBBBB", linewidth=0.8, zorder=0.5)
    axes.set_xlabel(
        "ms after the beginning of the step"
        + (f"; what is before {left_ms:.1f} ms is cut off" if left_ms > first_ms else ""),
        fontsize=_FONT_POINTS,
        color=_INK,
    )
    whole = summary.step
    about = _about(summary, device) + (f", {whole.p50_ms:.3f} ms each" if whole is not None else "")
    _write_titles(axes, f"{shortened(model, _MODEL_WIDTH)}: one step", about)
    _draw(figure, axes, calls, places)
    return figure


def _track_label(summary: WindowSummary, track: Track) -> str:
    tags = {"host": GAP_TAG, "communication": f"{STEP_TAG}all_reduce"}
    if track == "optimizer":
        times = summary.times_of(*(STEP_TAG + part for part in OF_OPTIMIZER))
    else:
        times = summary.get(tags.get(track, STEP_TAG + track))
    name = _TRACK_NAMES.get(track, track)
    return name if times is None else f"{name} {times.p50_ms:.3f} ms"


def _mixed(colour: str, white: float) -> tuple[float, float, float]:
    from matplotlib.colors import to_rgb

    red, green, blue = (part + (1.0 - part) * white for part in to_rgb(colour))
    return red, green, blue


def _draw(
    figure: Figure, axes: Axes, calls: list[PlacedCall], places: dict[tuple[Track, int, int], int]
) -> None:
    # Widths are known after the layout.
    figure.draw_without_rendering()
    to_px, to_ms = axes.transData.transform, axes.transData.inverted().transform
    px_ms = to_ms((1.0, 0.0))[0] - to_ms((0.0, 0.0))[0]
    rectangles: dict[tuple[Track, int, bool], list[tuple[float, float, int]]] = {}
    for one in calls:
        begin_ms, width_ms = one.begin / TICKS_PER_MS, (one.end - one.begin) / TICKS_PER_MS
        place = places[one.span.track, one.row, one.depth]
        # Narrow calls have no edge, which would hide them, and a minimum width.
        has_edge = width_ms > 4 * px_ms
        kind = one.span.track, one.depth, has_edge
        rectangles.setdefault(kind, []).append((begin_ms, max(width_ms, 1.2 * px_ms), place))
    for (track, depth, has_edge), of_kind in rectangles.items():
        axes.barh(
            [place for _, _, place in of_kind],
            [width_ms for _, width_ms, _ in of_kind],
            left=[begin_ms for begin_ms, _, _ in of_kind],
            height=0.86,
            color=_mixed(_COLOURS[track], _WHITE_BY_DEPTH[depth]),
            edgecolor="white",
            linewidth=0.6 if has_edge else 0.0,
        )
    left_px, right_px = axes.bbox.x0, axes.bbox.x1
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    widths_px: dict[str, float] = {}
    named: list[tuple[PlacedCall, float]] = []
    shortest: dict[str, str] = {}
    for one in calls:
        begin_px = max(to_px((one.begin / TICKS_PER_MS, 0.0))[0], left_px)
        end_px = min(to_px((one.end / TICKS_PER_MS, 0.0))[0], right_px)
        name = _fitting(one.span.name, end_px - begin_px - 6, axes, renderer, widths_px)
        if name:
            named.append((one, to_ms(((begin_px + end_px) / 2, 0.0))[0]))
            shortest[one.span.name] = min(shortest.get(one.span.name, name), name, key=len)
    for one, middle_ms in named:
        axes.text(
            middle_ms,
            places[one.span.track, one.row, one.depth],
            shortest[one.span.name],  # the same label of a layer in both passes
            ha="center",
            va="center_baseline",
            fontsize=_FONT_POINTS - 1.5,
            color="white" if one.depth == 0 else "black",
            clip_on=True,
            parse_math=False,
        )


def _fitting(name: str, room_px: float, axes: Axes, renderer: Any, widths_px: dict[str, float]) -> str:
    """The longest end of a dotted name that fits; empty if its last part does not."""
    path = name.split(".")
    for first in range(len(path)):
        end = ".".join(path[first:])
        if room_px < 4 * len(end):  # certainly too wide: no need to measure
            continue
        if end not in widths_px:
            text = axes.text(0, 0, end, fontsize=_FONT_POINTS - 1.5, parse_math=False)
            widths_px[end] = text.get_window_extent(renderer).width
            text.remove()
        if widths_px[end] <= room_px:
            return end
    return ""
