"""Cases of `GraphedStep` in several processes: under Fabric, and in plain loops."""

from __future__ import annotations

import copy
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from lightning.pytorch.strategies import DDPStrategy as TrainersDDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from examples import fabric_ddp
from lightning_cudagraph import (
    GraphedStep,
    UnsupportedError,
    Verification,
)
from lightning_cudagraph.device.sentry.sentry import is_capturing
from lightning_cudagraph.errors import ConfigurationError, PeerError
from lightning_cudagraph.graphed_step import step as step_module
from lightning_cudagraph.graphed_step.replicas import StepReplicas
from lightning_cudagraph.processes import peers
from lightning_cudagraph.processes.nccl import check_nccl
from tests.distributed.cases import WARM_UP, Here, _no_page
from tests.harness import differences, loader
from tests.loops import Net

STEPS = WARM_UP + 10


def _device(here: Here) -> torch.device:
    return torch.device("cuda", here.rank) if here.accelerator == "gpu" else torch.device("cpu")


def join(here: Here) -> None:
    """Join a process group, which lasts for the launch."""
    if not dist.is_initialized():
        os.environ["RANK"] = os.environ["LOCAL_RANK"]
        if here.accelerator == "gpu":
            torch.cuda.set_device(here.rank)
            dist.init_process_group("nccl", device_id=_device(here))
        else:
            dist.init_process_group("gloo")


class Plain:
    """A plain loop around a `DistributedDataParallel`; each process has its own batches."""

    steps = STEPS
    wrapper: ClassVar[dict[str, Any]] = {}
    kwargs: ClassVar[dict[str, Any]] = {}

    def __init__(self, here: Here) -> None:
        self.here = here
        self.device = _device(here)
        self.join()
        torch.manual_seed(3)
        self.build()

    def join(self) -> None:
        join(self.here)

    def make(self) -> nn.Module:
        return Net()

    def build(self) -> None:
        net = self.make().to(self.device)
        if self.device.type == "cuda":
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.net: Any = DistributedDataParallel(net, [self.here.rank], **self.wrapper)
            torch.cuda.current_stream().wait_stream(stream)
        else:
            self.net = DistributedDataParallel(net, **self.wrapper)
        self.optimizer: Any = torch.optim.AdamW(self.net.parameters(), lr=1e-2, fused=True)

    def step(self, x: Tensor, y: Tensor) -> Any:
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.net(x), y)
        loss.backward()
        self.optimizer.step()
        return loss

    def around(self, index: int) -> None:
        """The loop's host work after each call."""

    def call(self, step: Any, index: int, x: Tensor, y: Tensor) -> Any:
        return step(x, y)

    def size(self, index: int) -> int:
        return 8

    def state(self) -> Any:
        return {
            "net": self.net.state_dict(),
            "gradients": [p.grad for p in self.net.parameters()],
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "random_device": torch.cuda.get_rng_state() if self.device.type == "cuda" else None,
        }

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.here.rank)
        for index in range(self.steps):
            n = self.size(index)
            x, y = torch.randn(n, 6, generator=generator), torch.randint(0, 4, (n,), generator=generator)
            yield x.to(self.device), y.to(self.device)

    def run(self, graphed: bool) -> tuple[list[Any], GraphedStep[..., Any]]:
        """Run to the end; returns outputs and state after each step, and the step."""
        torch.manual_seed(7)
        history: list[Any] = []
        with GraphedStep(self.step, self.net, self.optimizer, **self.kwargs) as step:
            for index, (x, y) in enumerate(self.batches()):
                history.append(self.call(step if graphed else self.step, index, x, y))
                self.around(index)
                history.append(copy.deepcopy(self.state()))
        return history, step


def _same(here: Here, loop: Callable[[Here], Plain], replays: int) -> GraphedStep[..., Any]:
    """Fail unless the loop with graphs equals the one without, with the expected number of replays."""
    plain, _ = loop(here).run(graphed=False)
    graphed, step = loop(here).run(graphed=True)
    assert step.summary.calls.replayed == replays, step.summary
    found = differences(plain, graphed)
    assert not found, f"{len(found)} differences, the first: {found[:8]}"
    return step


