"""Cases of step times in several processes. All processes call each case at once."""

from __future__ import annotations

import json
import re
import socket
import time
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from lightning_cudagraph import (
    CUDAGraphCallback,
    LayerTimings,
    LayerTimingsMonitor,
)
from lightning_cudagraph.timing.readings.spans import EXPOSED_TAG
from tests.distributed.cases import Here
from tests.harness import Net, Trace, assert_same, loader

ALL_REDUCE = "step_ms/all_reduce"
# So that there are several.
BUCKETS = {"bucket_cap_mb": 0.0005}


def train_shown(here: Here, name: str, callback: CUDAGraphCallback | None, **kwargs: Any) -> Trace:
    """A run of all processes with TensorBoard."""
    arguments: dict[str, Any] = {"max_epochs": 4, "train_loader": loader(ragged=False, batches=24)}
    logger = TensorBoardLogger(here.folder / name, name="", version="")
    return here.train(name, callback, logger=logger, wrapper=BUCKETS, **arguments | kwargs)


def shown(here: Here, name: str) -> EventAccumulator:
    """The TensorBoard data of a run, from the first process."""
    folder = str(here.folder / name)
    accumulator = EventAccumulator(folder, size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def times_ms(accumulator: EventAccumulator, tag: str) -> dict[int, float]:
    """The scalars of a tag, by step."""
    return {scalar.step: scalar.value for scalar in accumulator.Scalars(f"~{tag}")}


def all_reduces_are_timed(here: Here) -> None:
    """In every replay, and in eager steps with unchanged numbers."""
    plain = train_shown(here, "plain", None)
    graph = train_shown(here, "graph", CUDAGraphCallback())
    timings = LayerTimingsMonitor()
    eager = train_shown(here, "eager", None, callbacks=(timings,))
    assert_same(plain, graph, ignore=("_ms/",))
    assert_same(plain, eager, ignore=("_ms/",))
    assert graph.counts.captures == 1, graph.counts
    for report in (str(graph.callback.summary), str(timings.summary)):
        assert re.search(r"all_reduce \d+\.\d+ ms \(\d+\.\d+ exposed\)", report), report
    if here.rank > 0:
        return
    for name, run in (("graph", graph), ("eager", eager)):
        found = shown(here, name)
        reduced_ms, exposed_ms = times_ms(found, ALL_REDUCE), times_ms(found, EXPOSED_TAG)
        total_ms, backward_ms = times_ms(found, "step_ms/total"), times_ms(found, "step_ms/backward")
        assert set(reduced_ms) == set(exposed_ms) == set(total_ms), name
        n_steps = run.counts.replayed if name == "graph" else run.trainer.global_step
        assert len(reduced_ms) == n_steps > 10, (name, len(reduced_ms), n_steps)
        for step, value_ms in reduced_ms.items():
            assert value_ms > 0, (name, step)
            # Another thread tells when gloo has ended, and that one may have to wait for its turn.
            most_ms = float("inf") if name == "eager" else backward_ms[step] + 0.1
            assert 0 < exposed_ms[step] <= most_ms, (name, step)


class SlowOnOne(Net):
    """On one process, the forward pass has extra work."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.randn(768, 768), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.trainer.global_rank == 1:
            for _ in range(1 if x.device.type == "cpu" else 600):  # seen on a busy machine, too
                self.large @ self.large
        return super().forward(x)


def the_slowest_is_named(here: Here) -> None:
    """In a graph and in eager steps; all wait for it, so it waits least itself."""
    few = LayerTimings(window_steps=8, trace_steps=4)
    callback = CUDAGraphCallback(timings=few)
    graph = train_shown(here, "graph", callback, build=SlowOnOne, max_epochs=5)
    timings = LayerTimingsMonitor(LayerTimings(window_steps=8))
    eager = train_shown(here, "eager", None, build=SlowOnOne, callbacks=(timings,))
    for trace in (graph, eager):
        assert trace.error is None
    path = here.folder / "graph" / ("layer_trace_rank1.json" if here.rank else "layer_trace.json")
    trace_file = json.loads(path.read_text())
    assert trace_file["otherData"] == {"rank": here.rank, "hostname": socket.gethostname()}
    tracks = [event.get("cat") for event in trace_file["traceEvents"]]
    assert tracks.count("communication") >= 4
    if here.rank > 0:
        assert "is slowest" not in str(callback.summary)
        return
    for name, report in (("graph", str(callback.summary)), ("eager", str(timings.summary))):
        said = str(report)
        assert "ranks     rank 1 is slowest: " in said, said
        assert "it waits least for others" in said, said
        assert "most of the difference is in its forward pass" in said, said
        found = shown(here, name)
        slowest = times_ms(found, "ranks/slowest")
        assert len(slowest) >= 3, slowest
        assert list(slowest.values()).count(1.0) > len(slowest) / 2, slowest
        for step, work_ms in times_ms(found, "ranks_ms/work_slowest").items():
            fastest_ms = times_ms(found, "ranks_ms/work_fastest")[step]
            spread_ms = times_ms(found, "ranks_ms/work_spread")[step]
            assert 0 < fastest_ms <= work_ms, (name, step)
            assert abs(work_ms - fastest_ms - spread_ms) < 1e-3 * work_ms, (name, step)
        (table, *_) = found.Tensors("~cudagraph/ranks/text_summary")
        assert "2 processes, " in table.tensor_proto.string_val[0].decode()
        charts = found.Tensors("custom_scalars__config__")[-1].tensor_proto.string_val[0]
        assert b"ranks_ms/work_median" in charts


class SleepsOnOne(Callback):
    """The host of the second process is late for each batch."""

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_rank == 1:
            time.sleep(0.02)


def a_late_host_is_named(here: Here) -> None:
    """Other processes wait for it, in a collective or before the launch."""
    for name, batches in (("graph", 1), ("accumulated", 2)):
        callback = CUDAGraphCallback(timings=LayerTimings(window_steps=8))
        late = {"callbacks": (SleepsOnOne(),), "accumulate_grad_batches": batches}
        train_shown(here, name, callback, max_epochs=3 * batches, limit_val_batches=0, **late)
        said = str(callback.summary)
        if here.rank > 0:
            assert "waits for others to come to the step" not in said, said
            continue
        assert "ranks     rank 1 is slowest: " in said, said
        assert "most of the difference is between its steps" in said, said
        assert "this process waits for others to come to the step" in said, said
        (ranks,) = re.findall(r"is slowest: ([\d.]+) ms of its own in .*, rank 0 ([\d.]+) ms; it", said)
        late_ms, prompt_ms = map(float, ranks)
        assert late_ms > 20 * batches, said
        # With the wait in it, the other's time would be that of a whole step, which is longer.
        assert prompt_ms < late_ms, said


def all_reduces_are_timed_with_accumulation(here: Here) -> None:
    """Once for each optimizer step, by the last of its batches."""
    graph = train_shown(here, "graph", CUDAGraphCallback(), max_epochs=8, accumulate_grad_batches=3)
    assert graph.counts.captures == 3, graph.counts
    if here.rank == 0:
        found = shown(here, "graph")
        n_forward, n_reduced = (len(found.Scalars(f"~{tag}")) for tag in ("step_ms/forward", ALL_REDUCE))
        assert n_reduced == len(found.Scalars("~step_ms/total")) > 0
        assert n_forward > 2 * n_reduced
