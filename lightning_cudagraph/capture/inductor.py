"""Inductor, the compiler behind torch.compile: its own CUDA graphs, and its kernels on a CPU.

`mode="reduce-overhead"` and `mode="max-autotune"` have Inductor capture what it has compiled in CUDA
graphs of its own, and no capture can hold another. During a run they are compiled without, which changes
no kernel: a graph of the whole step needs no graphs of its parts.
"""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._dynamo.backends import cudagraphs, debugging

from lightning_cudagraph.capture.compiled import compilations
from lightning_cudagraph.capture.sentry import Location, user_location
from lightning_cudagraph.errors import CaptureError

__all__ = ["refused_on_cpu", "without_its_graphs"]

_GRAPHS = "triton.cudagraphs"


def _wants_graphs(backend: Any) -> bool:
    """Whether a backend of `torch.compile` captures what it compiles."""
    wanted = backend.config.get(_GRAPHS)
    if wanted is None and "torch._inductor.config" in sys.modules:
        wanted = torch._inductor.config.triton.cudagraphs
    return bool(wanted)


def _has_compiled_with_graphs() -> bool:
    """Whether code that is alive may have been compiled with graphs of its own."""
    kind = torch._TorchCompileInductorWrapper
    return compilations() > 0 and any(
        isinstance(other, kind) and _wants_graphs(other) for other in gc.get_referrers(kind)
    )


class _WithoutGraphs:
    """Inductor without CUDA graphs of its own, as long as somebody needs that."""

    def __init__(self) -> None:
        self._told: list[Callable[[str], None]] = []
        self._patches = ExitStack()
        self._turned = False

    def enter(self, announce: Callable[[str], None]) -> None:
        self._told.append(announce)
        if len(self._told) > 1:
            return
        if _has_compiled_with_graphs():
            self._turn()
            torch.compiler.reset()
        kind: Any = torch._TorchCompileInductorWrapper
        by_inductor = kind.__call__

        def compile_by_inductor(backend: Any, *args: Any, **kwargs: Any) -> Any:
            if _wants_graphs(backend):
                self._turn()
                backend = copy.copy(backend)
                backend.config = {**backend.config, _GRAPHS: False}
            return by_inductor(backend, *args, **kwargs)

        def compile_by_cudagraphs(model: Any, inputs: Any, **kwargs: Any) -> Any:
            self._turn()  # without the graphs, what is left of this backend is the other one
            return debugging.aot_eager(model, inputs)

        self._replace(kind, "__call__", compile_by_inductor)
        self._replace(cudagraphs.CudagraphsBackend, "__call__", staticmethod(compile_by_cudagraphs))

    def leave(self, announce: Callable[[str], None]) -> None:
        self._told.remove(announce)
        if self._told:
            return
        self._patches.close()
        if self._turned:  # what was compiled meanwhile is compiled anew, as it was asked for
            self._turned = False
            torch.compiler.reset()

    def _replace(self, owner: type, name: str, by: Any) -> None:
        self._patches.callback(setattr, owner, name, vars(owner)[name])
        setattr(owner, name, by)

    def _turn(self) -> None:
        if not self._turned:
            self._turned = True
            self._told[0](
                "torch.compile runs without the CUDA graphs of its own that its `mode=`, `options=` or"
                " backend asks for, because the whole step is in one graph; its kernels are the same"
            )


_without_graphs = _WithoutGraphs()


@contextmanager
def without_its_graphs(announce: Callable[[str], None]) -> Iterator[None]:
    """Let torch.compile compile without CUDA graphs of its own.

    Args:
        announce: told, once, that somebody had wanted these; if there are several, the first.
    """
    _without_graphs.enter(announce)
    try:
        yield
    finally:
        _without_graphs.leave(announce)


@contextmanager
def refused_on_cpu() -> Iterator[None]:
    """Refuse kernels of Inductor's in a step of the emulator, which sees ops and nothing else."""
    output_code: Any = sys.modules.get("torch._inductor.output_code")
    if output_code is None:
        yield
        return
    kind = output_code.CompiledFxGraph
    call = kind.__call__

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise _unseen(user_location())

    kind.__call__ = refuse
    try:
        yield
    finally:
        kind.__call__ = call


def _unseen(where: Location | None) -> CaptureError:
    return CaptureError(
        "The training step calls kernels that Inductor has compiled for the CPU"
        f"{f', at {where}' if where else ''}; the CPU emulator sees ops, and no such kernels.",
        'On a CPU, pass `torch.compile(..., backend="aot_eager")`. On a GPU nothing has to be changed.',
    )