def plain_loop(here: Here) -> None:
    """Dropout, and batch norm with broadcast buffers."""
    step = _same(here, Plain, STEPS - WARM_UP)
    assert step.summary.calls.captures == 1, step.summary
    assert not step.summary.calls.eager, step.summary


class InBuckets(Plain):
    """Gradients that are views of several buckets."""

    wrapper: ClassVar[dict[str, Any]] = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0005}


def plain_loop_in_buckets(here: Here) -> None:
    """Gradients lie in the wrapper's own memory."""
    _same(here, InBuckets, STEPS - WARM_UP)


class Accumulates(Plain):
    """Gradients of four calls, the last of which averages; the optimizer steps outside."""

    steps = 4 * WARM_UP + 12

    def step(self, x: Tensor, y: Tensor) -> Any:
        loss = nn.functional.cross_entropy(self.net(x), y) / 4
        loss.backward()
        return loss

    def call(self, step: Any, index: int, x: Tensor, y: Tensor) -> Any:
        if index % 4 == 3:
            return step(x, y)
        with self.net.no_sync():
            return step(x, y)

    def around(self, index: int) -> None:
        if index % 4 == 3:
            self.optimizer.step()
            self.optimizer.zero_grad()


def accumulated(here: Here) -> None:
    """Three graphs: calls that broadcast buffers, calls that do not, and calls that average."""
    step = _same(here, Accumulates, 12)
    assert step.summary.calls.captures == 3, step.summary


class AccumulatesInside(Plain):
    """Both halves of the batch in one call."""

    def step(self, x: Tensor, y: Tensor) -> Any:
        self.optimizer.zero_grad()
        with self.net.no_sync():
            first = nn.functional.cross_entropy(self.net(x[:4]), y[:4]) / 2
            first.backward()
        second = nn.functional.cross_entropy(self.net(x[4:]), y[4:]) / 2
        second.backward()
        self.optimizer.step()
        return first + second


def accumulated_inside(here: Here) -> None:
    """One graph, which averages once."""
    step = _same(here, AccumulatesInside, STEPS - WARM_UP)
    assert step.summary.calls.captures == 1, step.summary


class Validates(Plain):
    """A forward pass without gradients in between, after which no buffers are broadcast."""

    steps = STEPS + 8

    def around(self, index: int) -> None:
        if index % 5 == 4:
            self.net.eval()
            with torch.no_grad():
                self.net(torch.ones(8, 6, device=self.device))
            self.net.train()


def validated(here: Here) -> None:
    """Calls after a validation get a graph of their own after enough warm-up."""
    step = _same(here, Validates, 18 - 1)
    assert step.summary.calls.captures == 2, step.summary


class OddBatch(Plain):
    """One process has a smaller batch in the middle; later all have one."""

    def size(self, index: int) -> int:
        return 5 if index == 18 or (index == 15 and self.here.rank == 1) else 8


def another_shape(here: Here) -> None:
    """All make that call eagerly, and keep their graph."""
    step = _same(here, OddBatch, STEPS - WARM_UP - 2)
    assert step.summary.calls.captures == 1, step.summary
    assert not step.summary.calls.recaptures, step.summary


def another_shape_over_sockets(here: Here) -> None:
    """The same without shared memory."""
    with _no_page():
        another_shape(here)


class OtherDropout(Plain):
    """In one process, the dropout rate changes."""

    def around(self, index: int) -> None:
        if index == 14 and self.here.rank == 1:
            self.net.module.layers[3].p = 0.5


def a_guard_in_one_process(here: Here) -> None:
    """All re-capture."""
    step = _same(here, OtherDropout, STEPS - WARM_UP - 3)
    assert step.summary.calls.captures == 2, step.summary
    assert "(rank 1)" in step.summary.calls.recaptures[0] or here.rank == 1, step.summary


