"""The data flow of a captured step: which op needs which, and on which of a few streams each one goes.

Nothing here knows a device. Ops come one after the other, as the ranges of memory that they read and
write. Each is told a stream, and the ops of other streams that it has to wait for: the last to write
what it reads, and the last to read or write what it writes. On its own stream it comes after all ops
before it, as ever. So every order that keeps the streams and the waits computes what the order of the
ops computes.

Memory is known by its addresses, and not by the tensors in it: other tensors may lie in the same place,
at the same time or later.

An allocator gives memory to streams: what was freed, it gives again to the next request *on the same
stream*, and scratch memory of kernels is in no tensor. So an op writes its results, and its scratch,
where ops before it on its stream have been, and these it comes after. What is still used on other
streams may not be freed before: `HeldMemory` keeps it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["Flow", "HeldMemory", "Placed", "Span"]

# Addresses in bytes, [start, end).
Span = tuple[int, int]

# What it costs an op to begin on another stream than what it waits for, in the unit of `cost`: so that
# a chain stays where it is.
_SWITCH_COST = 0.5


class Placed(NamedTuple):
    """The stream of an op, and the ops that it waits for.

    Attributes:
        number: of the op, in the order in which they came.
        stream: its stream.
        waits: ops of other streams that it waits for, at most one of each stream. Others that it needs
            come before these, or before it on its own stream.
    """

    number: int
    stream: int
    waits: tuple[int, ...]


@dataclass
class _Piece:
    """A range of memory that was used as one.

    Attributes:
        start: its first address.
        end: the first that is not in it.
        writer: the last op that wrote there, or None.
        readers: the last op of each stream that read there since.
    """

    start: int
    end: int
    writer: int | None = None
    readers: dict[int, int] = field(default_factory=dict)


class _Memory:
    """The last users of memory, in pieces that do not overlap, in the order of their addresses."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._pieces: list[_Piece] = []

    def overlapping(self, span: Span) -> list[_Piece]:
        """The pieces that have an address in a range."""
        first, last = self._slice(span)
        return self._pieces[first:last]

    def exactly(self, span: Span) -> list[_Piece]:
        """Pieces that make up a range, and nothing else; new ones where no op has been."""
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

    def one(self, span: Span) -> _Piece:
        """One new piece, which replaces all that was in a range."""
        start, end = span
        self._cut(start)
        self._cut(end)
        piece = _Piece(start, end)
        self._put(*self._slice(span), [piece])
        return piece

    def clear(self) -> None:
        """Forget all."""
        self._starts.clear()
        self._pieces.clear()

    def _slice(self, span: Span) -> tuple[int, int]:
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


def _nothing(stream: int, time: float) -> Iterable[int]:
    return ()


