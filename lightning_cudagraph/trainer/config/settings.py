"""The resolved arguments of the callback, for all parts of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_cudagraph.capture.stream_choice import Streams
from lightning_cudagraph.checks.verify.verification import Verification
from lightning_cudagraph.timing.layers.layers import LayerTimings

Scope = Literal["auto", "step", "forward_backward"]


@dataclass(frozen=True)
class Settings:
    """The arguments of `CUDAGraphCallback`, which documents each.

    Attributes:
        is_examined: the run looks for all that keeps its steps from being captured, and is thrown away.
    """

    scope: Scope
    warmup_steps: int
    raise_unsupported: bool
    timings: LayerTimings | None
    verify: Verification
    max_graphs: int
    harmless: frozenset[str] = frozenset()
    streams: Streams = 1
    compile: bool = False
    measures_plain_steps: bool = False
    is_examined: bool = False
