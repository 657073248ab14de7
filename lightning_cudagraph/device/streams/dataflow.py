"""The data flow of a captured step: dependencies between ops, and their assignment to streams.

This module knows no device. Ops arrive in program order, as the address ranges that they read and
write. Each is assigned a stream, and the ops of other streams that it has to wait for: the last writers
of what it reads, and the last readers and writers of what it writes. On its own stream it comes after
all earlier ops. So every execution that respects streams and waits computes the same as the program
order.

A collective is on a stream of NCCL's, one after the other. Ops wait for it by its data, and all else of
the step from where the step waits for it (`Work.wait`).

Dependencies are between addresses, not tensors: several tensors may have the same memory, at the same
time or one after the other.

A caching allocator keeps memory per stream: freed memory goes to the next request *on the same stream*,
and scratch memory of kernels belongs to no tensor. So an op writes its results and its scratch memory
where earlier ops on its stream have been, and it comes after those. Memory that other streams still use
must not be freed: `HeldMemory` keeps it alive.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# Addresses in bytes, [start, end).
AddressRange = tuple[int, int]

# The cost of a wait for an op of another stream, in the unit of `cost`: it keeps a chain on one stream.
_SWITCH_COST = 0.5


class Placed(NamedTuple):
    """The stream of an op, and the ops that it waits for.

    Attributes:
        waits: ops of other streams that it waits for, at most one of each stream. The other ops that it
            depends on come before these, or before it on its own stream.
    """

    number: int
    stream: int
    waits: tuple[int, ...]


@dataclass
class _Piece:
    """An address range, [start, end), with one history.

    Attributes:
        writer: the last op that wrote it, or None.
        readers: the last op of each stream that has read it since.
    """

    start: int
    end: int
    writer: int | None = None
    readers: dict[int, int] = field(default_factory=dict)


class _Memory:
    """The last users of memory, in disjoint pieces sorted by address."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._pieces: list[_Piece] = []

    def overlapping(self, span: AddressRange) -> list[_Piece]:
        first, last = self._slice(span)
        return self._pieces[first:last]

    def exactly(self, span: AddressRange) -> list[_Piece]:
        """The pieces that make up a range exactly; new ones where no op has been."""
        start, end = span
        if start >= end:
            return []
        self._cut(start)
        self._cut(end)
        first, last = self._slice(span)
        found: list[_Piece] = []
        for piece in self._pieces[first:last]:
            if start < piece.start:
                found.append(_Piece(start, piece.start))
            found.append(piece)
            start = piece.end
        if start < end:
            found.append(_Piece(start, end))
        self._put(first, last, found)
        return found

    def one(self, span: AddressRange) -> _Piece:
        """Replace everything in a range by one new piece."""
        start, end = span
        self._cut(start)
        self._cut(end)
        piece = _Piece(start, end)
        self._put(*self._slice(span), [piece])
        return piece

    def clear(self) -> None:
        self._starts.clear()
        self._pieces.clear()

    def _slice(self, span: AddressRange) -> tuple[int, int]:
        start, end = span
        first = bisect_right(self._starts, start)
        if first and self._pieces[first - 1].end > start:
            first -= 1
        return first, max(first, bisect_left(self._starts, end))

    def _cut(self, address: int) -> None:
        index = bisect_right(self._starts, address) - 1
        if index < 0:
            return
        piece = self._pieces[index]
        if piece.start < address < piece.end:
            rest = _Piece(address, piece.end, piece.writer, dict(piece.readers))
            piece.end = address
            self._put(index + 1, index + 1, [rest])

    def _put(self, first: int, last: int, pieces: list[_Piece]) -> None:
        self._pieces[first:last] = pieces
        self._starts[first:last] = [piece.start for piece in pieces]