class ReadsOnOne(Plain):
    """In one process, the step reads a value back to the host."""

    def step(self, x: Tensor, y: Tensor) -> Any:
        loss = super().step(x, y)
        if self.here.rank == 1:
            loss.item()
        return loss


class ReadsOnOneAndGoesOn(ReadsOnOne):
    kwargs: ClassVar[dict[str, Any]] = {"on_unsupported": "eager"}


def a_capture_that_one_refuses(here: Here) -> None:
    """If one process cannot capture, none does; or all go on without a graph."""
    with pytest.raises(UnsupportedError, match=r"\.item\(\)") as caught:
        ReadsOnOne(here).run(graphed=True)
    assert str(caught.value).startswith("On rank 1: ") == (here.rank == 0), caught.value
    step = _same(here, ReadsOnOneAndGoesOn, 0)
    assert any(".item()" in reason for reason in step.summary.calls.eager), step.summary


class RaisesOnOne(Plain):
    """In one process, the loop ends with an error."""

    def around(self, index: int) -> None:
        if index == 15 and self.here.rank == 1:
            raise ValueError("no more cheese")


def an_error_in_one_process(here: Here) -> None:
    """The other one ends with it within seconds."""
    _ends_all(here, RaisesOnOne(here), ValueError, "no more cheese")


def an_error_in_one_process_over_sockets(here: Here) -> None:
    """The same without shared memory."""
    with _no_page():
        an_error_in_one_process(here)


def _ends_all(here: Here, loop: Plain, kind: type[BaseException], reason: str = "") -> None:
    """Fail unless rank 1 meets an error, and the others end with it within seconds."""
    started_s = time.monotonic()
    with pytest.raises(kind if here.rank == 1 else PeerError) as caught:
        loop.run(graphed=True)
    assert reason in str(caught.value), caught.value
    assert here.rank == 1 or f"rank 1: {kind.__name__}: " in str(caught.value), caught.value
    assert time.monotonic() - started_s < 30


class RaisesInTheStep(Plain):
    """In one process, a call of the function raises: after the averages, or before."""

    call_index = 0

    def __init__(self, here: Here, is_behind: bool) -> None:
        super().__init__(here)
        self.is_behind = is_behind

    def around(self, index: int) -> None:
        self.call_index += 1

    def step(self, x: Tensor, y: Tensor) -> Any:
        raises = self.call_index == 2 and self.here.rank == 1
        if raises and not self.is_behind:
            raise ValueError("no more cheese")
        loss = super().step(x, y)
        if raises:
            raise ValueError("no more cheese")
        return loss


def an_error_in_the_step(here: Here) -> None:
    """After its averages: the others learn of it at the next call."""
    _ends_all(here, RaisesInTheStep(here, is_behind=True), ValueError, "no more cheese")


def an_error_in_the_step_before_averages(here: Here) -> None:
    """The others wait for gradients. On a CPU they end with the missing process."""
    RaisesInTheStep(here, is_behind=False).run(graphed=True)


class RaisesInTheCapture(Plain):
    """In one process, the function raises in the capture."""

    def step(self, x: Tensor, y: Tensor) -> Any:
        loss = super().step(x, y)
        if is_capturing() and self.here.rank == 1:
            raise ValueError("no more cheese")
        return loss


def an_error_in_the_capture(here: Here) -> None:
    """If one process cannot capture, none does."""
    with pytest.raises((PeerError, UnsupportedError), match="ValueError in the capture: no more cheese"):
        RaisesInTheCapture(here).run(graphed=True)


class Interrupted(Plain):
    """In one process, Ctrl-C comes while it waits for the other one."""

    def __init__(self, here: Here, at: int) -> None:
        super().__init__(here)
        self.at = at
        self.told = here.folder / f"interrupted{at}"

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index, batch in enumerate(super().batches()):
            if index == self.at:
                self.wait()
            yield batch

    def wait(self) -> None:
        if self.here.rank == 1:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            return
        while not self.told.exists():
            time.sleep(0.01)

    def run(self, graphed: bool) -> Any:
        try:
            return super().run(graphed)
        finally:
            self.told.touch()


