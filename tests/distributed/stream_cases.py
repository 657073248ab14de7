"""Cases of the number of streams in several processes. All processes call each case at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cudagraph import CUDAGraphCallback
from lightning_cudagraph.capture.decisions.stream_choice import StreamChoice
from lightning_cudagraph.capture.graph import CapturedStep
from lightning_cudagraph.device.emulator.emulator_backend import EmulatorBackend
from lightning_cudagraph.device.streams.branches import SentBackError
from tests.distributed.cases import BUCKETS, Here
from tests.harness import Net, Trace, assert_same


class Branched(Net):
    """Branches that do not need one another."""

    def __init__(self, make_optimizer: Any = None) -> None:
        super().__init__(make_optimizer)
        self.sides = nn.ModuleList(nn.Linear(12, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        sides = [nn.functional.dropout(side(x), 0.2).tanh() for side in self.sides]
        return super().forward(x) + torch.stack(sides).sum(0)


@contextmanager
def _seconds(here: Here, *by_rank: float) -> Iterator[None]:
    """Trials in which a process takes so many times as long on several streams as on one."""

    def planted(self: StreamChoice, captured: CapturedStep[Any], replays: int) -> float:
        captured.rerun()
        return replays * 1e-3 * (1.0 if self._backend.streams == 1 else by_rank[here.rank])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmulatorBackend, "overlaps", True)
        patch.setattr(StreamChoice, "_seconds", planted)
        yield


def _chosen(here: Here, name: str, plain: Trace) -> str:
    graph = here.train(name, CUDAGraphCallback(), build=Branched, wrapper=BUCKETS, max_epochs=4)
    assert_same(plain, graph, ignore=("_ms/",))
    assert graph.counts.captures == 1, graph.counts
    assert graph.counts.replayed >= 10, graph.counts
    return str(graph.callback and graph.callback.summary)


def streams_are_chosen_by_the_slowest(here: Here) -> None:
    """All take as many streams as make the slowest process faster; one alone would choose otherwise."""
    plain = here.train("plain", None, build=Branched, wrapper=BUCKETS, max_epochs=4)
    with _seconds(here, 0.5, 0.8):
        assert "streams, 1.25 times as fast as on one" in _chosen(here, "several", plain)
    with _seconds(here, 0.5, 1.1):
        assert "captured on 1 stream: " in _chosen(here, "one", plain)


def a_trial_that_one_cannot_capture(here: Here) -> None:
    """No process captures on several streams if one of them cannot, for whatever reason."""
    plain = here.train("plain", None, build=Branched, wrapper=BUCKETS, max_epochs=4)
    capture = CapturedStep.capture
    for error in (SentBackError("planted"), torch.OutOfMemoryError("planted")):

        def planted(self: CapturedStep[Any], *args: Any, error: Exception = error) -> None:
            if here.rank == here.size - 1 and self._backend.streams > 1:
                raise error
            capture(self, *args)

        with _seconds(here, 0.5, 0.5), pytest.MonkeyPatch.context() as patch:
            patch.setattr(CapturedStep, "capture", planted)
            said = _chosen(here, type(error).__name__, plain)
        assert "captured on 1 stream: " in said, said
        assert "planted" in said, said
