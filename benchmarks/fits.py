"""Interleaved fits: several in one process, block by block, so that drift of the machine cancels.

Each fit has a thread of its own, and one of them runs at a time. So figures to compare are measured a
second apart, at the same clocks and temperatures, and each fit captures its graphs once. Each has a
random state of its own, from the same seed: all see the same batches, weights and dropout.
"""

from __future__ import annotations

import contextlib
import io
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils._pytree import tree_map

__all__ = [
    "ON_GPU",
    "BlockedBatches",
    "Blocks",
    "Measured",
    "Times",
    "environment",
    "fits_in_turn",
    "pinned",
    "silent_fits_in_turn",
    "synchronize",
]

ON_GPU = torch.cuda.is_available()
# Distinct batches, so that two steps in a row have different ones.
_READY_BATCHES = 16
_SEED = 1


def environment() -> dict[str, Any]:
    """Device and versions that the figures belong to."""
    return {
        "device": torch.cuda.get_device_name() if ON_GPU else "CPU emulator: these figures mean nothing",
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "lightning": pl.__version__,
        "python": platform.python_version(),
    }


def pinned(batch: Any) -> Any:
    """A batch in host memory that the device can copy from at once."""
    return tree_map(lambda tensor: tensor.pin_memory() if ON_GPU else tensor, batch)


def synchronize() -> None:
    """Wait for the device, if there is one."""
    if ON_GPU:
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Blocks:
    """Division of the steps of a fit into blocks.

    Attributes:
        warm_steps: steps before the first block: warm-up, capture, verified replays, and some for the
            allocator to settle.
        lead_steps: untimed steps before each block, after another fit has run.
        steps: timed steps of a block.
        rounds: blocks of a fit.
    """

    warm_steps: int
    lead_steps: int
    steps: int
    rounds: int

    @property
    def total_steps(self) -> int:
        """Steps of a fit. The last one only ends it: no code of a loader runs after its last batch."""
        return self.warm_steps + self.rounds * (self.lead_steps + self.steps) + 1


class _Random:
    """The random state of a fit, kept while other fits run."""

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[torch.cuda.current_device()] if ON_GPU else []):
            torch.manual_seed(_SEED)
            self.keep()

    def keep(self) -> None:
        """Save the random state of the process."""
        self._host = torch.get_rng_state()
        self._device = torch.cuda.get_rng_state() if ON_GPU else None

    def go_on(self) -> None:
        """Restore it."""
        torch.set_rng_state(self._host)
        if self._device is not None:
            torch.cuda.set_rng_state(self._device)


class _Turns:
    """The schedule of the fits' threads, one of which runs at a time."""

    def __init__(self, names: Sequence[str], rounds: int) -> None:
        names = list(names)
        # Forward and backward in turn, so that drift within a round cancels too. The first entry of a
        # fit is its start, the last one its end.
        between = [names if number % 2 == 0 else names[::-1] for number in range(rounds)]
        self._schedule = [name for order in (names, *between, names) for name in order]
        # Each fit waits for a lock of its own. Nothing in them changes while another fit runs, which
        # would take a change for an effect of its step.
        self._locks = {name: threading.Lock() for name in names}
        for name in names[1:]:
            self._locks[name].acquire()
        self._random = {name: _Random() for name in names}

    def take(self, name: str) -> None:
        """Wait until it is the turn of `name`."""
        self._locks[name].acquire()
        self._random[name].go_on()

    def pass_on(self, name: str, for_good: bool = False) -> None:
        """End the turn of `name`."""
        if not for_good:
            self._random[name].keep()
        del self._schedule[0]
        if for_good:
            self._schedule = [other for other in self._schedule if other != name]
        if self._schedule:
            self._locks[self._schedule[0]].release()


