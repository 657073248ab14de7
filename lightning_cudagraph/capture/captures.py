"""Capture of a step, in all processes or in none."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import Generic, NamedTuple

from lightning_cudagraph.capture.context import EngineContext
from lightning_cudagraph.capture.decisions.invalidation import Invalidation
from lightning_cudagraph.capture.gradients.external_references import ExternalReferences
from lightning_cudagraph.capture.graph import CapturedStep, outside_inference_mode
from lightning_cudagraph.capture.steps import MAKES_GRADIENTS, Step, T
from lightning_cudagraph.checks.audit.step_audit import one_audit
from lightning_cudagraph.checks.diagnosis import Diagnosis
from lightning_cudagraph.checks.rebound_methods import refuse_rebound_methods
from lightning_cudagraph.device.cuda.capture_errors import clear_frames
from lightning_cudagraph.device.lines.user_lines import location_of
from lightning_cudagraph.device.streams.branches import SentBackError
from lightning_cudagraph.errors import (
    OR_FORWARD_BACKWARD,
    CaptureError,
    CUDAGraphError,
    Finding,
    UnsupportedError,
)
from lightning_cudagraph.processes.agreement import of_ranks
from lightning_cudagraph.tensors.batch import flatten_batch
from lightning_cudagraph.tensors.batch_signature import Signature
from lightning_cudagraph.tensors.host_values import held, in_words, is_host_value
from lightning_cudagraph.tensors.static import StaticBatch, refuse_shared_memory

_REPORT_IT = "This is a bug in `lightning_cudagraph`: please report it."
_OTHERS_EACH_TIME = (
    "Other parameters take part in the step each time that it is captured, and gradients are averaged"
    " with `find_unused_parameters=True`."
)
_USE_THE_SAME = "Let the code of the step choose the same parameters each time."


def _failure_of_ranks(findings: Iterable[Finding | None]) -> UnsupportedError | None:
    """Rebuild the error of the first rank that has one."""
    for rank, found in enumerate(findings):
        if found is not None:
            return UnsupportedError(
                f"On rank {rank}: {found.what}",
                found.remedy,
                in_optimizer=found.in_optimizer,
                location=found.location,
            )
    return None


class _Reads(NamedTuple):
    """Findings of an attempt on the host values that the step reads.

    Attributes:
        has_values: the step held a `HostValue` that C code may not take.
        are_new: it was the first to read something of one.
        are_of_another: its warm-up, or the phases with a graph, had another value of what it reads.
    """

    has_values: bool
    are_new: bool
    are_of_another: bool


@dataclass(eq=False)
class _Tried(Generic[T]):
    """The outcome of an attempt, in this process or in all together.

    Attributes:
        raised: the error of user code in the capture, in words.
        sent_back: why the step is to be captured on another number of streams.
        only_here: the error for what user code in this process raised in the capture.
    """

    captured: CapturedStep[T] | None
    failure: UnsupportedError | None
    raised: str
    sent_back: str
    only_here: UnsupportedError | None
    reads: _Reads

    @property
    def has_failed(self) -> bool:
        return self.failure is not None or bool(self.raised)


def raised_in_capture(error: Exception) -> str:
    """An error that user code has raised in a capture, in words."""
    return f"{type(error).__name__} in the capture: {in_words(str(error))}"


def _only_in_the_capture(error: Exception, raised: str) -> UnsupportedError:
    """Return the error for a step that raises in a capture and not in an eager run."""
    remedy = "Find the code that fails in a capture; the message may name it."
    if isinstance(error, TypeError):
        remedy = (
            "If the line uses a number that changes from step to step, such as `batch_idx`: in a capture"
            " it is an object that code may not accept. Use the number in a hook that runs on the host"
            " at every step, such as `on_train_batch_start`."
        )
    what = f"The training step raised {raised}. Eagerly, from the same state, it did not."
    return UnsupportedError(what, remedy, location=location_of(error))


def _discard(tried: _Tried[T]) -> None:
    if tried.failure is not None:
        clear_frames(tried.failure)
        tried.failure = None
    if tried.captured is not None:
        tried.captured.release()
        tried.captured = None


class Captures(Generic[T]):
    """The captures of an engine's steps."""

    def __init__(self, engine: EngineContext[T], invalidation: Invalidation[T]) -> None:
        self._run, self._guards, self._graphs = engine.run, engine.guards, engine.graphs
        self._warm_ups, self._copies = engine.warm_ups, engine.copies
        self._invalidation = invalidation
        self._streams, self._compiled = engine.streams, engine.compiled
        self._moving: str | None = None  # what changes between any two steps
        self._diagnosis: Diagnosis | None = None
        run = engine.run
        if run.agreement is None:  # else the others are not in the same place, and nothing more is found
            self._diagnosis = Diagnosis(
                run.backend, run.carried, engine.guards, engine.compiled, looks_twice=run.is_examined
            )

    def attempt(
        self, step: Step[T], signature: Signature
    ) -> tuple[CapturedStep[T] | None, str, UnsupportedError | None]:
        """Capture a step, in all processes or in none.

        Returns:
            The captured step. Or None, the reason, and the error for what user code in this process
            raised in the capture alone. The reason is empty if the step has read a host value that other
            steps had in its warm-up.
        """
        if self._diagnosis is not None and (error := self._diagnosis.error) is not None:
            self._examine(step, error)
            raise error
        self._guards.watch()
        self._run.carried.watch()
        self._moving = self._guards.moving()
        started_s = perf_counter()
        tried = self._tried_with_values(step, signature)
        if tried.captured is not None:
            self._count(step, (perf_counter() - started_s) * 1e3)
        if tried.reads.are_of_another:
            return None, "", None
        if (failure := tried.failure) is not None:
            tried.failure = None
            reason = failure.reason
            try:
                # In the words of the front end.
                reason = self._invalidation.unsupported(failure, signature)
            except UnsupportedError:
                if self._examine(step, failure):
                    raise
            # Training goes on. A suspended generator in the frames of the error would keep its context
            # managers entered: in torch 2.10, the saved-tensor hooks of a checkpoint.
            clear_frames(failure)
            failure = None  # this frame is one of the error's frames
            return None, reason, None
        if tried.sent_back:  # this step is eager, a later one is captured
            self._streams.send_back(tried.sent_back)
        return tried.captured, tried.raised or tried.sent_back, tried.only_here

    def eager_step_ended(self) -> None:
        if self._diagnosis is not None:
            self._diagnosis.step_ended()

    def _count(self, step: Step[T], capture_ms: float) -> None:
        counts = self._run.counts
        counts.captures += 1
        counts.capture_ms += capture_ms
        counts.memory_bytes = self._run.backend.graph_bytes()
        self._run.on_capture(step, capture_ms)

    def _tried_with_values(self, step: Step[T], signature: Signature) -> _Tried[T]:
        """Try to capture a step that gets all host values themselves that it reads."""
        reads = self._graphs.reads
        before = reads.kinds, reads.why
        tried = self._tried(step, signature)
        while not tried.reads.are_of_another and (
            tried.reads.are_new or (tried.has_failed and tried.reads.has_values)
        ):
            # A `HostValue` only finds out what is read: the graph is one of a step that gets the values
            # themselves. C code may insist on their type, and compiled code is compiled for it: then all
            # of a kind are part of the signature, if that helps.
            why = tried.raised or (tried.failure.reason if tried.failure is not None else "")
            are_new = tried.reads.are_new
            _discard(tried)
            if not are_new:
                reads.widen(why)
            tried = self._tried(step, signature)
        has_failed = tried.has_failed
        if tried.reads.are_of_another:
            _discard(tried)
        if has_failed:
            reads.narrow(*before)
        return tried

    def _tried(self, step: Step[T], signature: Signature, is_second: bool = False) -> _Tried[T]:
        """Try to capture a step, and tell all processes how it went.

        Args:
            is_second: the first attempt has shown which parameters other processes use.
        """
        tried = self._tried_here(step, signature)
        is_broken = self._run.replicas.is_broken
        if (agreement := self._run.agreement) is not None:
            found = tried.failure and tried.failure.findings[0]
            has_breaks = tried.captured is not None and tried.captured.has_breaks
            used = self._run.replicas.used
            mine = (found, tried.raised, tried.sent_back, is_broken, has_breaks, tried.reads, used)
            reasons, texts, back, broken, breaks, reads, of_all = zip(
                *agreement.gather(mine), strict=True
            )
            is_broken = any(broken)
            tried.reads = _Reads(*map(any, zip(*reads, strict=True)))
            tried.sent_back = of_ranks(back)
            if not tried.has_failed:  # here
                tried.failure = _failure_of_ranks(reasons)
                tried.raised = "" if tried.failure else of_ranks(texts)
            if tried.captured is not None:
                tried.captured.has_breaks_anywhere = any(breaks)
                if tried.has_failed or tried.sent_back:
                    tried.captured.release()
                    tried.captured = None
            is_over = tried.has_failed or tried.sent_back or tried.reads.are_new
            if self._run.replicas.settle_used(of_all) and not is_over:
                _discard(tried)
                if not is_second:
                    return self._tried(step, signature, is_second=True)
                tried.failure = UnsupportedError(_OTHERS_EACH_TIME, _USE_THE_SAME)
        if is_broken:
            self._run.replicas.reset()
        if tried.has_failed and not tried.reads.are_new:  # it fails whatever it reads
            tried.reads = _Reads(tried.reads.has_values, are_new=False, are_of_another=False)
        return tried

    def _tried_here(self, step: Step[T], signature: Signature) -> _Tried[T]:
        reads = self._graphs.reads
        has_values = signature.reads is not None and any(
            is_host_value(leaf) and not reads.counts(path, type(held(leaf)))
            for path, leaf in flatten_batch(step.batch)
        )
        version = reads.version
        captured: CapturedStep[T] | None = None
        failure: UnsupportedError | None = None
        raised = sent_back = ""
        only_here: UnsupportedError | None = None
        try:
            with ExternalReferences.recounted_after_capture(), reads.noted():
                captured = self._capture(step, signature)
        except SentBackError as error:
            sent_back = str(error)
        except UnsupportedError as error:
            failure = error
        except CUDAGraphError:
            raise
        except Exception as error:
            raised = raised_in_capture(error)
            only_here = _only_in_the_capture(error, raised)
            clear_frames(error)
        is_of_type = raised.startswith(TypeError.__name__)
        has_values |= is_of_type and reads.has_given_parts and not reads.kinds
        are_new = signature.reads is not None and reads.version != version
        are_of_another = signature.reads is not None and not self._fits(step, signature)
        found = _Reads(has_values, are_new, are_of_another)
        return _Tried(captured, failure, raised, sent_back, only_here, found)

    def _fits(self, step: Step[T], signature: Signature) -> bool:
        """True if the warm-up and the static batch are those of the step, given what is read by now."""
        now = self._graphs.signature_of(step)
        if self._warm_ups.left(now, step.accumulation) > 0:
            return False
        # The phases of a window share a static batch.
        return now in self._graphs or self._graphs.static_of(signature) is None

    def _examine(self, step: Step[T], error: UnsupportedError) -> bool:
        """Add to an error what else is found in the step; return True if it is complete."""
        if self._diagnosis is None:
            return True
        with outside_inference_mode():
            return self._diagnosis.examine(step, error)

    def _capture(self, step: Step[T], signature: Signature) -> CapturedStep[T]:
        try:
            return self._capture_once(step, signature)
        except SentBackError as error:
            reason = str(error)
            if self._streams.is_one:
                text = f"The training step cannot be captured: {reason}."
                raise CaptureError(text, _REPORT_IT) from None
            if self._run.agreement is not None or self._run.replicas.is_broken:
                raise  # all processes retry together, and a broken DDP reducer is repaired before
        self._streams.send_back(reason)
        return self._capture_once(step, signature)

    def _capture_once(self, step: Step[T], signature: Signature) -> CapturedStep[T]:
        self._graphs.clear_plain()  # each replays once through `step` before its next fast path
        self._guards.effects.kind = signature, step.accumulation
        refuse_rebound_methods()
        if self._moving:
            raise UnsupportedError(
                f"Between any two steps, {self._moving}: a graph would be invalid at the next step.",
                f"Keep it constant, or {OR_FORWARD_BACKWARD}.",
                in_optimizer=True,
            )
        maker = self._graphs.maker(step)
        if (
            isinstance(maker, CapturedStep)
            and maker.are_gradients_alike
            and not self._copies.is_in_place(step.parameters()[1])
        ):
            maker.put_back_gradients(self._invalidation.admission.is_varied)
            self._copies.in_place = []
        else:
            self._copies.copy_before_capture(*step.parameters(), step.is_followed_by_user_code)
        made: list[CapturedStep[T]] = []
        try:
            with ExitStack() as stack:
                stack.enter_context(self._guards.effects.refused(self._guards.all_mentioned))
                stack.enter_context(step.transaction())
                stack.enter_context(outside_inference_mode())
                stack.enter_context(self._compiled.one_look())
                stack.enter_context(self._run.replicas.taking_part())
                made.append(self._captured(step, signature))
            refuse_shared_memory(step.batch, made[0].written)
        except BaseException:
            for captured in made:
                captured.release()
            raise
        captured = made[0]
        self._run.carried.keep(self._guards.readable())
        self._guards.take(captured)
        return captured

    def _captured(self, step: Step[T], signature: Signature) -> CapturedStep[T]:
        self._run.carried.place()
        if (static := self._graphs.static_of(signature)) is None:
            static = StaticBatch(step.batch, signature.reads)
        else:
            static.copy_from(step.batch)

        def capture() -> CapturedStep[T]:
            captured: CapturedStep[T] = CapturedStep(
                self._run.backend,
                static,
                step.parameters(),
                self._compiled,
                one_place=step.in_window and step.accumulation == MAKES_GRADIENTS,
                in_place=self._copies.in_place,
                unread=self._run.replicas.tables(),
            )
            captured.capture(step.record, first)
            return captured

        first, *others = self._graphs.instances(signature, step)
        with one_audit():
            captured = self._streams.capture(capture, lambda captured: step.all_state(captured.written))
            captured.capture(step.record, *others)
        captured.watch_gradients(step.is_followed_by_user_code())
        return captured
