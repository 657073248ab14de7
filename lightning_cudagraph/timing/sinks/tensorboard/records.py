"""Scalars as records of a TensorBoard event file, vectorised over many steps.

A record is a length, an `Event` as protocol buffers serialise it, and checksums of both. Events with the
same tags differ only in time, step and values, if the step is padded to a fixed length. So these are
filled into copies of one template, all at once.

TensorBoard's `EventFileWriter.add_event` would take longer than a short step: it computes checksums byte
by byte in Python, in a thread that holds the GIL meanwhile. For 30, 72 and 200 times a step it needs
220, 505 and 1450 µs of the processor, and records made at once 3, 7 and 18 µs (one core of an AMD EPYC,
`python -m benchmarks.bulk_writing`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lightning_cudagraph.timing.readings.spans import MAX_LAYOUTS, Reading, SpanLayout
from lightning_cudagraph.timing.sinks.curves import tags_without_curves
from lightning_cudagraph.timing.sinks.tensorboard.crc32c import AlikeRows, masked_crc32c

# A function that reduces a layout to the spans that have curves, under the tags of these.
Curves = Callable[[SpanLayout], SpanLayout]

_HEADER_BYTES = 12
# Seven bits a byte: enough for any run. Protocol buffers allow a varint to be longer than needed.
_SHIFTS = np.arange(0, 7 * 6, 7)
# Records made at once: more would hold the GIL, which the training loop needs, for too long; fewer cost
# more, because each call of NumPy takes a microsecond.
_BYTES_AT_ONCE = 64 * 2**10


def behind(tag: str) -> str:
    """The tag in TensorBoard, which sorts by character: behind all letters, so behind the user's."""
    return f"~{tag}"


def curves_of(inner: frozenset[str] = frozenset()) -> Curves:
    """Create the function for all spans except those of inner layers."""

    @lru_cache(MAX_LAYOUTS)
    def curves(layout: SpanLayout) -> SpanLayout:
        without = tags_without_curves(layout.tags, inner)
        shown = [span for span in layout.spans if span.tag not in without]
        return SpanLayout(tuple(replace(span, tag=behind(span.tag)) for span in shown), layout.n_marks)

    return curves


def _event(tags: Sequence[str], byte: int) -> NDArray[np.uint8]:
    """The event of a step, with copies of a byte (in a varint, of its low bits) for all but the tags."""
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[attr-defined]
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]

    (walltime_s,) = struct.unpack("<d", bytes([byte]) * 8)
    (value,) = struct.unpack("<f", bytes([byte]) * 4)
    event = Event(
        wall_time=walltime_s,
        step=sum((byte & 0x7F) << shift for shift in _SHIFTS.tolist()),
        summary=Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag in tags]),
    )
    return np.frombuffer(event.SerializeToString(), np.uint8)


class ScalarRecords:
    """The records of steps with the same tags."""

    def __init__(self, tags: Sequence[str]) -> None:
        event, other = _event(tags, 0x55), _event(tags, 0xAA)
        places = np.flatnonzero(event != other)
        data = np.where(event == other, event, 0).tobytes()
        self._checksums = AlikeRows(data, places)
        length = struct.pack("<Q", len(data))
        header = length + struct.pack("<I", masked_crc32c(length))
        self._template = np.frombuffer(header + data + bytes(4), np.uint8)
        self.n_bytes = len(self._template)
        self._places_in_record = places + _HEADER_BYTES

    def serialised(
        self, steps: NDArray[np.int64], walltimes_s: NDArray[np.float64], values: NDArray[np.floating]
    ) -> NDArray[np.uint8]:
        """The records' bytes, shape ``(records, n_bytes)``, one for each row of values."""
        n = len(steps)
        groups = (steps[:, None] >> _SHIFTS & 0x7F).astype(np.uint8)
        groups[:, :-1] |= 0x80  # all bytes but the last are continued
        differing = np.concatenate(
            [
                walltimes_s.astype("<f8")[:, None].view(np.uint8),
                groups,
                np.ascontiguousarray(values, "<f4").view(np.uint8).reshape(n, -1),
            ],
            axis=1,
        )
        records = np.empty((n, len(self._template)), np.uint8)
        records[:] = self._template
        records[:, self._places_in_record] = differing
        records[:, -4:] = self._checksums.masked_crc32c(differing).astype("<u4")[:, None].view(np.uint8)
        return records


class ReadingRecords:
    """Serialiser of the curves of readings, for the thread of a writer."""

    def __init__(self, curves: Curves) -> None:
        self._curves = curves
        self._of_tags = lru_cache(MAX_LAYOUTS)(ScalarRecords)

    def of(self, readings: Sequence[Reading]) -> list[bytes]:
        """The record of each reading; empty for a reading without curves."""
        by_layout: dict[SpanLayout, list[int]] = {}
        for place, reading in enumerate(readings):
            by_layout.setdefault(self._curves(reading.layout), []).append(place)
        found = [b""] * len(readings)
        for layout, places in by_layout.items():
            if not layout.tags:
                continue
            records = self._of_tags(layout.tags)
            n_at_once = max(1, _BYTES_AT_ONCE // records.n_bytes)
            for begin in range(0, len(places), n_at_once):
                some = places[begin : begin + n_at_once]
                shown = [readings[place] for place in some]
                rows = records.serialised(
                    np.array([reading.step for reading in shown], np.int64),
                    np.array([reading.walltime_s for reading in shown]),
                    layout.durations_ms(np.array([reading.offsets_ms for reading in shown])),
                )
                for place, row in zip(some, rows, strict=True):
                    found[place] = row.tobytes()
        return found