class Flow:
    """The assignment of ops to streams, in program order; barriers are on stream 0.

    Collectives are on a stream of their own, the last: number `streams`.
    """

    def __init__(self, streams: int) -> None:
        if streams < 1:
            raise ValueError(f"expected at least one stream, found {streams}")
        self.streams = streams
        self._memory = _Memory()
        # For each op: its stream; its vector clock (for each stream the last op that it is, or comes
        # after); and its end, if each op took its cost.
        self._stream_of: list[int] = []
        self._after: list[tuple[int, ...]] = []
        self._ends: list[float] = []
        # The vector clock of each stream, for what is issued there next.
        self._clocks = [[-1] * (streams + 1) for _ in range(streams + 1)]
        self._last = [-1] * (streams + 1)
        # The last barrier, or -1.
        self._front = -1
        # The last collective that the step has waited for, or -1; and the memory of those after it.
        self._awaited = -1
        self._under_way: dict[int, list[AddressRange]] = {}
        # The last collective that ops come after which the latest collective comes after, or -1.
        self._settled = -1

    @property
    def used(self) -> int:
        return sum(last >= 0 for last in self._last[: self.streams])

    @property
    def end(self) -> float:
        """The end of all ops but collectives, if each took its cost."""
        return max((self._ends[last] for last in self._last[: self.streams] if last >= 0), default=0.0)

    @property
    def last(self) -> list[int]:
        """The last op of each stream, that of collectives included, or -1."""
        return list(self._last)

    @property
    def leaves(self) -> list[int]:
        """The ops to wait for to wait for all, but for collectives that the step has not waited for."""
        last = [index for index in (*self._last[: self.streams], self._awaited) if index >= 0]
        return [
            index
            for index in last
            if not any(
                self._after[other][self._stream_of[index]] >= index for other in last if other != index
            )
        ]

    def add(
        self,
        reads: Iterable[AddressRange],
        writes: Iterable[AddressRange],
        cost: float = 1.0,
        also_after: Callable[[int, float], Iterable[int]] = lambda stream, time: (),
    ) -> Placed:
        """Place the next op.

        Args:
            writes: existing memory that it writes; `made` takes the memory that it allocates.
            also_after: called with the stream and the begin of the op there; returns further ops to wait
                for.
        """
        reads, writes = list(reads), list(writes)
        needed = self._needed(reads, writes)
        if self._front >= 0:
            needed.add(self._front)
        stream = self._choose(needed, cost)
        needed.update(also_after(stream, self._begins(stream, needed)))
        placed = self._place(stream, needed, cost)
        for span in reads:
            for piece in self._memory.exactly(span):
                piece.readers[stream] = placed.number
        self._write(writes, placed.number)
        return placed

    def made(self, placed: Placed, spans: Iterable[AddressRange]) -> list[int]:
        """Record the memory that an op has allocated for its results.

        Args:
            spans: address ranges, unused or freed as far as its stream knows.

        Returns:
            Ops that use this memory too and that the op does not come after, because the memory was not
            held for them. If there are any, the order is not safe.
        """
        after = self._after[placed.number]
        early: set[int] = set()
        for span in spans:
            if span[0] >= span[1]:
                continue
            for piece in self._memory.overlapping(span):
                users = [*piece.readers.values(), *([] if piece.writer is None else [piece.writer])]
                early.update(user for user in users if after[self._stream_of[user]] < user)
            self._memory.one(span).writer = placed.number
        return sorted(early)

    def barrier(self) -> Placed:
        """Place an op on stream 0 that comes after all `leaves` and before all later ops."""
        placed = self._place(0, set(self.leaves), 1.0)
        self._front = placed.number
        self._memory.clear()  # later ops come after all earlier users
        for number, spans in self._under_way.items():
            self._write(spans, number)
        return placed

    def collective(self, spans: Iterable[AddressRange], cost: float = 1.0) -> Placed:
        """Place a collective, which comes after all `leaves` and all earlier collectives.

        Args:
            spans: the memory that it uses.
        """
        leaves = set(self.leaves)
        self._settled = max((self._after[n][self.streams] for n in leaves), default=-1)
        placed = self._place(self.streams, leaves, cost)
        self._under_way[placed.number] = list(spans)
        self._write(self._under_way[placed.number], placed.number)
        return placed

    def wait_for(self, number: int) -> None:
        """Let barriers and `leaves` come after a collective."""
        self._awaited = max(self._awaited, number)
        self._under_way = {n: spans for n, spans in self._under_way.items() if n > number}

    def collective_before(self, reads: Iterable[AddressRange], writes: Iterable[AddressRange]) -> int:
        """The last collective that an op has to come after because of its memory.

        Returns:
            Its number; -1 if there is none, or if ops before the latest collective come after it.
        """
        last = max((self._after[n][self.streams] for n in self._needed(reads, writes)), default=-1)
        return last if last > self._settled else -1

    def ends(self, number: int) -> float:
        """The end of an op, if each took its cost."""
        return self._ends[number]

    def comes_after(self, stream: int, index: int) -> bool:
        clocks = [self._clocks[stream], *([self._after[self._front]] if self._front >= 0 else [])]
        return any(clock[self._stream_of[index]] >= index for clock in clocks)

    def _needed(self, reads: Iterable[AddressRange], writes: Iterable[AddressRange]) -> set[int]:
        """The ops that an op has to come after because of its memory."""
        needed: set[int] = set()
        for span in reads:
            for piece in self._memory.overlapping(span):
                needed.update(self._read_after_write(piece))
        for span in writes:
            for piece in self._memory.overlapping(span):
                needed.update(self._write_after_write(piece))
                needed.update(self._write_after_read(piece))
        return needed

    def _write(self, spans: Iterable[AddressRange], number: int) -> None:
        for start, end in spans:
            if start < end:
                self._memory.one((start, end)).writer = number

    def _read_after_write(self, piece: _Piece) -> Iterator[int]:
        if piece.writer is not None:
            yield piece.writer

    def _write_after_write(self, piece: _Piece) -> Iterator[int]:
        if piece.writer is not None:
            yield piece.writer

    def _write_after_read(self, piece: _Piece) -> Iterator[int]:
        yield from piece.readers.values()

    def _choose(self, needed: set[int], cost: float) -> int:
        """The stream on which an op can begin first, or soon enough.

        Streams that wait for a later collective than the op needs come last. Of several, first that of
        the latest op that it depends on; then one with only ops that it depends on, so that the op does
        not wait for others; then the lowest number, so that unused streams come last.
        """
        if self.streams == 1:
            return 0
        latest = max(needed, default=-1)
        reached = [-1] * len(self._last)
        for index in needed:
            reached = list(map(max, reached, self._after[index]))

        # An op that ends before the latest end of all ops delays nothing, and need not begin earlier.
        soon = self.end - cost

        def begins(stream: int) -> tuple[int, float, bool, bool, int]:
            last = self._last[stream]
            collective = max(reached[self.streams], self._clocks[stream][self.streams])
            time = max(self._begins(stream, needed), soon)
            at_home = latest >= 0 and self._stream_of[latest] == stream
            is_free = last >= 0 and last <= reached[stream]
            return collective, time, not at_home, not is_free, stream

        return min(range(self.streams), key=begins)

    def _begins(self, stream: int, needed: set[int]) -> float:
        last = self._last[stream]
        time = self._ends[last] if last >= 0 else 0.0
        for index in needed:
            switch = 0.0 if self._stream_of[index] == stream else _SWITCH_COST
            time = max(time, self._ends[index] + switch)
        return time

    def _place(self, stream: int, needed: set[int], cost: float) -> Placed:
        index = len(self._stream_of)
        clock = self._clocks[stream]
        waits: list[int] = []
        begin = self._ends[self._last[stream]] if self._last[stream] >= 0 else 0.0
        # The latest first, because they come after many of the others.
        for other in sorted(needed, reverse=True):
            begin = max(begin, self._ends[other])
            if clock[self._stream_of[other]] < other:
                waits.append(other)
                clock[:] = map(max, clock, self._after[other])
        clock[stream] = index
        self._last[stream] = index
        self._stream_of.append(stream)
        self._after.append(tuple(clock))
        self._ends.append(begin + cost)
        return Placed(index, stream, tuple(waits))


