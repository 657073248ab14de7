"""One captured step: static inputs, outputs, gradients, and the ring of capture instances."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from lightning_cudagraph.capture.instances import CaptureInstance, GraphBreak
from lightning_cudagraph.checks.verify.tape import OpTape
from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.device.sentry.compiled import CompiledCode
from lightning_cudagraph.tensors.holds import Gradients, HandedOut, Holds, adopt, gradients_of
from lightning_cudagraph.tensors.local import local
from lightning_cudagraph.tensors.static import StaticBatch
from lightning_cudagraph.tensors.writes import storage_id

__all__ = ["CapturedStep", "Cut", "outside_inference_mode"]

T = TypeVar("T")


# Called by a step at a graph break: with the hooks that run there, in words, and True if gradients are
# dropped at it, and until then are those of the step before.
Cut = Callable[[str, bool], None]


def _moved(outputs: T, place: Gradients) -> T:
    """At the end of a captured step: copy its gradients to the addresses of another instance's."""
    if place:
        made = [local(parameter.grad) for parameter, _ in place if parameter.grad is not None]
        torch._foreach_copy_([local(gradient) for _, gradient in place], made)
        for parameter, gradient in place:
            parameter.grad = gradient
    return outputs


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Turn inference mode into `no_grad` for a capture, which computes the same.

    Tensors made in it are used outside of it too: the state of CUDA's generators, which all graphs
    share, and the static inputs, which have to count their versions. And in inference mode, ops that
    consist of others would come whole to the sentry.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