class BlockedBatches:
    """Batches of one fit. Iteration waits for the fit's turns, and times its blocks.

    Attributes:
        step_us: mean step time of each block in microseconds, with an idle device at both ends.
        begin_s: seconds from construction to the first block, warm steps included.
    """

    def __init__(self, batches: list[Any], blocks: Blocks, name: str, turns: _Turns) -> None:
        self._batches = batches
        self._blocks = blocks
        self._name = name
        self._turns = turns
        self.step_us: list[float] = []
        self.begin_s = float("nan")
        self._started_s = time.perf_counter()

    def __len__(self) -> int:
        return self._blocks.total_steps

    def __iter__(self) -> Iterator[Any]:
        step = 0

        def some(steps: int) -> Iterator[Any]:
            nonlocal step
            for _ in range(steps):
                yield self._batches[step % len(self._batches)]
                step += 1

        yield from some(self._blocks.warm_steps)
        synchronize()
        self.begin_s = time.perf_counter() - self._started_s
        for _ in range(self._blocks.rounds):
            synchronize()
            self._turns.pass_on(self._name)
            self._turns.take(self._name)
            yield from some(self._blocks.lead_steps)
            synchronize()
            started_s = time.perf_counter()
            yield from some(self._blocks.steps)
            synchronize()
            self.step_us.append((time.perf_counter() - started_s) / self._blocks.steps * 1e6)
        # The last turn is the end of the fit, with its report.
        self._turns.pass_on(self._name)
        self._turns.take(self._name)
        yield from some(1)


@dataclass
class Times:
    """The times of one fit.

    Attributes:
        step_us: mean step time of each block in microseconds.
        begin_s: seconds until the first block.
    """

    step_us: list[float] = field(default_factory=list)
    begin_s: float = float("nan")

    @property
    def median_us(self) -> float:
        return statistics.median(self.step_us)

    @property
    def spread_us(self) -> tuple[float, float]:
        """The quartiles."""
        return _quarters(self.step_us)

    def ratio_to(self, other: Times) -> tuple[float, float, float]:
        """Median and quartiles of the ratios, taken round by round."""
        ratios = [mine / its for mine, its in zip(self.step_us, other.step_us, strict=True)]
        return statistics.median(ratios), *_quarters(ratios)


@dataclass
class Measured(Times):
    """The times of one fit, or its failure.

    Attributes:
        failure: the exception that ended it, or None.
    """

    failure: BaseException | None = None


def _quarters(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def fits_in_turn(
    fits: dict[str, Callable[[BlockedBatches], None]],
    make_batch: Callable[[], Any],
    blocks: Blocks,
    in_main_thread: str | None = None,
    ready_batches: int = _READY_BATCHES,
) -> dict[str, Measured]:
    """Run several fits, block by block in turn.

    Args:
        fits: functions that train on the given batches to their end, by name.
        make_batch: makes one batch.
        blocks: the division of the steps into blocks.
        in_main_thread: the name of the one fit, if any, that must run in the main thread.
        ready_batches: number of distinct batches.

    Returns:
        The times or the failure of each. A failure does not affect the others.
    """
    turns = _Turns(list(fits), blocks.rounds)
    torch.manual_seed(_SEED)
    ready = [make_batch() for _ in range(ready_batches)]
    measured = {name: Measured() for name in fits}

    def run(name: str, fit: Callable[[BlockedBatches], None]) -> None:
        turns.take(name)
        try:
            batches = BlockedBatches(ready, blocks, name, turns)
            fit(batches)
            synchronize()
            measured[name].step_us, measured[name].begin_s = batches.step_us, batches.begin_s
        except BaseException as error:
            measured[name].failure = error
        finally:
            turns.pass_on(name, for_good=True)

    threads = [
        threading.Thread(target=run, args=each, name=each[0])
        for each in fits.items()
        if each[0] != in_main_thread
    ]
    for thread in threads:
        thread.start()
    if in_main_thread in fits:
        run(in_main_thread, fits[in_main_thread])
    for thread in threads:
        thread.join()
    return measured


def silent_fits_in_turn(
    fits: dict[str, Callable[[BlockedBatches], None]],
    make_batch: Callable[[], Any],
    blocks: Blocks,
    ready_batches: int = _READY_BATCHES,
) -> dict[str, Measured]:
    """Run several fits in turn, as `fits_in_turn`; what they draw goes to no terminal.

    Raises:
        BaseException: if one failed.
    """
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        measured = fits_in_turn(fits, make_batch, blocks, ready_batches=ready_batches)
    for each in measured.values():
        if each.failure is not None:
            raise each.failure
    return measured