def ctrl_c_in_one_process(here: Here) -> None:
    """At the start of a run, and after the capture."""
    for at in (0, WARM_UP + 4):
        _ends_all(here, Interrupted(here, at), KeyboardInterrupt)


def ctrl_c_over_sockets(here: Here) -> None:
    """Uncaught, so that the process ends.

    Its last message can still reach the others, which end with the missing process.
    """
    with _no_page():
        Interrupted(here, WARM_UP + 4).run(graphed=True)


class UncaughtError(BaseException):
    """An uncaught error, which ends Python."""


def an_uncaught_error_without_with(here: Here) -> None:
    """The step is closed at the end of Python, and reports the failure."""
    loop = Plain(here)
    step = GraphedStep(loop.step, loop.net, loop.optimizer)
    for index, (x, y) in enumerate(loop.batches()):
        if index == WARM_UP + 4 and here.rank == 1:
            raise UncaughtError("no more cheese")
        step(x, y)


def an_uncaught_error_before_the_first_call(here: Here) -> None:
    """The step exists, so the others are told."""
    loop = Plain(here)
    step = GraphedStep(loop.step, loop.net, loop.optimizer)
    if here.rank == 1:
        raise UncaughtError("no more cheese")
    for x, y in loop.batches():
        step(x, y)


def an_uncaught_error_between_two_steps(here: Here) -> None:
    """One step is closed, and the next not made in the failed process."""
    loop = Plain(here)
    loop.run(graphed=True)
    if here.rank == 1:
        raise UncaughtError("no more cheese")
    loop.run(graphed=True)


def an_uncaught_error_well_before_another_step(here: Here) -> None:
    """A process that makes the next step later finds the failure."""
    loop = Plain(here)
    loop.run(graphed=True)
    if here.rank == 1:
        raise UncaughtError("no more cheese")
    peers.own_store(peers._EXITED).wait(["1"], timedelta(seconds=60))
    loop.run(graphed=True)


class RaisesAtOnce(Plain):
    """In one process, inside `with`, before the first call."""

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self.here.rank == 1:
            raise ValueError("no more cheese")
        yield from super().batches()


def an_error_before_the_first_call(here: Here) -> None:
    """The other one ends with it within seconds."""
    _ends_all(here, RaisesAtOnce(here), ValueError, "no more cheese")


class Teacher(Plain):
    """Another wrapper, which averages nothing."""

    def build(self) -> None:
        super().build()
        net = self.make().to(self.device)
        self.teacher = DistributedDataParallel(net, [self.here.rank] if self.device.index else None)

    def step(self, x: Tensor, y: Tensor) -> Any:
        self.optimizer.zero_grad()
        with torch.no_grad():
            wanted = self.teacher(x)
        out = self.net(x)
        loss = nn.functional.cross_entropy(out, y) + nn.functional.mse_loss(out, wanted)
        loss.backward()
        self.optimizer.step()
        return loss


def a_teacher_without_gradients(here: Here) -> None:
    """The capture does not wait for its first average."""
    _same(here, Teacher, STEPS - WARM_UP)


class AlternatesOnOne(Plain):
    """In one process, a number alternates between two calls."""

    def step(self, x: Tensor, y: Tensor, factor: float = 1.0) -> Any:
        self.optimizer.zero_grad()
        loss = factor * nn.functional.cross_entropy(self.net(x), y)
        loss.backward()
        self.optimizer.step()
        return loss

    def call(self, step: Any, index: int, x: Tensor, y: Tensor) -> Any:
        return step(x, y, 2.0 if index % 2 and self.here.rank == 1 else 1.0)


