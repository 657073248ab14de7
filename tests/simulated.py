"""Simulation of streams, memory and an allocator, with random programs for them.

A program is a list of instructions: tensors are made, viewed, written in place one or several at a time,
share memory, and are freed, after which other tensors reuse their memory. It is placed on streams as a
capture places the ops of a step. Then its kernels run in orders that the streams and their waits allow,
each in two halves, and every value read is compared with that of program order.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lightning_cudagraph.device.streams.dataflow import AddressRange, Flow, HeldMemory, Placed

_OLDER = 3  # tensors that are there before the program
_SIZE = 8  # of each of them, in words
_HELD_WORDS = 2 * _SIZE
_MASK = (1 << 61) - 1
_MULTIPLIER = 1_000_003


class Instruction(NamedTuple):
    """One instruction of a program. Tensors are given by index, modulo the number of live ones.

    Attributes:
        name: the operation.
        target: the tensor to write, view or drop.
        others: tensors to read; for a list, every second one is written.
        start: offset of a view; a new tensor is small if it is odd.
        scratch: words of scratch memory that the kernel allocates, and frees at its end.
    """

    name: str
    target: int
    others: tuple[int, ...]
    start: int
    scratch: int


_KINDS = "make make write write list view share drop drop unknown unseen lie collective wait"
NAMES = tuple(_KINDS.split())
SCRATCH = (0, 0, 4, 8)


def random_program(seed: int, length: int = 25) -> list[Instruction]:
    """Random instructions."""
    draw = random.Random(seed)
    return [
        Instruction(
            draw.choice(NAMES),
            draw.randrange(16),
            tuple(draw.randrange(16) for _ in range(draw.randint(1, 3))),
            draw.randrange(16),
            draw.choice(SCRATCH),
        )
        for _ in range(length)
    ]


class Block:
    """Memory of one allocation, freed with its last reference."""

    def __init__(self, allocator: Allocator, physical: int, logical: int, size: int, home: int) -> None:
        self.physical, self.logical, self.size, self.home = physical, logical, size, home
        self._allocator = allocator

    def __del__(self) -> None:
        self._allocator.take_back(self.home, self.physical, self.size)


class Allocator:
    """Allocator by stream that reuses the memory freed last first, as torch's does."""

    def __init__(self) -> None:
        self._free: dict[int, list[tuple[int, int]]] = {}
        self._next_physical = 0
        self._next_logical = 0

    def ask(self, home: int, size: int) -> Block:
        """Allocate memory on a stream."""
        free = self._free.setdefault(home, [])
        self._next_logical += size
        for index in reversed(range(len(free))):
            start, room = free[index]
            if room >= size:
                del free[index]
                if room > size:
                    free.append((start + size, room - size))
                return Block(self, start, self._next_logical - size, size, home)
        self._next_physical += size
        return Block(self, self._next_physical - size, self._next_logical - size, size, home)

    def take_back(self, home: int, start: int, size: int) -> None:
        """Free memory, which the host knows to be unused."""
        self._free.setdefault(home, []).append((start, size))


@dataclass
class Tensor:
    """Words of a block."""

    block: Block
    start: int
    size: int

    @property
    def place(self) -> Place:
        return Place(self.block.logical + self.start, self.block.physical + self.start, self.size)

    @property
    def span(self) -> AddressRange:
        start = self.block.physical + self.start
        return start, start + self.size


class Place(NamedTuple):
    """Words of memory, by real address and by the address without any reuse of memory."""

    logical: int
    physical: int
    size: int


@dataclass
class Kernel:
    """A kernel on a stream.

    Attributes:
        stream: index of its stream.
        waits: the numbers of the kernels of other streams that it waits for.
        reads: memory that it reads.
        writes: memory that it writes.
        scratch: memory of its own while it runs.
    """

    stream: int
    waits: tuple[int, ...]
    reads: list[Place]
    writes: list[Place]
    scratch: list[Place] = field(default_factory=list)

    def first_half(self, number: int, memory: dict[int, int], physical: bool) -> None:
        """Read, and save the values in scratch memory."""
        seen = _digest(number, memory, self.reads, physical)
        _fill(memory, self.scratch, seen, physical)

    def second_half(self, number: int, memory: dict[int, int], physical: bool) -> int:
        """Read again, and write."""
        seen = _digest(number, memory, [*self.reads, *self.scratch], physical)
        _fill(memory, self.writes, seen, physical)
        return seen


def _addresses(place: Place, physical: bool) -> range:
    start = place.physical if physical else place.logical
    return range(start, start + place.size)


def _digest(number: int, memory: dict[int, int], places: list[Place], physical: bool) -> int:
    seen = number
    for place in places:
        for address in _addresses(place, physical):
            seen = (seen * _MULTIPLIER + memory.get(address, 0) + 1) & _MASK
    return seen


