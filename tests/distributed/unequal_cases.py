"""Cases of differences between processes, and of a wrapper or group that the strategy does not know.

All processes call each case at once. Without the callback all these runs succeed.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from lightning_cudagraph import (
    ConfigurationError,
    CUDAGraphCallback,
    LayerTimings,
    LayerTimingsMonitor,
    UnsupportedError,
)
from lightning_cudagraph.errors import PeerError
from tests.distributed.cases import Here
from tests.harness import BATCH_SIZE, Net, Trace, assert_same


class BeforeBackward(Callback):
    """Has a graph break in the middle of each step."""

    def on_before_backward(self, *args: Any) -> None:
        self.called = True


class BeforeZeroGrad(Callback):
    """The same, before gradients are dropped."""

    def on_before_zero_grad(self, *args: Any) -> None:
        self.called = True


class BeforeOptimizerStep(Callback):
    """Makes the optimizer step eagerly after the replay."""

    def on_before_optimizer_step(self, *args: Any) -> None:
        self.called = True


def _same_beside_on_rank_0(here: Here, kind: Callable[[], Callback], **kwargs: Any) -> Trace:
    """Train without and with our callback, with another one in the first process only."""
    runs = []
    for name, callback in (("plain", None), ("graph", CUDAGraphCallback())):
        others = (kind(),) if here.rank == 0 else ()
        runs.append(here.train(name, callback, callbacks=others, **kwargs))
    plain, graph = runs
    assert_same(plain, graph, ignore=("_ms/",))
    assert graph.counts.captures == 1, graph.counts
    assert graph.counts.replayed >= 10, graph.counts
    return graph


def a_turn_before_the_backward_pass_of_one(here: Here) -> None:
    """All check without the first process's graph breaks, and replay the step afterwards."""
    _same_beside_on_rank_0(here, BeforeBackward, max_epochs=4)


def a_turn_before_gradients_are_dropped_of_one(here: Here) -> None:
    """The same with a graph break at another hook."""
    _same_beside_on_rank_0(here, BeforeZeroGrad, max_epochs=4)


class SharedNorm(Net):
    """Has a collective after the backward pass."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = self.head.weight.grad.norm().detach().clone()  # type: ignore[union-attr]
        dist.all_reduce(norm)
        self.log("norm", norm)


def the_optimizer_is_behind_in_one(here: Here) -> None:
    """So it is in all: a check repeats the same collectives everywhere."""
    graph = _same_beside_on_rank_0(here, BeforeOptimizerStep, build=SharedNorm, max_epochs=4)
    report = str(graph.callback and str(graph.callback.summary))
    assert ("so it does in other processes" in report) == (here.rank > 0), report


class ReadsNorm(Net):
    """Reads on the host after the backward pass."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert float(self.head.weight.grad.norm()) < 1e9  # type: ignore[union-attr]


def the_optimizer_is_behind_in_one_and_cannot_be_captured_in_others(here: Here) -> None:
    """The optimizer has left the graph already when the others refuse it."""
    _same_beside_on_rank_0(here, BeforeOptimizerStep, build=ReadsNorm, max_epochs=4)


class StopsOnOne(Callback):
    """Stops the second process only, which then has another validation."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 20 and trainer.global_rank == 1:
            trainer.should_stop = True


class SkipsOnOne(Net):
    """Skips the last batch of an epoch in the second process only."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        is_last = batch_idx == self.trainer.num_training_batches - 1
        return -1 if is_last and self.current_epoch == 1 and self.global_rank == 1 else None


class OtherWindowsOnOne(Callback):
    """Accumulates gradients in the second process only."""

    def on_train_epoch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.current_epoch == 1 and trainer.global_rank == 1:
            trainer.accumulate_grad_batches = 2


