"""Inductor's own CUDA graphs, which are switched off, and its CPU kernels, which the emulator refuses.

With `mode="reduce-overhead"` and `mode="max-autotune"` Inductor captures compiled code in CUDA graphs of
its own, and a capture cannot contain another. During a run such code is compiled without them. The
kernels are the same, and a graph of the whole step needs no graphs of its parts.
"""

from __future__ import annotations

import copy
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

import torch

from lightning_cudagraph.compat.attributes import setting
from lightning_cudagraph.compat.names import torch_names
from lightning_cudagraph.device.lines.user_lines import user_location
from lightning_cudagraph.errors import CaptureError, Location

_GRAPHS = "triton.cudagraphs"
_CUDAGRAPHS = "torch._dynamo.backends.cudagraphs"
_SAID = (
    "torch.compile runs without the CUDA graphs of its own that its `mode=`, `options=` or backend asks"
    " for, because the whole step is in one graph; its kernels are the same"
)


def wants_graphs(backend: Any) -> bool:
    """True if a backend of `torch.compile` captures compiled code in CUDA graphs of its own."""
    if not isinstance(backend, torch._TorchCompileInductorWrapper):
        return _CUDAGRAPHS in sys.modules and isinstance(
            backend, torch_names.cudagraphs.CudagraphsBackend
        )
    wanted = backend.config.get(_GRAPHS)
    if wanted is None and "torch._inductor.config" in sys.modules:
        wanted = torch._inductor.config.triton.cudagraphs
    return bool(wanted)


class _Run:
    """A run that needs Inductor without CUDA graphs of its own."""

    def __init__(self, announce: Callable[[str], None]) -> None:
        self.thread = threading.get_ident()
        is_method = isinstance(announce, MethodType)
        # A weak reference: a step that is never closed must not be kept alive.
        self.announce = weakref.WeakMethod(announce) if is_method else weakref.ref(announce)


class _WithoutGraphs:
    """A patch of Inductor that keeps it from making CUDA graphs in the threads of the runs."""

    def __init__(self) -> None:
        self._runs: list[_Run] = []
        self._patches = ExitStack()
        self._without: set[int] = set()

    def enter(self, announce: Callable[[str], None]) -> _Run:
        self._remove([run for run in self._runs if run.announce() is None])
        self._runs.append(run := _Run(announce))
        if len(self._runs) == 1:
            self._patch()
        return run

    def leave(self, run: _Run) -> None:
        self._remove([run])

    def _remove(self, gone: list[_Run]) -> None:
        if not gone:
            return
        self._runs = [run for run in self._runs if run not in gone]
        if not self._runs:
            self._patches.close()
        if without := self._without - {run.thread for run in self._runs}:
            self._without -= without
            torch.compiler.reset()  # recompile with the graphs that were asked for

    def _patch(self) -> None:
        kind: Any = torch._TorchCompileInductorWrapper
        # Imported here, because that takes 0.2 s, and imports networkx.
        other_kind: Any = torch_names.cudagraphs.CudagraphsBackend
        by_inductor, by_cudagraphs = kind.__call__, other_kind.__call__

        def compile_by_inductor(backend: Any, *args: Any, **kwargs: Any) -> Any:
            if wants_graphs(backend) and self._must_go_without():
                backend = copy.copy(backend)
                backend.config = {**backend.config, _GRAPHS: False}
            return by_inductor(backend, *args, **kwargs)

        def compile_by_cudagraphs(model: Any, inputs: Any, **kwargs: Any) -> Any:
            if self._must_go_without():  # without graphs, this backend does the same as `aot_eager`
                return torch_names.debugging.aot_eager(model, inputs)
            return by_cudagraphs(model, inputs, **kwargs)

        self._replace(kind, "__call__", compile_by_inductor)
        self._replace(other_kind, "__call__", staticmethod(compile_by_cudagraphs))

    def _replace(self, owner: type, name: str, by: Any) -> None:
        self._patches.callback(setattr, owner, name, vars(owner)[name])
        setattr(owner, name, by)

    def _must_go_without(self) -> bool:
        """True if this thread must compile without graphs; the first time, announce it."""
        thread = threading.get_ident()
        of_thread = [run.announce() for run in self._runs if run.thread == thread]
        there = [announce for announce in of_thread if announce is not None]
        if there and thread not in self._without:
            self._without.add(thread)
            there[-1](_SAID)
        return bool(there)


_without_graphs = _WithoutGraphs()


def without_its_graphs(announce: Callable[[str], None]) -> ExitStack:
    """Let torch.compile compile without CUDA graphs of its own, in this thread.

    Args:
        announce: called once with a note for the user if compiled code had asked for graphs; of several
            runs in a thread, that of the last. It is not kept alive.

    Returns:
        A context manager. If it is never closed, its effect ends when `announce` is collected.
    """
    stack = ExitStack()
    stack.callback(_without_graphs.leave, _without_graphs.enter(announce))
    return stack


@contextmanager
def refused_on_cpu() -> Iterator[None]:
    """Refuse Inductor's kernels in a capture on the emulator, which records ops only."""
    output_code: Any = sys.modules.get("torch._inductor.output_code")
    if output_code is None:
        yield
        return
    kind = output_code.CompiledFxGraph

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise _unseen(user_location())

    with setting(kind, __call__=refuse):
        yield


def _unseen(where: Location | None) -> CaptureError:
    return CaptureError(
        "The training step calls kernels that Inductor has compiled for the CPU; the CPU emulator sees"
        " ops, and no such kernels.",
        'On a CPU, pass `torch.compile(..., backend="aot_eager")`. On a GPU nothing has to be changed.',
        location=where,
    )
