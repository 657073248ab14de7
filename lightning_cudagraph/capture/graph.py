"""A captured step: rings of capture instances that share one static batch, and their replay."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from lightning_cudagraph.capture.gradients.external_references import (
    ExternalReferences,
    Gradients,
    adopt,
    gradients_of,
    in_memory_of,
)
from lightning_cudagraph.capture.gradients.gradient_copies import HandedOut
from lightning_cudagraph.capture.gradients.step_gradients import StepGradients
from lightning_cudagraph.capture.graph_breaks import WRITE_INTO_IT, GraphBreak
from lightning_cudagraph.checks.audit.step_audit import one_audit
from lightning_cudagraph.checks.verify.tape import OpTape
from lightning_cudagraph.compat.attributes import setting
from lightning_cudagraph.device.backend import Backend, Graph
from lightning_cudagraph.device.sentry.compiled import CompiledCode
from lightning_cudagraph.errors import AskedFor, CaptureError
from lightning_cudagraph.tensors.layouts import are_alike
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


class CaptureInstance(Generic[T]):
    """One graph of a step, with the gradients that it writes.

    Args:
        makes: the parameters with gradients from this graph; they have these gradients now.
        drops: number of parameters, from the first of `makes`, that have no gradient after the step if
            it makes none.

    Attributes:
        replayed: True from its first replay on.
    """

    def __init__(
        self,
        graph: Graph,
        outputs: T,
        makes: list[nn.Parameter],
        drops: int,
        breaks: list[GraphBreak],
        is_timed: bool,
    ) -> None:
        self.graph = graph
        self.is_timed = is_timed
        self.replayed = False
        self.outputs = outputs
        self.breaks = breaks
        self.gradients = gradients_of(makes)
        # Dropped and not made again: a parameter may take no part in this kind of step.
        self._without = [parameter for parameter in makes[:drops] if parameter.grad is None]

    def replay(
        self,
        between: Callable[[T, int], None] | None,
        accumulated: Gradients,
        handed: HandedOut | None,
    ) -> T:
        """Replay, give the parameters their gradients, and return the static outputs.

        Args:
            between: called at each graph break; None for a replay without breaks.
            accumulated: the gradients that the step adds to, at the addresses in the graph.
            handed: the copies of gradients that hooks see; None if they see those of the graph.
        """

        def at_break(index: int) -> None:
            assert between is not None
            graph_break = self.breaks[index]
            graph_break.begin()
            if handed is not None:
                handed.give(accumulated)
                handed.give(graph_break.made)
            with graph_break.watched(handed, accumulated):
                between(self.outputs, index)
            graph_break.check(handed)
            if handed is not None:
                handed.take_back(graph_break.made)
            adopt(accumulated)

        self.replayed = True
        if between is None:
            self.graph.replay()
        else:
            if handed is None and any(each.drops for each in self.breaks):
                self._leave()
            self.graph.replay(at_break)
        # Validation or an eager batch may have dropped the gradients. The graph still writes its own,
        # and code that reads `param.grad` after the step must find these.
        for parameter, gradient in self.gradients:
            if parameter.grad is not gradient:  # to read costs a fourth of to set
                parameter.grad = gradient
        for parameter in self._without:
            if parameter.grad is not None:
                parameter.grad = None
        return self.outputs

    def copy_out(self, accumulated: Gradients, handed: HandedOut) -> None:
        """Copy the gradients of the last replay out of the graph, for the parameters to have."""
        handed.give(accumulated)
        handed.give(self.gradients)
        for parameter in self._without:
            parameter.grad = None

    def _leave(self) -> None:
        """Clone the gradients of the step before, so that hooks in the forward pass can read them.

        Their memory may be reused by the forward pass, even if another instance made them.
        """
        for parameter, _ in self.gradients:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()


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
        unread: tensors that the step writes, and neither it nor user code reads.

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
        unread: Iterable[Tensor] = (),
    ) -> None:
        self._backend = backend
        self._unread = {*map(storage_id, unread)}
        # Of gradients whose memory is none of the graph: the buckets of a wrapper.
        self._older: set[int] = set()
        self.static = static
        self._compiled = compiled
        self._one_place = one_place
        self._instances: list[CaptureInstance[T]] = []
        self._rings: dict[bool, deque[CaptureInstance[T]]] = {}
        self._last: CaptureInstance[T] | None = None
        self._holds: ExternalReferences | None = None
        self._runs_between = False
        self.tape = OpTape()
        self.n_replays = self.n_mismatches = 0
        self.has_breaks = self.has_breaks_anywhere = False
        self.written: list[Tensor] = []
        self.gradients = StepGradients(*parameters, in_place)

    def capture(self, record: Record[T], *timed: bool) -> None:
        """Capture further instances.

        Raises:
            CaptureError: if no graph can hold the step. Gradients, memory and random state are as
                before, and all instances are released.
        """
        there = gradients_of(self.gradients.adds)
        before = [parameter.grad for parameter in self.gradients.makes]
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
            left_out = own | self._unread
            self.written = [tensor for tensor in self.written if storage_id(tensor) not in left_out]
            self.gradients.note_written({*map(storage_id, self.written)})
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
            for parameter, gradient in (*zip(self.gradients.makes, before, strict=True), *there):
                parameter.grad = gradient

    def _instance(self, record: Record[T], is_timed: bool, there: Gradients) -> CaptureInstance[T]:
        """Capture an instance; `there` are the gradients that the step only adds to."""
        # Without a gradient to add to, the backward pass makes a new one in the memory pool, at no cost.
        # The previous instance keeps its own.
        for parameter in self.gradients.makes:
            parameter.grad = None
        target = self._instances[0].gradients if self._one_place and self._instances else []
        breaks: list[GraphBreak] = []

        def cut(hooks: str, drops: bool) -> None:
            gradients = [(parameter, parameter.grad) for parameter in self.gradients.makes]
            breaks.append(GraphBreak(hooks, drops, gradients))
            self._backend.cut()

        aliased = self.static.aliased()
        with aliased.watched():
            graph, outputs = self._backend.capture(
                lambda: self._compiled.held(
                    lambda: _moved(record(aliased.batch, cut, is_timed), target)
                ),
                is_compiled=self._compiled.is_called,
            )
        if moved := [
            (grad, old)
            for (_, grad), (_, old) in zip(there, self.gradients.accumulated, strict=True)
            if not in_memory_of(grad, old)
        ]:
            self._backend.release(graph)
            for grad, old in moved:
                grad.data = old
            error = CaptureError(
                "The step gives a gradient that it adds to other memory (`p.grad.data = ...`), where no"
                f" other graph would find it. Its shape is {tuple(moved[0][0].shape)}.",
                WRITE_INTO_IT,
            )
            error.subject = AskedFor("data")
            raise error
        # Some are added to, or read, and then dropped: they end at an address of the graph.
        replaced = [parameter for parameter, grad in there if parameter.grad is not grad]
        made = [*self.gradients.dropped, *replaced]
        instance = CaptureInstance(
            graph, outputs, [*made, *self.gradients.absent], len(made), breaks, is_timed
        )
        try:
            aliased.refuse_changes(graph.written)
        except BaseException:
            self._backend.release(graph)
            raise
        of_instances = {storage_id(g) for each in self._instances for _, g in each.gradients}
        of_step = {storage_id(gradient) for _, gradient in instance.gradients}
        self._older |= (of_step & {*map(storage_id, graph.written)}) - of_instances
        self.written += graph.written
        return instance

    def _examined(self, record: Record[T]) -> list[Tensor]:
        """Capture without `torch.compile` to inspect the Python; return older tensors that it writes."""
        for parameter in self.gradients.makes:
            parameter.grad = None

        def cut(hooks: str, drops: bool) -> None:
            self._backend.cut()

        aliased = self.static.aliased()
        with one_audit(), aliased.watched():  # compiled code has an audit of its own
            graph, _ = self._backend.capture(
                lambda: self._compiled.left_out(lambda: record(aliased.batch, cut, False))
            )
        try:
            written = [*graph.written]  # a copy: the release clears the list
            aliased.refuse_changes(written)
        finally:
            self._backend.release(graph)
        return written

    def watch_gradients(self, between: bool) -> None:
        """Detect external references to gradients from now on."""
        self._runs_between = between
        made = [pair for each in self._instances for at in each.breaks for pair in at.made]
        every = [pair for each in self._instances for pair in each.gradients]
        added = gradients_of(self.gradients.adds)
        # Views of a wrapper's buckets: it would not find other memory of theirs.
        views = [(p, gradient) for p, gradient in every if storage_id(gradient) in self._older]
        of_wrapper = {id(gradient) for _, gradient in views}
        own = [pair for pair in (*every, *made) if id(pair[1]) not in of_wrapper]
        self._holds = ExternalReferences(own, [*views, *added])

    @property
    def is_replayed_after_check(self) -> bool:
        """True if a verification does not replace the step: hooks at graph breaks must run once only."""
        return self.has_breaks or self.has_breaks_anywhere

    @property
    def are_gradients_alike(self) -> bool:
        """True if the gradients that the step makes can be put back: their layout is still the same."""
        made = self._instances[0].gradients
        return all(p.grad is None or are_alike(p.grad, gradient) for p, gradient in made)

    def put_back_gradients(self, is_varied: bool) -> None:
        """Move the gradients that the step makes back to the addresses in the graph.

        Args:
            is_varied: another signature may have begun the window: no zeros for gradients that it lacks.
        """
        made = self._instances[0].gradients
        adopt([(p, gradient) for p, gradient in made if p.grad is not None or not is_varied])

    def run_eagerly(self, step: Callable[[Any], T]) -> T:
        aliased = self.static.aliased_with_values()
        outputs = step(aliased.batch)
        aliased.refuse_changes()
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
        self.gradients.adopt()
        if handed is not None:
            handed.add_to_found(self.gradients.accumulated)
        ring = self._rings[timed]
        instance = self._last = ring[0]
        ring.rotate(-1)
        return instance.replay(between, self.gradients.accumulated, handed)

    def turn_back(self, timed: bool) -> None:
        """Turn the ring back: the next replay uses the instance of the last one again."""
        self._rings[timed].rotate(1)

    def rerun(self) -> None:
        """Replay the first instance on the present static batch, as a trial: nothing of it stays."""
        with setting(self._backend.checks, are_left_out=True):
            self._instances[0].graph.replay()

    def stay(self) -> bool:
        """Share the memory pool with later graphs; False if there are graphs in another pool."""
        return self._backend.stay(self._instances[0].graph)

    def next_outputs(self, timed: bool) -> T:
        """Return the static outputs of the instance that `replay` uses next."""
        return self._rings[timed][0].outputs

    def has(self, timed: Iterable[bool]) -> bool:
        """True if there are instances with and without timing events, as asked for."""
        return {each.is_timed for each in self._instances}.issuperset(timed)

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
            self._last.copy_out(self.gradients.accumulated, handed)

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
