"""Cases of several processes, with a difference in both or in one of them; all call each at once."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    Timer,
    timer,
)
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_cudagraph import (
    ConfigurationError,
    CUDAGraphCallback,
    LayerTimings,
    LayerTimingsMonitor,
    UnsupportedError,
    Verification,
)
from lightning_cudagraph.capture.gradients import external_references
from lightning_cudagraph.checks.verify.tape import OpTape
from lightning_cudagraph.device.streams.branches import SentBackError
from lightning_cudagraph.device.streams.dataflow import Flow
from lightning_cudagraph.errors import PeerError, VerificationError
from lightning_cudagraph.processes import failures
from lightning_cudagraph.processes.collective_state import CollectiveState
from lightning_cudagraph.processes.shared_page import SharedPage
from lightning_cudagraph.trainer.training.steps import TrainingSteps
from lightning_cudagraph.trainer.training.times import baseline
from tests.harness import BATCH_SIZE, Net, Trace, assert_same, loader, make, train

BUCKETS = {"bucket_cap_mb": 0.0005}
# Iterations that DistributedDataParallel needs before a capture.
WARM_UP = 11


def _fit_of_all(trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
    """A fit that ends when all processes have written their files."""
    try:
        trainer.fit(*args, **kwargs)
    except SIGTERMException:  # raised in all of them
        trainer.strategy.barrier()
        raise
    trainer.strategy.barrier()


@dataclass
class Here:
    """The process that runs a case.

    Attributes:
        folder: of the case.
        rank: of this process.
        accelerator: ``"cpu"`` or ``"gpu"``.
        size: number of processes.
    """

    folder: Path
    rank: int
    accelerator: str
    size: int

    def train(
        self,
        name: str,
        callback: CUDAGraphCallback | None,
        build: Callable[[], pl.LightningModule] = Net,
        wrapper: dict[str, Any] | None = None,
        strategy: Callable[[], Any] | None = None,
        size: int | None = None,
        **kwargs: Any,
    ) -> Trace:
        """One run of all processes.

        Args:
            name: of its folder.
            callback: the callback, or None.
            build: makes the module.
            wrapper: arguments of `DistributedDataParallel`.
            strategy: makes another strategy.
            size: the world size that the run is given, by default that of all processes.
            kwargs: of `tests.harness.train`.
        """
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        arguments: dict[str, Any] = {"max_epochs": 3, "train_loader": loader(batches=14), **kwargs}
        made = DDPStrategy(**(wrapper or {})) if strategy is None else strategy()
        return train(
            make(build),
            folder,
            callback,
            accelerator=self.accelerator,
            strategy=made,
            devices=size or self.size,
            **{"fit": _fit_of_all, **arguments},
        )

    def assert_same_runs(
        self, callback: CUDAGraphCallback | None = None, **kwargs: Any
    ) -> tuple[Trace, Trace]:
        """Train without the callback and with it, and compare; returns both."""
        plain = self.train("plain", None, **kwargs)
        graph = self.train("graph", callback or CUDAGraphCallback(), **kwargs)
        assert_same(plain, graph, ignore=("_ms/",))
        return plain, graph


def same_numbers(here: Here) -> None:
    """Equal runs: dropout, batch norm with broadcast buffers, logs, a validation after each epoch."""
    _, graph = here.assert_same_runs(max_epochs=4)
    assert graph.counts.captures == 1, graph.counts
    # One of the iterations that the wrapper needs is the first of the second epoch.
    assert graph.counts.warmed_up >= WARM_UP - 1, graph.counts
    assert graph.counts.replayed >= 10, graph.counts
    reasons = "; ".join(graph.counts.eager)
    assert "not broadcast in the step after a validation" in reasons
    assert "verified against eager steps" in str(graph.callback and str(graph.callback.summary))
    loop = graph.trainer.fit_loop.epoch_loop  # type: ignore[union-attr]
    assert "_broadcast_sigterm_tensor" not in vars(loop)
    assert "_setup_model" not in vars(graph.trainer.strategy)  # type: ignore[union-attr]


def same_numbers_with_sampled_times(here: Here) -> None:
    """Some steps replay a graph with events; also an eager run with the same marks."""
    timings = LayerTimings(every_n_steps=3)
    monitor = LayerTimingsMonitor(timings)
    plain, graph = here.assert_same_runs(CUDAGraphCallback(timings=timings), max_epochs=4)
    assert graph.counts.captures == 1, graph.counts
    eager = here.train("eager", None, callbacks=(monitor,), max_epochs=4)
    assert_same(plain, eager)
    assert "features.0" in monitor.summary.times.forward


class StopsAt(Callback):
    """Ends a fit that was to be long."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.should_stop = trainer.global_step >= self.steps


def same_numbers_with_plain_steps(here: Here) -> None:
    """Some steps before the capture are not watched; the emulator is taken for a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(baseline, "has_speed", lambda backend: True)
        for accumulated in (1, 2):
            kwargs = {
                "max_epochs": 100,
                "train_loader": loader(ragged=False, batches=80 * accumulated),
                "callbacks": (StopsAt(30),),
                "checkpoint_every": 0,  # a pause in the middle of the plain steps
                "accumulate_grad_batches": accumulated,
            }
            _, graph = here.assert_same_runs(**kwargs)
            assert graph.counts.plain_steps >= 3, graph.counts
            assert graph.counts.plain_ms > 0, graph.counts
            assert graph.counts.replayed >= 10, graph.counts
            assert "your plain step" in graph.summary.verdict


def same_numbers_accumulated(here: Here) -> None:
    """Gradients of four batches: three graphs, one of which averages."""
    _, graph = here.assert_same_runs(
        max_epochs=4, accumulate_grad_batches=4, train_loader=loader(batches=40)
    )
    assert graph.counts.captures == 3, graph.counts
    assert graph.counts.replayed >= 16, graph.counts


def same_numbers_accumulated_with_sampled_times(here: Here) -> None:
    """Every capture instance of a step that does not average broadcasts buffers."""
    _, graph = here.assert_same_runs(
        CUDAGraphCallback(timings=LayerTimings(every_n_steps=2)),
        max_epochs=6,
        accumulate_grad_batches=2,
        train_loader=loader(batches=12),
    )
    assert graph.counts.replayed >= 12, graph.counts


def same_numbers_in_buckets(here: Here) -> None:
    """Gradients that are views of several buckets."""
    wrapper = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0005}
    _, graph = here.assert_same_runs(CUDAGraphCallback(timings=None), wrapper=wrapper, max_epochs=4)
    assert graph.counts.replayed >= 10, graph.counts


def same_numbers_in_buckets_accumulated(here: Here) -> None:
    """Views of buckets to which other batches add before the average."""
    wrapper = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0005}
    _, graph = here.assert_same_runs(
        CUDAGraphCallback(timings=None),
        wrapper=wrapper,
        max_epochs=6,
        accumulate_grad_batches=2,
        train_loader=loader(batches=12),
    )
    assert graph.counts.replayed >= 12, graph.counts


class Later(Net):
    """Reads the number of the epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        if self.current_epoch >= 3:
            result["loss"] = result["loss"] * 2
        return result