def a_number_that_alternates_in_one_process(here: Here) -> None:
    """Each drops graphs that the other lacks; reasons of others are not repeated as one's own."""
    loop = AlternatesOnOne(here)
    loop.steps = 60
    plain, _ = loop.run(graphed=False)
    loop = AlternatesOnOne(here)
    loop.steps = 60
    graphed, step = loop.run(graphed=True)
    found = differences(plain, graphed)
    assert not found, f"{len(found)} differences, the first: {found[:8]}"
    assert step.summary.calls.recaptures, step.summary
    assert "(rank 0) (rank 1)" not in str(step.summary), step.summary


class DifferentArguments(Plain):
    def __init__(self, here: Here) -> None:
        super().__init__(here)
        self.kwargs = {"verify": Verification(replays=here.rank)}  # type: ignore[misc]


class SameArguments(Plain):
    """Sets have a different order in each process."""

    steps = 3
    kwargs: ClassVar[dict[str, Any]] = {"harmless": [f"name{index}" for index in range(20)]}


def different_arguments(here: Here) -> None:
    """No step begins."""
    with pytest.raises(
        ConfigurationError,
        match=r"argument `verify`: .*replays=0, .* on rank 0, .*replays=1, .* on rank 1",
    ):
        DifferentArguments(here).run(graphed=True)
    _same(here, SameArguments, 0)


class AnotherBackend(Plain):
    """One process has another backend than the others."""

    steps = 3

    def __init__(self, here: Here, backend: str) -> None:
        super().__init__(here)
        self.kwargs = {"backend": backend} if here.rank == 1 else {}  # type: ignore[misc]


class WithoutGraphs(Plain):
    steps = 3
    kwargs: ClassVar[dict[str, Any]] = {"backend": "off"}


def another_backend_in_one(here: Here) -> None:
    """Reported in all, if both have graphs. Without graphs in all processes it makes no difference."""
    other = "emulator" if here.accelerator == "gpu" else "cuda"
    _ends_all(here, AnotherBackend(here, other), ConfigurationError, "where the step runs")
    _same(here, WithoutGraphs, 0)


def _on_gpus(patch: pytest.MonkeyPatch) -> None:
    """Pretend to be on GPUs, with expandable segments."""
    patch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    settings = {"allocator_settings": {"expandable_segments": True}}
    patch.setattr(torch.cuda.memory, "_snapshot", lambda: settings)
    patch.setattr(step_module, "check_nccl", lambda device: check_nccl(torch.device("cuda")))


def buffers_that_move_are_refused(here: Here) -> None:
    """NCCL would register them. A function without a wrapper is not affected."""
    with pytest.MonkeyPatch.context() as patch:
        _on_gpus(patch)
        with pytest.raises(ConfigurationError, match="NCCL_GRAPH_REGISTER is not set"):
            Plain(here).run(graphed=True)
        loop = OnOneAlone(here)
        loop.steps = 3
        loop.run(graphed=True)


def averages_on_the_host_are_refused(here: Here) -> None:
    """By the group's backend for GPUs, not by its name."""
    loop = Plain(here)
    with pytest.MonkeyPatch.context() as patch:
        on_gpu = SimpleNamespace(device=torch.device("cuda"))
        patch.setattr(loop.net, "parameters", lambda: iter([on_gpu]))
        patch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:gloo")
        with pytest.raises(UnsupportedError, match="averages gradients on the host"):
            StepReplicas(loop.net)
        patch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
        patch.setattr(dist, "get_backend", lambda group: "undefined")  # made without a name
        StepReplicas(loop.net).close()


class FindsUnused(Plain):
    wrapper: ClassVar[dict[str, Any]] = {"find_unused_parameters": True}


class WithStaticGraph(Plain):
    wrapper: ClassVar[dict[str, Any]] = {"static_graph": True}


class WithHookOfTorch(Plain):
    def build(self) -> None:
        super().build()
        self.net.register_comm_hook(None, _HOOK_OF_TORCH)


