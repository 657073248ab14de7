"""The choice of the number of streams on which the ops of a step are captured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cudagraph.capture.graph import CapturedStep
from lightning_cudagraph.compat.attributes import OfThread, setting
from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.device.streams.branches import SentBackError
from lightning_cudagraph.device.streams.recorded_flow import RecordedFlow
from lightning_cudagraph.errors import CaptureError, wrong_argument
from lightning_cudagraph.processes.agreement import Agreement, Alone

MAX_STREAMS = 16
# The fewest of these that lose at most this share of the time of the most, by the data flow, are tried
# after one. (On an H200 the data flow of nine models named the number that trials of all found fastest.
# It ignores that kernels side by side slow each other down, and so overestimates what is gained.)
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


_is_trial = OfThread(False)


def is_trial() -> bool:
    """True if replays of this thread are trials, with effects that are undone."""
    return _is_trial.value


@dataclass(frozen=True, kw_only=True)
class AutoStreams:
    """The fastest number of streams, 1 to 8, within a bound on memory.

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
            expected = "a number of bytes, an int of at least 0, or None"
            raise wrong_argument("AutoStreams", "memory_bytes", self.memory_bytes, expected)

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
    """A capture on some number of streams, and its measurements.

    Attributes:
        state_bytes: device memory of all tensors that a replay changes.
        replay_ms: time of one replay; None if there was no memory to keep what it changes.
    """

    streams: int
    captured: CapturedStep[Any] | None
    barriers: dict[str, int]
    graph_bytes: int
    workspace_bytes: int
    state_bytes: int = 0
    replay_ms: float | None = None

    @property
    def taken_bytes(self) -> int:
        return self.graph_bytes + self.workspace_bytes

    def release(self) -> None:
        """Release the capture."""
        captured, self.captured = self.captured, None
        if captured is not None:
            captured.release()


def _copies_of(live: dict[str, Tensor]) -> dict[str, Tensor] | None:
    """Copies of some tensors; None if there is no memory for them."""
    try:
        return {name: tensor.detach().clone() for name, tensor in live.items()}
    except torch.OutOfMemoryError:
        return None


def streams_of(flow: RecordedFlow) -> list[int]:
    """The numbers of streams that can be faster than one: the best by the data flow, and fewer.

    On two, parts of an optimizer's step can run beside all-reduces, which the data flow does not tell.
    """
    one, _ = flow.on(1)
    placed = {streams: flow.on(streams) for streams in _MORE_STREAMS}
    least = min(time for time, _ in placed.values())
    if least > (1 - _LEAST_GAIN) * one:
        return [2] if flow.has_all_reduces else []
    best = next(n for n, (time, _) in placed.items() if time <= least / (1 - _WORTH_TWICE))
    # With no op on the last ones, fewer streams are the same.
    used = [min(n, placed[n][1]) for n in _MORE_STREAMS if n <= best]
    return sorted({n for n in used if n > 1}, reverse=True)


def _over(more_bytes: int, allowed_bytes: int) -> str:
    """Return the reason if a capture takes more memory than allowed; else an empty text."""
    if more_bytes <= allowed_bytes:
        return ""
    return f"{more_bytes / 2**20:.0f} MiB more, and {allowed_bytes / 2**20:.0f} are allowed"


def _choice_note(best: _Trial, trials: list[_Trial], left_out: list[str]) -> str:
    """Return a note on the choice, its gain and cost, and the reasons against others."""
    one = trials[0]
    replays = ", ".join(f"{trial.streams}: {trial.replay_ms:.3f}" for trial in trials)
    why_not = "".join(f"; not on {reason}" for reason in left_out)
    if best is one:
        no_gain = f"{trials[-1].streams} streams gain less than {_LEAST_GAIN:.0%} " * (len(trials) > 1)
        return f"captured on 1 stream: {no_gain}(ms a replay, {replays}){why_not}"
    more_mib = max(0.0, (best.taken_bytes - one.taken_bytes) / 2**20)
    assert one.replay_ms is not None
    assert best.replay_ms is not None
    factor = one.replay_ms / best.replay_ms
    return (
        f"captured on {best.streams} streams, {factor:.2f} times as fast as on one"
        f" (ms a replay, {replays}), for {more_mib:.0f} MiB more{why_not}"
    )


