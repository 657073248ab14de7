"""Curves in TensorBoard: which spans have one, and its tag."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from lightning_cudagraph.timing.readings.spans import MAX_LAYOUTS, SpanLayout

__all__ = ["Curves", "behind", "curves_of"]

# A function that reduces a layout to the spans that have curves, under the tags of these.
Curves = Callable[[SpanLayout], SpanLayout]


def behind(tag: str) -> str:
    """The tag in TensorBoard, which sorts by character: behind all letters, so behind the user's."""
    return f"~{tag}"


def curves_of(without: frozenset[str] = frozenset()) -> Curves:
    """Create the function for all spans except those with the tags `without`."""

    @lru_cache(MAX_LAYOUTS)
    def curves(layout: SpanLayout) -> SpanLayout:
        shown = [span for span in layout.spans if span.tag not in without]
        return SpanLayout(tuple(replace(span, tag=behind(span.tag)) for span in shown), layout.n_marks)

    return curves
