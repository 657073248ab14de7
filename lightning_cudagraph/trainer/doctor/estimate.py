"""An estimate of what a graph can gain: kernels of a plain step, and its time on host and device."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch.autograd import set_multithreading_enabled

from lightning_cudagraph.device.sentry.own_modes import OwnDispatchMode
from lightning_cudagraph.device.streams.accesses import only_looks
from lightning_cudagraph.timing.output.report import LAUNCH_BOUND

# Host time of an op in an eager step under Lightning, assumed where there is no GPU. On the machine of
# docs/beside_other_ways.md, with a slow CPU, steps of GPT, BERT-base, ResNet-18 and DLRM take 26 to 61
# µs for each of their ops (609, 1268, 217 and 94). That a fast CPU takes a third of 30 is a guess.
_ASSUMED_HOST_US_PER_OP = (10, 30)
_ALLOCATING = ("aten::empty", "aten::new_empty")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Numbers of one optimizer step that ran as without this package. None: not measured.

    Attributes:
        ops: ops that compute, with all micro-batches; each launches a kernel or a few. Views and
            allocations are left out.
        optimizer_ops: those of them in clipping and the optimizer's step, in the form that torch's
            optimizers take on this device.
        kernels: kernels that the device ran.
        host_ms: time of the host to launch them, with an idle device at the beginning.
        step_ms: the same, until the device has finished.
        device_ms: time in which the device computed.
        replay_ms: mean time of a replay, from the end of one step to that of the next.
        peak_bytes: highest device memory in a step.
        graph_bytes: memory that the graph has taken; on the emulator, an upper bound.
    """

    ops: int
    optimizer_ops: int
    kernels: int | None = None
    host_ms: float | None = None
    step_ms: float | None = None
    device_ms: float | None = None
    replay_ms: float | None = None
    peak_bytes: int | None = None
    graph_bytes: int | None = None

    @property
    def highest_gain(self) -> float | None:
        """Step time by device time: the gain of a graph on one stream that leaves no gap."""
        return None if self.step_ms is None or not self.device_ms else self.step_ms / self.device_ms

    @property
    def is_launch_bound(self) -> bool | None:
        gain = self.highest_gain
        return None if gain is None else gain >= LAUNCH_BOUND

    @property
    def assumed_host_ms(self) -> tuple[float, ...]:
        """Host time of the ops, for a fast CPU and a slow one."""
        return tuple(self.ops * us * 1e-3 for us in _ASSUMED_HOST_US_PER_OP)

    def to_dict(self) -> dict[str, Any]:
        """All numbers, as values that JSON can hold."""
        assumed = {"us_per_op": [*_ASSUMED_HOST_US_PER_OP], "host_ms": [*self.assumed_host_ms]}
        return {
            **asdict(self),
            "is_launch_bound": self.is_launch_bound,
            "highest_gain": self.highest_gain,
            "assumed": assumed if self.host_ms is None else None,
        }

    def lines(self) -> list[tuple[str, str]]:
        """The estimate in words: subjects, and what is said of them."""
        ops = f"{self.ops} ops that compute, {self.optimizer_ops} of them in clipping and optimizer"
        if self.kernels is None:
            ops += "; a GPU launches a kernel or a few for each, and fewer for a fused optimizer"
        else:
            ops = f"{self.kernels} kernels a step; {ops}"
        found = [("kernels", ops), *self._times(), ("launch-bound", self._verdict())]
        return [*found, *self._memory()]

    def _times(self) -> list[tuple[str, str]]:
        if self.host_ms is None or self.step_ms is None:
            (low_ms, high_ms), (low_us, high_us) = self.assumed_host_ms, _ASSUMED_HOST_US_PER_OP
            assumed = f"assumed, not measured: {low_us} to {high_us} µs an op"
            return [("host", f"{low_ms:.1f} to {high_ms:.1f} ms a step beside a GPU ({assumed})")]
        found = f"{self.host_ms:.2f} ms to launch a step that takes {self.step_ms:.2f} ms"
        if self.device_ms is not None:
            found += f"; the device computes for {self.device_ms:.2f} ms of it"
        return [("host", found)]

    def _verdict(self) -> str:
        gain = self.highest_gain
        if self.host_ms is None:
            return (
                "not measured: this is no GPU. It is, on one that computes the step in less time than"
                " the host needs"
            )
        if gain is None:
            return "not measured: another profiler is running"
        found = f"no, {gain:.2f} times" if gain < LAUNCH_BOUND else f"yes, about {gain:.1f} times"
        if self.replay_ms and self.step_ms is not None:
            by = self.step_ms / self.replay_ms
            found += f"; a replay took {self.replay_ms:.2f} ms, {by:.1f} times as fast as a plain step"
        return found

    def _memory(self) -> list[tuple[str, str]]:
        found = []
        if self.peak_bytes is not None:
            found.append(f"{self.peak_bytes / 2**20:.1f} MiB at the peak of a plain step")
        if self.graph_bytes:
            at_most = " at most, because the emulator reuses none" if self.host_ms is None else ""
            found.append(f"{self.graph_bytes / 2**20:.1f} MiB for a graph{at_most}")
        return [("memory", "; ".join(found))] if found else []


