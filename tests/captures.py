"""Work captured and replayed by hand, on CUDA or on the emulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_cudagraph.device.emulator.emulator_backend import EmulatorBackend


class Work:
    """Work of some duration, on one device.

    Args:
        accelerator: ``"cpu"`` or ``"gpu"``.
    """

    def __init__(self, accelerator: str) -> None:
        self.on_gpu = accelerator == "gpu"
        self.device = "cuda" if self.on_gpu else "cpu"
        side = 2048 if self.on_gpu else 64
        self.x = torch.ones(side, side, device=self.device)
        self.out = torch.zeros(side, side, device=self.device)
        self.run()  # handles of cuBLAS are made outside of captures

    def run(self, times: int = 1) -> Tensor:
        """Do the work `times` times."""
        for _ in range(times):
            torch.mm(self.x, self.x, out=self.out)
        return self.out

    def capture(self, body: Callable[[], Any]) -> Any:
        """A graph of what `body` does."""
        if not self.on_gpu:
            return EmulatorBackend().capture(body)[0]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            body()
        return graph

    def wait(self) -> None:
        """Wait for all of it."""
        if self.on_gpu:
            torch.cuda.synchronize()
