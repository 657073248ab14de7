"""Captures on several streams: independent ops become parallel branches of the graph.

Work captured on one stream is a chain, each kernel after the one before, and small kernels leave most
of a GPU idle. Here each op of the step runs on one of a few capture streams, and waits only for the ops
that it depends on. All other code sees no difference: between two ops the step's own stream is current,
and *it waits for everything issued so far*. So work that passes no dispatcher (a Triton kernel, an
extension, an event) comes after all ops before it. The state of the capture shows it before the next op,
and all later ops wait for it.

A collective is on NCCL's stream, and the step's own stream waits for it where the code of the step does.
Ops wait for it by their data. So the part of an optimizer's step that needs one all-reduce can run
beside the later ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_cudagraph.compat.names.torch_names import tree_iter
from lightning_cudagraph.device.streams.accesses import (
    Access,
    access_of,
    has_address,
    launches_nothing,
    made_by,
    span_of,
)
from lightning_cudagraph.device.streams.dataflow import Flow, HeldMemory, Placed
from lightning_cudagraph.device.streams.driver import let_wait, position_of
from lightning_cudagraph.device.streams.list_ops import (
    is_whole_step,
    length_of,
    merged,
    overlap,
    part_of,
    tensors_at,
)
from lightning_cudagraph.tensors.writes import tensors_in, users_of

_UNSEEN = "work that is no op of torch's (such as Triton's kernels)"
# The memory of a stream that may be held for other streams before it waits for them: this, or a share of
# what the capture has allocated, if that is more.
_HELD_BYTES = 1 << 20
_HELD_SHARE = 1 / 64
# The bytes that a collective between GPUs of one machine averages in the time of a small kernel: a rough
# guess, with which ops are assigned to streams.
_AVERAGED_BYTES_A_KERNEL = 5e5


class SentBackError(RuntimeError):
    """A step cannot be captured on several streams; it is captured again on one."""


class Branches:
    """The streams of one capture.

    Args:
        streams: streams of one capture. The first is the step's own, which is current between ops.
        record: records an event on a stream, and keeps it alive as long as the graph.
        group_and_work: the process group and the `Work` of a collective that was issued; None for
            other ops.

    Attributes:
        broken: the reason why the order of ops may be wrong; None if it is right.
    """

    def __init__(
        self,
        streams: Sequence[torch.cuda.Stream],
        record: Callable[[torch.cuda.Event, torch.cuda.Stream], None],
        group_and_work: Callable[[Any, Any, Any], tuple[Any, Any] | None],
    ) -> None:
        self._record = record
        self._group_and_work = group_and_work
        self._streams = list(streams)
        self._own = self._streams[0]
        # The stream that memory was allocated on, by address. Unknown memory belongs to the step's own
        # stream, on which all code but ops allocates.
        self._homes: dict[int, int] = {}
        self._flow = Flow(len(self._streams))
        self._held = HeldMemory(self._flow, _is_free)
        self._nodes: list[tuple[int, ...]] = []
        self._left: tuple[int, ...] = ()
        # The numbers of collectives of one process group, by their nodes.
        self._collectives: dict[int, int] = {}
        self._group: Any = None
        # There was a collective that is not followed: a wait may be for it, too.
        self._are_others = False
        # The position of each stream after its last op.
        self._at: list[tuple[int, ...]] = []
        self._made_bytes = 0
        self.used = 0
        self.barriers: dict[str, int] = {}
        self.broken: str | None = None

    def begin(self) -> None:
        """Fork the streams at the beginning of a part, with the step's own stream current."""
        self._flow = Flow(len(self._streams))
        self._held = HeldMemory(self._flow, _is_free)
        self._nodes = []
        self._collectives = {}
        self._are_others = False
        fork = torch.cuda.Event()
        self._record(fork, self._own)
        for stream in self._streams[1:]:
            stream.wait_event(fork)
        self._left = self._position(self._own)
        self._wait(self._own, self._left)
        self._at = [self._position(stream) for stream in self._streams]

    def end(self) -> None:
        """Join the streams at the end of a part, on the error path too."""
        self.used = max(self.used, self._flow.used)
        for stream in self._streams[1:]:
            if position_of(stream) is not None:
                self._own.wait_stream(stream)
        self._held = HeldMemory(self._flow)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op on a stream chosen by its data flow."""
        if self.broken is not None:
            raise SentBackError(self.broken)
        if torch.cuda.current_stream(self._own.device) != self._own:
            # A stream of the user's code, which orders it with the step's own stream.
            self._are_others |= func.namespace == "c10d"
            return func(*args, **kwargs)
        self._notice()
        if launches_nothing(func, args, kwargs):
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            return self._run_collective(func, args, kwargs)
        access = access_of(func, args, kwargs)
        if access is None or not all(map(self._is_here, access.tensors)):
            return self._run_alone(func, args, kwargs)
        if not any(map(self._is_on_device, access.tensors)) and not self._makes_on_device(kwargs):
            return func(*args, **kwargs)
        if parts := self._parts(func, args, kwargs):
            return self._run_parts(func, args, kwargs, parts)
        return self._run_placed(func, args, kwargs, access)

    def resized(self) -> None:
        """Let all later ops wait for all earlier ones: they may be given memory that is let go of."""
        if torch.cuda.current_stream(self._own.device) == self._own:
            self._notice()
            self._bar("a storage that is resized")

    def _parts(self, func: Any, args: Any, kwargs: Any) -> list[list[int]]:
        """The indices of an op on lists that wait for the same collectives; empty if all do."""
        length = length_of(func, args, kwargs) if self._collectives else 0
        spans = [[*map(span_of, tensors)] for tensors in tensors_at(args, kwargs, length)]
        parts: dict[int, list[int]] = {}
        for index, own in enumerate(spans):
            parts.setdefault(self._flow.collective_before(own, own), []).append(index)
        if len(parts) < 2 or overlap(spans):
            return []
        in_order = [indices for _, indices in sorted(parts.items())]
        return in_order if is_whole_step(func) else merged(in_order, len(self._streams))

    def _run_parts(self, func: Any, args: Any, kwargs: Any, parts: list[list[int]]) -> Any:
        """Run an op on lists in parts, those first whose collective is done first."""
        results: dict[int, Any] = {}
        for indices in parts:
            some_args, some_kwargs = part_of(args, kwargs, indices)
            access = access_of(func, some_args, some_kwargs)
            assert access is not None
            made = self._run_placed(func, some_args, some_kwargs, access)
            if made is not None:
                results.update(zip(indices, made, strict=True))
        return [results[index] for index in sorted(results)] if results else None

    def _run_placed(self, func: Any, args: Any, kwargs: Any, access: Access) -> Any:
        self._notice()  # reading an address may copy a copy-on-write storage
        before = self._flow.last
        placed = self._flow.add(access.reads, access.writes, access.cost, also_after=self._overdue)
        stream = self._streams[placed.stream]
        if placed.stream and self._position(stream) != self._at[placed.stream]:
            self._break("the step uses a stream of its own that is one of the capture's")
        for tensor in access.tensors:
            if self._is_on_device(tensor):
                storage = tensor.untyped_storage()
                home = self._homes.get(storage.data_ptr(), 0)
                self._held.use(placed, home, storage, storage.nbytes())
        self._held.release()
        self._wait(stream, self._nodes_of([before[placed.stream], *placed.waits]))
        torch.cuda.set_stream(stream)
        try:
            result = func(*args, **kwargs)
        finally:
            torch.cuda.set_stream(self._own)
            self._at[placed.stream] = self._position(stream)
            self._nodes.append(self._at[placed.stream])
            self._join()
        if how := access.moved():
            self._break(f"{func} {how}")
        self._take(placed, made_by(result, access.tensors, self._own.device.type))
        return result

    def _overdue(self, stream: int, time: float) -> list[int]:
        allowed_bytes = max(_HELD_BYTES, int(_HELD_SHARE * self._made_bytes))
        return self._held.overdue(stream, time, allowed_bytes)

    def _run_alone(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op with unknown accesses after all earlier and before all later ops."""
        result = func(*args, **kwargs)
        self._bar(str(func))
        for leaf in tree_iter(result):
            if not isinstance(leaf, Tensor) or not has_address(leaf):
                continue
            if self._is_on_device(leaf) and leaf.layout is torch.strided:
                self._homes[leaf.untyped_storage().data_ptr()] = 0
        return result

    def _run_collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a collective after all earlier ops; only those that use its memory wait for it.

        Only those of the first process group are followed, which are on one stream of NCCL's. After any
        other, the step's own stream waits where the code of the step does, as for other work that is no
        op.
        """
        result = func(*args, **kwargs)
        left = self._left
        if self._position(self._own) != left:
            self._bar(str(func))
            return result
        tensors = tensors_in(args)
        group, work = self._group_and_work(func, args, result) or (None, None)
        is_here = all(tensor.device == self._own.device for tensor in tensors)
        if work is None or not is_here or self._group not in (None, group):
            self._are_others = True
            return result
        work.wait()  # the step's own stream waits, not the host; what comes next is not to wait
        nodes = set(self._position(self._own)) - set(left)
        self._wait(self._own, left)
        self._left = self._position(self._own)
        if nodes and nodes.isdisjoint(self._collectives):
            self._group = group
            self._follow(tensors, tuple(nodes))
        else:  # it has launched nothing: its end is that of another one
            self._are_others = True
        return result

    def _follow(self, tensors: list[Tensor], nodes: tuple[int, ...]) -> None:
        """Note a collective under way, and keep its memory, which torch lets go of in `Work.wait`."""
        spans = [*map(span_of, tensors)]
        moved_bytes = sum(end - start for start, end in spans)
        placed = self._flow.collective(spans, 1.0 + moved_bytes / _AVERAGED_BYTES_A_KERNEL)
        self._nodes.append(nodes)
        self._collectives.update(dict.fromkeys(nodes, placed.number))
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._held.use(placed, self._homes.get(storage.data_ptr(), 0), storage, storage.nbytes())

    def _take(self, placed: Placed, made: list[Tensor]) -> None:
        spans = []
        for tensor in made:
            storage = tensor.untyped_storage()
            start = storage.data_ptr()
            self._homes[start] = placed.stream
            spans.append((start, start + storage.nbytes()))
            self._made_bytes += storage.nbytes()
        if self._flow.made(placed, spans):
            self._break("memory was given to an op while others still used it")

    def _notice(self) -> None:
        """Detect work that was issued without an op, and make it a barrier."""
        if not self._nodes and not self._position(self._own):
            # The graph begins in one node.
            self._record(torch.cuda.Event(external=True), self._own)
        position = self._position(self._own)
        if position == self._left:
            return
        new = set(position) - set(self._left)
        for node in new & self._collectives.keys():
            self._flow.wait_for(self._collectives[node])
        are_all_known = set(self._left) <= set(position) and new <= self._collectives.keys()
        if are_all_known and not self._are_others:
            self._join()
        else:
            self._bar(_UNSEEN if self._nodes else None)

    def _bar(self, what: str | None) -> None:
        if what is not None:
            self.barriers[what] = self.barriers.get(what, 0) + 1
        self._flow.barrier()
        self._nodes.append(self._position(self._own))
        self._held.release()
        self._left = self._nodes[-1]

    def _join(self) -> None:
        """Make the step's own stream wait for everything issued so far."""
        self._wait(self._own, self._nodes_of(self._flow.leaves))
        self._left = self._position(self._own)

    def _nodes_of(self, numbers: Iterable[int]) -> set[int]:
        return {node for number in numbers if number >= 0 for node in self._nodes[number]}

    def _is_on_device(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._own.device.type

    def _is_here(self, tensor: Tensor) -> bool:
        return not self._is_on_device(tensor) or tensor.device == self._own.device

    def _makes_on_device(self, kwargs: Any) -> bool:
        device = kwargs.get("device")
        return device is not None and torch.device(device).type == self._own.device.type

    def _position(self, stream: torch.cuda.Stream) -> tuple[int, ...]:
        position = position_of(stream)
        if position is None:
            self._break("the driver does not tell how far the capture has come")
        return position[1:]

    def _wait(self, stream: torch.cuda.Stream, nodes: Iterable[int]) -> None:
        if not let_wait(stream, tuple(nodes)):
            self._break("the driver does not let work of a capture wait for chosen nodes")

    def _break(self, reason: str) -> NoReturn:
        """Fail the capture, even if the step catches the error."""
        self.broken = reason
        raise SentBackError(reason)


def _is_free(storage: torch.UntypedStorage) -> bool:
    """True if nothing else refers to a storage; False if torch cannot tell."""
    return users_of is not None and users_of(storage._cdata) == 1