def _fill(memory: dict[int, int], places: list[Place], value: int, physical: bool) -> None:
    for place in places:
        for index, address in enumerate(_addresses(place, physical)):
            memory[address] = (value + index) & _MASK


class RefusedError(Exception):
    """The allocator gave a kernel memory that others still use."""


class Scheduled:
    """A program on streams.

    Args:
        program: its instructions.
        streams: number of streams, without that of collectives.
        flow: the placement under test.
        held: keeps memory that other streams use.
        knows_liars: undeclared writes are known.
        refuses: end the program where memory is reused too early, and `flow` detects it.
    """

    def __init__(
        self,
        program: list[Instruction],
        streams: int,
        flow: Callable[[int], Flow] = Flow,
        held: Callable[[Flow], HeldMemory] = HeldMemory,
        knows_liars: bool = True,
        refuses: bool = True,
    ) -> None:
        self.kernels: list[Kernel] = []
        self.flow = flow(streams)
        self.held = held(self.flow)
        self._knows_liars = knows_liars
        self._refuses = refuses
        # The numbers of collectives that the program has not waited for, and their memory.
        self._under_way: dict[int, list[Place]] = {}
        self._allocator = Allocator()
        self._tensors = [Tensor(self._allocator.ask(0, _SIZE), 0, _SIZE) for _ in range(_OLDER)]
        self.older = [tensor.place for tensor in self._tensors]
        # The capture begins after all that was before.
        self._bar([], [])
        for instruction in program:
            getattr(self, f"_{instruction.name}")(instruction)
        self.left = [tensor.place for tensor in self._tensors]

    def _pick(self, number: int) -> Tensor:
        return self._tensors[number % len(self._tensors)]

    def _make(self, instruction: Instruction) -> None:
        size = _SIZE // 2 if instruction.start % 2 else _SIZE
        self._launch([self._pick(n) for n in instruction.others], [], instruction.scratch, size)

    def _write(self, instruction: Instruction) -> None:
        target = self._pick(instruction.target)
        reads = [self._pick(n) for n in instruction.others]
        self._launch(reads, [target], instruction.scratch)

    def _list(self, instruction: Instruction) -> None:
        picked = [self._pick(n) for n in (instruction.target, *instruction.others)]
        self._launch(picked[1::2], picked[::2], instruction.scratch)

    def _lie(self, instruction: Instruction) -> None:
        target = self._pick(instruction.target)
        reads = [self._pick(n) for n in instruction.others]
        declared = [target] if self._knows_liars else []
        self._launch([*reads, target], declared, instruction.scratch, really=[target])

    def _view(self, instruction: Instruction) -> None:
        base = self._pick(instruction.target)
        start = instruction.start % base.size
        self._tensors.append(Tensor(base.block, base.start + start, max(1, (base.size - start) // 2)))

    def _share(self, instruction: Instruction) -> None:
        base = self._pick(instruction.target)
        self._tensors.append(Tensor(base.block, base.start, base.size))

    def _drop(self, instruction: Instruction) -> None:
        if len(self._tensors) > _OLDER:
            del self._tensors[_OLDER + instruction.target % (len(self._tensors) - _OLDER)]

    def _unknown(self, instruction: Instruction) -> None:
        target = self._pick(instruction.target).place
        reads = [self._pick(n).place for n in instruction.others]
        used = [n for n, places in self._under_way.items() if _overlap([target, *reads], places)]
        if used:  # a program that does not wait is wrong without streams, too
            self._wait_for(max(used))
        self._bar(reads, [target], instruction.scratch)

    _unseen = _unknown  # what is no op is noticed before the next one, and does the same

    def _collective(self, instruction: Instruction) -> None:
        tensors = [self._pick(n) for n in (instruction.target, *instruction.others)]
        placed = self.flow.collective([tensor.span for tensor in tensors], cost=3.0)
        for tensor in tensors:
            self.held.use(placed, tensor.block.home, tensor.block, tensor.block.size)
        places = [tensor.place for tensor in tensors]
        self.kernels.append(Kernel(placed.stream, placed.waits, places, places))
        self._under_way[placed.number] = places

    def _wait(self, instruction: Instruction) -> None:
        """Let the program wait for a collective, and so for all before it."""
        if numbers := sorted(self._under_way):
            self._wait_for(numbers[instruction.start % len(numbers)])

    def _wait_for(self, last: int) -> None:
        self.flow.wait_for(last)
        self._under_way = {n: places for n, places in self._under_way.items() if n > last}

    def _bar(self, reads: list[Place], writes: list[Place], scratch: int = 0) -> None:
        work = []
        if scratch:
            block = self._allocator.ask(0, scratch)
            work = [Place(block.logical, block.physical, block.size)]
            del block
        placed = self.flow.barrier()
        self.kernels.append(Kernel(placed.stream, placed.waits, reads, writes, work))
        self.held.release()

    def _launch(
        self,
        reads: list[Tensor],
        writes: list[Tensor],
        scratch: int,
        size: int = 0,
        really: list[Tensor] | None = None,
    ) -> None:
        """Put a kernel on a stream, as `Branches` does."""
        placed = self.flow.add(
            [t.span for t in reads], [t.span for t in writes], also_after=self._overdue
        )
        for tensor in (*reads, *writes):
            self.held.use(placed, tensor.block.home, tensor.block, tensor.block.size)
        self.held.release()
        kernel = Kernel(
            placed.stream,
            placed.waits,
            [tensor.place for tensor in reads],
            [tensor.place for tensor in (writes if really is None else really)],
        )
        self.kernels.append(kernel)
        made = Tensor(self._allocator.ask(placed.stream, size), 0, size) if size else None
        if scratch:
            block = self._allocator.ask(placed.stream, scratch)
            kernel.scratch.append(Place(block.logical, block.physical, block.size))
            del block
        if made is not None:
            kernel.writes.append(made.place)
            self._tensors.append(made)
        self._take(placed, made)

    def _overdue(self, stream: int, time: float) -> list[int]:
        return self.held.overdue(stream, time, _HELD_WORDS)

    def _take(self, placed: Placed, made: Tensor | None) -> None:
        early = self.flow.made(placed, [] if made is None else [made.span])
        if early and self._refuses:
            raise RefusedError(f"{early} still use what {placed.number} was given")

    # What the waits allow ------------------------------------------------------------------------

    def races(self) -> list[tuple[int, int]]:
        """Pairs of unordered kernels that use the same memory, at least one to write."""
        before: list[int] = []  # for each kernel, the kernels that it comes after, as bits
        last: dict[int, int] = {}
        found = []
        for number, kernel in enumerate(self.kernels):
            bits = 0
            for other in (*kernel.waits, *([last[kernel.stream]] if kernel.stream in last else [])):
                bits |= before[other] | 1 << other
            before.append(bits)
            last[kernel.stream] = number
            found += [
                (other, number)
                for other in range(number)
                if not bits >> other & 1 and _conflict(self.kernels[other], kernel)
            ]
        return found

    def orders(self, seeds: int) -> Iterator[list[tuple[int, bool]]]:
        """Orders of the halves of all kernels: each stream as early as possible, and random ones."""
        streams = self.flow.streams + 1  # and that of collectives
        permutations = itertools.permutations(range(streams))
        for preference in itertools.islice(permutations, 24):
            yield self._order(lambda ready, p=preference: min(ready, key=p.index))
        for seed in range(seeds):
            yield self._order(random.Random(seed).choice)

    def _order(self, choose: Callable[[list[int]], int]) -> list[tuple[int, bool]]:
        left: dict[int, list[int]] = {}
        for number, kernel in enumerate(self.kernels):
            left.setdefault(kernel.stream, []).append(number)
        done: set[int] = set()
        begun: set[int] = set()
        order = []
        while left:
            ready = [s for s in left if done.issuperset(self.kernels[left[s][0]].waits)]
            stream = choose(ready)
            number = left[stream][0]
            order.append((number, number in begun))
            if number in begun:
                done.add(number)
                del left[stream][0]
                if not left[stream]:
                    del left[stream]
            begun.add(number)
        return order

    def outcome(self, orders: list[list[tuple[int, bool]]], physical: bool) -> list[Any]:
        """All values read in consecutive replays, and the final memory."""
        memory: dict[int, int] = {}
        _fill(memory, self.older, 7, physical)
        seen: list[Any] = []
        for order in orders:
            read: dict[int, int] = {}
            for number, second in order:
                kernel = self.kernels[number]
                if second:
                    read[number] = kernel.second_half(number, memory, physical)
                else:
                    kernel.first_half(number, memory, physical)
            seen += [read[number] for number in range(len(self.kernels))]
            seen.append(_digest(0, memory, self.left, physical))
        return seen

    def differs(self, seeds: int = 8) -> bool:
        """True if an order that the waits allow has other results than program order."""
        plain = [(number, half) for number in range(len(self.kernels)) for half in (False, True)]
        expected = self.outcome([plain, plain], physical=False)
        return any(
            self.outcome([order, order], physical=True) != expected for order in self.orders(seeds)
        )


def _overlap(some: list[Place], others: list[Place]) -> bool:
    return any(
        a.physical < b.physical + b.size and b.physical < a.physical + a.size
        for a in some
        for b in others
    )


def _conflict(one: Kernel, other: Kernel) -> bool:
    writes, other_writes = one.writes + one.scratch, other.writes + other.scratch
    return _overlap(writes, other.reads + other_writes) or _overlap(one.reads, other_writes)
