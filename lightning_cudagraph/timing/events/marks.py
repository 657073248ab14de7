"""Marks of a step: events at its changes of stage and layer.

An event marks each change from stage to stage (forward, backward, optimizer) and from layer to layer. If
nothing has been issued since the last event, the change shares it: neighbouring layers, and a container
and its first member, have one mark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakValueDictionary

from torch import nn

from lightning_cudagraph.device.backend import Backend, Event
from lightning_cudagraph.device.sentry.collective_hooks import collective_hook
from lightning_cudagraph.device.sentry.sentry import is_capturing
from lightning_cudagraph.errors import CUDAGraphError
from lightning_cudagraph.timing.events.collective_marks import Collectives
from lightning_cudagraph.timing.layers.layer_marks import LayerMarks
from lightning_cudagraph.timing.layers.layer_selection import Placement
from lightning_cudagraph.timing.readings.spans import (
    BACKWARD_TAG,
    FORWARD_TAG,
    STEP_TAG,
    TOTAL_TAG,
    Span,
    SpanLayout,
    Stage,
    Track,
)

_TRACKS: dict[Stage, Track] = {
    "forward": "forward",
    "backward": "backward",
    "host": "host",
    "clipping": "optimizer",
    "scaler": "optimizer",
    "optimizer": "optimizer",
}

_Calls = list[tuple[int, int]]

# Captures with equal marks share one layout object.
_layouts: WeakValueDictionary[tuple[Any, ...], SpanLayout] = WeakValueDictionary()


class StepMarks:
    """The events of one captured step.

    The stages tile the step, so that their times add up to the whole:

    - forward: `training_step`.
    - backward: from there to the end of the backward pass, with recomputation for it.
    - host: graph breaks, in which hooks run on the host while the device waits.
    - clipping: `configure_gradient_clipping`. scaler: unscaling, and the update of the scale.
    - optimizer: all else that comes after the backward pass.

    A layer's backward pass is the time of the autograd nodes that its calls have made, for gradients of
    inputs and of weights, and of the recomputation of its outputs. The sum of a gradient of several
    layers counts for the layer that adds the last part. The time of a layer is the sum of its calls; a
    layer called inside itself counts once.

    With several processes there are parts beside the stages, in a track of their own:

    - all_reduce: the all-reduces of the step: under `DistributedDataParallel` one for each bucket of
      gradients, beside the backward pass. Each lasts from when it can begin (its inputs are ready, and
      the collective before it is done) until it is done, which includes this process's wait for the
      others.
    - all_reduce_exposed: the step's wait for them, from the last gradients until the last all-reduce is
      done. Those between the kernels of the step, such as `SyncBatchNorm`'s, are waited for from
      beginning to end.
    - broadcast, all_gather, and so on: other collectives of the step, likewise.

    Args:
        has_optimizer: the step ends with the optimizer's, and not with the backward pass.
        placement: ``"serial"`` for events between the kernels, and not on a branch beside them.

    Attributes:
        layout: the spans, after `recording`: ``step_ms/`` and a stage or a part, ``step_ms/total`` if
            there is an optimizer, ``layer_forward_ms/{module}`` and ``layer_backward_ms/{module}``.
            Marks are numbered in the order of the step.
        untimed: reasons why layers are not timed, by their names in words.
    """

    layout: SpanLayout
    untimed: dict[str, str]

    def __init__(
        self,
        backend: Backend,
        layers: Mapping[str, nn.Module],
        has_optimizer: bool = True,
        placement: Placement = "forked",
        with_collectives: bool = False,
    ) -> None:
        self._backend = backend
        self._with_collectives = with_collectives
        self._collectives = Collectives()
        self._has_optimizer = has_optimizer
        self._forked = placement == "forked"
        self._names = list(layers)
        self._layers = LayerMarks(layers, self._turn_to)
        self._events: list[Event] = []
        # Reads the events; made once all have been recorded.
        self._times: Callable[[], list[float]] | None = None
        self._position: object | None = None
        self._here = -1  # the mark at this position
        self._stage: Stage | None = None
        self._stage_begin = 0
        self._stages: dict[Stage, _Calls] = {}
        # Marks at which the layers' passes under way began, by tag.
        self._open: dict[str, int] = {}
        self._calls: dict[str, _Calls] = {}
        self._is_recording = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context around the step: mark its beginning, its layers, and its end."""
        with ExitStack() as stack:
            stack.enter_context(self._layers.followed(captured=is_capturing()))
            if self._with_collectives:
                stack.enter_context(collective_hook(self._collective, captured=is_capturing()))
            self._is_recording = True
            try:
                self._enter("forward")
                yield
                self._layers.end_backward()
                self._enter(None)
            finally:
                self._is_recording = False
        if is_capturing():  # the end of the graph waits for all of its branches
            self._collectives.let_go()
        self._lay_out()

    def forward_began(self) -> None:
        """Mark the beginning of the forward pass, if it does not begin with the step."""
        self._layers.begin_forward()
        if self._stage != "forward":
            self._enter("forward")

    def forward_ended(self, output: Any = None) -> None:
        """Mark the end of the forward pass, which is the beginning of the backward pass.

        Without `output`, from which the backward pass begins, the backward passes of layers are found,
        but not the end of the nodes between these tensors and the layers.
        """
        self._layers.end_forward(output)
        self._enter("backward")

    def backward_ended(self) -> None:
        """Mark the end of the backward pass, if it is under way, and the beginning of the next stage."""
        if self._stage == "backward":
            self._layers.end_backward()
            self._enter("optimizer" if self._has_optimizer else None)

    @contextmanager
    def stage(self, name: Stage) -> Iterator[None]:
        """Time the block as a stage of its own, and not as part of the stage around it."""
        around = self._stage
        self._enter(name)
        yield
        self._enter(around)

    @property
    def start(self) -> Event:
        return self._events[0]

    def read(self) -> list[float]:
        """Read the times of the marks in the last replay, in milliseconds after the first mark."""
        if self._is_recording or is_capturing():
            raise CUDAGraphError("The marks of a step cannot be read while a step is captured.")
        if not hasattr(self, "layout"):
            raise CUDAGraphError("The marks of a step were to be read, and no step has been recorded.")
        events = self._events
        try:
            events[self._here].synchronize()
            for end in self._collectives.ends:  # on streams of their own, or recorded by gloo's threads
                events[end].synchronize()
            if self._times is None:
                self._times = self._backend.event_times(events)
            times_ms = self._times()
        except (RuntimeError, ValueError) as error:
            raise CUDAGraphError(
                f"The marks of a step cannot be read: {error} Expected a replay of its graph before."
            ) from error
        self._collectives.let_go()
        return times_ms + self._collectives.begins_ms(times_ms)

    def _mark(self) -> int:
        if not self._is_recording:
            raise CUDAGraphError("A step was to be marked that is not being recorded.")
        position = self._backend.position()
        if position is None or position != self._position:
            event = self._backend.event()
            self._backend.mark(event, self._forked)
            self._here = self._take(event)
            self._position = self._backend.position()  # an event between kernels has moved it
        return self._here

    def _take(self, event: Event) -> int:
        self._events.append(event)
        return len(self._events) - 1

    def _collective(self, name: str, tensors: Any) -> Callable[[Any], None]:
        """Mark the point where a collective can begin; return a function that marks its end."""
        ready = self._mark()

        def issued(work: Any) -> None:
            if work is None:
                self._collectives.add_waited_for(name, ready, self._mark())
                return
            event = self._backend.event()
            runs_beside = self._backend.mark_end(event, work)
            if runs_beside:
                self._collectives.add(name, ready, self._take(event), tensors)
            else:
                self._collectives.add_waited_for(name, ready, self._take(event))

        return issued

    def _enter(self, stage: Stage | None) -> None:
        number = self._mark()
        if self._stage is not None and number > self._stage_begin:
            self._stages.setdefault(self._stage, []).append((self._stage_begin, number))
        self._stage, self._stage_begin = stage, number

    def _turn_to(self, tags: frozenset[str]) -> None:
        """Attribute the time from here on to the layers' passes with these tags."""
        if self._open.keys() == tags:
            return
        number = self._mark()
        for tag in self._open.keys() - tags:
            self._calls.setdefault(tag, []).append((self._open.pop(tag), number))
        for tag in tags - self._open.keys():
            self._open[tag] = number

    def _lay_out(self) -> None:
        last = self._here
        spans = [
            Span(STEP_TAG + stage, track, tuple(self._stages[stage]))
            for stage, track in _TRACKS.items()
            if stage in self._stages
        ]
        if self._has_optimizer:
            spans.append(Span(TOTAL_TAG, "host", ((0, last),)))
        spans += self._collectives.spans(len(self._events))
        for name in self._names:
            for tag, track in _PASSES:
                if calls := self._calls.get(tag + name):
                    lasting = [(begin, end) for begin, end in calls if end > begin]
                    spans.append(Span(tag + name, track, tuple(lasting or calls[:1])))
        self.untimed = self._layers.untimed(frozenset(span.tag for span in spans))
        if not self._layers.backward_is_known:
            spans = [span for span in spans if not span.tag.startswith(BACKWARD_TAG)]
        key = (tuple(spans), len(self._events) + len(self._collectives.ends))
        self.layout = _layouts.setdefault(key, SpanLayout(*key))


_PASSES: tuple[tuple[str, Track], ...] = ((FORWARD_TAG, "forward"), (BACKWARD_TAG, "backward"))