def same_numbers_in_buckets_of_later_graphs(here: Here) -> None:
    """Graphs are released, and the buckets stay the wrapper's."""
    wrapper = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0005}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(external_references, "_is_in_pool", lambda gradient: True)  # as on a GPU
        _, graph = here.assert_same_runs(wrapper=wrapper, max_epochs=6, build=Later)
    assert graph.counts.captures >= 3, graph.counts


def same_numbers_compiled(here: Here) -> None:
    """The step is compiled inside the wrapper, which averages gradients as before."""
    torch.compiler.reset()
    with torch.compiler.set_stance("default", force_backend="eager"):
        _, graph = here.assert_same_runs(CUDAGraphCallback(compile=True), max_epochs=4)
    assert graph.counts.replayed >= 10, graph.counts
    assert "the step runs compiled code" in str(graph.callback and str(graph.callback.summary))


def same_numbers_without_broadcasts(here: Here) -> None:
    """Each process keeps the statistics of its own batches."""
    # Another name since torch 2.13, where the older one warns.
    names = inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
    _, graph = here.assert_same_runs(wrapper={name: False}, max_epochs=4)
    assert "buffers are not broadcast" not in " ".join(graph.counts.eager), graph.counts
    assert graph.counts.replayed >= 10, graph.counts


def same_numbers_in_a_group_made_before(here: Here) -> None:
    """The process group is not Lightning's own, and older than the callback."""
    is_on_gpu = here.accelerator == "gpu"
    if is_on_gpu:
        torch.cuda.set_device(here.rank)
    dist.init_process_group("nccl" if is_on_gpu else "gloo", rank=here.rank, world_size=here.size)
    try:
        _, graph = here.assert_same_runs()
        assert graph.counts.replayed >= 10, graph.counts
    finally:
        dist.destroy_process_group()


def a_group_that_averages_on_the_host(here: Here) -> None:
    """On GPUs: the process group is older than the trainer, and is not NCCL's."""
    dist.init_process_group("gloo", rank=here.rank, world_size=here.size)
    graph = here.train("graph", CUDAGraphCallback(), raises=UnsupportedError)
    assert "The process group uses" in str(graph.error), graph.error
    dist.destroy_process_group()


def same_numbers_with_expandable_segments(here: Here) -> None:
    """On GPUs: NCCL is told not to register buffers."""
    callback = CUDAGraphCallback()
    _, graph = here.assert_same_runs(callback, accumulate_grad_batches=2, max_epochs=8)
    assert graph.counts.replayed >= 10, graph.counts


def expandable_segments_alone(here: Here) -> None:
    """On GPUs: NCCL is not told, and registers buffers."""
    here.train("plain", None)
    graph = here.train("graph", CUDAGraphCallback(), raises=ConfigurationError)
    assert "NCCL_GRAPH_REGISTER is not set" in str(graph.error), graph.error


def registered_buffers_that_move(here: Here) -> None:
    """On GPUs: NCCL is told to register buffers of an allocator with expandable segments."""
    graph = here.train("graph", CUDAGraphCallback(), raises=ConfigurationError)
    assert "NCCL_GRAPH_REGISTER is 1" in str(graph.error), graph.error


def same_numbers_of_one(here: Here) -> None:
    """One process alone, with the wrapper."""
    _, graph = here.assert_same_runs(train_loader=loader(batches=7), max_epochs=4)
    assert graph.counts.replayed >= 10, graph.counts


def captures_around_the_hundredth_iteration(here: Here) -> None:
    """The wrapper times this iteration, which no capture can hold."""
    batches = loader(False, batches=2 * 112)
    plain = here.train("plain", None, max_epochs=1, train_loader=batches, checkpoint_every=0)
    for steps in (97, 98, 99, 100):
        callback = CUDAGraphCallback(warmup_steps=steps, verify=Verification(replays=1))
        graph = here.train(
            f"graph{steps}", callback, max_epochs=1, train_loader=batches, checkpoint_every=0
        )
        assert_same(plain, graph, ignore=("_ms/",))
        assert graph.counts.replayed == 112 - steps, graph.counts


class Unused(Net):
    """Has a parameter that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))


class UsedByOne(Unused):
    """Has a layer that one process uses, one of the other at first, and one that all use later."""

    def __init__(self) -> None:
        super().__init__()
        self.of_one = nn.Linear(4, 4)
        self.later = nn.Linear(4, 4)
        self.at_first = nn.Linear(4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        if self.global_rank == 1:
            result["loss"] = result["loss"] + self.of_one(result["logits"]).square().mean()
        if self.current_epoch >= 3:
            result["loss"] = result["loss"] + self.later(result["logits"]).square().mean()
        elif self.global_rank == 0:
            result["loss"] = result["loss"] + self.at_first(result["logits"]).square().mean()
        return result


def _same_where_unused_are_looked_for(
    here: Here, build: type[Net], view: bool, **arguments: Any
) -> Trace:
    wrapper = {"find_unused_parameters": True, "gradient_as_bucket_view": view, **BUCKETS}
    made = {"build": build, "wrapper": wrapper, "max_epochs": 5}
    plain = here.train(f"{build.__name__}{view} plain", None, **made)
    graph = here.train(f"{build.__name__}{view} graph", CUDAGraphCallback(**arguments), **made)
    assert_same(plain, graph, ignore=("_ms/",))
    return graph


def same_numbers_where_one_uses_a_layer(here: Here) -> None:
    """`find_unused_parameters=True`; another layer comes into use later."""
    for scope in ("step", "forward_backward"):
        graph = _same_where_unused_are_looked_for(here, UsedByOne, False, scope=scope)
        assert graph.counts.replayed >= 10, graph.counts


def same_numbers_where_unused_are_looked_for(here: Here) -> None:
    """`find_unused_parameters=True` where all parameters are used, and where one is not."""
    for build, view in ((Net, False), (Unused, False), (Unused, True), (UsedByOne, True)):
        graph = _same_where_unused_are_looked_for(here, build, view)
        assert graph.counts.replayed >= (10 if build is UsedByOne else 20), graph.counts


class UsedBefore(Net):
    """Has a layer that every second batch uses; the processes have other batches."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.is_first = True

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.is_first = batch_idx % 2 == 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        if self.is_first:
            logits = result["logits"] + self.global_rank
            result["loss"] = result["loss"] + self.before(logits).square().mean()
        return result


