"""The choice of the number of streams on which the ops of a step are captured."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cudagraph.capture.graph import CapturedStep
from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.device.streams.branches import SentBackError
from lightning_cudagraph.errors import CaptureError, ConfigurationError

__all__ = [
    "MAX_STREAMS",
    "AskedStreams",
    "AutoStreams",
    "StreamChoice",
    "Streams",
    "are_streams",
    "is_trial",
    "streams_for",
]

MAX_STREAMS = 16
# Tried after one, as long as each doubling saves this share of the time. (The benchmarks' GPT on an
# H200: 2.202 ms a replay on one stream, 1.951 on two, 1.907 on four.)
_MORE_STREAMS = (2, 4, 8)
_WORTH_TWICE = 0.01
# Several streams must save this share of the time of one.
_LEAST_GAIN = 0.03
# The default bound on the memory that several streams take beyond one: the larger of a share of the
# memory of one, and a size that is small on GPUs of today.
_MORE_SHARE = 0.15
_MORE_BYTES = 1 << 30
# A trial: a few single replays, then rounds of several; the fastest round counts.
_FIRST_REPLAYS = 2
_ROUNDS = 3
_ROUND_S = 0.03
_ROUND_REPLAYS = 10
# The most kinds of barriers that a note names.
_SHOWN = 4


class _Trials(threading.local):
    """A flag of each thread: a trial is under way."""

    under_way = False


_trials = _Trials()


def is_trial() -> bool:
    """True if replays of this thread are trials, with effects that are undone."""
    return _trials.under_way


@contextmanager
def _trial() -> Iterator[None]:
    _trials.under_way = True
    try:
        yield
    finally:
        _trials.under_way = False


@dataclass(frozen=True, kw_only=True)
class AutoStreams:
    """The fastest of 1, 2, 4 and 8 streams, within a bound on memory.

    Args:
        memory_bytes: the most device memory in bytes that graph and workspaces may take beyond those of
            one stream; fewer streams are used if they would take more. None: 15 % of the memory of one
            stream, but at least 1 GiB.

    Raises:
        ConfigurationError: if `memory_bytes` is not an int of at least 0, or None.
    """

    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.memory_bytes is not None and (
            type(self.memory_bytes) is not int or self.memory_bytes < 0
        ):
            raise ConfigurationError(
                f"`AutoStreams(memory_bytes={self.memory_bytes!r})`: expected a number of bytes, an int"
                " of at least 0, or None."
            )

    def allowed_bytes(self, one_bytes: int) -> int:
        """Return the bytes that several streams may take beyond the `one_bytes` of one."""
        if self.memory_bytes is not None:
            return self.memory_bytes
        return max(_MORE_BYTES, int(_MORE_SHARE * one_bytes))


Streams = int | AutoStreams
# The argument of the user.
AskedStreams = Literal["auto"] | int | AutoStreams


def are_streams(value: object) -> bool:
    """True if a value is a valid `streams` argument."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return value == "auto" or isinstance(value, AutoStreams) or (is_whole and 1 <= value <= MAX_STREAMS)  # type: ignore[operator]


def streams_for(asked: AskedStreams) -> Streams:
    """Translate a `streams` argument."""
    return AutoStreams() if asked == "auto" else asked


@dataclass
class _Trial:
    """The measurements of a capture on some number of streams.

    Attributes:
        replay_ms: time of one replay.
        taken_bytes: device memory of graph and workspaces.
        workspace_bytes: device memory of the workspaces alone.
    """

    streams: int
    replay_ms: float
    taken_bytes: int
    workspace_bytes: int


def _over(more_bytes: int, allowed_bytes: int) -> str:
    """Return the reason if a capture takes more memory than allowed; else an empty text."""
    if more_bytes <= allowed_bytes:
        return ""
    return f"{more_bytes / 2**20:.0f} MiB more, and {allowed_bytes / 2**20:.0f} are allowed"


def _choice_note(best: _Trial, trials: list[_Trial], left_out: list[str]) -> str:
    """Return a note on the choice, its gain and cost, and the reasons against more streams."""
    one = trials[0]
    replays = ", ".join(f"{trial.streams}: {trial.replay_ms:.3f}" for trial in trials)
    why_not = "".join(f"; not on {reason}" for reason in left_out)
    if best is one:
        no_gain = f"no other gains {_LEAST_GAIN:.0%} " if len(trials) > 1 else ""
        return f"captured on 1 stream: {no_gain}(ms a replay, {replays}){why_not}"
    more_mib = max(0.0, (best.taken_bytes - one.taken_bytes) / 2**20)
    factor = one.replay_ms / best.replay_ms
    return (
        f"captured on {best.streams} streams, {factor:.2f} times as fast as on one"
        f" (ms a replay, {replays}), for {more_mib:.0f} MiB more{why_not}"
    )