class CapturedStep(Generic[T]):
    """A training step as graphs that read one set of static buffers.

    A step that is timed has a ring of capture instances: so that the events of one replay can be read
    while the next one runs, or so that most replays are of a graph without any. The instances are equal
    but for their events and gradients.

    Args:
        backend: where it is captured.
        static: the static buffers of the signature to capture, with the values of a batch in them.
        record: the step, as a function of the static batch, of the function that it calls at a graph
            break, and of True for timing events. Runs once for each instance.
        parameters: those whose gradients the step drops and computes anew, and those to whose it only
            adds.
        timed: for each instance, True if it has timing events. Those of one kind are a ring.
        compiled: the compiled code that the step calls. If there is any, the step is captured once more,
            to look at the Python that was compiled.
        one_place: all instances leave their gradients at one address, for steps that add to them.

    Attributes:
        static: the static buffers that it reads.
        replays: number of steps that were replays; its caller counts them.
        tape: the ops of the step, as they were when it was first verified.
        written: tensors older than the step that it writes into.
        has_breaks_anywhere: it has graph breaks in some process of the run.

    Raises:
        CaptureError: if the step did something that no graph can hold; gradients, memory and random
            state are then as before.
    """

    def __init__(
        self,
        backend: Backend,
        static: StaticBatch,
        record: Callable[[Any, Cut, bool], T],
        parameters: tuple[list[nn.Parameter], list[nn.Parameter]],
        timed: Sequence[bool],
        compiled: CompiledCode,
        one_place: bool,
    ) -> None:
        self._backend = backend
        self.static = static
        self._instances: list[CaptureInstance[T]] = []
        self._rings: dict[bool, deque[CaptureInstance[T]]] = {}
        self._last: CaptureInstance[T] | None = None
        self._holds: Holds | None = None
        self.tape = OpTape()
        self.replays = 0
        self.has_breaks_anywhere = False
        self.written: list[Tensor] = []
        dropped, added = parameters
        there = gradients_of(added)
        # The graph adds to these in place, where they are; all instances to the same. Aliases, because a
        # reference would look like an external one to the gradient.
        self._accumulated = [(parameter, grad.detach()) for parameter, grad in there]
        # Without a gradient to add to, the step makes one, or leaves that parameter alone, as long as
        # there is none before it.
        self._absent = [parameter for parameter in added if parameter.grad is None]
        makes = self._makes = [*dropped, *self._absent]
        before = [parameter.grad for parameter in makes]
        try:
            if compiled.is_called:
                if compiled.written is None:
                    compiled.written = self._examined(compiled, record, makes)
                    for parameter, grad in there:
                        parameter.grad = grad
                # Kernels of compiled code write where no op says so.
                self.written += compiled.written
            for is_timed in timed:
                # Without a gradient to add to, the backward pass makes new ones in the graph's pool,
                # at no cost; the ones of the instance before are kept by it.
                for parameter in makes:
                    parameter.grad = None
                place = self._instances[0].gradients if one_place and self._instances else []
                breaks: list[GraphBreak] = []

                def cut(hooks: str, drops: bool, breaks: list[GraphBreak] = breaks) -> None:
                    gradients = [(parameter, parameter.grad) for parameter in makes]
                    breaks.append(GraphBreak(hooks, drops, gradients))
                    backend.cut()

                loan = self.static.lend()
                graph, outputs = backend.capture(
                    lambda: compiled.held(
                        lambda: _moved(record(loan.batch, cut, is_timed), place)  # noqa: B023
                    ),
                    is_compiled=compiled.is_called,
                )
                # Some are added to, or read, and then dropped: found where they are, and left elsewhere.
                replaced = [parameter for parameter, grad in there if parameter.grad is not grad]
                made = [*dropped, *replaced]
                self._instances.append(
                    CaptureInstance(graph, outputs, [*made, *self._absent], len(made), breaks)
                )
                written = backend.written(graph)
                loan.refuse_changes(written)
                self.written += written
                for parameter, grad in there:
                    parameter.grad = grad
            own = {storage_id(gradient) for each in self._instances for _, gradient in each.gradients}
            self.written = [tensor for tensor in self.written if storage_id(tensor) not in own]
            self._rings = {
                kind: deque(
                    [each for each, of in zip(self._instances, timed, strict=True) if of is kind]
                    or self._instances
                )
                for kind in (False, True)
            }
        except BaseException:
            self.release()
            raise
        finally:
            for parameter, gradient in (*zip(makes, before, strict=True), *there):
                parameter.grad = gradient

    def _examined(
        self, compiled: CompiledCode, record: Callable[[Any, Cut, bool], T], makes: list[nn.Parameter]
    ) -> list[Tensor]:
        """Capture the step without torch.compile, to look at its Python; release the graph.

        Returns:
            The tensors older than the step that it writes into.
        """
        for parameter in makes:
            parameter.grad = None

        def cut(hooks: str, drops: bool) -> None:
            self._backend.cut()

        loan = self.static.lend()
        graph, _ = self._backend.capture(
            lambda: compiled.left_out(lambda: record(loan.batch, cut, False))
        )
        try:
            written = [*self._backend.written(graph)]  # of which the graph's own list is cleared
            loan.refuse_changes(written)
        finally:
            self._backend.release(graph)
        return written

    def watch_gradients(self) -> None:
        """Count references to its gradients: user code between two replays can keep them."""
        made = [pair for each in self._instances for at in each.breaks for pair in at.made]
        every = [pair for each in self._instances for pair in each.gradients]
        found = gradients_of(parameter for parameter, _ in self._accumulated)
        self._holds = Holds([*every, *made, *found])

    @property
    def has_breaks(self) -> bool:
        """True if hooks run on the host in the middle of the step."""
        return bool(self._instances[0].breaks)

    @property
    def is_checked_apart(self) -> bool:
        """True if a check leaves the step to be taken, because hooks run in it, which they do once."""
        return self.has_breaks or self.has_breaks_anywhere

    @property
    def is_plain(self) -> bool:
        """True if a replay needs nothing of the host, and leaves all gradients where the graph does."""
        return not self.has_breaks and not self._absent

    @property
    def can_be_kept(self) -> bool:
        """True if user code can keep gradients of the graph."""
        return self._holds is not None

    @contextmanager
    def gradients_kept(self) -> Iterator[None]:
        """Afterwards, the gradients that the step drops are what they were before."""
        kept = [
            (parameter, None if parameter.grad is None else parameter.grad.clone())
            for parameter in self._makes
        ]
        try:
            yield
        finally:
            for parameter, gradient in kept:
                parameter.grad = gradient

    def stale(self) -> str | None:
        """The reason why this is not the step any more, in words, or None."""
        if any(parameter.grad is not None for parameter in self._absent):
            return "a parameter that had no gradient before the step has one now"
        return None

    def adopt_gradients(self) -> None:
        """Bring the gradients that the step only adds to back to the addresses that the graph knows."""
        adopt(self._accumulated)

    def put_back_gradients(self) -> None:
        """Bring the gradients that the step makes back to the addresses at which it makes them."""
        adopt(self._instances[0].gradients)

    def run_eagerly(self, step: Callable[[Any], T], batch: Any) -> T:
        """Run a function of the static batch on a batch of this signature, without a graph."""
        self.static.copy_from(batch)
        loan = self.static.lend()
        outputs = step(loan.batch)
        loan.refuse_changes()
        return outputs

    def replay(
        self,
        batch: Any,
        between: Callable[[T, int], None] | None = None,
        handed: HandedOut | None = None,
        timed: bool = False,
    ) -> T:
        """Run the step on a batch of this signature.

        Args:
            batch: the batch; its tensors are copied into the static buffers.
            between: called at each graph break with the static outputs and its number. None: the step
                without its breaks.
            handed: the copies that hooks are given instead of the graph's gradients, or None.
            timed: replay an instance with timing events, if there is one, or else one without.

        Returns:
            The static outputs of the instance that is replayed. The next replay overwrites them.
        """
        self.static.copy_from(batch)
        self.adopt_gradients()
        if handed is not None:
            handed.add_to_found(self._accumulated)
        ring = self._rings[timed]
        instance = self._last = ring[0]
        ring.rotate(-1)
        return instance.replay(between, self._accumulated, handed)

    def turn_back(self, timed: bool) -> None:
        """Turn the ring back, so that the next replay is of the same instance as the last one."""
        self._rings[timed].rotate(1)

    def rerun(self) -> None:
        """Replay the first instance on the values in the static buffers, and leave gradients alone."""
        self._instances[0].graph.replay()

    def upcoming(self, timed: bool) -> T:
        """The static outputs of the instance that `replay` runs next."""
        return self._rings[timed][0].outputs

    def is_unproved(self, timed: bool) -> bool:
        """True if the instance that `replay` runs next has never been replayed."""
        return not self._rings[timed][0].replayed

    def kind_to_prove(self, timed: bool) -> bool:
        """True if a replay that is verified had best be of an instance with timing events.

        Nothing reads the events of a step that is not timed, but the next one that is need not be
        verified then.
        """
        return timed or (self.is_unproved(True) and not self.is_unproved(False))

    def hand_out(self, handed: HandedOut) -> None:
        """After a replay: give the parameters copies of its gradients, which no replay overwrites."""
        if self._last is not None:
            self._last.hand_out(self._accumulated, handed)

    def is_kept(self) -> bool:
        """True if there is an external reference to a gradient of the graph, or to a part of one."""
        return self._holds is not None and self._holds.is_any_kept()

    def bring_out_gradients(self) -> None:
        """Give parameters that still have gradients of the graph copies that no graph writes into."""
        for instance in self._instances:
            for parameter, gradient in instance.gradients:
                if parameter.grad is gradient:
                    parameter.grad = gradient.clone()

    def release(self) -> None:
        """Release the graphs and their memory."""
        for instance in self._instances:
            self._backend.release(instance.graph)
        if self._holds is None:
            self.bring_out_gradients()
        else:
            self._holds.move_out()
            self._holds = None
        self._instances = []
        self._rings = {}
        self._last = None
