"""Ops on several streams come to what they come to one after the other, whatever the step is.

Random programs are placed on streams that are simulated (`tests/simulated.py`). With one rule taken
out, each of these tests fails: that is tested, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_cudagraph.device.streams.dataflow import AddressRange, Flow, HeldMemory, Placed
from tests.simulated import NAMES, SCRATCH, Instruction, RefusedError, Scheduled, random_program

pytestmark = pytest.mark.usefixtures("hypothesis_leaves_no_clock")

_number = st.integers(0, 15)
_instruction = st.builds(
    Instruction,
    st.sampled_from(NAMES),
    _number,
    st.lists(_number, min_size=1, max_size=3).map(tuple),
    _number,
    st.sampled_from(SCRATCH),
)
# Short ones seldom use memory twice.
_program = st.lists(_instruction, min_size=20, max_size=40)
_PROGRAMS = 1000  # among so many, one that shows what is wrong
_quiet = settings(
    database=None,
    deadline=None,
    derandomize=True,
    max_examples=50,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.spread(4, first=3)
@pytest.mark.parametrize("streams", [1, 2, 3, 4])
def test_every_order_comes_to_the_same(streams: int) -> None:
    raced: list[int] = []

    @_quiet
    @given(_program)
    def check(program: list[Instruction]) -> None:
        scheduled = Scheduled(program, streams)
        assert not scheduled.races()
        assert not scheduled.differs(seeds=2)
        raced.append(scheduled.flow.used)

    check()
    assert max(raced) == streams  # it was tested on all of them


@pytest.mark.long
@_quiet
@given(_program)
def test_one_stream_waits_for_collectives_alone(program: list[Instruction]) -> None:
    kernels = Scheduled(program, 1).kernels
    waits = [(kernel, kernels[number]) for kernel in kernels for number in kernel.waits]
    assert all({kernel.stream, other.stream} == {0, 1} for kernel, other in waits)


@_quiet
@given(_program)
def test_nothing_is_kept_when_all_have_come_together(program: list[Instruction]) -> None:
    scheduled = Scheduled(program, 4)
    scheduled.flow.wait_for(scheduled.flow.last[-1])
    scheduled.flow.barrier()
    scheduled.held.release()
    assert not list(scheduled.held)


class _NoReadAfterWrite(Flow):
    def _read_after_write(self, piece: Any) -> Iterator[int]:
        return iter(())


class _NoWriteAfterWrite(Flow):
    def _write_after_write(self, piece: Any) -> Iterator[int]:
        return iter(())


class _NoWriteAfterRead(Flow):
    def _write_after_read(self, piece: Any) -> Iterator[int]:
        return iter(())


class _BarrierWaitsForNothing(Flow):
    def barrier(self) -> Placed:
        placed = self._place(0, set(), 1.0)
        self._front = placed.number
        self._memory.clear()
        return placed


class _NothingWaitsForBarriers(Flow):
    def barrier(self) -> Placed:
        placed = super().barrier()
        self._front = -1
        return placed


class _BarrierForgetsCollectives(Flow):
    def barrier(self) -> Placed:
        placed = super().barrier()
        self._memory.clear()
        return placed


class _CollectivesWaitForNothing(Flow):
    def collective(self, spans: Iterable[AddressRange], cost: float = 1.0) -> Placed:
        placed = self._place(self.streams, set(), cost)
        self._under_way[placed.number] = list(spans)
        self._write(self._under_way[placed.number], placed.number)
        return placed


class _WaitsAreIgnored(Flow):
    def wait_for(self, number: int) -> None:
        pass


class _KeepsNothing(HeldMemory):
    def use(self, placed: Placed, home: int, owner: Any, size_bytes: int = 0) -> None:
        pass


class _LetsGoAtOnce(HeldMemory):
    def release(self) -> None:
        self._held.clear()


WITHOUT: dict[str, dict[str, Any]] = {
    "read after write": {"flow": _NoReadAfterWrite},
    "write after write": {"flow": _NoWriteAfterWrite},
    "write after read": {"flow": _NoWriteAfterRead},
    "what a barrier waits for": {"flow": _BarrierWaitsForNothing},
    "what waits for a barrier": {"flow": _NothingWaitsForBarriers},
    "what a collective waits for": {"flow": _CollectivesWaitForNothing},
    "collectives under way at a barrier": {"flow": _BarrierForgetsCollectives},
    "waits for collectives": {"flow": _WaitsAreIgnored},
    "memory that others use": {"held": _KeepsNothing, "refuses": False},
    "how long memory is held": {"held": _LetsGoAtOnce, "refuses": False},
    "what is written undeclared": {"knows_liars": False},
}


def _smallest(is_wrong: Callable[[list[Instruction]], bool]) -> list[Instruction]:
    """A program that is wrong, and is not if any of its instructions is left out."""
    programs = map(random_program, range(_PROGRAMS))
    found = next((program for program in programs if is_wrong(program)), None)
    assert found is not None, f"none of {_PROGRAMS} programs came out wrong"
    index = 0
    while index < len(found):
        shorter = found[:index] + found[index + 1 :]
        if is_wrong(shorter):
            found, index = shorter, 0
        else:
            index += 1
    return found


@pytest.mark.spread
@pytest.mark.parametrize("rule", WITHOUT)
@pytest.mark.parametrize("shown", [Scheduled.races, Scheduled.differs])
def test_without_a_rule_it_comes_out_wrong(rule: str, shown: Callable[[Scheduled], object]) -> None:
    how = {"refuses": False, **WITHOUT[rule]}
    found = _smallest(lambda program: bool(shown(Scheduled(program, 3, **how))))
    assert len(found) <= 8
    assert not shown(Scheduled(found, 3))


def test_memory_that_is_given_out_too_early_is_seen() -> None:
    def is_refused(program: list[Instruction]) -> bool:
        try:
            Scheduled(program, 3, held=_KeepsNothing)
        except RefusedError:
            return True
        return False

    assert len(_smallest(is_refused)) <= 14


def test_a_chain_stays_on_its_stream_and_branches_do_not() -> None:
    flow = Flow(4)
    ends = [(1000 * branch, 1000 * branch + 10) for branch in range(3)]
    streams = [[flow.add([end], [end]).stream for _ in range(5)] for end in ends]
    assert [len(set(of_branch)) for of_branch in streams] == [1, 1, 1]
    assert len({of_branch[0] for of_branch in streams}) == 3
    joined = flow.add(ends, [])
    assert len(joined.waits) == 2
    assert flow.leaves == [joined.number]
