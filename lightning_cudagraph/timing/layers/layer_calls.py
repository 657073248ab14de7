"""The calls of layers in a step, and which of autograd's nodes they have made.

A thread numbers its nodes in the order in which it makes them: those of a call lie between two numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from threading import get_ident

import torch

__all__ = ["Call", "LayerCalls", "Layers"]

# Names of layers.
Layers = frozenset[str]


def _next_number() -> int:
    """The number of the node that this thread makes next."""
    return torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]


@dataclass(eq=False)
class Call:
    """A call of a layer.

    Attributes:
        layers: the layer, and those in whose calls it is.
        begins: the number of the first node that it can have made.
        ends: that of the first one after it, or None as long as it runs.
        around: the call of a layer that it is in.
    """

    layers: Layers
    begins: int
    ends: int | None
    around: Call | None

    def end(self) -> bool:
        """It has ended; returns whether it has made nodes."""
        self.ends = _next_number()
        return self.ends > self.begins


class LayerCalls:
    """The calls of one step, in each thread that makes nodes.

    Attributes:
        stack: those under way, the innermost last.
    """

    def __init__(self) -> None:
        self.stack: list[Call] = []
        # In the order in which they began, behind the numbers of their first nodes.
        self._made: dict[int, tuple[list[int], list[Call]]] = {}

    def begin(self, layers: Layers) -> Call:
        """A layer is called.

        Args:
            layers: the layer, and those to whose calls this one belongs.
        """
        call = Call(layers, _next_number(), None, self.stack[-1] if self.stack else None)
        self.stack.append(call)
        begins, calls = self._made.setdefault(get_ident(), ([], []))
        begins.append(call.begins)
        calls.append(call)
        return call

    def around(self, number: int, thread: int) -> Layers | None:
        """The layers in whose calls a node was made, or None if it was in none."""
        begins, calls = self._made.get(thread, ([], []))
        index = bisect_right(begins, number)
        call = calls[index - 1] if index > 0 else None
        while call is not None and call.ends is not None and call.ends <= number:
            call = call.around
        return None if call is None else call.layers
