"""The capture of a step, in all processes or in none."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from time import perf_counter
from typing import Generic, TypeVar

from torch import Tensor

from lightning_cudagraph.capture.by_signature import GraphsBySignature
from lightning_cudagraph.capture.context import RunContext
from lightning_cudagraph.capture.graph import CapturedStep, outside_inference_mode
from lightning_cudagraph.capture.standing import StandingGraphs
from lightning_cudagraph.capture.steps import MAKES_GRADIENTS, Step
from lightning_cudagraph.capture.stream_choice import StreamChoice
from lightning_cudagraph.checks.diagnosis import Diagnosis
from lightning_cudagraph.checks.guards.guards import Guards
from lightning_cudagraph.device.refusals import clear_frames
from lightning_cudagraph.device.sentry.compiled import CompiledCode
from lightning_cudagraph.device.streams.branches import SentBackError
from lightning_cudagraph.errors import CaptureError, CUDAGraphError, UnsupportedError
from lightning_cudagraph.processes.agreement import of_ranks
from lightning_cudagraph.tensors.batch import Signature, flatten_batch
from lightning_cudagraph.tensors.holds import GradientCopies, Holds
from lightning_cudagraph.tensors.static import StaticBatch
from lightning_cudagraph.tensors.writes import storage_id

__all__ = ["Captures"]

T = TypeVar("T")

_REPORT_IT = "This is a fault of the package's, and should not be: please report it."


def _refuse_shared_memory(batch: object, captured: CapturedStep[T]) -> None:
    """Refuse a step that writes the memory of its batch under another name: a graph reads a copy."""
    written = {storage_id(tensor) for tensor in captured.written}
    for path, leaf in flatten_batch(batch):
        if isinstance(leaf, Tensor) and storage_id(leaf) in written:
            raise CaptureError(
                f"The training step writes into memory that `{path}` lies in; a graph reads a copy of"
                f" `{path}` that was made before.",
                "Pass a copy, `tensor.clone()`, or use in the step what the tensor is taken from.",
            )


def _portable(error: UnsupportedError) -> tuple[str, str, bool]:
    return error.reason, error.remedy, error.in_optimizer


def _failure_of_ranks(told: Iterable[tuple[str, str, bool] | None]) -> UnsupportedError | None:
    """The first error of a process, for those that have none."""
    for rank, error in enumerate(told):
        if error is not None:
            reason, remedy, in_optimizer = error
            return UnsupportedError(f"On rank {rank}: {reason}", remedy, in_optimizer=in_optimizer)
    return None


class Captures(Generic[T]):
    """Captures the steps of an engine."""

    def __init__(
        self,
        run: RunContext,
        guards: Guards,
        graphs: GraphsBySignature[T],
        standing: StandingGraphs[T],
        copies: GradientCopies,
        streams: StreamChoice,
        compiled: CompiledCode,
    ) -> None:
        self._run = run
        self._guards = guards
        self._graphs = graphs
        self._standing = standing
        self._copies = copies
        self._streams = streams
        self._compiled = compiled
        self._diagnosis: Diagnosis | None = None
        if run.agreement is None:  # else the others are not in the same place, and nothing more is found
            self._diagnosis = Diagnosis(
                run.backend, run.carried, guards, compiled, looks_twice=run.is_examined
            )

    def attempt(self, step: Step[T], signature: Signature) -> tuple[CapturedStep[T] | None, str, bool]:
        """Capture a step, in all processes or in none.

        Args:
            step: the step.
            signature: that of its batch.

        Returns:
            The captured step; or None with the reason, and True if that was an error of the user's own
            code in this process.

        Raises:
            UnsupportedError: if it cannot be captured, and the user wants that raised. It names all that
                was found.
        """
        if self._diagnosis is not None and (error := self._diagnosis.error) is not None:
            self._examine(step, error)
            raise error
        captured: CapturedStep[T] | None = None
        failure: UnsupportedError | None = None
        raised = sent_back = ""
        try:
            with Holds.of_captures_apart():
                captured = self._capture(step, signature)
        except SentBackError as error:
            sent_back = str(error)
        except UnsupportedError as error:
            failure = error
        except CUDAGraphError:
            raise
        except Exception as error:
            raised = f"{type(error).__name__} in the capture: {error}"
            clear_frames(error)
        mine = bool(raised)
        is_broken = step.is_broken()
        if (agreement := self._run.agreement) is not None:
            has_breaks = captured is not None and captured.has_breaks
            said = (failure and _portable(failure), raised, is_broken, sent_back, has_breaks)
            reasons, texts, broken, back, breaks = zip(*agreement.gather(said), strict=True)
            is_broken = any(broken)
            if captured is not None:
                captured.has_breaks_anywhere = any(breaks)
            sent_back = of_ranks(back)
            if captured is not None and (any(reasons) or any(texts) or sent_back):
                captured.release()
                captured = None
                self._run.counts.captures -= 1
                failure = _failure_of_ranks(reasons)
                raised = "" if failure else of_ranks(texts)
                mine = False
        if is_broken:
            step.mend()
        if failure is not None:
            try:
                self._standing.unsupported(failure)  # which puts it into the words of the front end
            except UnsupportedError:
                if self._examine(step, failure):
                    raise
            # Steps go on. A suspended generator of the failed one would leave what it has entered on:
            # in torch 2.10, hooks of a checkpoint, for all tensors that are saved from then on.
            clear_frames(failure)
            reason, failure = failure.reason, None  # its frames have it, and this is one of them
            return None, reason, False
        if sent_back:  # the step is eager, and a later one is captured
            self._streams.send_back(sent_back)
        return captured, raised or sent_back, mine

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
            if self._run.agreement is not None or step.is_broken():
                raise  # all go back together, and what waits for gradients has to be mended first
        self._streams.send_back(reason)
        return self._capture_once(step, signature)

    def _capture_once(self, step: Step[T], signature: Signature) -> CapturedStep[T]:
        self._graphs.plain.clear()  # each is to be replayed by `step` once more, after what comes now
        self._guards.watch()
        self._guards.effects.kind = signature, step.place
        self._run.carried.watch()
        if moving := self._guards.moving():
            raise UnsupportedError(
                f"Between any two steps, {moving}: a graph would be stale at once.",
                'Keep it constant, or pass `scope="forward_backward"`.',
                in_optimizer=True,
            )
        maker = self._graphs.maker(step, signature)
        if isinstance(maker, CapturedStep):
            maker.put_back_gradients()
        else:
            self._copies.move_apart(*step.parameters(), step.kept)
        started_s = perf_counter()
        made: list[CapturedStep[T]] = []
        try:
            with ExitStack() as stack:
                stack.enter_context(self._guards.effects.refused(self._guards.all_mentioned))
                stack.enter_context(step.transaction())
                stack.enter_context(outside_inference_mode())
                stack.enter_context(self._compiled.one_look())
                made.append(self._captured(step, signature))
            self._streams.captured()
            _refuse_shared_memory(step.batch, made[0])
        except BaseException:
            for captured in made:
                captured.release()
            raise
        captured = made[0]
        self._guards.take()
        capture_ms = (perf_counter() - started_s) * 1e3
        counts = self._run.counts
        counts.captures += 1
        counts.capture_ms += capture_ms
        counts.memory_bytes = self._run.backend.graph_bytes()
        self._run.on_capture(step, capture_ms)
        return captured

    def _captured(self, step: Step[T], signature: Signature) -> CapturedStep[T]:
        self._run.carried.place()
        static = self._graphs.static_of(signature) or StaticBatch(step.batch)
        static.copy_from(step.batch)

        def capture(timed: tuple[bool, ...], kept: bool) -> CapturedStep[T]:
            captured = CapturedStep(
                self._run.backend,
                static,
                step.record,
                step.parameters(),
                timed,
                self._compiled,
                one_place=step.in_window and step.place == MAKES_GRADIENTS,
            )
            if kept:
                captured.watch_gradients()
            return captured

        self._streams.settle(
            lambda: capture((False,), kept=False),
            lambda captured: step.all_state(captured.written),
        )
        return capture(step.takes, step.kept())