def processes_that_part(here: Here) -> None:
    """All end at once, and report their positions."""
    cases: dict[str, dict[str, Any]] = {
        "`trainer.should_stop`": {"callbacks": (StopsOnOne(),)},
        "before batch 7 of the epoch, and others at the end of the epoch, after": {"build": SkipsOnOne},
        "`trainer.accumulate_grad_batches` 1, and others 2": {"callbacks": (OtherWindowsOnOne(),)},
    }
    for index, (reason, kwargs) in enumerate(cases.items()):
        graph = here.train(f"{index}", CUDAGraphCallback(), max_epochs=4, raises=PeerError, **kwargs)
        assert reason in str(graph.error), (reason, graph.error)


class HookedByHand(Callback):
    """Registers a communication hook on the wrapper, unknown to the strategy.

    Args:
        hook: the hook.
        step: the optimizer step before which it is registered.
    """

    def __init__(self, hook: Callable[..., Any], step: int = 0) -> None:
        self.hook = hook
        self.step = step
        self.calls = 0

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if self.calls == 0 and trainer.global_step == self.step:
            self.calls = 1
            ddp = trainer.strategy.model
            assert isinstance(ddp, DistributedDataParallel)
            ddp.register_comm_hook(None, self.hook)


class HookedBefore(HookedByHand):
    """The same before the first step."""

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        super().on_train_batch_start(trainer)


def _of_the_users(state, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations in words
    """A hook that is audited."""
    return default_hooks.allreduce_hook(state, bucket)


# A hook of torch's that is not known to be without state.
_OF_TORCH = default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)


def hooks_by_hand(here: Here) -> None:
    """Known ones and the user's are captured; others are refused, or leave the fit eager."""
    known = default_hooks.allreduce_hook
    plain = here.train("plain", None, callbacks=(HookedBefore(known),), max_epochs=4)
    for hook in (known, _of_the_users):
        callbacks = (HookedBefore(hook),)
        graph = here.train(hook.__name__, CUDAGraphCallback(), callbacks=callbacks, max_epochs=4)
        assert_same(plain, graph, ignore=("_ms/",))
        assert graph.counts.replayed >= 10, graph.counts
    reason = "fp16_compress_wrapper_hook`, which runs Python of a library"
    before = HookedBefore(_OF_TORCH)
    refused = here.train(
        "before", CUDAGraphCallback(), callbacks=(before,), max_epochs=4, raises=UnsupportedError
    )
    assert reason in str(refused.error), refused.error
    callbacks = (HookedByHand(_OF_TORCH, step=20),)
    plain = here.train("plain with it", None, callbacks=callbacks, max_epochs=4)
    later = HookedByHand(_OF_TORCH, step=20)
    eager = here.train("later", CUDAGraphCallback(), callbacks=(later,), max_epochs=4)
    assert_same(plain, eager, ignore=("_ms/",))
    assert any(reason in why for why in eager.counts.eager), eager.counts


def a_known_hook_in_mid_fit(here: Here) -> None:
    """The existing graph is invalidated."""
    runs = []
    for name, callback in (("plain", None), ("graph", CUDAGraphCallback())):
        other = HookedByHand(default_hooks.allreduce_hook, step=20)
        runs.append(here.train(name, callback, callbacks=(other,), max_epochs=6))
    plain, graph = runs
    assert_same(plain, graph, ignore=("_ms/",))
    assert any("communication hooks" in reason for reason in graph.counts.recaptures), graph.counts
    assert graph.counts.captures == 2, graph.counts


class WrapsItself(DDPStrategy):
    """A user's strategy that gives the wrapper a hook without exposing it."""

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(None, _OF_TORCH)
        return ddp


def a_strategy_that_wraps_by_itself(here: Here) -> None:
    """The wrapper itself is checked."""
    callback = CUDAGraphCallback()
    refused = here.train("graph", callback, strategy=WrapsItself, raises=UnsupportedError)
    assert "fp16_compress_wrapper_hook`, which runs" in str(refused.error), refused.error
    assert "`DistributedDataParallel`" in str(refused.error), refused.error


