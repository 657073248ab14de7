"""The resolved arguments of the callback, for all parts of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_cudagraph.capture.context import CaptureSettings
from lightning_cudagraph.timing.layers.layer_selection import LayerTimings

Scope = Literal["auto", "step", "forward_backward", "modules"]


@dataclass(frozen=True, kw_only=True)
class Settings(CaptureSettings):
    """The arguments of `CUDAGraphCallback`, which documents each."""

    scope: Scope
    modules: tuple[str, ...] = ()
    timings: LayerTimings | None
    compile: bool = False
    measures_plain_steps: bool = False
    is_examined: bool = False  # the run looks for all findings, and is thrown away