def unused_parameters_of_several_batches(here: Here) -> None:
    """Steps are eager if their gradients are averaged with those of others."""
    wrapper = {"find_unused_parameters": True, **BUCKETS}
    made = {"wrapper": wrapper, "train_loader": loader(False, batches=80), "checkpoint_every": 0}
    _, graph = here.assert_same_runs(build=UsedBefore, accumulate_grad_batches=2, **made)
    assert "marks on the host which parameters" in "; ".join(graph.counts.eager), graph.counts
    assert graph.counts.replayed == 0, graph.counts
    schedule = GradientAccumulationScheduler({0: 1, 1: 2, 2: 1})
    plain = here.train("plain2", None, UsedByOne, callbacks=(copy.deepcopy(schedule),), **made)
    graph = here.train("graph2", CUDAGraphCallback(), UsedByOne, callbacks=(schedule,), **made)
    assert_same(plain, graph, ignore=("_ms/",))
    assert graph.counts.replayed >= 20, graph.counts


class Awkward(Net):
    """Returns an output that is in no loss, and whose gradient would be infinite times zero."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        return {"loss": loss, "extra": (logits.softmax(-1) * 0).log()}


class Hooked(UsedByOne):
    """Has a hook on a parameter that the other process alone uses."""

    def __init__(self) -> None:
        super().__init__()
        self.of_one.weight.register_hook(lambda gradient: gradient + 0.1)


class Zeroed(UsedByOne):
    """Keeps the gradients of the step before, and sets them to zero."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class FrozenLater(Net):
    def on_fit_start(self) -> None:
        self.head.bias.requires_grad_(False)


class PastTheWrapper(Unused):
    def on_after_backward(self) -> None:
        self(torch.zeros(2, 12, device=self.device)).sum()


def odd_steps_where_unused_are_looked_for(here: Here) -> None:
    """An output without a gradient; and what is refused, where all go on as plain."""
    wrapper = {"find_unused_parameters": True, **BUCKETS}
    made = {"wrapper": wrapper, "max_epochs": 4}
    _, graph = here.assert_same_runs(build=Awkward, **made)
    assert graph.counts.replayed >= 10, graph.counts
    for build, reason in (
        (Hooked, "has a hook, which an eager step does not call"),
        (Zeroed, "has a gradient from before it"),
        (FrozenLater, "other parameters of the module require gradients"),
        (PastTheWrapper, "calls the module past its `DistributedDataParallel`"),
    ):
        plain = here.train(f"plain {build.__name__}", None, build, **made)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "lightning_cudagraph: all steps eager")
            callback = CUDAGraphCallback(on_unsupported="eager")
            graph = here.train(f"graph {build.__name__}", callback, build, **made)
        assert_same(plain, graph, ignore=("_ms/",))
        assert reason in str(graph.summary), graph.summary


def other_parameters_each_time(here: Here) -> None:
    """Each attempt at a capture finds other used parameters; the second ends in an error."""
    wrapper = {"find_unused_parameters": True, **BUCKETS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CollectiveState, "settle_used", lambda self, of_ranks: True)
        graph = here.train("graph", CUDAGraphCallback(), Unused, wrapper, raises=UnsupportedError)
    assert "Other parameters take part in the step each time" in str(graph.error), graph.error


def same_numbers_with_a_static_graph(here: Here) -> None:
    """The wrapper has `static_graph=True`."""
    wrapper = {"static_graph": True, "bucket_cap_mb": 0.0005}
    _, graph = here.assert_same_runs(wrapper=wrapper, max_epochs=4)
    assert graph.counts.replayed >= 10, graph.counts


def same_numbers_with_unused_parameters(here: Here) -> None:
    """Same numbers as with `find_unused_parameters=True`: the wrapper looks for them once."""
    plain = here.train("plain", None, Unused, {"find_unused_parameters": True, **BUCKETS}, max_epochs=4)
    callback = CUDAGraphCallback()
    graph = here.train("graph", callback, Unused, {"static_graph": True, **BUCKETS}, max_epochs=4)
    assert_same(plain, graph, ignore=("_ms/",))
    assert graph.counts.replayed >= 10, graph.counts


def same_numbers_with_the_optimizer_behind(here: Here) -> None:
    """The optimizer steps eagerly; gradients of some batches are averaged, others not."""
    _, graph = here.assert_same_runs(
        CUDAGraphCallback(scope="forward_backward"), accumulate_grad_batches=2, max_epochs=8
    )
    assert graph.counts.replayed >= 10, graph.counts


