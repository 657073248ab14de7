"""Tables of a window in plain text: the parts of the step, and the layers as a tree."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_cudagraph.timing.output.texts import shortened, table
from lightning_cudagraph.timing.readings.spans import BACKWARD_TAG, FORWARD_TAG, STEP_PARTS, STEP_TAG
from lightning_cudagraph.timing.readings.windows import Times, WindowSummary

_NAME_WIDTH = 40
_BAR_WIDTH = 24
# If its members take this many times a layer's own time, some are called outside of it.
_MORE = 1.2
_NAMES_SHOWN = 5
# Parts that are not added to the step's time: gap and copy come before the step, and collectives are
# contained in other parts or run beside them.
_BESIDE = {
    "gap": "beside the copy",
    "copy": "of the batch",
    "all_reduce": "beside the backward pass",
    "all_reduce_exposed": "what of it the step waits for",
    **dict.fromkeys(
        ("broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all"), "in the parts above"
    ),
}
_BETWEEN = ("gap", "copy")
_OF_PERIOD = "; of the time from step to step"


def _median_ms(*passes: Times | None) -> float:
    return sum(times.p50_ms for times in passes if times is not None)


@dataclass(frozen=True)
class Layer:
    """A timed layer and its place among the others.

    Attributes:
        containers: the timed layers that contain it, by name, from the outermost to the innermost.
        is_sum: most of its time is that of its members.
    """

    name: str
    containers: tuple[str, ...]
    is_sum: bool
    forward: Times | None
    backward: Times | None

    @property
    def median_ms(self) -> float:
        """Milliseconds of both passes: the sum of their medians, which is robust against outliers."""
        return _median_ms(self.forward, self.backward)

    @property
    def share(self) -> float:
        return sum(times.share for times in (self.forward, self.backward) if times is not None)

    @property
    def own_name(self) -> str:
        return self.name.removeprefix(f"{self.containers[-1]}." if self.containers else "")


def layers_of(summary: WindowSummary) -> list[Layer]:
    """The timed layers as a tree: each before its members, in the order of the model."""
    names = dict.fromkeys(
        tag.removeprefix(prefix)
        for tag in summary.tags
        for prefix in (FORWARD_TAG, BACKWARD_TAG)
        if tag.startswith(prefix) and tag in summary.times
    )
    # Each with those that contain it, from the outermost to the innermost.
    lineages = {
        name: (*(name[:end] for end, c in enumerate(name) if c == "." and name[:end] in names), name)
        for name in names
    }
    passes = {
        name: (summary.get(FORWARD_TAG + name), summary.get(BACKWARD_TAG + name)) for name in names
    }
    inside_ms: dict[str, float] = {}
    for *containers, name in lineages.values():
        for container in containers[-1:]:
            inside_ms[container] = inside_ms.get(container, 0.0) + _median_ms(*passes[name])
    # Layers whose members take most of their time, which is shown at the members.
    sums = {name for name, ms in inside_ms.items() if ms >= 0.5 * _median_ms(*passes[name])}
    places = {name: place for place, name in enumerate(names)}
    return [
        Layer(name, tuple(containers), name in sums, *passes[name])
        for *containers, name in sorted(
            lineages.values(), key=lambda lineage: [places[name] for name in lineage]
        )
    ]


def timed_steps(number: int) -> str:
    """A number of timed steps, in words."""
    return f"{number} timed step" + ("" if number == 1 else "s")


def _bar(forward: float, backward: float) -> str:
    """Bar of both passes, one after the other; the whole width is the step."""
    end = min(forward + backward, 1.0)
    marks = round(end * _BAR_WIDTH)
    first = min(round(min(forward, 1.0) * _BAR_WIDTH), marks)
    return "#" * first + "=" * (marks - first)


def parts_table(summary: WindowSummary) -> list[str]:
    """Lines with the parts of a step, which add up to it, and parts outside of it; none if untimed.

    Shares are ratios of medians: to the step, but for gap and copy to the time from step to step.
    """
    step = summary.step
    if step is None:
        return []
    lines: list[tuple[str | float, ...]] = [
        ("step", "p05 ms", "p50 ms", "p95 ms", "max ms", "mean ms", "share", "")
    ]

    def add(name: str, times: Times, note: str = "", share: str | None = None) -> None:
        numbers = (times.p05_ms, times.p50_ms, times.p95_ms, times.max_ms, times.mean_ms)
        lines.append((name, *numbers, share or f"{times.share:.1%}", note))

    for part in STEP_PARTS:
        if (times := summary.get(STEP_TAG + part)) is not None:
            add(f"  {part}", times, _bar(times.share, 0.0))
    add("  whole", step)
    for part, what in _BESIDE.items():
        if (times := summary.get(STEP_TAG + part)) is None:
            continue
        if part in _BETWEEN and summary.period is None:
            add(f"  {part}", times, f"({what})", "-")
        else:
            add(f"  {part}", times, f"({what}{_OF_PERIOD if part in _BETWEEN else ''})")
    return table(lines, left=(0, 7))


def layer_table(summary: WindowSummary, most_rows: int = 40) -> list[str]:
    """Lines with the layers as a tree, and their times; none if no layer was timed.

    Of more than can be shown, the slowest and their containers are shown.
    """
    layers = layers_of(summary)
    if not layers:
        return []
    shown: set[str] = set()
    # A container takes at least as long as its members, so it is sorted before them. If a member is also
    # called elsewhere that may not hold, but the container is shown all the same.
    for layer in sorted(layers, key=lambda layer: (-layer.median_ms, len(layer.containers))):
        missing = [name for name in (*layer.containers, layer.name) if name not in shown]
        if len(shown) + len(missing) <= most_rows:
            shown.update(missing)
    rows = [
        ("", "forward", "", "backward", "", "both", ""),
        ("layer", "p50 ms", "p95 ms", "p50 ms", "p95 ms", "share", "# forward = backward"),
        *(_layer_row(layer) for layer in layers if layer.name in shown),
    ]
    text = table(rows, left=(0, 6))
    hidden = [layer for layer in layers if layer.name not in shown]
    if hidden:
        slowest_ms = max(layer.median_ms for layer in hidden)
        text.append(f"and {len(hidden)} faster layers, none above {slowest_ms:.3f} ms in both passes")
    return text + _sums(summary, layers)


def _layer_row(layer: Layer) -> tuple[str | float | None, ...]:
    indent = "  " * min(len(layer.containers), 8)
    passes = (layer.forward, layer.backward)
    times_ms = [(None, None) if times is None else (times.p50_ms, times.p95_ms) for times in passes]
    shares = [0.0 if times is None else times.share for times in passes]
    name = indent + shortened(layer.own_name, max(_NAME_WIDTH - len(indent), 12))
    return name, *times_ms[0], *times_ms[1], f"{layer.share:.1%}", _bar(*shares)


def _called_elsewhere(summary: WindowSummary, layers: list[Layer]) -> list[str]:
    """Layers whose members take longer than the layer itself, in one of the passes."""
    members: dict[str, list[str]] = {}
    for layer in layers:
        for container in layer.containers[-1:]:
            members.setdefault(container, []).append(layer.name)
    found = []
    for name, inside in members.items():
        for prefix in (FORWARD_TAG, BACKWARD_TAG):
            # Step by step, because steps may call different members.
            inside_ms = summary.series_ms(*(prefix + member for member in inside))
            ratios = inside_ms / np.maximum(summary.series_ms(prefix + name), 1e-6)
            known = ratios[~np.isnan(ratios)]
            if len(known) and np.median(known) > _MORE:
                found.append(name)
                break
    return found


def _sums(summary: WindowSummary, layers: list[Layer]) -> list[str]:
    """Sentences about the sums of the table, and about times that it contains twice."""
    lines = []
    if any(layer.containers for layer in layers):
        text = "The time of an indented layer is contained in that of the one above it"
        if elsewhere := _called_elsewhere(summary, layers):
            more = ", ..." if len(elsewhere) > _NAMES_SHOWN else ""
            names = "`, `".join(elsewhere[:_NAMES_SHOWN])
            text += f"; but members of `{names}`{more} are called outside of it, too"
        lines.append(f"{text}.")
    outermost = [layer.name for layer in layers if not layer.containers]
    for part, prefix in (("forward", FORWARD_TAG), ("backward", BACKWARD_TAG)):
        whole = summary.get(STEP_TAG + part)
        inside = summary.times_of(*(prefix + name for name in outermost))
        if whole is None or inside is None or inside.count != whole.count:
            continue
        rest_ms = round(whole.mean_ms - inside.mean_ms, 3) + 0.0  # no negative zero
        text = f"Mean {part}: {inside.mean_ms:.3f} ms in the outermost layers"
        if rest_ms >= 0:
            text += f" + {rest_ms:.3f} ms outside of them = {whole.mean_ms:.3f} ms"
        else:
            text += f", {whole.mean_ms:.3f} ms in all: some of them run inside of others"
        lines.append(f"{text}.")
    return lines


def window_text(summary: WindowSummary) -> str:
    """The tables of a window: parts of the step, then layers."""
    if not summary.n_readings:
        return "No step was timed."
    steps = f"{summary.first_step} to {summary.last_step}"
    lines = [f"{timed_steps(summary.n_readings)}, {steps}"]
    for text in (parts_table(summary), layer_table(summary)):
        lines += ["", *text] if text else []
    return "\n".join(lines)
