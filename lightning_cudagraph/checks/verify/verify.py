"""A replay held against an eager step from the same state, on the same batch.

What a capture freezes without anybody noticing shows here: the eager step runs the user's Python again,
and if it comes to other numbers than the replay, the graph is not the step any more. The first replay
checks the capture itself. Later ones, on another batch and with another learning rate than those of the
capture, catch what was baked in.

What counts as the same: every bit; or, if two replays from one state differ from one another (kernels
with atomics do, some of them seldom, so that up to 16 replays are compared), being about as far from
them. Two eager steps would be no measure: host code that counts its calls makes them differ too. Or,
rarely, rounding: the kernels of a graph can be others than those of an eager step (a library that
chooses an algorithm by the memory it is given), but they are the same in every replay. So a difference
in the last places is taken for rounding only if the first check of the graph showed one too, which is
that of the first replay, when nothing on the host had had the time to change; or if torch.compile has
compiled something since, which an eager step may call. A frozen value that drifts slowly from there on
is no rounding.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lightning_cudagraph.checks.verify.compare import (
    distance,
    names_that_differ,
    rounding,
    verification_error,
)
from lightning_cudagraph.checks.verify.memory import host_free_bytes
from lightning_cudagraph.checks.verify.tape import TapeDifference
from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.device.sentry.compiled import compilations
from lightning_cudagraph.errors import CUDAGraphError, StaleGraphError, VerificationError
from lightning_cudagraph.processes.agreement import Agreement
from lightning_cudagraph.tensors.batch import OF_THE_HOST

__all__ = ["Verifier"]

_Values = dict[str, Tensor]
Trace = Callable[[], TapeDifference | None]

# Kernels with atomics differ from run to run. A replay passes then if it is no further from an eager
# step than this many times the distance between two replays.
_SPREAD = 10.0
# Atomics that seldom meet come to the same sums in most replays: so many are made to see whether they
# are what moved an eager step in the last places. In a DLRM that torch.compile had compiled (26 tables
# of 1000 rows, batch 128, H200) two replays were the same, and an eager step was not.
_REPLAYS_TO_COMPARE = 16
# Before the step, after it eagerly, and, if that differs, after a first replay.
_COPIES = 3
# Pauses after which a replay is checked, whatever that costs; later ones within the budget.
_PAUSES = 3
# Without a pause, replays are checked at distances that grow by this factor, from the first one on.
_FIRST_DISTANCE = 64
_GROWTH = 4


def _no_rates() -> tuple[Any, ...]:
    return ()


@dataclass
class _History:
    """What the checks of one graph have seen.

    Attributes:
        captured_rates: the learning rates at the capture.
        checks: how many there have been.
        had_other_rates: one of them was with other learning rates than those of the capture.
        rounds_differently: the first of them found differences in the last places.
        pauses: of the run, before the last check.
        latest_replay: the one that was asked about last.
        next_replay: the one that is checked next where there is no pause.
        compilations: how often torch.compile had compiled something before them. What was compiled since
            (for another size, say) may be what an eager step calls now, and differ in the last places.
    """

    captured_rates: tuple[Any, ...]
    compilations: int
    checks: int = 0
    had_other_rates: bool = False
    rounds_differently: bool = False
    pauses: int = 0
    latest_replay: int = 0
    next_replay: int = _FIRST_DISTANCE


@dataclass
class _Outcome:
    """What one way of doing the step came to."""

    values: _Values
    rng_state: Tensor


@dataclass
class Verifier:
    """Decides which replays are checked, and checks them.

    Attributes:
        backend: where steps run.
        replays: how many of the first replays of a graph are checked. The first one has the batch of
            the capture; a single check is therefore that of the second one.
        every_n_steps: beyond those, check one replay in so many; None for none.
        rates: the learning rates. If none of the checks of a graph has been with others than those of
            its capture, the first replay that is gets one more check.
        agreement: with the other processes of the run, which check the same replays.
        checked: replays that were checked.
        budget: the share of the run's time that checks may take that come later than the first ones.
        notes: what the user should know of the checks.
    """

    backend: Backend
    replays: int
    every_n_steps: int | None
    rates: Callable[[], tuple[Any, ...]] = _no_rates
    agreement: Agreement | None = None
    budget: float = 0.01
    checked: int = 0
    notes: list[str] = field(default_factory=list)
    _histories: WeakKeyDictionary[object, _History] = field(default_factory=WeakKeyDictionary)
    _ran_out: bool = False
    _pauses: int = 0
    _started_s: float = field(default_factory=perf_counter)
    _longest_s: float = 0.0
    _spent_s: float = 0.0

    def pause(self) -> None:
        """Code of the user's may have run: check the next replay of each graph, within the budget."""
        self._pauses += 1

    def due(self, graph: object, replay_idx: int, is_unproved: bool = False) -> bool:
        """Whether a replay is to be checked.

        Args:
            graph: which graph is replayed. To be asked about each of its replays, from the first on.
            replay_idx: how many replays of it came before this one.
            is_unproved: it is the first of one of several captures, which may come later than the
                first replays.
        """
        if self._ran_out:
            return False
        history = self._history(graph)
        history.latest_replay = replay_idx
        if is_unproved and self.replays > 1:
            return True
        first = 1 if self.replays == 1 else 0
        if first <= replay_idx < first + self.replays:
            return True
        if self.every_n_steps is not None and replay_idx % self.every_n_steps == 0:
            return True
        if not self.replays:
            return False
        if not history.had_other_rates and self._rates() != history.captured_rates:
            return True
        if history.pauses < self._pauses and (self._pauses <= _PAUSES or self._is_affordable()):
            return True
        return replay_idx >= history.next_replay and self._is_affordable()

    def _is_affordable(self) -> bool:
        """Whether one more check stays within the budget."""
        elapsed_s = perf_counter() - self._started_s
        return self._spent_s + self._longest_s <= self.budget * elapsed_s

    def check(
        self,
        graph: object,
        live: _Values,
        eagerly: Callable[[], _Values],
        replay: Callable[[], tuple[Any, _Values]],
        keep: bool = True,
        trace: Trace | None = None,
        doubt: str = "",
    ) -> Any:
        """Do a step both ways from the same state, and keep what the replay came to.

        Where there is no memory for it, only the replay is done, and a note says so.

        Args:
            graph: which graph is replayed.
            live: all tensors that the step changes, by name, in the order of the step.
            eagerly: the step without a graph and without a trace on the host; returns its outputs.
            replay: the step by replay; returns what the caller wants back, and its outputs.
            keep: False: go back to the state before the step, for who takes the step afterwards.
            trace: does the step eagerly to look at its ops, in the first check, in doubt, and if a
                replay differs. Returns the first op that is not as in the first check.
            doubt: a change, in words, of which is not known whether the step depends on it. It does if
                an op of the user's has another number or shape, also where that shows on other batches.

        Returns:
            The first of what `replay` returned. The state is that after the replay, or before it.

        Raises:
            StaleGraphError: if the replay differs, and it is known why. The state is that before the
                step.
            VerificationError: if the replay differs otherwise.
        """
        history = self._history(graph)
        history.pauses = self._pauses
        while history.next_replay <= history.latest_replay:
            history.next_replay *= _GROWTH
        history.had_other_rates |= self._rates() != history.captured_rates
        copy = self._copier(live)
        if self._somewhere(copy is None) or copy is None:
            return replay()[0] if keep else None
        started_s = perf_counter()
        try:
            return self._checked(history, live, copy, eagerly, replay, keep, trace, doubt)
        except torch.OutOfMemoryError as error:
            if self.agreement is not None:
                raise  # the others are in the middle of the check
            ran_out = str(error).splitlines()[0] if str(error) else "no details"
        finally:
            self._longest_s = perf_counter() - started_s
            if history.checks > self.replays:
                self._spent_s += self._longest_s
        # Out of the handler, whose error holds the memory. Each try would cost as much as this one.
        self._ran_out = True
        self._note(f"not verified: a check ran out of memory ({ran_out})")
        return replay()[0] if keep else None

    def _checked(
        self,
        history: _History,
        live: _Values,
        copy: Callable[[Tensor], Tensor],
        eagerly: Callable[[], _Values],
        replay: Callable[[], tuple[Any, _Values]],
        keep: bool,
        trace: Trace | None,
        doubt: str,
    ) -> Any:
        before = _Outcome(_copied(live, copy), self.backend.rng_state())
        try:
            difference: TapeDifference | None = None
            is_in_doubt = self._somewhere(bool(doubt))
            if trace is not None and (is_in_doubt or not history.checks):
                difference = self._traced(trace, live, before)
            expected = self._outcome(eagerly(), live, copy)
            self._put(live, before)
            result, outputs = replay()
            found = {**outputs, **live}
            same_names = found.keys() == expected.values.keys()
            differing = names_that_differ(found, expected.values) if same_names else []
            same_random_state = torch.equal(expected.rng_state, self.backend.rng_state())
            failure: VerificationError | None = None
            if self._somewhere(bool(differing) and same_random_state):
                is_lenient = self._is_lenient(history)
                seen = _Replays(before.values, expected.values, {*outputs}, _copied(found, copy))
                for _ in range(1, _REPLAYS_TO_COMPARE):
                    self._put(live, before)
                    result, outputs = replay()  # the last word: what it leaves behind is what stays
                    found = {**outputs, **live}
                    again = names_that_differ(found, expected.values) if same_names else []
                    if same_names:
                        seen.add(found)
                    is_open = same_random_state and not is_lenient and seen.may_be_unsteady(again, found)
                    if not self._somewhere(is_open):
                        break
                if same_random_state and (differing or again):
                    note = _excuse(history, is_lenient, again, seen, found)
                    if note is None:
                        failure = verification_error(again, expected.values, found, {*outputs})
                    else:
                        self._note(note)
            if not same_names:
                failure = _other_names(expected.values, found)
            elif not same_random_state:
                failure = verification_error(differing, expected.values, found, {*outputs})
            stale = ""
            if self._somewhere(failure is not None) and trace is not None and not is_in_doubt:
                self._put(live, before)
                difference = self._traced(trace, live, before)
            if failure is not None or (difference is not None and difference.where is not None):
                stale = "; ".join(filter(None, (doubt, str(difference or ""))))
            self._raise_together(failure, stale)
        except BaseException:
            self._put(live, before)
            raise
        if not keep:
            self._put(live, before)
        self.checked += 1
        history.checks += 1
        return result

    def _traced(self, trace: Trace, live: _Values, before: _Outcome) -> TapeDifference | None:
        """Look at the ops of the step, from the state before it, and go back to that."""
        failed = False
        try:
            return trace()
        except (CUDAGraphError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # under a mode of the dispatcher some of torch's own code fails
            self._note(f"the ops of the step cannot be told by name: {type(error).__name__}: {error}")
            failed = True
        finally:
            self._put(live, before)
        if failed:
            # Generators of torch's that the error has left (of checkpointing) hold hooks until they go.
            gc.collect()
        return None

    def _somewhere(self, is_here: bool) -> bool:
        """Whether something is so in any process of the run."""
        return is_here if self.agreement is None else any(self.agreement.gather(is_here))

    def _raise_together(self, failure: VerificationError | None, stale: str) -> None:
        """Raise if the check has failed in any process of the run."""
        mine = (failure.reason, failure.remedy, stale) if failure else ("", "", stale) if stale else None
        told = [mine] if self.agreement is None else self.agreement.gather(mine)
        if not (failed := [(rank, said) for rank, said in enumerate(told) if said is not None]):
            return
        reasons = dict.fromkeys(why for _, (_, _, why) in failed)
        if "" not in reasons:
            _, (_, remedy, _) = failed[0]
            raise StaleGraphError("; ".join(reasons), remedy)
        if failure is not None:
            raise failure
        rank, (reason, remedy, _) = failed[0]
        raise VerificationError(f"On rank {rank}: {reason}", remedy)

    @staticmethod
    def _is_lenient(history: _History) -> bool:
        """Whether an eager step may differ in the last places, because it runs other kernels."""
        is_first = history.checks == 0 or compilations() != history.compilations
        return is_first or history.rounds_differently

    def _history(self, graph: object) -> _History:
        if (history := self._histories.get(graph)) is None:
            history = self._histories[graph] = _History(self._rates(), compilations())
        return history

    def _rates(self) -> tuple[Any, ...]:
        # A learning rate that is a tensor is read by the graph itself, and by the host at a high price.
        return tuple(rate for rate in self.rates() if not isinstance(rate, Tensor))

    def _copier(self, live: _Values) -> Callable[[Tensor], Tensor] | None:
        """How to keep copies of the state: on the device, on the host if there is no room, or not."""
        sizes_bytes = [tensor.nbytes for tensor in live.values()]
        copies_bytes = _COPIES * sum(sizes_bytes)
        # The eager step needs about what a capture of it has taken.
        step_bytes = self.backend.largest_graph_bytes()
        free_bytes = self.backend.free_bytes()
        if copies_bytes + step_bytes < free_bytes:
            return lambda tensor: tensor.detach().clone()
        # Parked, they are brought back and compared one by one, or a few small ones together.
        if (
            step_bytes + 3 * max(sizes_bytes, default=0) < free_bytes
            and copies_bytes < host_free_bytes()
        ):
            return lambda tensor: tensor.detach().to("cpu", copy=True)
        self._note(
            f"not verified: a check needs {(copies_bytes + step_bytes) / 2**20:.0f} MiB, which neither"
            " the device nor the host has free"
        )
        return None

    def _outcome(self, outputs: _Values, live: _Values, copy: Callable[[Tensor], Tensor]) -> _Outcome:
        return _Outcome(_copied({**outputs, **live}, copy), self.backend.rng_state())

    def _put(self, live: _Values, outcome: _Outcome) -> None:
        with torch.no_grad():
            for name, tensor in live.items():
                # By `data`, so that no version is counted: a step around this one may have saved it.
                tensor.data.copy_(outcome.values[name])
        self.backend.set_rng_state(outcome.rng_state)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


@dataclass
class _Replays:
    """Some replays of a step from one state, held against an eager step from it.

    Attributes:
        before: the state.
        expected: what the eager step came to.
        outputs: the names of what the step returned and logged.
        first: what the first replay came to.
        spread: of all that came out otherwise in another replay, how far apart it was at most.
    """

    before: _Values
    expected: _Values
    outputs: set[str]
    first: _Values
    spread: dict[str, float] = field(default_factory=dict)

    def add(self, found: _Values) -> None:
        """Take what one more of them came to."""
        for name in names_that_differ(found, self.first):
            apart = distance(self.first[name], found[name])
            self.spread[name] = max(self.spread.get(name, 0.0), apart)

    def are_unsteady(self, differing: list[str]) -> bool:
        """Whether replays differ as well, and in all outputs in which the eager step does.

        What these lead to (gradients, weights) may have come out the same in all replays nevertheless,
        where other atomics met in them than in the eager step.
        """
        return bool(self.spread) and all(
            name in self.spread
            for name in differing
            if name in self.outputs and not self._is_decided(name)
        )

    def _is_decided(self, name: str) -> bool:
        """Whether it is an output that a tensor's last place may turn over: a class, a mask, a count."""
        value = self.expected[name]
        is_exact = not (value.is_floating_point() or value.is_complex())
        return is_exact and name in self.outputs and not name.endswith(OF_THE_HOST)

    def may_be_unsteady(self, differing: list[str], found: _Values) -> bool:
        """Whether more replays could still show that they are."""
        return bool(differing) and not self.are_unsteady(differing) and self.allow(differing, found)

    def allow(self, differing: list[str], found: _Values) -> bool:
        """Whether all differences are in the last places, or like those between replays."""
        # What is decided by numbers that differ may differ with them, and not by itself.
        measured = [name for name in differing if not self._is_decided(name)]
        if differing and not measured:
            return False
        for name in differing:
            one, other = self.expected[name], found[name]
            if one.shape != other.shape or one.dtype != other.dtype:
                return False
            if name not in measured:
                continue
            allowed = rounding(one, self.before.get(name))
            if name in self.spread:
                allowed = max(allowed, _SPREAD * self.spread[name])
            if not distance(one, other) <= allowed:  # not so for a NaN either
                return False
        return True


def _excuse(
    history: _History, is_lenient: bool, differing: list[str], seen: _Replays, found: _Values
) -> str | None:
    """Why the last replay may differ where it does, for the report; None if it may not."""
    if not (is_lenient or seen.are_unsteady(differing)) or not seen.allow(differing, found):
        return None
    if seen.spread:
        return (
            f"two replays from one state differ (first in {next(iter(seen.spread))}), so that they could"
            " not be verified bit for bit"
        )
    history.rounds_differently = True
    return (
        f"replays differ from eager steps in the last places, first in {differing[0]}: another"
        " kernel or algorithm was chosen"
    )


def _copied(values: _Values, copy: Callable[[Tensor], Tensor]) -> _Values:
    return {name: copy(value) for name, value in values.items()}


def _other_names(expected: _Values, found: _Values) -> VerificationError:
    return VerificationError(
        "A replay of the captured step comes to other values than the eager step: only eagerly there is"
        f" {_listed(expected.keys() - found.keys())}, and only in the captured step"
        f" {_listed(found.keys() - expected.keys())}.",
        "Return and log the same names, and train the same parameters, in every step.",
    )


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