class SharedLogs(Net):
    """Logs values of all processes, in each step and at the end, and a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.right = MulticlassAccuracy(4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        self.log("shared", result["loss"], on_step=True, on_epoch=True, sync_dist=True)
        self.log("most", result["loss"], on_epoch=True, reduce_fx="max", sync_dist=True)
        self.right(result["logits"], batch[1])
        self.log("right", self.right, on_epoch=True, on_step=False)
        return result


def same_numbers_with_shared_logs(here: Here) -> None:
    """Values of all processes need collectives between two replays."""
    _, graph = here.assert_same_runs(build=SharedLogs, max_epochs=4)
    assert graph.counts.replayed >= 10, graph.counts


def _same_beside(here: Here, make_callback: Callable[[], Callback], **kwargs: Any) -> Trace:
    """Train without and with the callback, each time beside another callback; returns the latter."""
    plain = here.train("plain", None, callbacks=(make_callback(),), **kwargs)
    graph = here.train("graph", CUDAGraphCallback(), callbacks=(make_callback(),), **kwargs)
    assert_same(plain, graph, ignore=("_ms/",))
    return graph


def same_numbers_with_averaged_weights(here: Here) -> None:
    """Evaluation in the middle of epochs, with averaged weights swapped in."""
    graph = _same_beside(here, lambda: EMAWeightAveraging(decay=0.9), max_epochs=4, val_check_interval=3)
    assert graph.counts.replayed >= 10, graph.counts
    assert "`EMAWeightAveraging` has a graph of its own" in str(graph.summary)


def same_numbers_with_learning_rates_logged(here: Here) -> None:
    """They are read between two replays, and written by one process."""
    graph = _same_beside(here, lambda: LearningRateMonitor("step"))
    assert "lr-AdamW" in graph.csv
    assert graph.counts.replayed >= 8, graph.counts


def same_numbers_with_scheduled_accumulation(here: Here) -> None:
    """All processes re-capture where more batches are accumulated."""
    graph = _same_beside(here, lambda: GradientAccumulationScheduler({0: 1, 3: 2}), max_epochs=8)
    assert "`accumulate_grad_batches` of the trainer changed" in graph.counts.recaptures[0]
    assert graph.counts.replayed >= 20, graph.counts


def same_numbers_stopped_early(here: Here) -> None:
    """All stop as soon as one of them would."""
    graph = _same_beside(
        here,
        lambda: EarlyStopping("val_loss", patience=4 - 2 * here.rank, min_delta=0.5),
        max_epochs=9,
    )
    assert graph.final["global_step"] == 24
    assert graph.counts.replayed >= 8, graph.counts


def same_numbers_stopped_by_the_clock(here: Here) -> None:
    """The first process's clock advances a second at each read; those of the others stand still."""

    def make_timer() -> Callback:
        look = itertools.count(0, 1 if here.rank == 0 else 0).__next__
        patch.setattr(timer, "time", SimpleNamespace(monotonic=look))
        return Timer(timedelta(seconds=60))

    with pytest.MonkeyPatch.context() as patch:
        graph = _same_beside(here, make_timer, max_epochs=9)
    assert graph.final["should_stop"]
    assert graph.counts.replayed >= 8, graph.counts


@contextlib.contextmanager
def _no_page() -> Iterator[None]:
    """Disable memory shared by processes, as on several machines."""

    def create(size: int) -> str:
        raise OSError("no shared memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedPage, "create", create)
        yield


def same_numbers_over_sockets(here: Here) -> None:
    """Processes without shared memory, as on several machines."""

    with _no_page(), _Again() as again:
        _, graph = here.assert_same_runs(
            watched=False, checkpoint_every=0, train_loader=loader(batches=20)
        )
    assert graph.counts.replayed >= 10, graph.counts
    assert again.plain >= 4, vars(again)


def same_numbers_on_several_streams(here: Here) -> None:
    """Independent ops lie on parallel streams; averages wait for their gradients."""
    _, graph = here.assert_same_runs(CUDAGraphCallback(streams=3), max_epochs=4, wrapper=BUCKETS)
    assert graph.counts.captures == 1, graph.counts
    assert graph.counts.replayed >= 10, graph.counts


def sent_back_to_one_stream(here: Here) -> None:
    """If one process cannot capture on several streams, all capture on one, maybe some steps later."""
    told = "planted" if here.size == 1 else "planted (rank 1)"
    for where, in_backward in (("forward", False), ("backward", True)):
        plain = here.train(f"plain {where}", None, max_epochs=4)
        with pytest.MonkeyPatch.context() as patch:
            _plant(patch, in_backward, here.rank == here.size - 1)
            graph = here.train(f"graph {where}", CUDAGraphCallback(streams=3), max_epochs=4)
        assert_same(plain, graph, ignore=("_ms/",))
        assert graph.counts.captures == 1, graph.counts
        assert graph.counts.replayed >= 10, graph.counts
        # One that is alone tries again at once, unless gradients are waited for.
        is_later = here.size > 1 or in_backward
        assert any(told in reason for reason in graph.counts.eager) == is_later, graph.counts
        assert f"on one stream: {told}" in str(graph.callback and str(graph.callback.summary))


def _plant(patch: pytest.MonkeyPatch, in_backward: bool, here: bool) -> None:
    """Send captures on several streams back to one, at once or after some gradients."""
    add = Flow.add

    def refuses(flow: Flow, *args: Any, **kwargs: Any) -> Any:
        node = torch._C._current_autograd_node()
        if here and flow.streams > 1 and (not in_backward or (node and "Relu" in node.name())):
            raise SentBackError("planted")
        return add(flow, *args, **kwargs)

    patch.setattr(Flow, "add", refuses)


class NotFused(Net):
    """With an optimizer whose gradients Lightning clips under mixed precision.

    It has the same bits on a GPU too, unlike AdamW that is not fused (`docs/same_numbers.md`).
    """

    def __init__(self) -> None:
        super().__init__(
            lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, foreach=True)
        )


def same_numbers_compressed(here: Here) -> None:
    """Gradients are averaged in bfloat16, by a hook of torch's; mixed precision, and clipping."""
    wrapper = {"ddp_comm_hook": default_hooks.bf16_compress_hook}
    _, graph = here.assert_same_runs(
        build=NotFused, wrapper=wrapper, max_epochs=4, precision="bf16-mixed", gradient_clip_val=0.5
    )
    assert graph.counts.replayed >= 10, graph.counts


def same_numbers_in_fp16(here: Here) -> None:
    """Losses are scaled; all processes see the same overflows."""
    _, graph = here.assert_same_runs(max_epochs=4, precision="16-mixed")
    assert graph.counts.replayed >= 10, graph.counts


def same_numbers_with_shared_batch_norm(here: Here) -> None:
    """Batch norm over the batches of all processes: collectives in the forward pass too."""
    _, graph = here.assert_same_runs(max_epochs=4, sync_batchnorm=True)
    assert graph.counts.replayed >= 10, graph.counts