class Flow:
    """Put ops on streams, in the order in which they come.

    Args:
        streams: how many there are. Stream 0 is that of barriers.

    Attributes:
        streams: how many there are.
        used: how many of them have been given an op.
    """

    def __init__(self, streams: int) -> None:
        if streams < 1:
            raise ValueError(f"expected at least one stream, found {streams}")
        self.streams = streams
        self._memory = _Memory()
        # For each op, its stream, the last op of each stream that it is or comes after, and when it
        # would end if each op took as long as it is said to cost.
        self._stream_of: list[int] = []
        self._after: list[tuple[int, ...]] = []
        self._ends: list[float] = []
        # For each stream: the last op of each stream that all that is issued there comes after.
        self._clocks = [[-1] * streams for _ in range(streams)]
        self._last = [-1] * streams
        # The last barrier.
        self._front = -1

    @property
    def used(self) -> int:
        return sum(last >= 0 for last in self._last)

    @property
    def last(self) -> list[int]:
        """For each stream its last op, or -1."""
        return list(self._last)

    @property
    def leaves(self) -> list[int]:
        """The last ops of the streams: who comes after these comes after all."""
        last = [index for index in self._last if index >= 0]
        return [
            index
            for index in last
            if not any(
                self._after[other][self._stream_of[index]] >= index for other in last if other != index
            )
        ]

    def add(
        self,
        reads: Iterable[Span],
        writes: Iterable[Span],
        cost: float = 1.0,
        also_after: Callable[[int, float], Iterable[int]] = _nothing,
    ) -> Placed:
        """Place the next op.

        Args:
            reads: memory that it reads.
            writes: older memory that it writes; `made` takes what it allocates itself.
            cost: how long it takes, in a unit of one's own: about one for a small kernel.
            also_after: given the stream, and when the op would begin there, the other ops to wait for.
        """
        reads, writes = list(reads), list(writes)
        needed: set[int] = set()
        for span in reads:
            for piece in self._memory.overlapping(span):
                needed.update(self._read_after_write(piece))
        for span in writes:
            for piece in self._memory.overlapping(span):
                needed.update(self._write_after_write(piece))
                needed.update(self._write_after_read(piece))
        if self._front >= 0:
            needed.add(self._front)
        stream = self._choose(needed, cost)
        needed.update(also_after(stream, self._begins(stream, needed)))
        placed = self._place(stream, needed, cost)
        for span in reads:
            for piece in self._memory.exactly(span):
                piece.readers[stream] = placed.number
        for span in writes:
            if span[0] < span[1]:
                self._memory.one(span).writer = placed.number
        return placed

    def made(self, placed: Placed, spans: Iterable[Span]) -> list[int]:
        """Say which memory the op placed last was given for its results.

        Args:
            placed: the op.
            spans: the memory. It was freed before, or not in use, for all that its stream knows.

        Returns:
            Ops that use it too, and that the op does not come after: it was not held for them. The
            order is then not safe.
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
        """Place something that comes after all before it, and before all after it, on stream 0."""
        placed = self._place(0, {last for last in self._last if last >= 0}, 1.0)
        self._front = placed.number
        self._memory.clear()  # who comes now comes after all who have been there
        return placed

    def ends(self, number: int) -> float:
        """When an op would end if each took as long as it is said to cost."""
        return self._ends[number]

    def comes_after(self, stream: int, index: int) -> bool:
        """Tell if what is issued next on a stream comes after an op."""
        return index <= self._front or self._clocks[stream][self._stream_of[index]] >= index

    def _read_after_write(self, piece: _Piece) -> Iterator[int]:
        if piece.writer is not None:
            yield piece.writer

    def _write_after_write(self, piece: _Piece) -> Iterator[int]:
        if piece.writer is not None:
            yield piece.writer

    def _write_after_read(self, piece: _Piece) -> Iterator[int]:
        yield from piece.readers.values()

    def _choose(self, needed: set[int], cost: float) -> int:
        """The stream on which an op can begin first, or soon enough; of several, where what it needs is.

        After that one where only ops are that it needs anyway, so that no other waits behind it; and
        the first ones before those that nothing has been put on.
        """
        if self.streams == 1:
            return 0
        latest = max(needed, default=-1)
        reached = [-1] * self.streams
        for index in needed:
            reached = list(map(max, reached, self._after[index]))

        # What ends before the step has come so far anyway delays no other, and need not begin earlier.
        soon = max((self._ends[last] for last in self._last if last >= 0), default=0.0) - cost

        def begins(stream: int) -> tuple[float, bool, bool, int]:
            last = self._last[stream]
            time = max(self._begins(stream, needed), soon)
            at_home = latest >= 0 and self._stream_of[latest] == stream
            is_free = last >= 0 and last <= reached[stream]
            return time, not at_home, not is_free, stream

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
        # The latest first: they come after many of the others.
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
class _Use:
    """A use of memory on another stream than its own.

    Attributes:
        number: of the op that uses it.
        owner: what keeps it alive.
        size_bytes: how much it is.
    """

    number: int
    owner: Any
    size_bytes: int


class HeldMemory:
    """Memory that other streams use than the one it belongs to, and that may not be freed yet.

    Args:
        flow: where its users are placed.
        is_free: whether nothing else refers to an owner any more.
    """

    def __init__(self, flow: Flow, is_free: Callable[[Any], bool] = lambda owner: True) -> None:
        self._flow = flow
        self._is_free = is_free
        # By the stream that it belongs to, and the one that uses it, in the order of the ops.
        self._held: dict[tuple[int, int], deque[_Use]] = {}
        self._held_bytes: Counter[int] = Counter()  # by the stream that it belongs to

    def use(self, placed: Placed, home: int, owner: Any, size_bytes: int = 0) -> None:
        """Keep memory that an op uses, if it belongs to another stream.

        Args:
            placed: the op.
            home: the stream that the memory was allocated on.
            owner: what keeps the memory alive as long as it is referred to.
            size_bytes: how much it is.
        """
        if placed.stream != home:
            uses = self._held.setdefault((home, placed.stream), deque())
            uses.append(_Use(placed.number, owner, size_bytes))
            self._held_bytes[home] += size_bytes

    def release(self) -> None:
        """Let go of what each stream may give to who asks next.

        To be called when an op has been placed, before it asks for memory.
        """
        for (home, _), uses in self._held.items():
            while uses and self._flow.comes_after(home, uses[0].number):
                self._held_bytes[home] -= uses.popleft().size_bytes

    def overdue(self, home: int, time: float, allowed_bytes: int) -> list[int]:
        """Ops that a stream had better wait for, so that it gets back the memory that they use.

        A stream that never waits for another one never gets back what that uses. There are such ops only
        when the memory that nothing else needs any more is more than may be held; and of these first
        those that would have ended, for which to wait costs nothing.

        Args:
            home: the stream.
            time: when it would go on.
            allowed_bytes: how much of its memory may be held for others. Four times of that may be held
                for ops that have not ended.
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


def _together_bytes(uses: Iterable[_Use]) -> int:
    return sum({id(use.owner): use.size_bytes for use in uses}.values())