class StepMeter(Callback):
    """Callback that measures the optimizer steps of a plain run, from the batch to its end.

    Of several micro-batches the sum is taken, without the time and the ops between them. An accumulation
    window that the end of an epoch cuts short is not measured.

    On a CPU the second step is counted. On a GPU there are three steps of warm-up, five that are timed,
    each from an idle device, one that is counted, and one under torch's profiler, if no other runs.

    Attributes:
        most_steps: of the optimizer; the run ends earlier, when all is measured.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        warm_up, self._n_timed = (3, 5) if self._is_cuda else (1, 0)
        self._counted_step = warm_up + self._n_timed
        self._first_timed_step = warm_up
        self._n_steps = self._counted_step + 1 + self._is_cuda
        self.most_steps = 2 * self._n_steps  # at most every second window is short
        self._step = 0  # of those in whole windows
        self._is_whole = False
        self._global_step = 0
        self._measures = ExitStack()  # of the present micro-batch
        self._count = _OpCount()
        self._ops_before_optimizer = 0
        self._host_ms = [0.0] * self._n_timed
        self._step_ms = [0.0] * self._n_timed
        self._kernels: int | None = None
        self._device_ms: float | None = None
        self._peak_bytes: int | None = None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        n_batches, in_window = trainer.num_training_batches, trainer.accumulate_grad_batches
        first = batch_idx - batch_idx % in_window
        self._is_whole = first + min(in_window, n_batches) <= n_batches
        if self._is_whole:
            self._begin()

    def on_before_optimizer_step(self, *args: Any) -> None:
        if self._is_whole and self._step == self._counted_step:
            self._ops_before_optimizer = self._count.ops

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.close()
        self._step += self._is_whole and trainer.global_step > self._global_step
        self._global_step = trainer.global_step
        if self._step == self._n_steps:
            trainer.should_stop = True

    @property
    def has_run(self) -> bool:
        """True if steps were measured."""
        return self._step > 0

    def close(self) -> None:
        """End the measures of the present micro-batch, also of one that an exception has ended."""
        self._measures.close()

    def estimate(self, replay_ms: float | None, graph_bytes: int) -> Estimate | None:
        """The numbers, with those of a run with graphs; None if no step was counted."""
        ops = self._count.ops
        if not ops:
            return None
        return Estimate(
            ops=ops,
            optimizer_ops=ops - self._ops_before_optimizer,
            kernels=self._kernels,
            host_ms=median(self._host_ms) if self._is_cuda else None,
            step_ms=median(self._step_ms) if self._is_cuda else None,
            device_ms=self._device_ms,
            replay_ms=replay_ms if self._is_cuda else None,
            peak_bytes=self._peak_bytes,
            graph_bytes=graph_bytes or None,
        )

    def _begin(self) -> None:
        step = self._step
        if self._is_cuda:
            torch.cuda.synchronize()
        if step == self._counted_step:
            # The backward pass of a GPU's step would run in another thread, past the count.
            self._measures.enter_context(set_multithreading_enabled(False))
            self._measures.enter_context(self._count)
        elif self._first_timed_step <= step < self._counted_step:
            torch.cuda.reset_peak_memory_stats()
            self._measures.callback(self._time_since, perf_counter())
        elif step > self._counted_step:
            profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            with suppress(RuntimeError):  # another is running
                profile.start()
                self._measures.callback(self._read, profile)

    def _time_since(self, began_s: float) -> None:
        index = self._step - self._first_timed_step
        self._host_ms[index] += (perf_counter() - began_s) * 1e3
        torch.cuda.synchronize()
        self._step_ms[index] += (perf_counter() - began_s) * 1e3
        self._peak_bytes = max(self._peak_bytes or 0, torch.cuda.max_memory_allocated())

    def _read(self, profile: torch.profiler.profile) -> None:
        torch.cuda.synchronize()
        profile.stop()
        events = [
            event
            for event in profile.events() or ()
            if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)
        ]
        copies = ("Memcpy", "Memset")
        kernels = sum(not event.name.startswith(copies) for event in events)
        self._kernels = (self._kernels or 0) + kernels
        spans_us = sorted((event.time_range.start, event.time_range.end) for event in events)
        self._device_ms = (self._device_ms or 0.0) + _covered(spans_us) * 1e-3


class _OpCount(OwnDispatchMode):
    """Mode that counts ops that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.ops += not (only_looks(func) or func._schema.name.startswith(_ALLOCATING))
        return func(*args, **(kwargs or {}))


def _covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union of sorted spans."""
    total, reached = 0.0, float("-inf")
    for begin, end in spans:
        total += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return total