class AveragesByItself(Net):
    """Averages gradients by a collective in its step."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(dist.get_world_size())


class AveragesInValidation(AveragesByItself):
    """Also has a collective after each of its validation steps."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        total = batch[0].sum()
        dist.all_reduce(total)
        self.log("total", total)


class OneOdd(IterableDataset[Any]):
    """Batches, one of them smaller in the second process."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(self.rank)
        for index in range(14):
            size = BATCH_SIZE - 3 if self.rank and index == 3 else BATCH_SIZE
            labels = torch.randint(0, 4, (size,), generator=generator)
            yield torch.randn(size, 12, generator=generator), labels


def a_group_that_the_strategy_does_not_know(here: Here) -> None:
    """Each process decides alone, so its graphs hold no collectives."""
    device = torch.device("cuda", here.rank) if here.accelerator == "gpu" else torch.device("cpu")
    kind = "nccl" if here.accelerator == "gpu" else "gloo"
    dist.init_process_group(kind, rank=here.rank, world_size=here.size, timeout=timedelta(seconds=25))
    try:
        runs = []
        callback = CUDAGraphCallback(evaluation=True, on_unsupported="eager")
        for name, each in (("plain", None), ("graph", callback)):
            trace = here.train(
                f"{name}{here.rank}",
                each,
                AveragesInValidation,
                strategy=lambda: SingleDeviceStrategy(device),
                size=1,
                logger=False,  # Lightning logs in the first process of the group only
                train_loader=DataLoader(OneOdd(here.rank), batch_size=None),
            )
            runs.append(trace)
        assert_same(*runs, ignore=("_ms/",))
        report = str(callback.summary)
        refused = "a collective (`c10d::allreduce_`) in a run that is one process to Lightning"
        assert report.count(refused) >= 2, report
        assert callback.summary.validate.replayed == 0, report
        assert runs[1].counts.replayed >= 10, runs[1].counts
    finally:
        dist.destroy_process_group()


def a_trace_in_one(here: Here) -> None:
    """The processes exchange no trace folder before all have compared their arguments."""
    timings = LayerTimings(trace_steps=5 if here.rank == 0 else 0)
    trace = here.train("graph", CUDAGraphCallback(timings=timings), raises=ConfigurationError)
    assert "differ in their argument `timings`" in str(trace.error), trace.error


def a_trace_and_a_refusal_in_one(here: Here) -> None:
    """The same if another process refuses the run."""
    callback = CUDAGraphCallback(on_unsupported="eager", timings=LayerTimings(trace_steps=5))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "lightning_cudagraph: all steps eager")  # on rank 0
        warnings.filterwarnings("ignore", ".*anomaly")
        here.train("graph", callback, detect_anomaly=here.rank == 1)
    assert "detect_anomaly=True" in str(callback.summary), callback.summary


def times_after_a_refusal_in_one(here: Here) -> None:
    """The next fit has the times of all: its name is the same everywhere."""
    a_trace_and_a_refusal_in_one(here)
    callback = CUDAGraphCallback()
    here.train("next", callback, max_epochs=4)
    if here.rank == 0:
        assert "\n  ranks     " in str(callback.summary), callback.summary


def an_eager_clock_in_one(here: Here) -> None:
    """The first process has its trace, and reports that the times of the others are missing."""
    timings = LayerTimingsMonitor(LayerTimings(trace_steps=3))
    logger = TensorBoardLogger(here.folder / "alone", name="", version="")
    others = (timings,) if here.rank == 0 else ()
    here.train("alone", None, callbacks=others, logger=logger)
    if here.rank == 0:
        trace_file = json.loads((here.folder / "alone" / "layer_trace.json").read_text())
        assert trace_file["otherData"]["rank"] == 0
        assert "the times of other processes are not known: not all" in str(timings.summary)
