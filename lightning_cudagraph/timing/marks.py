"""Events inside a captured step: what they mark, and when they were passed.

A step goes from stage to stage (forward, backward, optimizer), and inside of these from layer to layer.
Each change is marked by an event. Where nothing has been issued since the last one, that one is taken:
neighbouring layers, and a container and its first member, have a mark in common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal
from weakref import WeakValueDictionary

from torch import nn

from lightning_cudagraph.capture.backend import Backend, Event
from lightning_cudagraph.capture.sentry import is_capturing
from lightning_cudagraph.errors import CUDAGraphError
from lightning_cudagraph.timing.layer_marks import LayerMarks
from lightning_cudagraph.timing.layers import Placement
from lightning_cudagraph.timing.spans import (
    BACKWARD_TAG,
    FORWARD_TAG,
    STEP_TAG,
    Lane,
    Span,
    SpanLayout,
)

__all__ = ["Stage", "StepMarks"]

Stage = Literal["forward", "backward", "host", "clipping", "scaler", "optimizer"]
_LANES: dict[Stage, Lane] = {
    "forward": "forward",
    "backward": "backward",
    "host": "host",
    "clipping": "optimizer",
    "scaler": "optimizer",
    "optimizer": "optimizer",
}

_Calls = list[tuple[int, int]]

# Captures that mark the same share their layout, as an object.
_layouts: WeakValueDictionary[tuple[Any, ...], SpanLayout] = WeakValueDictionary()


class StepMarks:
    """The events of one captured step.

    The stages tile the step, so that their times add up to the whole. What is in them:

    - forward: what `training_step` does.
    - backward: from there to the end of the backward pass, with what is recomputed for it.
    - host: turns of the host in the middle of the step, while which the device waits.
    - clipping: `configure_gradient_clipping`. scaler: unscaling, and the update of the scale.
    - optimizer: all else that comes after the backward pass.

    A layer's backward pass is the time in which nodes run that its calls have made, be they for the
    gradients of its inputs or of its weights, and in which what it computed is recomputed. A gradient
    that several layers add to is added up in the one whose part comes last. Layers that are called
    several times have the sum of their calls; a layer called inside itself counts once.

    Args:
        backend: where the step runs.
        layers: the modules to time, by name.
        has_optimizer: the step ends with that of the optimizer, and not with the backward pass.
        placement: ``"serial"`` to have the events between the kernels, and not beside them.

    Attributes:
        layout: what is timed, after `recording`: ``step_ms/`` and a stage or a part,
            ``step_ms/total`` if there is an optimizer, ``layer_forward_ms/{module}`` and
            ``layer_backward_ms/{module}``. Marks are numbered in the order of the step.
        untimed: what is not timed, in words, and why.
    """

    layout: SpanLayout
    untimed: dict[str, str]

    def __init__(
        self,
        backend: Backend,
        layers: Mapping[str, nn.Module],
        has_optimizer: bool = True,
        placement: Placement = "forked",
    ) -> None:
        self._backend = backend
        self._has_optimizer = has_optimizer
        self._forked = placement == "forked"
        self._names = list(layers)
        self._layers = LayerMarks(layers, self._turn_to)
        self._events: list[Event] = []
        # What reads them, once all have been recorded.
        self._times: Callable[[], list[float]] | None = None
        self._position: object | None = None
        self._stage: Stage | None = None
        self._stage_begin = 0
        self._stages: dict[Stage, _Calls] = {}
        self._parts: dict[str, tuple[Lane, _Calls]] = {}
        # What is under way, by tag, and the marks at which it began.
        self._open: dict[str, int] = {}
        self._calls: dict[str, _Calls] = {}
        self._is_recording = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around the step: mark its beginning and its end, and its layers in between."""
        with self._layers.followed(captured=is_capturing()):
            self._is_recording = True
            try:
                self._enter("forward")
                yield
                self._layers.end_backward()
                self._enter(None)
            finally:
                self._is_recording = False
        self._lay_out()

    def forward_began(self) -> None:
        """Say that the forward pass begins, if it is not with the step."""
        self._layers.begin_forward()
        if self._stage != "forward":
            self._enter("forward")

    def forward_ended(self, output: Any = None) -> None:
        """Mark the end of the forward pass, which is the beginning of the backward pass.

        Args:
            output: what the backward pass begins from; layers whose outputs it comes from are known
                without it, but not when what comes after them in the step ends.
        """
        self._layers.end_forward(output)
        self._enter("backward")

    def backward_ended(self) -> None:
        """Mark the end of the backward pass, if it has not ended, and the beginning of what follows."""
        if self._stage == "backward":
            self._layers.end_backward()
            self._enter("optimizer" if self._has_optimizer else None)

    @contextmanager
    def stage(self, name: Stage) -> Iterator[None]:
        """Time what is done inside as a stage of its own, and not as that around it."""
        around = self._stage
        self._enter(name)
        yield
        self._enter(around)

    @contextmanager
    def part(self, name: str, lane: Lane) -> Iterator[None]:
        """Time what is done inside on the current stream, as ``step_ms/{name}``, beside all else.

        Args:
            name: what it is.
            lane: where it is drawn on a timeline.
        """
        end = self.begin_part(name, lane)
        yield
        end()

    def begin_part(self, name: str, lane: Lane) -> Callable[[], None]:
        """Time something as `part` does, that ends elsewhere: in a callback, or on another stream.

        Args:
            name: what it is.
            lane: where it is drawn on a timeline.

        Returns:
            What marks its end, on the stream that is current then.
        """
        begin = self._mark()

        def end() -> None:
            self._parts.setdefault(name, (lane, []))[1].append((begin, self._mark()))

        return end

    @property
    def start(self) -> Event:
        """The first of the events."""
        return self._events[0]

    def read(self) -> list[float]:
        """When the last replay passed its marks, waiting for its end if need be.

        Returns:
            Milliseconds after the first mark, one for each of the layout's.

        Raises:
            CUDAGraphError: if there has been no replay, or if a capture is under way.
        """
        if self._is_recording or is_capturing():
            raise CUDAGraphError("The marks of a step cannot be read while a step is captured.")
        if not hasattr(self, "layout"):
            raise CUDAGraphError("The marks of a step were to be read, and no step has been recorded.")
        events = self._events
        try:
            events[-1].synchronize()
            for _, calls in self._parts.values():  # on streams of their own
                events[calls[-1][1]].synchronize()
            if self._times is None:
                self._times = self._backend.event_times(events)
            return self._times()
        except (RuntimeError, ValueError) as error:
            raise CUDAGraphError(
                f"The marks of a step cannot be read: {error} Expected a replay of its graph before."
            ) from error

    def _mark(self) -> int:
        """Mark this point; returns the number of the mark."""
        if not self._is_recording:
            raise CUDAGraphError("A step was to be marked that is not being recorded.")
        position = self._backend.position()
        if position is None or position != self._position:
            event = self._backend.event()
            self._backend.mark(event, self._forked)
            self._events.append(event)
            self._position = self._backend.position()  # an event between kernels has moved it
        return len(self._events) - 1

    def _enter(self, stage: Stage | None) -> None:
        number = self._mark()
        if self._stage is not None and number > self._stage_begin:
            self._stages.setdefault(self._stage, []).append((self._stage_begin, number))
        self._stage, self._stage_begin = stage, number

    def _turn_to(self, tags: frozenset[str]) -> None:
        """From here on the time belongs to the layers' passes of these tags."""
        if self._open.keys() == tags:
            return
        number = self._mark()
        for tag in self._open.keys() - tags:
            self._calls.setdefault(tag, []).append((self._open.pop(tag), number))
        for tag in tags - self._open.keys():
            self._open[tag] = number

    def _lay_out(self) -> None:
        """Say what the marks mean."""
        last = len(self._events) - 1
        spans = [
            Span(STEP_TAG + stage, lane, tuple(self._stages[stage]))
            for stage, lane in _LANES.items()
            if stage in self._stages
        ]
        if self._has_optimizer:
            spans.append(Span(f"{STEP_TAG}total", "host", ((0, last),)))
        spans += [
            Span(STEP_TAG + name, lane, tuple(calls)) for name, (lane, calls) in self._parts.items()
        ]
        for name in self._names:
            for tag, lane in _PASSES:
                if calls := self._calls.get(tag + name):
                    stretches = [(begin, end) for begin, end in calls if end > begin]
                    spans.append(Span(tag + name, lane, tuple(stretches or calls[:1])))
        self.untimed = self._layers.untimed(frozenset(span.tag for span in spans))
        if not self._layers.backward_is_known:
            spans = [span for span in spans if not span.tag.startswith(BACKWARD_TAG)]
        key = (tuple(spans), len(self._events))
        self.layout = _layouts.setdefault(key, SpanLayout(*key))


_PASSES: tuple[tuple[str, Lane], ...] = ((FORWARD_TAG, "forward"), (BACKWARD_TAG, "backward"))