class StreamChoice:
    """The number of streams for the captures of an engine.

    Args:
        backend: the device, or its emulator.
        wanted: a number, or `AutoStreams` for trials. With a process group, `AutoStreams` is one
            stream without trials: the clocks of the processes would lead to different choices.
    """

    def __init__(self, backend: Backend, wanted: Streams) -> None:
        self._backend = backend
        self._auto = wanted if isinstance(wanted, AutoStreams) else AutoStreams()
        self._streams = wanted if isinstance(wanted, int) else None
        self._notes: list[str] = []
        self._barriers: dict[str, int] = {}
        if self._streams is None and not backend.overlaps:
            self._streams = 1
        elif self._streams is not None and self._streams > 1:
            self._notes.append(f"captured on {self._streams} streams")

    @property
    def notes(self) -> list[str]:
        """Notes for the report."""
        notes = list(self._notes)
        if self._barriers:
            most_common = Counter(self._barriers).most_common(_SHOWN)
            barriers = ", ".join(f"{name} ({n})" for name, n in most_common)
            notes.append(f"all streams wait, before and after, for {barriers}")
        return notes

    def captured(self) -> None:
        """Note the barriers of a capture that has succeeded."""
        self._barriers = self._backend.barriers

    def settle(
        self,
        capture: Callable[[], CapturedStep[Any]],
        state: Callable[[CapturedStep[Any]], dict[str, Tensor]],
    ) -> None:
        """Set the streams of the next capture; the first call makes the choice.

        Args:
            capture: captures the step, without timing events.
            state: returns all tensors that replays of a capture change, by name.
        """
        if self._streams is None and dist.is_available() and dist.is_initialized():
            self._streams = 1
            self._notes.append("captured on one stream: processes of a group do not choose together")
        elif self._streams is None:
            self._streams = self._fastest(capture, state)
        self._backend.streams = self._streams

    @property
    def is_one(self) -> bool:
        """True if captures are on one stream."""
        return self._streams == 1

    def send_back(self, reason: str) -> None:
        """Fall back to one stream, after a capture on several has failed because of `reason`."""
        self._streams = 1
        self._notes.append(f"captured on one stream: {reason}")

    def _fastest(
        self,
        capture: Callable[[], CapturedStep[Any]],
        state: Callable[[CapturedStep[Any]], dict[str, Tensor]],
    ) -> int:
        with self._backend.apart(), _trial():
            one = self._try(1, capture, state)
            if one is None:
                self._notes.append("captured on one stream: there was no memory to try others")
                return 1
            best, trials = one, [one]
            left_out: list[str] = []
            allowed_bytes = self._auto.allowed_bytes(one.taken_bytes)
            for streams in _MORE_STREAMS:
                # Checked before the trial: workspaces stay allocated after it.
                if over := _over((streams - 1) * one.workspace_bytes, allowed_bytes):
                    left_out.append(f"{streams}: {over}")
                    break
                try:
                    trial = self._try(streams, capture, state)
                except (SentBackError, CaptureError) as error:
                    left_out.append(f"{streams}: {error}")
                    break
                if trial is None:
                    left_out.append(f"{streams}: there was no memory to try it")
                    break
                if over := _over(trial.taken_bytes - one.taken_bytes, allowed_bytes):
                    left_out.append(f"{streams}: {over}")
                    break
                trials.append(trial)
                if trial.replay_ms > (1 - _WORTH_TWICE) * best.replay_ms:
                    break  # more streams would gain less, and take more workspaces
                best = trial
        if best.replay_ms > (1 - _LEAST_GAIN) * one.replay_ms:
            best = one
        self._notes.append(_choice_note(best, trials, left_out))
        return best.streams

    def _try(
        self,
        streams: int,
        capture: Callable[[], CapturedStep[Any]],
        state: Callable[[CapturedStep[Any]], dict[str, Tensor]],
    ) -> _Trial | None:
        self._backend.streams = streams
        before_bytes = self._backend.graph_bytes()
        captured = capture()
        try:
            taken_bytes = self._backend.graph_bytes() - before_bytes
            live = state(captured)
            if sum(tensor.nbytes for tensor in live.values()) > self._backend.free_bytes():
                return None
            rng_state = self._backend.rng_state()
            copies = {name: tensor.detach().clone() for name, tensor in live.items()}
            try:
                replay_ms = self._replay_ms(captured)
            finally:
                with torch.no_grad():
                    for name, tensor in live.items():
                        tensor.copy_(copies[name])
                self._backend.set_rng_state(rng_state)
            workspace_bytes = self._backend.workspace_bytes()
            return _Trial(streams, replay_ms, taken_bytes + workspace_bytes, workspace_bytes)
        finally:
            captured.release()

    def _replay_ms(self, captured: CapturedStep[Any]) -> float:
        first_s = min(self._seconds(captured, 1) for _ in range(_FIRST_REPLAYS))
        replays = max(1, min(_ROUND_REPLAYS, int(_ROUND_S / max(first_s, 1e-6))))
        return 1e3 * min(self._seconds(captured, replays) for _ in range(_ROUNDS)) / replays

    def _seconds(self, captured: CapturedStep[Any], replays: int) -> float:
        self._backend.synchronize()
        started_s = perf_counter()
        for _ in range(replays):
            captured.rerun()
        self._backend.synchronize()
        return perf_counter() - started_s
