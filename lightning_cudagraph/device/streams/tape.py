"""The tape of the emulator: the calls of one part of a graph, replayed in orders that the streams allow.

On a GPU, streams that do not wait for each other run concurrently, and their relative progress differs
between replays. Here their calls run one after the other, in orders as different as the waits allow: one
stream always as early as possible, another as late as possible. If a wait is missing, such an order
gives other numbers.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch

from lightning_cudagraph.device.streams.accesses import access_of, made_by, only_looks
from lightning_cudagraph.device.streams.dataflow import AddressRange, Flow, Placed

W = TypeVar("W")

# No memory has this address: random ops write there, so that they keep their order among themselves.
_GENERATOR: AddressRange = (-2, -1)


class Tape(Generic[W]):
    """The calls of one part of a replay."""

    def __init__(self, streams: int) -> None:
        self._streams = streams
        self._flow = Flow(streams)
        # The index of each op on the tape.
        self._places: list[int] = []
        self._work: list[W] = []
        self._stream_of: list[int] = []
        self._waits: list[list[int]] = []
        self.barriers: Counter[str] = Counter()

    def __iter__(self) -> Iterator[W]:
        return iter(self._work)

    def place(self, func: Any, args: Any, kwargs: Any) -> Placed | None:
        """Assign a stream to an op that is about to run; None if it launches nothing."""
        if self._streams == 1 or only_looks(func):
            return None
        access = access_of(func, args, kwargs)
        if access is None:
            self.barriers[str(func)] += 1
            return self._flow.barrier()
        writes = access.writes
        if torch.Tag.nondeterministic_seeded in func.tags:
            writes = [*writes, _GENERATOR]
        return self._flow.add(access.reads, writes, access.cost)

    def add(self, work: W, placed: Placed | None, result: Any = None, arguments: Any = ()) -> None:
        if placed is None:
            placed = self._flow.barrier()
        waits = [*placed.waits]
        if self._streams > 1:
            spans = [
                (start, start + storage.nbytes())
                for made in made_by(result, arguments, "cpu")
                for storage in [made.untyped_storage()]
                for start in [storage.data_ptr()]
            ]
            waits += self._flow.made(placed, spans)
        self._places.append(len(self._work))
        self._put(work, placed.stream, waits)

    def add_mark(self, work: W) -> None:
        """Append a call that comes after all earlier ones, and that nothing waits for."""
        self._put(work, self._streams, self._flow.leaves)

    def _put(self, work: W, stream: int, waits: Iterable[int]) -> None:
        self._work.append(work)
        self._stream_of.append(stream)
        self._waits.append([self._places[number] for number in waits])

    def order(self, seed: int) -> Iterator[W]:
        """The calls in an order that the waits allow, which depends on the seed."""
        if self._streams == 1:
            return iter(self._work)
        return (self._work[place] for place in self._order(seed))

    def _order(self, seed: int) -> Iterator[int]:
        left: list[list[int]] = [[] for _ in range(self._streams + 1)]
        for place, stream in enumerate(self._stream_of):
            left[stream].append(place)
        for of_stream in left:
            of_stream.reverse()
        random.Random(seed).shuffle(left)
        done: set[int] = set()
        while len(done) < len(self._work):
            # The first stream of the shuffled order that can go on does.
            ready = next(s for s in left if s and done.issuperset(self._waits[s[-1]]))
            place = ready.pop()
            done.add(place)
            yield place
