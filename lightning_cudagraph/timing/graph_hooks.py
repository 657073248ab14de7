"""Hooks on all graphs of the process: when a capture begins and ends, a graph is replayed or reset.

They stand in the place of methods of `torch.cuda.CUDAGraph`; those of the emulator's graphs have the
same names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lightning_cudagraph.capture.emulator import EmulatedGraph

__all__ = ["GraphHooks", "GraphListener"]

_GRAPHS: tuple[type, ...] = (torch.cuda.CUDAGraph, EmulatedGraph)


@dataclass(frozen=True)
class GraphListener:
    """Who is told, when torch's own method has done its work.

    Attributes:
        begun: the capture of a graph has begun, in the calling thread.
        ended: it has ended; whether it failed, so that there is no graph.
        replayed: a replay has been launched.
        emptied: a graph has been reset.
    """

    begun: Callable[[Any], None]
    ended: Callable[[Any, bool], None]
    replayed: Callable[[Any], None]
    emptied: Callable[[Any], None]


@dataclass(frozen=True)
class _Patch:
    """One method that has been replaced.

    Attributes:
        owner: the class.
        name: the name of the method.
        hook: what stands there now.
        own: what stood in the class itself; None if the method was inherited.
    """

    owner: type
    name: str
    hook: Any
    own: Any

    def undo(self) -> bool:
        """Put back what was there; False if somebody else has put something over the hook."""
        if vars(self.owner).get(self.name) is not self.hook:
            return False
        if self.own is None:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.own)
        return True


class GraphHooks:
    """Puts the hooks there.

    Args:
        listener: is told until `remove` is called.
    """

    def __init__(self, listener: GraphListener) -> None:
        self._listener: GraphListener | None = listener
        self._patches: list[_Patch] = []
        makers = {
            "capture_begin": self._begins,
            "capture_end": self._ends,
            "replay": self._replays,
            "reset": self._resets,
        }
        for owner in _GRAPHS:
            for name, make in makers.items():
                # Whatever its arguments are: they are not the same in all versions of torch.
                method = getattr(owner, name)
                hook = functools.wraps(method)(make(method))
                self._patches.append(_Patch(owner, name, hook, vars(owner).get(name)))
                setattr(owner, name, hook)

    def remove(self) -> list[str]:
        """Put back the methods, and tell nobody any more.

        Returns:
            The methods over which somebody else has put something, which goes through the hook: there it
            has to stay, and only passes calls on.
        """
        self._listener = None
        left = [patch for patch in reversed(self._patches) if not patch.undo()]
        self._patches = []
        return [f"{patch.owner.__name__}.{patch.name}" for patch in left]

    def _begins(self, method: Any) -> Any:
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            result = method(graph, *args, **kwargs)
            if (listener := self._listener) is not None:
                listener.begun(graph)
            return result

        return capture_begin

    def _ends(self, method: Any) -> Any:
        def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
            failed = True
            try:
                result = method(graph, *args, **kwargs)
                failed = False
            finally:
                if (listener := self._listener) is not None:
                    listener.ended(graph, failed)
            return result

        return capture_end

    def _replays(self, method: Any) -> Any:
        def replay(graph: Any, *args: Any, **kwargs: Any) -> Any:
            result = method(graph, *args, **kwargs)
            if (listener := self._listener) is not None:
                listener.replayed(graph)
            return result

        return replay

    def _resets(self, method: Any) -> Any:
        def reset(graph: Any, *args: Any, **kwargs: Any) -> Any:
            result = method(graph, *args, **kwargs)
            if (listener := self._listener) is not None:
                listener.emptied(graph)
            return result

        return reset
