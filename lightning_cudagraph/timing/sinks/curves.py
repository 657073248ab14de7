"""The layers that have no curves, because only tables and pictures show them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from lightning_cudagraph.timing.layers.layer_selection import MOST_CURVES
from lightning_cudagraph.timing.readings.spans import BACKWARD_TAG, FORWARD_TAG

_PASSES = (FORWARD_TAG, BACKWARD_TAG)


def tags_without_curves(tags: Iterable[str], inner: frozenset[str]) -> set[str]:
    """The tags of inner layers among those of a step.

    Members of a container that is never called itself (a `ModuleList`, or a `Sequential` that is called
    member by member) are the outermost layers of what they do. They have curves where there is room for
    all members of the container.
    """
    timed = dict.fromkeys(tag.partition("/")[2] for tag in tags if tag.startswith(_PASSES))
    hidden = [name for name in timed if name in inner]
    room = MOST_CURVES - (len(timed) - len(hidden))
    shown: set[str] = set()
    for container, members in groupby(sorted(hidden, key=_container), _container):
        of_it = {*members}
        is_called = any(container == name or container.startswith(f"{name}.") for name in timed)
        if not is_called and container and len(of_it) <= room:
            shown |= of_it
            room -= len(of_it)
    return {way + name for name in hidden if name not in shown for way in _PASSES}


def _container(name: str) -> str:
    return name.rpartition(".")[0]
