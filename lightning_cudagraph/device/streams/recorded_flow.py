"""The data flow of a capture on one stream, and how many streams it could use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from lightning_cudagraph.device.streams.accesses import (
    access_of,
    all_of,
    launches_nothing,
    made_by,
)
from lightning_cudagraph.device.streams.dataflow import AddressRange, Flow


class RecordedOp(NamedTuple):
    """An op of a capture: the address ranges that it reads, writes and makes, and its cost."""

    reads: list[AddressRange]
    writes: list[AddressRange]
    made: list[AddressRange]
    cost: float


class RecordedFlow:
    """The ops of a capture, in order, with None for a barrier; each launch moves the `position`.

    Attributes:
        has_all_reduces: True if all-reduces were issued. The step's waits for them count as barriers.
    """

    def __init__(self, device_type: str, position: Callable[[], object]) -> None:
        self._device_type = device_type
        self._position = position
        self._left: object = None
        self.ops: list[RecordedOp | None] = []
        self.has_all_reduces = False

    def run(self, func: Any, args: Any, kwargs: Any, run: Callable[[Any, Any, Any], Any]) -> Any:
        if launches_nothing(func, args, kwargs):
            return run(func, args, kwargs)
        if self.ops and self._position() != self._left:
            self.ops.append(None)  # work that is no op, or another part
        access = access_of(func, args, kwargs)
        result = run(func, args, kwargs)
        self.has_all_reduces |= func._schema.name == "c10d::allreduce_"
        if func.namespace == "c10d" and self._position() == self._left:
            return result  # on NCCL's stream: what waits for it is seen later
        if access is None:
            self.ops.append(None)
        else:
            made = [all_of(tensor) for tensor in made_by(result, access.tensors, self._device_type)]
            if made or any(tensor.device.type == self._device_type for tensor in access.tensors):
                self.ops.append(RecordedOp(access.reads, access.writes, made, access.cost))
        self._left = self._position()
        return result

    def bar(self) -> None:
        """Note that all later ops come after all earlier ones."""
        self.ops.append(None)

    def on(self, streams: int) -> tuple[float, int]:
        """Place the ops on streams; return their time, in small kernels, and the streams in use."""
        flow = Flow(streams)
        for op in self.ops:
            if op is None:
                flow.barrier()
            else:
                flow.made(flow.add(op.reads, op.writes, op.cost), op.made)
        return flow.end, flow.used
