"""Calls of layers in a step, with the ranges of autograd nodes that they made.

Each thread numbers its nodes in the order of their creation, so the nodes of a call are a range.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from threading import get_ident

import torch

Layers = frozenset[str]  # their names


def _next_number() -> int:
    return torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]


@dataclass(eq=False)
class LayerCall:
    """A call of a layer, and the range of the nodes that it makes, by sequence number.

    `layers` are the layer and those around it; `around` is the enclosing call. `ends` is None while the
    call runs.
    """

    layers: Layers
    begins: int
    around: LayerCall | None
    ends: int | None = field(default=None, init=False)

    def end(self) -> bool:
        """End the call; return True if it has made nodes."""
        self.ends = _next_number()
        return self.ends > self.begins


class LayerCalls:
    """The calls of one step, by thread; `stack` are those under way, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[LayerCall] = []
        # By thread, in the order of their beginning: first nodes, and calls.
        self._made: dict[int, tuple[list[int], list[LayerCall]]] = {}

    def begin(self, layers: Layers) -> LayerCall:
        """Begin a call of a layer; `layers` are the layer and the layers around it."""
        call = LayerCall(layers, _next_number(), self.stack[-1] if self.stack else None)
        self.stack.append(call)
        begins, calls = self._made.setdefault(get_ident(), ([], []))
        begins.append(call.begins)
        calls.append(call)
        return call

    def around(self, number: int, thread: int) -> Layers | None:
        """The layers whose calls made a node; None if it was made outside of all calls."""
        begins, calls = self._made.get(thread, ([], []))
        index = bisect_right(begins, number)
        call = calls[index - 1] if index > 0 else None
        while call is not None and call.ends is not None and call.ends <= number:
            call = call.around
        return None if call is None else call.layers