@dataclass
class _UseElsewhere:
    """A use of memory on another stream than its own."""

    number: int
    owner: Any
    size_bytes: int


class HeldMemory:
    """Memory that streams other than its own still use, and that must not be freed yet."""

    def __init__(self, flow: Flow, is_free: Callable[[Any], bool] = lambda owner: True) -> None:
        self._flow = flow
        self._is_free = is_free
        # By the stream of the memory and the stream of the use, in program order.
        self._held: dict[tuple[int, int], deque[_UseElsewhere]] = {}
        self._held_bytes: Counter[int] = Counter()  # by the stream of the memory

    def use(self, placed: Placed, home: int, owner: Any, size_bytes: int = 0) -> None:
        """Keep memory that an op uses, if it belongs to another stream: `home`."""
        if placed.stream != home:
            uses = self._held.setdefault((home, placed.stream), deque())
            uses.append(_UseElsewhere(placed.number, owner, size_bytes))
            self._held_bytes[home] += size_bytes

    def release(self) -> None:
        """Release memory that the next op of its stream may be given.

        Called when an op has been placed, before it allocates.
        """
        for (home, _), uses in self._held.items():
            while uses and self._flow.comes_after(home, uses[0].number):
                self._held_bytes[home] -= uses.popleft().size_bytes

    def overdue(self, home: int, time: float, allowed_bytes: int) -> list[int]:
        """Ops that a stream should wait for, to get back the memory that they use.

        A stream that never waits for another one never gets back memory that the other uses. There are
        such ops only if more is held than allowed of memory that nothing else refers to. First come ops
        that have ended by then, for which the wait costs nothing.

        Args:
            time: the time at which it goes on.
            allowed_bytes: its memory that may be held for others; four times as much for ops that have
                not ended.
        """
        if self._held_bytes[home] <= allowed_bytes:
            return []
        uses = [use for (of, _), uses in self._held.items() if of == home for use in uses]
        free = [use for use in uses if self._is_free(use.owner)]
        if _together_bytes(free) <= allowed_bytes:
            return []
        ended = [use for use in free if self._flow.ends(use.number) <= time]
        left = [use for use in free if self._flow.ends(use.number) > time]
        due = ended if _together_bytes(left) <= 4 * allowed_bytes else free
        return [use.number for use in due]

    def __iter__(self) -> Iterator[Any]:
        return (use.owner for uses in self._held.values() for use in uses)


def _together_bytes(uses: Iterable[_UseElsewhere]) -> int:
    return sum({id(use.owner): use.size_bytes for use in uses}.values())