class StreamChoice:
    """The number of streams for the captures of an engine.

    Processes choose together, by the slowest of them: they replay the same trials at the same time,
    because collectives are in them.

    Args:
        agreement: that of processes that choose together. Without it, `AutoStreams` is one stream
            without trials in a process group.
    """

    def __init__(self, backend: Backend, wanted: Streams, agreement: Agreement | None = None) -> None:
        self._backend = backend
        self._agreement = agreement or Alone()
        self._are_many = agreement is not None
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
        notes = list(self._notes)
        if self._barriers:
            most_common = Counter(self._barriers).most_common(_SHOWN)
            barriers = ", ".join(f"{name} ({n})" for name, n in most_common)
            notes.append(f"all streams wait, before and after, for {barriers}")
        return notes

    def capture(
        self,
        capture: Callable[[], CapturedStep[Any]],
        state: Callable[[CapturedStep[Any]], dict[str, Tensor]],
    ) -> CapturedStep[Any]:
        """Capture a step on the chosen number of streams; the first call makes the choice.

        `state` returns all tensors that replays of a capture change, by name.
        """
        has_group = dist.is_available() and dist.is_initialized()
        if self._streams is None and has_group and not self._are_many:
            self._streams = 1
            self._notes.append(
                "captured on one stream: here the processes of the group do not choose together"
            )
        captured = None
        if self._streams is None:
            captured, self._streams = self._chosen(capture, state)
            if self._streams is None:
                assert captured is not None
                return captured
        self._backend.streams = self._streams
        if captured is None:
            captured = capture()
            self._barriers = self._backend.barriers
        return captured

    @property
    def is_one(self) -> bool:
        return self._streams == 1

    def send_back(self, reason: str) -> None:
        """Fall back to one stream, after a capture on several has failed because of `reason`."""
        self._streams = 1
        self._notes.append(f"captured on one stream: {reason}")

    def _chosen(
        self,
        capture: Callable[[], CapturedStep[Any]],
        state: Callable[[CapturedStep[Any]], dict[str, Tensor]],
    ) -> tuple[CapturedStep[Any] | None, int | None]:
        """The number of streams, and the capture on them if its memory pool can be kept.

        If another process cannot capture the step, the number is None: what this one has captured is
        released as soon as the processes have told each other.
        """
        trials: list[_Trial] = []
        try:
            with setting(self._backend, records_flow=True):
                one, failure = self._try(1, capture)
            flow, self._backend.flow = self._backend.flow, None
            trials.append(one)
            if failure:  # in another process
                return one.captured, None
            assert flow is not None
            candidates = self._agreement.gather(streams_of(flow))[0]
            best = self._best(trials, candidates, capture, state)
            for trial in trials:
                if trial is not best:
                    trial.release()
            if not all(self._agreement.gather(best.captured is not None and best.captured.stay())):
                best.release()
            self._barriers = best.barriers
            return best.captured, best.streams
        except BaseException:
            for trial in trials:
                trial.release()
            raise

    def _best(
        self,
        trials: list[_Trial],
        candidates: list[int],
        capture: Callable[[], CapturedStep[Any]],
        state: Callable[[CapturedStep[Any]], dict[str, Tensor]],
    ) -> _Trial:
        """Compare one stream, tried already, with the first candidate that the memory allows."""
        one = trials[0]
        if not candidates:
            no_gain = f"by its data flow, more gain less than {_LEAST_GAIN:.0%}"
            self._notes.append(f"captured on 1 stream: {no_gain}")
            return one
        self._measure(one, state)
        if one.replay_ms is None:
            self._notes.append("captured on one stream: there was no memory to try others")
            return one
        best = one
        left_out: list[str] = []
        allowed_bytes = self._auto.allowed_bytes(one.taken_bytes)
        for streams in candidates:
            # Checked before the trial: workspaces stay allocated after it.
            more_bytes = (streams - 1) * one.workspace_bytes
            if over := self._first(_over(more_bytes, allowed_bytes)):
                left_out.append(f"{streams}: {over}")
                continue
            needed_bytes = one.graph_bytes + allowed_bytes + one.state_bytes
            if any(self._agreement.gather(self._backend.free_bytes() < needed_bytes)):
                one.release()  # if it is the fastest, it is captured again
            trial, failure = self._try(streams, capture)
            if failure:
                trial.release()
                left_out.append(f"{streams}: {failure}")
                break
            trials.append(trial)
            over = self._first(_over(trial.taken_bytes - one.taken_bytes, allowed_bytes))
            if not over:
                self._measure(trial, state)
                if trial.replay_ms is not None:
                    if trial.replay_ms <= (1 - _LEAST_GAIN) * one.replay_ms:
                        best = trial
                    break
                over = "there was no memory to try it"
            left_out.append(f"{streams}: {over}")
            trials.remove(trial)
            trial.release()
        self._notes.append(_choice_note(best, trials, left_out))
        return best

    def _first(self, mine: str) -> str:
        """The reason of the first process that has one."""
        return next(filter(None, self._agreement.gather(mine)), "")

    def _try(self, streams: int, capture: Callable[[], CapturedStep[Any]]) -> tuple[_Trial, str]:
        """Capture on some streams, in all processes.

        Returns:
            The trial, and why it has failed in any process; empty if it has not.

        Raises:
            Exception: that of the capture in this process on one stream; if it is alone, any other than
                those of ops that several streams cannot hold.
        """
        self._backend.streams = streams
        before_bytes = self._backend.graph_bytes()
        captured: CapturedStep[Any] | None = None
        failures: list[str] = []
        try:
            with self._backend.in_pool():
                captured = capture()
        except Exception as error:
            # Told before it is raised: the others wait here, and must not go on to another question.
            failures = self._agreement.gather(str(error) or repr(error))
            is_of_streams = self._are_many or isinstance(error, (SentBackError, CaptureError))
            if streams == 1 or not is_of_streams:
                raise
        else:
            failures = self._agreement.gather("")
        graph_bytes = self._backend.graph_bytes() - before_bytes
        workspace_bytes = self._backend.workspace_bytes()
        trial = _Trial(streams, captured, self._backend.barriers, graph_bytes, workspace_bytes)
        return trial, next(filter(None, failures), "")

    def _measure(self, trial: _Trial, state: Callable[[CapturedStep[Any]], dict[str, Tensor]]) -> None:
        """Measure replays, and undo what they change, if there is memory to keep it."""
        assert trial.captured is not None
        live = state(trial.captured)
        trial.state_bytes = sum(tensor.nbytes for tensor in live.values())
        rng_state = self._backend.rng_state()
        copies = None
        if trial.state_bytes <= self._backend.free_bytes():
            copies = _copies_of(live)
        if not all(self._agreement.gather(copies is not None)) or copies is None:
            return
        try:
            with setting(_is_trial, value=True):
                trial.replay_ms = self._replay_ms(trial.captured)
        finally:
            with torch.no_grad():
                for name, tensor in live.items():
                    # By `data`, so that the version counter stays: code around a `GraphedStep` may have
                    # saved the tensor for its backward pass.
                    tensor.data.copy_(copies[name])
            self._backend.set_rng_state(rng_state)

    def _replay_ms(self, captured: CapturedStep[Any]) -> float:
        first_s = min(self._seconds(captured, 1) for _ in range(_FIRST_REPLAYS))
        first_s = max(self._agreement.gather(first_s))  # all replay as often: they wait for each other
        replays = max(1, min(_ROUND_REPLAYS, int(_ROUND_S / max(first_s, 1e-6))))
        fastest_s = min(self._seconds(captured, replays) for _ in range(_ROUNDS))
        return 1e3 * max(self._agreement.gather(fastest_s)) / replays

    def _seconds(self, captured: CapturedStep[Any], replays: int) -> float:
        self._backend.synchronize()
        started_s = perf_counter()
        for _ in range(replays):
            captured.rerun()
        self._backend.synchronize()
        return perf_counter() - started_s
