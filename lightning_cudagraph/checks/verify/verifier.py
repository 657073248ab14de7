"""Verification: compare a replay with an eager step from the same state, on the same batch.

The eager step runs the user's Python again. If it gives other numbers than the replay, the capture has
frozen something. The check of the first replay tests the capture itself; later checks, on another batch
and with another learning rate, find what was baked in.

Replay and eager step agree if

- every bit is equal; or
- replays from one state differ from each other (kernels with atomics do, some of them seldom, so up to
  16 replays are compared), and the eager step is about as far from them; or
- replays differ from each other, and another eager step, with the same ops and numbers (`tape.py`), is
  about as far from them: atomics moved the first one further than others. Eager steps alone would be no
  measure, host code that counts its calls or takes turns makes them differ too: none may be far off; or
- the difference is rounding: a graph can have other kernels than an eager step (a library that chooses
  an algorithm by the memory it is given), but they are the same in every replay. A difference in the
  last places counts as rounding only if the first check of the graph showed one too, before anything on
  the host had the time to change, or if torch.compile has compiled something since, which an eager step
  may call. A frozen value that drifts slowly is thus not taken for rounding.
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

from lightning_cudagraph.checks.verify.compare import Values, names_that_differ, verification_error
from lightning_cudagraph.checks.verify.memory import host_free_bytes
from lightning_cudagraph.checks.verify.noise import ComparedReplays, unsteady_note
from lightning_cudagraph.checks.verify.settings import Verification
from lightning_cudagraph.checks.verify.tape import TapeDifference
from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.device.sentry.compiled import compilations
from lightning_cudagraph.errors import CUDAGraphError, StaleGraphError, VerificationError
from lightning_cudagraph.processes.agreement import Agreement

Trace = Callable[[], tuple[TapeDifference | None, Values]]

# Atomics that seldom collide give the same sums in most replays, so it takes many replays to see that
# they moved an eager step in the last places. In a compiled DLRM (26 tables of 1000 rows, batch 128,
# H200) two replays were equal, and an eager step was not.
_REPLAYS_TO_COMPARE = 16
# Further eager steps, if the first is too far off: atomics in cuDNN's convolutions move one step in five
# fifty times as far as most (a ResNet-18 at 32 x 32 pixels, H100: a sum near 0 decides what ReLU lets
# through). All are done: code that takes turns shows in one of them.
_EAGER_STEPS_TO_COMPARE = 8
# Copies of the state: before the step, after the eager step, and, if that differs, after a first replay.
_COPIES = 3
# Pauses after which a replay is always checked; after later ones, within the budget.
_PAUSES = 3
# Without a pause, replays are checked at distances that start with the first and grow by the second.
_FIRST_DISTANCE = 64
_GROWTH = 4


@dataclass
class _History:
    """The checks of one graph so far.

    Attributes:
        compilations: torch.compile's compilations before the first check. Code that was compiled since
            (for another size, say) may run in an eager step now, and differ in the last places.
        latest_replay: index of the replay that `due` was last called for.
        checked_replay: index of the replay that was checked last.
        next_replay: index of the replay that is checked next without a pause.
    """

    captured_rates: tuple[Any, ...]
    compilations: int
    checks: int = 0
    had_other_rates: bool = False
    rounds_differently: bool = False
    pauses: int = 0
    checks_after_pauses: int = 0
    latest_replay: int = 0
    checked_replay: int = 0
    next_replay: int = _FIRST_DISTANCE


def _unchecked(history: _History, have: str = "had other numbers than eager steps") -> str:
    """The number of replays since the check before, in words."""
    replays = history.latest_replay - history.checked_replay - 1
    if replays <= 0:
        return ""
    return f" ({replays} replays since the check before may have {have})"


@dataclass
class _Outcome:
    """The state after one way of doing the step."""

    values: Values
    rng_state: Tensor


def on_host(tensor: Tensor) -> Tensor:
    """A copy in host memory."""
    return tensor.detach().to("cpu", copy=True)


@dataclass
class Verifier:
    """Selection of the replays to check, and the checks.

    Attributes:
        rates: the present learning rates. The first replay with other rates than the capture's gets one
            more check, unless a check had other rates already.
    """

    backend: Backend
    asked: Verification
    rates: Callable[[], tuple[Any, ...]] = tuple
    agreement: Agreement | None = None
    checked: int = field(init=False, default=0)
    notes: list[str] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._histories: WeakKeyDictionary[object, _History] = WeakKeyDictionary()
        self._ran_out = False
        # A single check is that of the second replay: the first has the batch of the capture.
        replays = self.asked.replays
        self._end_of_first_replays = replays + (replays == 1)
        self._pauses = 0
        self._started_s = perf_counter()
        self._longest_s = self._spent_s = 0.0

    def pause(self) -> None:
        """Check the next replay of each graph, within the budget: user code may have run."""
        self._pauses += 1

    def due(self, graph: object, replay_idx: int, is_unproved: bool = False) -> bool:
        """True if a replay must be checked. To be called for each replay of a graph.

        Args:
            is_unproved: it is the first replay of one of several capture instances, which may come later
                than the first replays.
        """
        if self._ran_out:
            return False
        history = self._history(graph)
        history.latest_replay = replay_idx
        replays, every_n_steps = self.asked.replays, self.asked.every_n_steps
        if is_unproved and replays > 1:
            return True
        if self._end_of_first_replays - replays <= replay_idx < self._end_of_first_replays:
            return True
        if every_n_steps is not None and replay_idx % every_n_steps == 0:
            return True
        if not replays:
            return False
        if not history.had_other_rates and self._rates() != history.captured_rates:
            return True
        if history.pauses < self._pauses and (
            history.checks_after_pauses < _PAUSES or self._is_affordable()
        ):
            return True
        return replay_idx >= history.next_replay and self._is_affordable()

    def unchecked(self, graph: object) -> str:
        """The replays since the last check of a graph, which may have lost effects, in words."""
        return _unchecked(self._history(graph), "lost it")

    def _is_affordable(self) -> bool:
        """True if one more check stays within the budget."""
        elapsed_s = perf_counter() - self._started_s
        return self._spent_s + self._longest_s <= self.asked.budget * elapsed_s

    def check(
        self,
        graph: object,
        live: Values,
        eagerly: Callable[[], Values],
        replay: Callable[[], tuple[Any, Values]],
        keep: bool = True,
        trace: Trace | None = None,
        suspicion: str = "",
        late: Callable[[], str] = str,
    ) -> Any:
        """Do a step eagerly and by replay from the same state, and keep the result of the replay.

        Without enough memory only the replay is done, and a note says so.

        Args:
            live: all tensors that the step changes, by name, in the order of the step.
            eagerly: does the step without a graph and without effects on the host; returns its outputs.
            replay: does the step by replay; returns the caller's result, and its outputs.
            keep: False to go back to the state before the step, for a caller that takes the step itself.
            trace: does the step eagerly on the op tape, in the first check, on suspicion, and if a
                replay differs. Returns the first op that differs from the first check, and the outputs.
            suspicion: a change, in words, on which the step may depend. It does if an op with a
                line of the user's has another number or shape, even if the results on this batch agree.
            late: tells what the eager step did that no replay repeats, in words; empty for nothing.

        Returns:
            The caller's result. The state is that after the replay, or, without `keep`, before it.

        Raises:
            StaleGraphError: the replay differs, and the cause is known. The state is that before the
                step.
            VerificationError: the replay differs otherwise. The state is that before the step.
        """
        history = self._history(graph)
        if history.pauses < self._pauses and history.latest_replay >= self._end_of_first_replays:
            history.checks_after_pauses += 1
        history.pauses = self._pauses
        while history.next_replay <= history.latest_replay:
            history.next_replay *= _GROWTH
        history.had_other_rates |= self._rates() != history.captured_rates
        copy = self._copier(live)
        if self._somewhere(copy is None) or copy is None:
            return replay()[0] if keep else None
        started_s = perf_counter()
        try:
            return self._checked(history, live, copy, eagerly, replay, keep, trace, suspicion, late)
        except torch.OutOfMemoryError as error:
            if self.agreement is not None:
                raise  # the other processes are in the middle of the check
            ran_out = str(error).splitlines()[0] if str(error) else "no details"
        finally:
            self._longest_s = perf_counter() - started_s
            if history.checks > self.asked.replays:
                self._spent_s += self._longest_s
        # After the handler: its error holds the memory. Checks end here, as each would cost the same.
        self._ran_out = True
        self._note(f"not verified: a check ran out of memory ({ran_out})")
        return replay()[0] if keep else None

    def _checked(
        self,
        history: _History,
        live: Values,
        copy: Callable[[Tensor], Tensor],
        eagerly: Callable[[], Values],
        replay: Callable[[], tuple[Any, Values]],
        keep: bool,
        trace: Trace | None,
        suspicion: str,
        late: Callable[[], str],
    ) -> Any:
        before = _Outcome(_copied(live, copy), self.backend.rng_state())
        try:
            difference: TapeDifference | None = None
            is_suspected = self._somewhere(bool(suspicion))
            # The first pass is the one that is audited, and on no tape: an audit has ops of its own.
            expected = _Outcome(_copied({**eagerly(), **live}, copy), self.backend.rng_state())
            self._put(live, before)
            if trace is not None and (is_suspected or not history.checks):
                difference, *_ = self._traced(trace, live, before)
            result, outputs = replay()
            found = {**outputs, **live}
            same_names = found.keys() == expected.values.keys()
            differing = names_that_differ(found, expected.values) if same_names else []
            same_random_state = torch.equal(expected.rng_state, self.backend.rng_state())
            failure: VerificationError | None = None
            doubted: ComparedReplays | None = None  # not excused by the first eager step
            if self._somewhere(bool(differing) and same_random_state):
                # An eager step may run other kernels than the capture, and differ in the last places.
                is_lenient = not history.checks or compilations() != history.compilations
                is_lenient |= history.rounds_differently
                seen = ComparedReplays(before.values, expected.values, {*outputs}, _copied(found, copy))
                for _ in range(1, _REPLAYS_TO_COMPARE):
                    self._put(live, before)
                    result, outputs = replay()  # the state after the last replay stays
                    found = {**outputs, **live}
                    again = names_that_differ(found, expected.values) if same_names else []
                    if same_names:
                        seen.add(found)
                    is_open = same_random_state and not is_lenient and seen.may_be_unsteady(again, found)
                    if not self._somewhere(is_open):
                        break
                if same_random_state and (differing or again):
                    note = _reason_to_differ(history, is_lenient, again, seen, found)
                    if note is None:
                        failure = verification_error(again, expected.values, found)
                        doubted, differing = seen, again
                    else:
                        self._note(note)
            if not same_names:
                failure = _other_names(expected.values, found)
            elif not same_random_state:
                failure = verification_error(differing, expected.values, found)
            stale = ""
            if self._somewhere(failure is not None) and trace is not None and not is_suspected:
                difference, is_unsteady = self._eagerly_again(trace, live, before, doubted)
                if is_unsteady:
                    failure = None
                    self._note(unsteady_note("eager steps", differing[0]))
                if not self._somewhere(failure is not None):
                    result, outputs = replay()
            if failure is not None or (difference is not None and difference.where is not None):
                stale = "; ".join(filter(None, (suspicion, str(difference or ""))))
                stale += "" if suspicion or not stale else _unchecked(history)
            self._raise_together(failure, stale or late())
        except BaseException:
            self._put(live, before)
            raise
        if not keep:
            self._put(live, before)
        self.checked += 1
        history.checks += 1
        history.checked_replay = history.latest_replay
        return result

    def _eagerly_again(
        self, trace: Trace, live: Values, before: _Outcome, doubted: ComparedReplays | None
    ) -> tuple[TapeDifference | None, bool]:
        """Do the step eagerly on the op tape, several times if the numbers of replays are in doubt.

        Args:
            doubted: the replays; None if something else is wrong.

        Returns:
            The first op that differs from the first check; and True if there is none in any of these
            steps, one agrees with the replays, and none is far from them.
        """
        is_found, are_near = False, doubted is not None and doubted.are_near(doubted.expected)
        difference: TapeDifference | None = None
        for _ in range(_EAGER_STEPS_TO_COMPARE):
            self._put(live, before)
            now, agrees, is_near = self._traced(trace, live, before, doubted)
            if difference is None or difference.where is None:
                difference = now
            is_other = difference is not None and difference.where is not None
            is_found |= agrees
            are_near &= is_near and not is_other
            if not self._somewhere(are_near):
                break
        return difference, is_found and are_near

    def _traced(
        self, trace: Trace, live: Values, before: _Outcome, replays: ComparedReplays | None = None
    ) -> tuple[TapeDifference | None, bool, bool]:
        """Run the step on the op tape from the state before it, and restore that state.

        Return the first op that differs, and whether the values agree with `replays`, and are near.
        """
        failed = False
        try:
            difference, outputs = trace()
            if replays is None:
                return difference, False, False
            eager = {**outputs, **live}
            return difference, replays.agree_with(eager), replays.are_near(eager)
        except (CUDAGraphError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # under a mode of the dispatcher some of torch's own code fails
            self._note(f"the ops of the step cannot be told by name: {type(error).__name__}: {error}")
            failed = True
        finally:
            self._put(live, before)
        if failed:
            # Suspended generators of torch (of checkpointing) hold hooks until they are collected.
            gc.collect()
        return None, False, False

    def _somewhere(self, is_here: bool) -> bool:
        """True if any process of the run says so."""
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

    def _history(self, graph: object) -> _History:
        if (history := self._histories.get(graph)) is None:
            history = self._histories[graph] = _History(self._rates(), compilations())
        return history

    def _rates(self) -> tuple[Any, ...]:
        # The graph itself reads a learning rate that is a tensor; reading it on the host would wait.
        return tuple([r for r in self.rates() if type(r) is float or not isinstance(r, Tensor)])

    def _copier(self, live: Values) -> Callable[[Tensor], Tensor] | None:
        """A function that copies to the device, or without room there to the host; None for no room."""
        sizes_bytes = [tensor.nbytes for tensor in live.values()]
        copies_bytes = _COPIES * sum(sizes_bytes)
        # The eager step needs about as much as its capture has taken.
        step_bytes = self.backend.largest_graph_bytes()
        free_bytes = self.backend.free_bytes()
        if copies_bytes + step_bytes < free_bytes:
            return lambda tensor: tensor.detach().clone()
        # Copies on the host are brought back and compared one by one, or a few small ones together.
        if (
            step_bytes + 3 * max(sizes_bytes, default=0) < free_bytes
            and copies_bytes < host_free_bytes()
        ):
            return on_host
        self._note(
            f"not verified: a check needs {(copies_bytes + step_bytes) / 2**20:.0f} MiB, which neither"
            " the device nor the host has free"
        )
        return None

    def _put(self, live: Values, outcome: _Outcome) -> None:
        with torch.no_grad():
            for name, tensor in live.items():
                # By `data`, so that the version counter stays: autograd of an enclosing step may have
                # saved the tensor.
                tensor.data.copy_(outcome.values[name])
        self.backend.set_rng_state(outcome.rng_state)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _reason_to_differ(
    history: _History, is_lenient: bool, differing: list[str], seen: ComparedReplays, found: Values
) -> str | None:
    """The reason why the last replay may differ, for the report; None if it may not."""
    if not (is_lenient or seen.are_unsteady(differing)) or not seen.allow(differing, found):
        return None
    if seen.spread:
        return unsteady_note("replays", next(iter(seen.spread)))
    history.rounds_differently = True
    return (
        f"replays differ from eager steps in the last places, first in {differing[0]}: another"
        " kernel or algorithm was chosen"
    )


def _copied(values: Values, copy: Callable[[Tensor], Tensor]) -> Values:
    return {name: copy(value) for name, value in values.items()}


def _other_names(expected: Values, found: Values) -> VerificationError:
    return VerificationError(
        "A replay of the captured step comes to other values than the eager step: only eagerly there is"
        f" {_listed(expected.keys() - found.keys())}, and only in the captured step"
        f" {_listed(found.keys() - expected.keys())}.",
        "Return and log the same names, and train the same parameters, in every step.",
    )


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