class Joins(Plain):
    """Processes may end after different numbers of batches."""

    def run(self, graphed: bool) -> Any:
        with self.net.join():
            return super().run(graphed)


# A hook of torch's that is not known to be without state.
_HOOK_OF_TORCH = default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)


class WithPartOfTheProcesses(Plain):
    def build(self) -> None:
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        self.wrapper = {"process_group": groups[self.here.rank]}  # type: ignore[misc]
        super().build()


def wrappers_that_are_refused(here: Here) -> None:
    """Each with its reason; or all calls are eager, with equal results."""
    for loop, reason in (
        (WithStaticGraph, "with `static_graph` is not known"),
        (WithHookOfTorch, "fp16_compress_wrapper_hook`, which runs Python of a library"),
        (WithPartOfTheProcesses, "averages over 1 of the 2 processes"),
    ):
        with pytest.raises(UnsupportedError, match=f"(?s){reason}"):
            loop(here).run(graphed=True)
        goes_on = type("GoesOn", (loop,), {"kwargs": {"on_unsupported": "eager"}, "steps": 3})
        assert reason in str(_same(here, goes_on, 0).summary)


class LeavesOut(nn.Module):
    """A net with a layer that is not used, and one that one process uses."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3)
        self.of_one = nn.Linear(6, 6)
        self.net = Net()
        self.rank = rank

    def forward(self, x: Tensor) -> Any:
        return self.net(self.of_one(x) if self.rank == 1 else x)


class LeavesSomeOut(FindsUnused):
    def make(self) -> nn.Module:
        return LeavesOut(self.here.rank)


class LooksInWindows(AccumulatesInside):
    wrapper: ClassVar[dict[str, Any]] = {"find_unused_parameters": True}


def steps_where_unused_are_looked_for(here: Here) -> None:
    """A wrapper with `find_unused_parameters=True`."""
    for loop in (FindsUnused, LeavesSomeOut):
        step = _same(here, loop, STEPS - WARM_UP)
        assert not step.summary.calls.eager, step.summary
    with pytest.raises(UnsupportedError, match=r"accumulates gradients \(`no_sync`\)"):
        LooksInWindows(here).run(graphed=True)


def unequal_batches(here: Here) -> None:
    """All decide together, so all have to call."""
    with pytest.raises(ConfigurationError, match=r"inside of `DistributedDataParallel\.join\(\)`"):
        Joins(here).run(graphed=True)


class Shorter(Plain):
    """One process has fewer batches."""

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        return itertools.islice(super().batches(), STEPS - 4 * (self.here.rank == 1))


def fewer_batches_in_one(here: Here) -> None:
    """The other one does not wait for the missing calls."""
    if here.rank == 1:
        Shorter(here).run(graphed=True)
        return
    with pytest.raises(PeerError, match="Another process has come to its end"):
        Shorter(here).run(graphed=True)


class Manual(pl.LightningModule):
    """Manual optimization, with a captured part."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = Net()

    def on_fit_start(self) -> None:
        self.part = GraphedStep(self.run_part, optimizers=self.optimizers())

    def run_part(self, x: Tensor, y: Tensor) -> Tensor:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.manual_backward(loss)
        optimizer.step()
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.part(batch[0][:, :6], batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def manual_optimization_is_refused(here: Here) -> None:
    """The wrapper's forward pass is around the captured part."""
    trainer = pl.Trainer(
        accelerator=here.accelerator,
        devices=2,
        strategy=TrainersDDPStrategy(),
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(UnsupportedError, match="manual optimization on a single device"):
        trainer.fit(Manual(), loader(ragged=False))


class Collective(Plain):
    """Averages gradients by hand."""

    def build(self) -> None:
        self.net = Net().to(self.device)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2, fused=True)

    def step(self, x: Tensor, y: Tensor) -> Any:
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.net(x), y)
        loss.backward()
        for parameter in self.net.parameters():
            dist.all_reduce(parameter.grad)
        self.optimizer.step()
        return loss


