"""A captured step: the rings of capture instances that share one static batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from lightning_cudagraph.capture.gradient_copies import HandedOut
from lightning_cudagraph.capture.instances import CaptureInstance, GraphBreak
from lightning_cudagraph.checks.audit.frozen import one_audit
from lightning_cudagraph.checks.verify.tape import OpTape
from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.device.refusals.first_refusal import AskedFor
from lightning_cudagraph.device.sentry.compiled import CompiledCode
from lightning_cudagraph.errors import CaptureError
from lightning_cudagraph.tensors.external_references import (
    ExternalReferences,
    Gradients,
    adopt,
    gradients_of,
    in_memory_of,
)
from lightning_cudagraph.tensors.layouts import Layouts, are_alike
from lightning_cudagraph.tensors.local import local
from lightning_cudagraph.tensors.static import StaticBatch
from lightning_cudagraph.tensors.writes import storage_id

T = TypeVar("T")


# Called by a step at a graph break, with the names of the hooks that run there, and with True if
# gradients are dropped there: until then, parameters have the gradients of the step before.
BreakGraph = Callable[[str, bool], None]
# A step as a function of the static batch, a `BreakGraph`, and True to record timing events.
Record = Callable[[Any, BreakGraph, bool], T]


def _moved(outputs: T, target: Gradients) -> T:
    """Copy the gradients at the end of a captured step to the addresses of another instance."""
    if target:
        made = [local(parameter.grad) for parameter, _ in target if parameter.grad is not None]
        torch._foreach_copy_([local(gradient) for _, gradient in target], made)
        for parameter, gradient in target:
            parameter.grad = gradient
    return outputs


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Replace inference mode by `no_grad` for a capture: the numbers are the same.

    Tensors of the capture are used outside of inference mode too: the states of CUDA generators, which
    all graphs share, and static inputs, which need version counters. Also, in inference mode the sentry
    would see composite ops instead of the ops that they call.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


class CapturedStep(Generic[T]):
    """A step as one or more graphs that read one static batch.

    A timed step has several capture instances, which differ in timing events and gradients only. The
    events of one replay are read while another instance replays, and most replays use an instance
    without events.

    Args:
        parameters: the parameters with gradients that the step drops and makes, and those with gradients
            that it only adds to.
        compiled: compiled code in the step. If there is any, a further capture runs the step without
            `torch.compile`, to inspect its Python.
        one_place: all instances write gradients to the same addresses, for steps that add to them.
        in_place: parameters with gradients of user code, which the step adds to in their memory.

    Attributes:
        tape: the ops of the step at its first verification.
        written: the tensors older than the step that it writes.
        has_breaks: the step has graph breaks.
        has_breaks_anywhere: the step has graph breaks in at least one process of the run.
    """

    def __init__(
        self,
        backend: Backend,
        static: StaticBatch,
        parameters: tuple[list[nn.Parameter], list[nn.Parameter]],
        compiled: CompiledCode,
        one_place: bool,
        in_place: Iterable[nn.Parameter] = (),
    ) -> None:
        self._backend = backend
        self.static = static
        self._compiled = compiled
        self._one_place = one_place
        self._in_place = {*map(id, in_place)}
        self._instances: list[CaptureInstance[T]] = []
        self._rings: dict[bool, deque[CaptureInstance[T]]] = {}
        self._last: CaptureInstance[T] | None = None
        self._holds: ExternalReferences | None = None
        self._runs_between = False
        self.tape = OpTape()
        self.n_replays = self.n_mismatches = 0
        self.has_breaks = self.has_breaks_anywhere = False
        self.written: list[Tensor] = []
        self._dropped, added = parameters
        # All instances add to these gradients in place. Kept as aliases: a reference to the gradient
        # itself would count as an external one.
        self._accumulated = [(parameter, grad.detach()) for parameter, grad in gradients_of(added)]
        self._added_layouts = Layouts([gradient for _, gradient in self._accumulated])
        # Parameters without a gradient to add to: the step makes one, or leaves the parameter alone. The
        # graph is valid only as long as they have none before the step.
        self._absent = [parameter for parameter in added if parameter.grad is None]
        self._only_adds = not self._dropped
        self._makes = [*self._dropped, *self._absent]

    def capture(self, record: Record[T], *timed: bool) -> None:
        """Capture further instances.

        Raises:
            CaptureError: if no graph can hold the step. Gradients, memory and random state are as
                before, and all instances are released.
        """
        there = gradients_of(self.adds)
        before = [parameter.grad for parameter in self._makes]
        try:
            if self._compiled.is_called and not self._instances:
                if self._compiled.written is None:
                    self._compiled.written = self._examined(record)
                    for parameter, grad in there:
                        parameter.grad = grad
                # No op tells the memory that compiled kernels write.
                self.written += self._compiled.written
            for is_timed in timed:
                self._instances.append(self._instance(record, is_timed, there))
                for parameter, grad in there:
                    parameter.grad = grad
            own = {storage_id(gradient) for each in self._instances for _, gradient in each.gradients}
            self.written = [tensor for tensor in self.written if storage_id(tensor) not in own]
            self.has_breaks = bool(self._instances[0].breaks)
            self._rings = {
                kind: deque([each for each in self._instances if each.is_timed is kind])
                or deque(self._instances)
                for kind in (False, True)
            }
        except BaseException:
            self.release()
            raise
        finally:
            for parameter, gradient in (*zip(self._makes, before, strict=True), *there):
                parameter.grad = gradient

    def _instance(self, record: Record[T], is_timed: bool, there: Gradients) -> CaptureInstance[T]:
        """Capture an instance; `there` are the gradients that the step only adds to."""
        # Without a gradient to add to, the backward pass makes a new one in the memory pool, at no cost.
        # The previous instance keeps its own.
        for parameter in self._makes:
            parameter.grad = None
        target = self._instances[0].gradients if self._one_place and self._instances else []
        breaks: list[GraphBreak] = []

        def cut(hooks: str, drops: bool) -> None:
            gradients = [(parameter, parameter.grad) for parameter in self._makes]
            breaks.append(GraphBreak(hooks, drops, gradients))
            self._backend.cut()

        loan = self.static.lend()
        with loan.watched():
            graph, outputs = self._backend.capture(
                lambda: self._compiled.held(lambda: _moved(record(loan.batch, cut, is_timed), target)),
                is_compiled=self._compiled.is_called,
            )
        if moved := [
            (grad, old)
            for (_, grad), (_, old) in zip(there, self._accumulated, strict=True)
            if not in_memory_of(grad, old)
        ]:
            self._backend.release(graph)
            for grad, old in moved:
                grad.data = old
            error = CaptureError(
                "The step gives a gradient that it adds to other memory (`p.grad.data = ...`), where no"
                f" other graph would find it. Its shape is {tuple(moved[0][0].shape)}.",
                "Write into the gradient instead: `p.grad.copy_(...)`.",
            )
            error.subject = AskedFor("data")
            raise error
        # Some are added to, or read, and then dropped: they end at an address of the graph.
        replaced = [parameter for parameter, grad in there if parameter.grad is not grad]
        made = [*self._dropped, *replaced]
        instance = CaptureInstance(graph, outputs, [*made, *self._absent], len(made), breaks, is_timed)
        try:
            written = self._backend.written(graph)
            loan.refuse_changes(written)
        except BaseException:
            self._backend.release(graph)
            raise
        self.written += written
        return instance

    def _examined(self, record: Record[T]) -> list[Tensor]:
        """Capture without `torch.compile` to inspect the Python; return older tensors that it writes."""
        for parameter in self._makes:
            parameter.grad = None

        def cut(hooks: str, drops: bool) -> None:
            self._backend.cut()

        loan = self.static.lend()
        with one_audit(), loan.watched():  # compiled code has an audit of its own
            graph, _ = self._backend.capture(
                lambda: self._compiled.left_out(lambda: record(loan.batch, cut, False))
            )
        try:
            written = [*self._backend.written(graph)]  # a copy: the release clears the list
            loan.refuse_changes(written)
        finally:
            self._backend.release(graph)
        return written

    def watch_gradients(self, between: bool) -> None:
        """Detect external references to gradients from now on."""
        self._runs_between = between
        made = [pair for each in self._instances for at in each.breaks for pair in at.made]
        every = [pair for each in self._instances for pair in each.gradients]
        added = gradients_of(self.adds)
        self._holds = ExternalReferences([*every, *made], added)

    @property
    def is_checked_apart(self) -> bool:
        """True if a verification does not replace the step: hooks at graph breaks must run once only."""
        return self.has_breaks or self.has_breaks_anywhere

    @property
    def is_plain(self) -> bool:
        """True if a replay needs no work on gradients before it."""
        return not self._absent

    @contextmanager
    def gradients_kept(self) -> Iterator[None]:
        """Restore the gradients that the step drops on exit."""
        kept = [
            (parameter, None if parameter.grad is None else parameter.grad.clone())
            for parameter in self._makes
        ]
        try:
            yield
        finally:
            for parameter, gradient in kept:
                parameter.grad = gradient

    def stale(self, is_varied: bool = False) -> str | None:
        """Return the reason why the graph does not match the step, or None.

        Args:
            is_varied: micro-batches of other signatures come before it. Without them, only a drop of all
                gradients can take one to which the step adds, and zeros serve as well. With them, no
                micro-batch may have used the parameter, and optimizers skip one without a gradient.
        """
        if any(parameter.grad is not None for parameter in self._absent):
            return "a parameter that had no gradient before the step has one now"
        is_strict = is_varied and self._only_adds
        if is_strict and any(parameter.grad is None for parameter, _ in self._accumulated):
            return "a parameter that had a gradient before the step has none now"
        return None

    def replaced(self) -> tuple[list[nn.Parameter], bool]:
        """Find parameters with gradients in other memory than those that the step adds to.

        Returns:
            The parameters, and True if user code has replaced one to which the step adds in place.
        """
        if self._are_in_place():
            return [], False
        moved = [p for p, g in self._accumulated if p.grad is not None and not in_memory_of(p.grad, g)]
        missing = self._in_place and any(
            p.grad is None for p, _ in self._accumulated if id(p) in self._in_place
        )
        return moved, bool(missing) or any(id(p) in self._in_place for p in moved)

    def has_other_layouts(self) -> bool:
        """True if gradients that the step adds to have other strides or alignments than in the graph."""
        now = [g if p.grad is None else p.grad for p, g in self._accumulated]
        return self._added_layouts.changed_but_for_addresses(now)

    @property
    def adds(self) -> list[nn.Parameter]:
        """The parameters with gradients that the step only adds to."""
        return [parameter for parameter, _ in self._accumulated]

    def adopt_gradients(self) -> None:
        """Move the gradients that the step only adds to back to the addresses in the graph."""
        if not self._are_in_place():
            adopt(self._accumulated)

    def _are_in_place(self) -> bool:
        """True if all gradients that the step adds to are at the addresses in the graph."""
        return not self._added_layouts.changed([p.grad for p, _ in self._accumulated])

    @property
    def are_gradients_alike(self) -> bool:
        """True if the gradients that the step makes can be put back: their layout is still the same."""
        made = self._instances[0].gradients
        return all(p.grad is None or are_alike(p.grad, gradient) for p, gradient in made)

    def put_back_gradients(self) -> None:
        """Move the gradients that the step makes back to the addresses in the graph."""
        adopt(self._instances[0].gradients)

    def run_eagerly(self, step: Callable[[Any], T]) -> T:
        loan = self.static.lend_values()
        outputs = step(loan.batch)
        loan.refuse_changes()
        return outputs

    def replay(
        self,
        between: Callable[[T, int], None] | None = None,
        handed: HandedOut | None = None,
        timed: bool = False,
    ) -> T:
        """Replay the step on the static batch.

        Args:
            between: called at each graph break with the static outputs and the index of the break. None:
                replay without breaks.
            handed: the copies of gradients that hooks see; None if they see those of the graph.
            timed: replay an instance with timing events, if there is one.

        Returns:
            The static outputs of the instance. Its next replay overwrites them.
        """
        self.adopt_gradients()
        if handed is not None:
            handed.add_to_found(self._accumulated)
        ring = self._rings[timed]
        instance = self._last = ring[0]
        ring.rotate(-1)
        return instance.replay(between, self._accumulated, handed)

    def turn_back(self, timed: bool) -> None:
        """Turn the ring back: the next replay uses the instance of the last one again."""
        self._rings[timed].rotate(1)

    def rerun(self) -> None:
        """Replay the first instance on the present static batch, without work on gradients."""
        self._instances[0].graph.replay()

    def stay(self) -> bool:
        """Share the memory pool with later graphs; False if there are graphs in another pool."""
        return self._backend.stay(self._instances[0].graph)

    def next_outputs(self, timed: bool) -> T:
        """Return the static outputs of the instance that `replay` uses next."""
        return self._rings[timed][0].outputs

    def is_unproved(self, timed: bool) -> bool:
        """True if the instance that `replay` uses next has never been replayed."""
        return not self._rings[timed][0].replayed

    def kind_to_prove(self, timed: bool) -> bool:
        """True if a verification should replay an instance with timing events.

        Also for a step that is not timed, if only the timed instance is unverified: the next timed step
        then needs no verification.
        """
        return timed or (self.is_unproved(True) and not self.is_unproved(False))

    def copy_out(self, handed: HandedOut) -> None:
        """Copy the gradients of the last replay out of the graph, for the parameters to have."""
        if self._last is not None:
            self._last.copy_out(self._accumulated, handed)

    def is_kept(self, after_pause: bool) -> bool:
        """True if there is an external reference to a gradient of the graph, or to a view of one.

        After a pause, user code may have run even if none runs between any two steps.
        """
        return (
            self._holds is not None and (after_pause or self._runs_between) and self._holds.is_any_kept()
        )

    def bring_out_gradients(self) -> None:
        """Replace gradients of the graph that parameters have by copies outside the memory pool."""
        for instance in self._instances:
            for parameter, gradient in instance.gradients:
                if parameter.grad is gradient:
                    parameter.grad = gradient.clone()

    def release(self) -> None:
        for instance in self._instances:
            self._backend.release(instance.graph)
        holds, self._holds = self._holds, None
        if holds is not None and (self._runs_between or holds.is_any_kept()):
            holds.move_out()
        else:
            self.bring_out_gradients()
        self._instances = []
        self._rings = {}
        self._last = None
