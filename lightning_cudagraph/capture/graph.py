"""One captured step: static inputs, outputs, gradients, and the captures that take turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from lightning_cudagraph.capture.takes import Take, Turn
from lightning_cudagraph.checks.verify.tape import OpTape
from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.device.sentry.compiled import CompiledCode
from lightning_cudagraph.tensors.holds import Gradients, HandedOut, Holds, adopt, gradients_of
from lightning_cudagraph.tensors.local import local
from lightning_cudagraph.tensors.static import StaticBatch
from lightning_cudagraph.tensors.writes import storage_id

__all__ = ["CapturedStep", "Cut", "outside_inference_mode"]

T = TypeVar("T")


# Called by a step where the host has a turn in every replay: with whose turn it is, in words, and
# whether gradients are dropped in it, and until then are those of the step before.
Cut = Callable[[str, bool], None]


def _moved(outputs: T, place: Gradients) -> T:
    """At the end of a captured step: its gradients, copied to where another take leaves its own."""
    if place:
        made = [local(parameter.grad) for parameter, _ in place if parameter.grad is not None]
        torch._foreach_copy_([local(gradient) for _, gradient in place], made)
        for parameter, gradient in place:
            parameter.grad = gradient
    return outputs


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Turn inference mode into `no_grad` for a capture, which computes the same.

    What is made in it is used outside of it too: the state of CUDA's generators, which all graphs share,
    and the static batch, whose buffers have to count their versions. And in inference mode, ops that
    consist of others would come whole to the sentry.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


class CapturedStep(Generic[T]):
    """A training step as graphs that read one set of static buffers.

    A step that is timed is captured more than once: so that the events of one replay can be read while
    the next one runs, or so that most replays are of a graph without any. The captures are equal but for
    their events and gradients.

    Args:
        backend: where it is captured.
        static: the static buffers of the signature to capture, with the values of a batch in them.
        record: the step, as a function of the static batch, of what it calls where the host has a turn
            in every replay, and of whether it has timing events. Runs once for each capture.
        drops: the parameters whose gradients the step drops and computes anew.
        adds: the parameters to whose gradients it only adds.
        takes: the captures, by whether they have timing events. Those of one kind take turns.
        one_place: all captures leave their gradients in one place, for steps that add to them.
        kept: code of the user's runs between two replays, and can keep gradients.
        compiled: the compiled code that the step calls. If there is any, the step is captured once more,
            to look at the Python that was compiled.

    Attributes:
        static: the static buffers that it reads.
        replays: how many steps were replays; counted by who takes them.
        tape: the ops of the step, as they were when it was first checked.
        written: tensors older than the step that it writes into.
        has_turns_anywhere: the host has turns in it in some process of the run.

    Raises:
        CaptureError: if the step did something that no graph can hold; gradients, memory and random
            state are then as before.
    """

    def __init__(
        self,
        backend: Backend,
        static: StaticBatch,
        record: Callable[[Any, Cut, bool], T],
        drops: Iterable[nn.Parameter],
        adds: Iterable[nn.Parameter],
        takes: Sequence[bool],
        one_place: bool = False,
        kept: bool = False,
        compiled: CompiledCode | None = None,
    ) -> None:
        compiled = compiled or CompiledCode()
        self._backend = backend
        self.static = static
        self._takes: list[Take[T]] = []
        self._turns: dict[bool, deque[Take[T]]] = {}
        self._kept = kept
        self._last: Take[T] | None = None
        self._holds: Holds | None = None
        self.tape = OpTape()
        self.replays = 0
        self.has_turns_anywhere = False
        self.written: list[Tensor] = []
        dropped, added = list(drops), list(adds)
        there = gradients_of(added)
        # The graph adds to these in place, where they are; all takes to the same. Aliases, because a
        # reference would look as if somebody had kept the gradient.
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
            for timed in takes:
                # Without a gradient to add to, the backward pass makes new ones in the graph's pool,
                # at no cost; the ones of the take before are kept by it.
                for parameter in makes:
                    parameter.grad = None
                place = self._takes[0].gradients if one_place and self._takes else []
                turns: list[Turn] = []

                def cut(whose: str, drops: bool, turns: list[Turn] = turns) -> None:
                    gradients = [(parameter, parameter.grad) for parameter in makes]
                    turns.append(Turn(whose, drops, gradients))
                    backend.cut()

                loan = self.static.lend()
                graph, outputs = backend.capture(
                    lambda: compiled.held(
                        lambda: _moved(record(loan.batch, cut, timed), place)  # noqa: B023
                    ),
                    is_compiled=compiled.is_called,
                )
                # Some are added to, or read, and then dropped: found where they are, and left elsewhere.
                replaced = [parameter for parameter, grad in there if parameter.grad is not grad]
                anew = [*dropped, *replaced]
                self._takes.append(Take(graph, outputs, [*anew, *self._absent], len(anew), turns))
                written = backend.written(graph)
                loan.refuse_changes(written)
                self.written += written
                for parameter, grad in there:
                    parameter.grad = grad
            if kept:
                made = [
                    gradient for take in self._takes for turn in take.turns for gradient in turn.made
                ]
                every = [gradient for take in self._takes for gradient in take.gradients]
                self._holds = Holds([*every, *made, *there])
            own = {storage_id(gradient) for take in self._takes for _, gradient in take.gradients}
            self.written = [tensor for tensor in self.written if storage_id(tensor) not in own]
            self._turns = {
                kind: deque(
                    [take for take, timed in zip(self._takes, takes, strict=True) if timed is kind]
                    or self._takes
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
        """Capture the step without torch.compile: its Python is looked at, and the graph thrown away.

        Returns:
            The tensors older than the step that it writes into.
        """
        for parameter in makes:
            parameter.grad = None

        def cut(whose: str, drops: bool) -> None:
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

    @property
    def has_turns(self) -> bool:
        """Whether the host has a turn in the middle of the step."""
        return bool(self._takes[0].turns)

    @property
    def is_checked_apart(self) -> bool:
        """Whether a check leaves the step to be taken, because the host does something in it, once."""
        return self.has_turns or self.has_turns_anywhere

    @property
    def is_plain(self) -> bool:
        """Whether a replay needs nothing of the host, and leaves all gradients where the graph does."""
        return not self.has_turns and not self._absent

    @property
    def can_be_kept(self) -> bool:
        """Whether code of the user's can keep gradients of the graph."""
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
        """Why this is not the step any more, in words, or None."""
        if any(parameter.grad is not None for parameter in self._absent):
            return "a parameter that had no gradient before the step has one now"
        return None

    def adopt_gradients(self) -> None:
        """Bring the gradients that the step only adds to back to the place that the graph knows."""
        adopt(self._accumulated)

    def put_back_gradients(self) -> None:
        """Bring the gradients that the step makes back to where it makes them."""
        adopt(self._takes[0].gradients)

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
            between: called where the host has a turn, with what this returns, and which turn it is.
                None: the step without the host's turns.
            handed: what the host is given in place of the graph's gradients, or None.
            timed: replay a capture with timing events, if there is one, or else one without.

        Returns:
            What `record` returned in the capture whose turn it is. The tensors in it are static, and
            are overwritten by the next replay.
        """
        self.static.copy_from(batch)
        self.adopt_gradients()
        if handed is not None:
            handed.add_to_found(self._accumulated)
        turns = self._turns[timed]
        take = self._last = turns[0]
        turns.rotate(-1)
        return take.replay(between, self._accumulated, handed)

    def turn_back(self, timed: bool) -> None:
        """Let the next replay be of the capture that the last one was of.

        Args:
            timed: as in `replay`.
        """
        self._turns[timed].rotate(1)

    def rerun(self) -> None:
        """Run the first of the captures on what is in the static buffers, and leave gradients alone."""
        self._takes[0].graph.replay()

    def upcoming(self, timed: bool) -> T:
        """The static outputs of the capture that `replay` will run next."""
        return self._turns[timed][0].outputs

    def is_unproved(self, timed: bool) -> bool:
        """Whether the capture that `replay` will run next has never been replayed."""
        return not self._turns[timed][0].replayed

    def kind_to_prove(self, timed: bool) -> bool:
        """Whether a replay that is verified had best be of a capture with timing events.

        Those of a step that is not timed say nothing to anybody, but the next one that is timed need not
        be verified then.

        Args:
            timed: the step is timed.
        """
        return timed or (self.is_unproved(True) and not self.is_unproved(False))

    def hand_out(self, handed: HandedOut) -> None:
        """After a replay: give the parameters copies of its gradients, which no replay overwrites."""
        if self._last is not None:
            self._last.hand_out(self._accumulated, handed)

    def is_kept(self) -> bool:
        """Whether somebody outside refers to a gradient of the graph, or to a part of one."""
        return self._holds is not None and self._holds.is_any_kept()

    def bring_out_gradients(self) -> None:
        """Give who still needs the gradients copies that no graph writes into."""
        for take in self._takes:
            for parameter, gradient in take.gradients:
                if parameter.grad is gradient:
                    parameter.grad = gradient.clone()

    def release(self) -> None:
        """Let go of the graphs and their memory."""
        for take in self._takes:
            self._backend.release(take.graph)
        if self._holds is None:
            self.bring_out_gradients()
        else:
            self._holds.move_out()
            self._holds = None
        self._takes = []
        self._turns = {}
        self._last = None