class Hidden:
    """A wrapper that a search for modules does not find."""

    __slots__ = ("net",)


class HiddenWrapper(Plain):
    """The step works on a wrapper that it was not given."""

    def step(self, x: Tensor, y: Tensor) -> Any:
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.hidden.net(x), y)
        loss.backward()
        self.optimizer.step()
        return loss

    def run(self, graphed: bool) -> Any:
        self.hidden = Hidden()
        self.hidden.net, self.net = self.net, self.net.module
        return super().run(graphed)


class Waits(Plain):
    """Waits for the other processes on the host."""

    def step(self, x: Tensor, y: Tensor) -> Any:
        dist.barrier()
        return super().step(x, y)


def collectives_that_are_refused(here: Here) -> None:
    """By hand, in a wrapper that was not passed, and one that blocks the host."""
    for loop, reason in (
        (
            Collective,
            r"`c10d::allreduce_`\) in a function that works on no `DistributedDataParallel` or",
        ),
        (HiddenWrapper, r"`DistributedDataParallel`"),
        (Waits, "a barrier"),
    ):
        with pytest.raises(UnsupportedError, match=f"(?s){reason}"):
            loop(here).run(graphed=True)


class OnOneAlone(Collective):
    """A step without collectives."""

    def step(self, x: Tensor, y: Tensor) -> Any:
        return Plain.step(self, x, y)


def a_step_of_one_process(here: Here) -> None:
    """One process alone may call it."""
    if here.rank == 1:
        join(here)
        return
    step = _same(here, OnOneAlone, STEPS - 3)
    assert step.summary.calls.captures == 1, step.summary


