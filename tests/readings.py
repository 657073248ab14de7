"""Readings like those of a small transformer, for tests of the outputs."""

from __future__ import annotations

import numpy as np

from lightning_cudagraph.timing.readings.spans import (
    BACKWARD_TAG,
    FORWARD_TAG,
    STEP_TAG,
    Reading,
    Span,
    SpanLayout,
    Track,
)

_MEMBERS = {"ln1": 0.01, "attention": 0.05, "ln2": 0.01, "mlp": 0.03}


class _Marks:
    """Marks of an artificial step, in the order of their numbers."""

    def __init__(self) -> None:
        self.offsets_ms: list[float] = []
        self.now_ms = 0.0

    def mark(self) -> int:
        self.offsets_ms.append(self.now_ms)
        return len(self.offsets_ms) - 1


def _run(
    marks: _Marks,
    calls: dict[str, tuple[int, int]],
    name: str,
    tree: dict[str, object] | float,
    factor: float,
    kept: int,
) -> None:
    """A layer with its members, timed down to `kept` levels."""
    begin = marks.mark()
    if isinstance(tree, dict):
        members = list(tree.items())
        for member, below in members if factor == 1 else members[::-1]:
            _run(marks, calls, f"{name}.{member}", below, factor, kept)  # type: ignore[arg-type]
    else:
        marks.now_ms += tree * factor
    if name.count(".") <= kept:
        calls[name] = (begin, marks.mark())


def gpt_readings(
    n: int = 200,
    n_blocks: int = 6,
    with_members: bool = False,
    gap_ms: float = 0.02,
    noise: float = 0.08,
    seed: int = 0,
    first_step: int = 0,
) -> list[Reading]:
    """Readings of one layout: a gap and a copy, both passes, clipping and the optimizer.

    Args:
        n: number of readings.
        n_blocks: number of blocks of the transformer, each with 0.1 ms in the forward pass.
        with_members: time the members of the blocks too.
        gap_ms: the time between two steps; half of it is the copy of the batch.
        noise: variation of the times between two marks, as a share of each.
        seed: of the noise.
        first_step: the number of the first step.
    """
    marks = _Marks()
    model: dict[str, object] = {
        "embedding": 0.005,
        "blocks": {str(i): dict(_MEMBERS) for i in range(n_blocks)},
        "ln_f": 0.004,
        "head": 0.006,
    }
    kept = 2 if with_members else 1
    start = marks.mark()
    passes: list[dict[str, tuple[int, int]]] = []
    ends = []
    for factor in (1.0, 2.3):
        calls: dict[str, tuple[int, int]] = {}
        for name, tree in list(model.items()) if factor == 1 else list(model.items())[::-1]:
            _run(marks, calls, name, tree, factor, kept)  # type: ignore[arg-type]
            marks.now_ms += 0.001
        passes.append(calls)
        ends.append(marks.mark())
    for part_ms in (0.03, 0.12):
        marks.now_ms += part_ms
        ends.append(marks.mark())
    for offset_ms in (-gap_ms, -0.75 * gap_ms, -0.25 * gap_ms):  # behind all others, as in a fit
        marks.now_ms = offset_ms
        marks.mark()
    previous, begin, end = range(len(marks.offsets_ms) - 3, len(marks.offsets_ms))
    parts: list[tuple[str, Track, tuple[tuple[int, int], ...]]] = [
        ("forward", "forward", ((start, ends[0]),)),
        ("backward", "backward", ((ends[0], ends[1]),)),
        ("clipping", "optimizer", ((ends[1], ends[2]),)),
        ("optimizer", "optimizer", ((ends[2], ends[3]),)),
        ("total", "host", ((start, ends[3]),)),
    ]
    spans = [Span(STEP_TAG + part, track, calls) for part, track, calls in parts]
    tracks: tuple[tuple[str, Track], ...] = ((FORWARD_TAG, "forward"), (BACKWARD_TAG, "backward"))
    for name in sorted(passes[0], key=lambda name: (list(model).index(name.split(".")[0]), name)):
        for (prefix, track), of_pass in zip(tracks, passes, strict=True):
            spans.append(Span(prefix + name, track, (of_pass[name],)))
    spans.append(Span(f"{STEP_TAG}copy", "copy", ((begin, end),)))
    spans.append(Span(f"{STEP_TAG}gap", "host", ((previous, begin), (end, start))))
    layout = SpanLayout(tuple(spans), len(marks.offsets_ms))

    rng = np.random.default_rng(seed)
    offsets_ms = np.array(marks.offsets_ms)
    order = np.argsort(offsets_ms, kind="stable")
    stretches_ms = np.diff(offsets_ms[order])
    readings = []
    for index in range(n):
        noisy_ms = np.empty_like(offsets_ms)
        factors = rng.lognormal(0, noise, len(stretches_ms))
        noisy_ms[order] = np.concatenate([[0.0], np.cumsum(stretches_ms * factors)])
        noisy_ms -= noisy_ms[start]
        step = first_step + index
        readings.append(Reading(layout, step, 1e9 + step * 0.0023, noisy_ms.tolist()))
    return readings


def without_optimizer() -> Reading:
    """Readings with 1 ms of gap, 1 ms of forward and 2 ms of backward pass, and no optimizer."""
    spans = (
        Span("step_ms/forward", "forward", ((0, 1),)),
        Span("step_ms/backward", "backward", ((1, 2),)),
        Span("step_ms/gap", "host", ((3, 0),)),
    )
    return Reading(SpanLayout(spans, 4), 0, 0.0, [0.0, 1.0, 3.0, -1.0])