class Stream(IterableDataset[Any]):
    """Batches without a known number; one may be smaller."""

    def __init__(self, batches: int, odd: int = -1) -> None:
        self.batches = batches
        self.odd = odd

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(loader(ragged=False, batches=self.batches)):
            yield [x[: BATCH_SIZE // 2] for x in batch] if index == self.odd else batch


class Endless(IterableDataset[Any]):
    """Batches without end."""

    def __iter__(self) -> Iterator[Any]:
        return itertools.cycle(loader(ragged=False, batches=2))


class _Again:
    """Counts the steps on the fast path."""

    def __init__(self) -> None:
        self.plain = 0
        self.others = 0

    def __enter__(self) -> _Again:
        self._replay = replay = TrainingSteps.replay

        def counting(steps: Any, *args: Any) -> Any:
            outputs = replay(steps, *args)
            self.plain += outputs is not None
            self.others += outputs is None
            return outputs

        TrainingSteps.replay = counting  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        TrainingSteps.replay = self._replay  # type: ignore[method-assign]


def same_numbers_on_the_fast_path(here: Here) -> None:
    """The fast path: no user code between steps."""
    with _Again() as again:
        _, graph = here.assert_same_runs(
            watched=False,
            checkpoint_every=0,
            accumulate_grad_batches=2,
            train_loader=loader(batches=30),
        )
    assert graph.counts.replayed >= 8, graph.counts
    assert again.plain >= 4, vars(again)


class OddBatch(Net):
    """On one process, one batch in the middle is smaller."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        odd = self.trainer.global_rank == 1 and self.trainer.global_step == 16
        return tuple(x[: BATCH_SIZE // 2] for x in batch) if odd else batch


def another_shape(here: Here) -> None:
    """One process has a batch of another shape: all run that step eagerly, and keep their graphs."""
    _, graph = here.assert_same_runs(
        build=OddBatch, max_epochs=4, train_loader=loader(False, batches=14)
    )
    assert graph.counts.captures == 1, graph.counts
    reasons = " ".join(graph.counts.eager)
    expected = "another batch signature" if here.rank == 1 else "not all processes could take this step"
    assert expected in reasons, reasons


class TwoShapes(IterableDataset[Any]):
    """Batches of two sizes: in turn, or, apart, beginning with the other one on each process."""

    def __init__(self, batches: int, shift: int) -> None:
        self.batches = batches
        self.shift = shift

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(loader(ragged=False, batches=self.batches)):
            is_small = (index + self.shift) % 2 == 1
            yield [x[: BATCH_SIZE // 2] for x in batch] if is_small else batch


def two_shapes_in_all(here: Here) -> None:
    """All processes come to the second shape together, and capture it together."""
    batches = DataLoader(TwoShapes(40, 0), batch_size=None)
    _, graph = here.assert_same_runs(max_epochs=2, train_loader=batches)
    assert graph.counts.captures == 2, graph.counts
    assert graph.counts.recaptures == (), graph.counts
    assert graph.counts.replayed >= 30, graph.counts


class InTurn(Net):
    """Takes another path every second step, with a value of its own that all processes log."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        if batch_idx % 2 == 0:
            self.log("in_turn", loss, sync_dist=True)
            return loss * 2
        return loss


def two_paths_in_all(here: Here) -> None:
    """Each path has a graph in both."""
    stream = loader(batches=14, ragged=False)
    _, graph = here.assert_same_runs(build=InTurn, train_loader=stream, max_epochs=8)
    assert graph.counts.captures == 2, graph.counts
    assert graph.counts.replayed > 14, graph.counts


class Phases(Net):
    """Has a phase that changes in turn, on all processes or on one, and scales the loss."""

    on_all = True
    phase = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.on_all or self.trainer.global_rank == 1:
            self.phase = self.trainer.global_step // 4 % 2

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        if self.phase == 1:
            self.log("phase", loss, sync_dist=self.on_all)
            return loss * 2
        return loss


class PhasesOnOne(Phases):
    on_all = False


def a_value_that_recurs(here: Here) -> None:
    """Each value has a graph in all processes."""
    stream = loader(batches=14, ragged=False)
    _, graph = here.assert_same_runs(build=Phases, train_loader=stream, max_epochs=8)
    assert graph.counts.replayed >= 24, graph.counts
    assert len(graph.counts.recaptures) == 1, graph.counts


def a_value_that_recurs_in_one(here: Here) -> None:
    """Where one process has a value without a graph, that step is eager in all."""
    stream = loader(batches=14, ragged=False)
    _, graph = here.assert_same_runs(build=PhasesOnOne, train_loader=stream, max_epochs=8)
    assert graph.counts.replayed >= 16, graph.counts
    assert len(graph.counts.recaptures) == 1, graph.counts


def two_shapes_apart(here: Here) -> None:
    """In each step the processes have different shapes; each replays the graph of its own."""
    batches = DataLoader(TwoShapes(40, here.rank), batch_size=None)
    _, graph = here.assert_same_runs(max_epochs=2, train_loader=batches)
    assert graph.counts.captures == 2, graph.counts
    assert graph.counts.recaptures == (), graph.counts
    assert graph.counts.replayed >= 30, graph.counts


class OtherDropout(Callback):
    """On one process, dropout becomes another in the middle."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 16:
            pl_module.features[3].p = 0.5


def another_shape_on_the_fast_path(here: Here) -> None:
    """One process finds another shape while the others are about to replay."""
    batches = DataLoader(Stream(24, odd=18 if here.rank == 1 else -1), batch_size=None)
    with _Again() as again:
        _, graph = here.assert_same_runs(
            watched=False, checkpoint_every=0, max_epochs=2, train_loader=batches
        )
    assert graph.counts.captures == 1, graph.counts
    assert again.plain >= 10, vars(again)
    reasons = " ".join(graph.counts.eager)
    expected = "another batch signature" if here.rank == 1 else "not all processes could take this step"
    assert expected in reasons, reasons


def a_guard_in_one_process(here: Here) -> None:
    """A baked-in value changes in one process: all re-capture."""
    _, graph = here.assert_same_runs(callbacks=(OtherDropout(),), max_epochs=5)
    assert graph.counts.captures == 2, graph.counts
    assert "(rank 1)" in graph.counts.recaptures[0] or here.rank == 1, graph.counts
    assert graph.counts.replayed >= 10, graph.counts


class ReadsOnOne(Net):
    """On one process, the step reads a value back to the host."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        if self.trainer.global_rank == 1:
            result["loss"].item()
        return result


def a_capture_that_one_refuses(here: Here) -> None:
    """If one process cannot capture, none does."""
    graph = here.train("graph", CUDAGraphCallback(), ReadsOnOne, raises=UnsupportedError)
    found = str(graph.error)
    assert ".item()" in found, found
    assert found.startswith("On rank 1: ") == (here.rank == 0), found


def a_capture_that_one_refuses_goes_on(here: Here) -> None:
    """All go on without a graph."""
    callback = CUDAGraphCallback(on_unsupported="eager")
    _, graph = here.assert_same_runs(callback, build=ReadsOnOne)
    assert graph.counts.replayed == 0, graph.counts
    assert any(".item()" in reason for reason in graph.counts.eager), graph.counts


class ReadsLaterOnOne(Net):
    """On one process, the step reads a value back to the host from some epoch on."""

    reads = False

    def on_train_epoch_start(self) -> None:
        self.reads = self.trainer.global_rank == 1 and self.current_epoch >= 4

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        if self.reads:
            result["loss"].item()
        return result


def a_later_capture_that_one_refuses(here: Here) -> None:
    """After a change in one process, which leads to another capture in all: all go on eagerly."""
    _, graph = here.assert_same_runs(
        build=ReadsLaterOnOne, max_epochs=7, train_loader=loader(False, batches=14)
    )
    assert graph.counts.captures == len(graph.counts.recaptures) == 1, graph.counts
    assert graph.counts.replayed >= 10, graph.counts
    assert any(".item()" in reason for reason in graph.counts.eager), graph.counts


class _ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        return gradient * (1.0 if float(gradient.sum()) < 1e9 else 0.0)


class ReadsInBackwardOnOne(Net):
    """On one process, the backward pass reads a value after some gradients are made."""

    def forward(self, x: Tensor) -> Tensor:
        features = self.features(x)
        if self.trainer.global_rank == 1:
            features = _ReadsInBackward.apply(features)
        return self.head(features)


def a_capture_that_fails_in_the_backward_pass(here: Here) -> None:
    """In the middle of averaging; all go on without a graph."""
    callback = CUDAGraphCallback(on_unsupported="eager")
    _, graph = here.assert_same_runs(callback, build=ReadsInBackwardOnOne)
    assert graph.counts.replayed == 0, graph.counts
    assert any("cannot hold" in reason for reason in graph.counts.eager), graph.counts


class WideReadsInBackwardOnOne(Net):
    """The same with several large buckets, some of which one process has averaged."""

    def __init__(self) -> None:
        super().__init__()
        width = 1024
        layers = (nn.Linear(24, width), nn.Linear(width, width), nn.Linear(width, width))
        self.features.extend([*layers, nn.Linear(width, 24)])

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.features):
            x = layer(x)
            if index == 5 and self.trainer.global_rank == 1:
                x = _ReadsInBackward.apply(x)
        return self.head(x)


def a_wide_capture_that_fails_in_the_backward_pass(here: Here) -> None:
    """NCCL registers large buffers of a capture in all processes, and one process stops early."""
    callback = CUDAGraphCallback(on_unsupported="eager")
    wrapper = {"bucket_cap_mb": 3.0}
    _, graph = here.assert_same_runs(
        callback, build=WideReadsInBackwardOnOne, wrapper=wrapper, checkpoint_every=0
    )
    assert graph.counts.replayed == 0, graph.counts


class CountsOnOne(Net):
    """On one process, the loss depends on the number of Python calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        if self.trainer.global_rank == 1:
            self.calls += 1
            result["loss"] = result["loss"] * self.calls
        return result


def a_check_that_one_fails(here: Here) -> None:
    """A replay that differs in one process fails the check in all."""
    callback = CUDAGraphCallback(harmless=["calls"])
    try:
        graph = here.train("graph", callback, CountsOnOne, raises=VerificationError)
    except pytest.fail.Exception as error:
        raise AssertionError(str(callback.summary)) from error
    # Gradients are averaged, so that all see it; each in its own numbers.
    assert "comes to other numbers than the eager step" in str(graph.error), graph.error


class CountsInBufferOnOne(Net):
    """On one process, a buffer depends on the number of Python calls between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("counted", torch.zeros(()))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.calls += 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        if self.trainer.global_rank == 1:
            self.counted += result["loss"].detach() * self.calls
        return result


def a_check_that_one_fails_alone(here: Here) -> None:
    """A replay that differs in one process, in values that are not averaged, ends all."""
    callback = CUDAGraphCallback(harmless=["calls"])
    with patch.object(
        OpTape, "difference", None
    ):  # with a name for it, the graph would be captured again
        graph = here.train("graph", callback, CountsInBufferOnOne, raises=VerificationError)
    found = str(graph.error)
    assert "comes to other numbers than the eager step" in found, found
    assert "`counted`" in found, found
    assert found.startswith("On rank 1: ") == (here.rank == 0), found


def a_check_that_one_fails_alone_goes_on(here: Here) -> None:
    """All go on without a graph."""
    callback = CUDAGraphCallback(harmless=["calls"], on_unsupported="eager")
    with patch.object(OpTape, "difference", None):
        _, graph = here.assert_same_runs(callback, build=CountsInBufferOnOne)
    assert graph.counts.replayed == 1, graph.counts  # the step of the capture, where nothing had changed
    reasons = [reason for reason in graph.counts.eager if "comes to other numbers" in reason]
    assert reasons, graph.counts
    assert reasons[0].startswith("On rank 1: ") == (here.rank == 0), reasons


class CountsLaterOnOne(Net):
    """On one process, counts once a hook has said so, under a name that is put together."""

    at_step = 18

    def __init__(self) -> None:
        super().__init__()
        self.calls = [0]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_rank == 1 and self.trainer.global_step == self.at_step:
            setattr(self, "".join(("is_", "counting")), True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if getattr(self, "".join(("is_", "counting")), False):
            self.calls[0] += 1
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        steps = self.trainer.global_step - self.at_step
        assert self.calls[0] == steps * self.trainer.global_rank, self.calls


def an_effect_that_begins_later_on_one(here: Here) -> None:
    """A check tells it to all processes, which drop the graph together; the effect is done once."""
    callback = CUDAGraphCallback(on_unsupported="eager")
    _, graph = here.assert_same_runs(callback, build=CountsLaterOnOne)
    assert graph.counts.replayed, graph.counts
    assert any("`calls" in reason for reason in graph.counts.recaptures), graph.counts


class DrawsLaterOnOne(Net):
    """On one process, draws from a generator once a hook has said so, by a name that is put together."""

    def on_fit_start(self) -> None:
        self.noise = torch.Generator(device=self.device).manual_seed(5)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_rank == 1 and self.trainer.global_step == 16:
            setattr(self, "".join(("is_", "noisy")), True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        if getattr(self, "".join(("is_", "noisy")), False):
            x = x + torch.rand(x.shape, generator=self.noise, device=x.device)
        return super().training_step([x, y], batch_idx)


def a_generator_that_one_begins_to_draw_from(here: Here) -> None:
    """A check puts back its own draws; the other process has other gradients, and all graphs end."""
    callback = CUDAGraphCallback(verify=Verification(replays=8), on_unsupported="eager")
    _, graph = here.assert_same_runs(callback, build=DrawsLaterOnOne)
    assert graph.counts.replayed, graph.counts
    assert any("comes to other numbers" in reason for reason in graph.counts.eager), graph.counts


def different_arguments(here: Here) -> None:
    """The processes have different arguments."""
    callback = CUDAGraphCallback(verify=Verification(replays=1 + here.rank))
    graph = here.train("graph", callback, raises=ConfigurationError)
    said = r"argument `verify`: .*replays=1, .* on rank 0, .*replays=2, .* on rank 1"
    assert re.search(said, str(graph.error)), graph.error


def switched_off_in_one(here: Here) -> None:
    """One process has `backend="off"`."""
    callback = CUDAGraphCallback(backend="auto" if here.rank == 0 else "off")
    graph = here.train("graph", callback, raises=ConfigurationError)
    assert "argument `backend`: 'auto' on rank 0, 'off' on rank 1" in str(graph.error), graph.error


def a_shorter_loader(here: Here) -> None:
    """One process has fewer batches, and all know the number."""
    batches = loader(batches=14 + 4 * here.rank)
    graph = here.train("graph", CUDAGraphCallback(), train_loader=batches, raises=ConfigurationError)
    assert "number of training batches: 8 on rank 0, 10 on rank 1" in str(graph.error), graph.error


def fewer_epochs_on_rank_0(here: Here) -> None:
    """A process that ends first is not waited for, and those with more epochs do not hang."""
    _fewer_epochs(here, here.rank == 0)


def fewer_epochs_on_rank_1(here: Here) -> None:
    """The same if the other process hosts the store."""
    _fewer_epochs(here, here.rank == 1)


def _fewer_epochs(here: Here, is_first: bool) -> None:
    started_s = time.monotonic()
    trace = here.train(
        "graph",
        CUDAGraphCallback(),
        max_epochs=3 - is_first,
        checkpoint_every=0,
        limit_val_batches=0,
        raises=None if is_first else PeerError,
        fit=pl.Trainer.fit,  # which does not wait for the others at its end
    )
    if not is_first:
        assert "Another process has come to its end" in str(trace.error), trace.error
        assert "the same numbers of batches, steps and epochs" in str(trace.error), trace.error
        assert time.monotonic() - started_s < 30


def different_accumulation(here: Here) -> None:
    """The processes would average gradients in different steps."""
    graph = here.train(
        "graph",
        CUDAGraphCallback(),
        accumulate_grad_batches=1 + here.rank,
        raises=ConfigurationError,
    )
    assert "`Trainer(accumulate_grad_batches=...)`: 1 on rank 0, 2 on rank 1" in str(graph.error)


def a_shorter_stream(here: Here) -> None:
    """One process ends before the others."""
    batches = DataLoader(Stream(20 + 3 * here.rank), batch_size=None)
    graph = here.train("graph", CUDAGraphCallback(), train_loader=batches, raises=PeerError)
    assert "are before batch 19 of the epoch, which is the last one there" in str(graph.error), (
        graph.error
    )
    assert graph.counts.replayed > 0


class Raises(Callback):
    """Raises in the middle, in one process."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == 18:
            raise ValueError("no more cheese")


def an_error_on_rank_0(here: Here) -> None:
    """Raises the error that this process reports."""
    here.train("graph", CUDAGraphCallback(), callbacks=(Raises(0),))


def an_error_on_rank_1(here: Here) -> None:
    """Raises the error that this process reports."""
    here.train("graph", CUDAGraphCallback(), callbacks=(Raises(1),))


class RaisesInOneOfThree(Raises):
    """Raises in the middle, in one process, while another one is busy and learns of it later."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_rank == 2 and trainer.global_step == 18:
            time.sleep(5)
        super().on_train_batch_start(trainer, pl_module, *args)


def an_error_on_rank_1_of_three(here: Here) -> None:
    """Raises the reported error; rank 0, which hosts the store, ends at once."""
    with pytest.MonkeyPatch.context() as patch:
        if here.rank == 2:
            patch.setattr(failures, "_LOOK_EVERY_S", 2.5)
        callbacks = (RaisesInOneOfThree(1),)
        here.train("graph", CUDAGraphCallback(), callbacks=callbacks, max_epochs=9, fit=pl.Trainer.fit)


class Killed(Callback):
    """Kills its process in the middle, on one rank."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 18:
            os.kill(os.getpid(), signal.SIGKILL)


def killed_on_rank_1(here: Here) -> None:
    """Raises in the other process that this one is gone."""
    here.train("graph", CUDAGraphCallback(), callbacks=(Killed(),), fit=pl.Trainer.fit)


class RaisesEarly(Callback):
    """Raises before training begins, in one process."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_rank == self.rank:
            raise ValueError("no more cheese")


def an_error_before_training_on_rank_0(here: Here) -> None:
    """Raises where the other processes are about to compare arguments with this one."""
    here.train("graph", CUDAGraphCallback(), callbacks=(RaisesEarly(0),))


def an_error_before_training_on_rank_1(here: Here) -> None:
    """Raises where the other processes are about to compare arguments with this one."""
    here.train("graph", CUDAGraphCallback(), callbacks=(RaisesEarly(1),))


class RaisesInStep(Net):
    """Raises in a step of warm-up, in one process."""

    at_step = 5
    rank = 1

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        here = self.trainer.global_rank == self.rank
        self.has_cheese = not here or self.trainer.global_step != self.at_step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.has_cheese:
            raise ValueError("no more cheese")
        return super().training_step(batch, batch_idx)


class ChecksItsBatch(Net):
    """Has a batch in the middle, in one process, with which a check of a replayed step fails."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_rank == 1 and self.trainer.global_step == 18:
            batch[0][0] = torch.nan

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not batch[0].isfinite().all():
            raise ValueError("no more cheese")
        return super().training_step(batch, batch_idx)


def a_failed_check_on_rank_1(here: Here) -> None:
    """Raises behind the replay of a step, or of a later one, which both processes have launched."""
    here.train("graph", CUDAGraphCallback(), ChecksItsBatch)


def an_error_in_a_step_on_rank_1(here: Here) -> None:
    """Raises where the other processes are about to average gradients with this one."""
    here.train("graph", CUDAGraphCallback(), RaisesInStep)


def an_error_in_a_step_on_rank_0(here: Here) -> None:
    """The same if the failed process hosts the store, which has the reason."""
    here.train("graph", CUDAGraphCallback(), type("RaisesInStep", (RaisesInStep,), {"rank": 0}))


class RaisesInCapture(RaisesInStep):
    """Raises in the captured step, in one process, and again when it runs eagerly."""

    at_step = WARM_UP


def an_error_in_a_capture_on_rank_1(here: Here) -> None:
    """Raises where the other processes have captured, and reports the counts of steps."""
    _error_in_a_capture(here, CUDAGraphCallback())


def an_error_in_a_capture_on_rank_1_eager(here: Here) -> None:
    """The same with `on_unsupported="eager"`: the step fails eagerly too."""
    _error_in_a_capture(here, CUDAGraphCallback(on_unsupported="eager"))


def _error_in_a_capture(here: Here, callback: CUDAGraphCallback) -> None:
    try:
        here.train("graph", callback, RaisesInCapture)
    finally:
        print(callback.summary.fit, file=sys.stderr)


class Signalled(Callback):
    """Sends its process SIGTERM once, in training or in the evaluation after some step."""

    def __init__(self, global_step: int, evaluates: bool) -> None:
        self.at = (global_step, evaluates)

    def _reach(self, *at: int) -> None:
        if self.at == at:
            self.at = (-1, False)
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self._reach(trainer.global_step, False)

    def on_validation_batch_start(self, trainer: Any, *args: Any) -> None:
        self._reach(trainer.global_step, True)


def _ends(here: Here, *callbacks: Callback, **kwargs: Any) -> int:
    """Check that a run ends as after SIGTERM, after equally many steps in all processes.

    Returns:
        The number of steps.
    """
    arguments: dict[str, Any] = {"watched": False, "checkpoint_every": 0, "max_epochs": 10, **kwargs}
    trace = here.train(
        "graph", CUDAGraphCallback(), callbacks=callbacks, raises=SIGTERMException, **arguments
    )
    step = torch.tensor(trace.trainer.global_step, device=trace.trainer.strategy.root_device)
    highest = step.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    dist.all_reduce(step, dist.ReduceOp.MIN)
    assert step == highest, (step, highest)
    return int(step)


def a_signal_in_an_evaluation(here: Here) -> None:
    """In all processes; the evaluation itself has no end."""
    endless = DataLoader(Endless(), batch_size=None)
    assert _ends(here, Signalled(24, True), val_loader=endless, check_val_every_n_epoch=3) == 24


def a_signal_in_an_evaluation_of_one(here: Here) -> None:
    """All end after the next training batch."""
    callbacks = [Signalled(20, True)] if here.rank == 1 else []
    assert _ends(here, *callbacks, val_check_interval=4) == 21


def a_signal_at_the_end_of_an_epoch_of_one(here: Here) -> None:
    """All end with the epoch."""
    callbacks = [Signalled(24, True)] if here.rank == 1 else []
    assert _ends(here, *callbacks) == 24


def a_signal_at_the_end_of_one(here: Here) -> None:
    """In the last epoch."""
    callbacks = [Signalled(24, True)] if here.rank == 0 else []
    assert _ends(here, *callbacks, max_epochs=3) == 24


def a_signal_before_and_in_an_evaluation(here: Here) -> None:
    """One process is in its evaluation already, the other one has not begun."""
    # It may learn in time that the other has the signal, too, and end in the evaluation.
    assert _ends(here, Signalled(20, here.rank == 0), val_check_interval=4) in (20, 21)


class SharedInEvaluation(Net):
    """Logs values of all processes in an evaluation."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self(x), y), sync_dist=True)


def a_signal_before_what_all_need(here: Here) -> None:
    """At the end of the evaluation, processes meet in a collective."""
    found = _ends(here, Signalled(20, here.rank == 0), build=SharedInEvaluation, val_check_interval=4)
    assert found in (20, 21), found


class SharesEachBatch(Net):
    """Has a collective in each batch of an evaluation."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        dist.all_reduce(loss)
        self.log("val_loss", loss)


class SignalledInTurn(Callback):
    """Sends its process SIGTERM in one evaluation: rank 1 a few batches later than the other.

    Rank 1 is slow after each batch, so the other one is in the next batch by then.
    """

    sent = False

    def _is_in(self, trainer: Any) -> bool:
        return trainer.global_step == 24 and not trainer.sanity_checking

    def on_validation_batch_start(
        self, trainer: Any, module: Any, batch: Any, index: int, *_: Any
    ) -> None:
        if self._is_in(trainer) and not self.sent and index == 2 + 3 * trainer.global_rank:
            self.sent = True
            os.kill(os.getpid(), signal.SIGTERM)

    def on_validation_batch_end(self, trainer: Any, *args: Any) -> None:
        if self._is_in(trainer) and trainer.global_rank == 1:
            time.sleep(0.2)


def a_signal_where_all_share_each_batch(here: Here) -> None:
    """All end after the same batch of the evaluation; none hangs in a collective."""
    batches = loader(ragged=False, seed=1, batches=40)
    found = _ends(here, SignalledInTurn(), build=SharesEachBatch, val_loader=batches)
    assert found == 24, found


def an_error_behind_a_signal(here: Here) -> None:
    """In one process, in the last step, on which all have agreed."""
    callbacks = (Signalled(5, False),)
    # The other process may end by the signal, and does not wait for this one then.
    here.train("graph", CUDAGraphCallback(), RaisesInStep, callbacks=callbacks, fit=pl.Trainer.fit)


class Notes(Callback):
    """Writes when replays have begun, and at which step the run ends."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 20:
            (self.here.folder / f"begun{self.here.rank}").touch()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        note = f"{type(exception).__name__} after {trainer.global_step}"
        (self.here.folder / f"ended{self.here.rank}").write_text(note)


def trains_for_ever(here: Here) -> None:
    """Train until the process is ended from outside."""
    here.train("graph", CUDAGraphCallback(), callbacks=(Notes(here),), max_epochs=100_000)


class Reads(Net):
    """Waits for the loss of each step, in a copy from the device."""

    def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
        assert outputs["loss"].item() > 0


def trains_for_ever_and_reads(here: Here) -> None:
    """The same, with a process that waits in a copy if another one is gone."""
    here.train("graph", CUDAGraphCallback(), Reads, callbacks=(Notes(here),), max_epochs=100_000)


def _over_sockets(case: Callable[[Here], None]) -> Callable[[Here], None]:
    def called(here: Here) -> None:
        with _no_page():
            case(here)

    return called


# The same without memory that processes share.
OVER_SOCKETS = {
    f"{case.__name__}_over_sockets": _over_sockets(case)
    for case in (
        another_shape,
        a_guard_in_one_process,
        a_capture_that_one_refuses,
        a_shorter_stream,
        fewer_epochs_on_rank_1,
        an_error_on_rank_1,
        killed_on_rank_1,
        a_signal_in_an_evaluation_of_one,
    )
}