class WithFabric(Accumulates):
    """Fabric wraps net and optimizer, casts, clips, and skips averages."""

    precision: Any = "32-true"

    def join(self) -> None:
        self.fabric = Fabric(
            accelerator=self.here.accelerator,
            devices=2,
            strategy=DDPStrategy(**self.wrapper),
            precision=self.precision,
        )
        self.fabric.launch()

    def build(self) -> None:
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
        self.net, self.optimizer = self.fabric.setup(net, optimizer)

    def step(self, x: Tensor, y: Tensor) -> Any:
        loss = nn.functional.cross_entropy(self.net(x), y) / 4
        self.fabric.backward(loss)
        return loss

    def call(self, step: Any, index: int, x: Tensor, y: Tensor) -> Any:
        with self.fabric.no_backward_sync(self.net, enabled=index % 4 != 3):
            return step(x, y)

    def around(self, index: int) -> None:
        if index % 4 == 3:
            self.fabric.clip_gradients(self.net, self.optimizer, max_norm=0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()


def fabric_accumulated(here: Here) -> None:
    """As in `examples/fabric_ddp.py`, with the optimizer outside."""
    step = _same(here, WithFabric, 12)
    assert step.summary.calls.captures == 3, step.summary


class FabricInOne(WithFabric):
    """The whole step in one graph."""

    steps = STEPS
    precision: Any = "bf16-mixed"

    def step(self, x: Tensor, y: Tensor) -> Any:
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.fabric.backward(loss)
        self.fabric.clip_gradients(self.net, self.optimizer, max_norm=0.5, error_if_nonfinite=False)
        self.optimizer.step()
        return loss

    def call(self, step: Any, index: int, x: Tensor, y: Tensor) -> Any:
        return step(x, y)

    def around(self, index: int) -> None:
        pass


def fabric_in_one(here: Here) -> None:
    """Mixed precision, and clipping in the graph."""
    step = _same(here, FabricInOne, STEPS - WARM_UP)
    assert step.summary.calls.captures == 1, step.summary


class FabricInFp16(FabricInOne):
    precision: Any = "16-mixed"

    def step(self, x: Tensor, y: Tensor) -> Any:
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.fabric.backward(loss)
        self.optimizer.step()
        return loss


def the_example_of_fabric(here: Here) -> None:
    """With graphs and without."""
    found = []
    for graphs in (False, True):
        fabric = Fabric(accelerator=here.accelerator, devices=2, strategy="ddp")
        fabric.launch()
        net, losses, report = fabric_ddp.train(fabric, 64, graphs)
        found.append([net.state_dict(), losses])
    assert not differences(*found)
    assert "44 warmed up, 20 replayed, 0 eager" in report, report


def fabric_in_fp16(here: Here) -> None:
    """Losses are scaled; all processes see the same overflows."""
    _same(here, FabricInFp16, STEPS - WARM_UP)


class Compressed(Plain):
    """Gradients are averaged in bfloat16, by a hook of torch's."""

    def build(self) -> None:
        super().build()
        self.net.register_comm_hook(None, default_hooks.bf16_compress_hook)


def plain_loop_compressed(here: Here) -> None:
    """A hook without state."""
    _same(here, Compressed, STEPS - WARM_UP)


class HookedLater(Plain):
    """Registers a hook in the middle of the loop."""

    hook: Any = staticmethod(default_hooks.allreduce_hook)

    def around(self, index: int) -> None:
        if index == WARM_UP + 3:
            self.net.register_comm_hook(None, self.hook)


class WithHookOfTorchLater(HookedLater):
    hook: Any = staticmethod(_HOOK_OF_TORCH)


def a_hook_in_the_middle_of_the_loop(here: Here) -> None:
    """Calls with it are another specialization, with graphs of its own or none."""
    _same(here, HookedLater, STEPS - WARM_UP - 3)
    plain, _ = WithHookOfTorchLater(here).run(graphed=False)
    for unsupported in ("raise", "eager"):
        loop = WithHookOfTorchLater(here)
        loop.kwargs = {"on_unsupported": unsupported}  # type: ignore[misc]
        graphed, step = loop.run(graphed=True)
        assert step.summary.calls.replayed == 4, step.summary
        found = differences(plain, graphed)
        assert not found, f"{len(found)} differences, the first: {found[:8]}"


class SharedBatchNorm(Plain):
    """Batch norm over the batches of all processes: collectives in the forward pass too."""

    def make(self) -> nn.Module:
        return nn.SyncBatchNorm.convert_sync_batchnorm(super().make())


def plain_loop_with_shared_batch_norm(here: Here) -> None:
    """All of them in the graph."""
    _same(here, SharedBatchNorm, STEPS - WARM_UP)


class OnTheDefaultStream(Plain):
    """The wrapper is made on the default stream: torch adds gradients there, and no capture may wait."""

    def build(self) -> None:
        self.net = DistributedDataParallel(Net().to(self.device), [self.here.rank])
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2, fused=True)


def a_wrapper_on_the_default_stream(here: Here) -> None:
    """It is refused by name, and leaves earlier captures of the process intact."""
    reason = "on the default stream, where something that keeps its nodes, such as a `Distributed"
    with pytest.raises(UnsupportedError, match=f"(?s){reason}"):
        OnTheDefaultStream(here).run(graphed=True)
    _same(here, Plain, STEPS - WARM_UP)


def expandable_segments(here: Here) -> None:
    """On GPUs: NCCL is told not to register buffers."""
    _same(here, Plain, STEPS - WARM_UP)


def expandable_segments_alone(here: Here) -> None:
    """On GPUs: NCCL is not told, and registers buffers."""
    with pytest.raises(ConfigurationError, match="NCCL_GRAPH_REGISTER is not set"):
        Plain(here).run(graphed=True)


class AveragesOnTheHost(Plain):
    def join(self) -> None:
        os.environ["RANK"] = os.environ["LOCAL_RANK"]
        torch.cuda.set_device(self.here.rank)
        dist.init_process_group("gloo")


def a_group_that_averages_on_the_host(here: Here) -> None:
    """On GPUs: the process group is not NCCL's."""
    with pytest.raises(UnsupportedError, match="averages gradients on the host"):
        AveragesOnTheHost(here).run(graphed=True)
