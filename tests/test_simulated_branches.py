"""Work that `Branches` issues, with collectives in it: on a simulated graph, nothing is out of order.

The ops of random programs are run on CPU tensors. Each becomes a node of a graph, with the dependencies
of the stream that was current, and NCCL's streams are streams beside them. Two nodes that use the same
memory, one to write, must not be unordered.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_cudagraph.device.streams import branches as module
from lightning_cudagraph.device.streams.accesses import span_of
from lightning_cudagraph.device.streams.branches import Branches
from lightning_cudagraph.device.streams.dataflow import AddressRange, Flow
from lightning_cudagraph.device.streams.list_ops import length_of, merged, overlap
from lightning_cudagraph.tensors.writes import tensors_in

aten = torch.ops.aten
_PROGRAMS = 150


class _Stream:
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.behind: set[int] = set()

    def wait_event(self, event: _Event) -> None:
        self.behind |= event.behind

    def wait_stream(self, other: _Stream) -> None:
        self.behind |= other.behind


class _Event:
    def __init__(self, external: bool = False) -> None:
        self.external, self.behind = external, set[int]()


class _Node(NamedTuple):
    """A node of the graph; `after` are the nodes that it comes after, as bits."""

    after: int
    reads: list[AddressRange]
    writes: list[AddressRange]


class _Work:
    def __init__(self, simulated: Simulated, behind: set[int]) -> None:
        self._simulated, self._behind = simulated, behind

    def wait(self) -> None:
        self._simulated.current.behind |= self._behind


class Simulated:
    """A graph under capture, and the streams of NCCL: one for each group."""

    def __init__(self, patch: pytest.MonkeyPatch, streams: int) -> None:
        self.nodes: list[_Node] = []
        self._kept: list[Any] = []  # memory is not given out twice
        self._nccl = {"first": _Stream(), "second": _Stream()}
        own: Any = [_Stream() for _ in range(streams)]
        self.current: _Stream = own[0]
        patch.setattr(torch.cuda, "Event", _Event)
        patch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        patch.setattr(torch.cuda, "set_stream", lambda stream: setattr(self, "current", stream))
        patch.setattr(module, "position_of", lambda stream: (0, *sorted(stream.behind)))
        patch.setattr(module, "let_wait", self._let_wait)
        self.branches = Branches(own, self._record, _group_and_work)
        self.branches.begin()

    def _let_wait(self, stream: _Stream, nodes: Any) -> bool:
        stream.behind = set(nodes)
        return True

    def _record(self, event: Any, stream: Any) -> None:
        if event.external:
            self._add(stream, [], [])
        event.behind = set(stream.behind)

    def _add(self, stream: _Stream, reads: list[AddressRange], writes: list[AddressRange]) -> None:
        after = 0
        for number in stream.behind:
            after |= self.nodes[number].after | 1 << number
        stream.behind = {len(self.nodes)}
        self.nodes.append(_Node(after, reads, writes))

    def run(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Run an op of torch's."""

        def call(*args: Any, **kwargs: Any) -> Any:
            made = op(*args, **kwargs)
            spans = [span_of(tensor) for tensor in tensors_in(args, kwargs, made)]
            written = [*tensors_in(args[0])] if op._schema.is_mutable else []
            self._add(self.current, spans, [span_of(each) for each in (*written, *tensors_in(made))])
            self._kept.append(made)
            return made

        return self.branches.run(_Op(op, call), args, kwargs)

    def unseen(self, tensor: Tensor) -> None:
        """Work that is no op."""
        self._add(self.current, [], [span_of(tensor)])

    def collective(
        self, tensors: list[Tensor], group: str = "first", is_known: bool = True, launches: bool = True
    ) -> _Work:
        """Issue a collective on a group; if it is not known, it is told nothing about."""
        nccl = self._nccl[group]

        def call(given: list[Tensor]) -> _Work:
            nccl.behind |= self.current.behind
            spans = [*map(span_of, given)]
            if launches:
                self._add(nccl, spans, spans)
            return _Work(self, set(nccl.behind))

        schema = SimpleNamespace(name="c10d::allreduce_", arguments=[], returns=[])
        func = SimpleNamespace(
            namespace="c10d", group=group if is_known else None, _schema=schema, is_view=False
        )
        work: _Work = self.branches.run(_Op(func, call), (tensors,), {})
        return work

    def races(self) -> list[tuple[int, int]]:
        """Pairs of unordered nodes that use the same memory."""
        return [
            (one, other)
            for other, later in enumerate(self.nodes)
            for one, earlier in enumerate(self.nodes[:other])
            if not later.after >> one & 1
            and (
                _meet(earlier.writes, [*later.reads, *later.writes])
                or _meet(earlier.reads, later.writes)
            )
        ]


class _Op:
    """An op whose calls are nodes of the graph."""

    def __init__(self, op: Any, call: Callable[..., Any]) -> None:
        self._op, self._call = op, call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._op, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __hash__(self) -> int:
        return id(self)


def _group_and_work(func: Any, args: Any, made: _Work) -> tuple[str, _Work] | None:
    return (func.group, made) if func.group else None


def _meet(some: list[AddressRange], others: list[AddressRange]) -> bool:
    return any(a < d and c < b for a, b in some for c, d in others)


class _UnderWay(NamedTuple):
    """A collective that the program has not waited for; ops may use its memory if it is followed."""

    work: _Work
    used: list[Tensor]
    is_followed: bool


class _Program:
    """A random step: ops, ops on lists, collectives of two groups, waits, and work that is no op.

    As in a correct step, work that is no op uses memory of a collective behind the wait for it. So do
    ops, where the collective is one that `Branches` does not follow.
    """

    def __init__(self, simulated: Simulated, seed: int) -> None:
        self._simulated = simulated
        self._draw = random.Random(seed)
        self._tensors = [torch.ones(4) for _ in range(8)]
        self._under_way: dict[str, list[_UnderWay]] = {"first": [], "second": []}

    def run(self, length: int = 40) -> None:
        self._collective(self._tensors)  # its group is the one that is followed
        for _ in range(length):
            kinds = ["op", "made", "list", "list", "collective", "other", "wait", "unseen"]
            getattr(self, f"_{self._draw.choice(kinds)}")(self._draw.sample(self._tensors, 4))
        for group in self._under_way:
            self._wait_in(group, -1)
        self._simulated.branches.end()

    def _op(self, some: list[Tensor]) -> None:
        self._wait_for(some[:2])
        self._simulated.run(aten.add_.Tensor, some[0], some[1])

    def _made(self, some: list[Tensor]) -> None:
        self._wait_for(some[:2])
        made = self._simulated.run(aten.mul.Tensor, some[0], some[1])
        self._tensors[self._draw.randrange(8)] = made

    def _list(self, some: list[Tensor]) -> None:
        self._wait_for(some)
        self._simulated.run(aten._foreach_add_.List, some[:2], some[2:])

    def _unseen(self, some: list[Tensor]) -> None:
        self._wait_for(some[:1], of_all=True)
        self._simulated.unseen(some[0])

    def _collective(self, some: list[Tensor]) -> None:
        used = some[: self._draw.randint(1, 2)]
        self._wait_for(used)
        work = self._simulated.collective(used, "first")
        self._under_way["first"].append(_UnderWay(work, used, is_followed=True))

    def _other(self, some: list[Tensor]) -> None:
        """A collective of another group, an empty one, or one that is issued later."""
        self._wait_for(some[:1], of_all=True)
        kind = self._draw.choice(("second", "empty", "later"))
        group = "second" if kind == "second" else "first"
        is_known, launches = kind != "later", kind != "empty"
        work = self._simulated.collective(some[:1], group, is_known, launches)
        self._under_way[group].append(_UnderWay(work, some[:1], is_followed=False))

    def _wait(self, some: list[Tensor]) -> None:
        group = self._draw.choice(("first", "second"))
        if number := len(self._under_way[group]):
            self._wait_in(group, self._draw.randrange(number))

    def _wait_in(self, group: str, number: int) -> None:
        """Wait for a collective, and so for all before it on its stream of NCCL's."""
        if works := self._under_way[group]:
            works[number].work.wait()
            del works[: number % len(works) + 1]

    def _wait_for(self, tensors: list[Tensor], of_all: bool = False) -> None:
        for group, works in self._under_way.items():
            users = [
                number
                for number, each in enumerate(works)
                if (of_all or not each.is_followed)
                and any(one is other for one in each.used for other in tensors)
            ]
            if users:
                self._wait_in(group, users[-1])


def _races(seed: int, streams: int) -> list[tuple[int, int]]:
    with pytest.MonkeyPatch.context() as patch:
        simulated = Simulated(patch, streams)
        _Program(simulated, seed).run()
        return simulated.races()


@pytest.mark.parametrize("streams", [2, 4])
def test_random_steps_are_in_order(streams: int) -> None:
    assert [seed for seed in range(_PROGRAMS) if _races(seed, streams)] == []


def _never(branches: Branches) -> bool:
    return False


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (Flow, "wait_for", lambda flow, number: None),
        (Branches, "_are_others", property(_never, lambda branches, value: None)),
        (
            Branches,
            "_bar",
            lambda branches, what: setattr(branches, "_left", branches._position(branches._own)),
        ),
    ],
    ids=["waits of the step", "collectives that are not followed", "barriers"],
)
def test_without_a_rule_they_are_not(
    owner: Any, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, fault, raising=False)
    assert any(_races(seed, 4) for seed in range(_PROGRAMS))


def test_a_step_in_parts_waits_for_each_collective_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = Simulated(monkeypatch, 2)
    weights, gradients = ([torch.ones(4) for _ in range(6)] for _ in range(2))
    works, numbers = [], []
    for index in range(0, 6, 2):
        simulated.run(aten.mul_.Tensor, gradients[index], 2.0)
        works.append(simulated.collective(gradients[index : index + 2]))
        numbers.append(len(simulated.nodes) - 1)
    for work in works:
        work.wait()
    before = len(simulated.nodes)
    simulated.run(aten._foreach_add_.List, weights, gradients)
    simulated.run(aten._foreach_add_.List, weights[:5], weights[1:])  # one tensor at two indices
    waited_for = [
        [number in numbers and bool(node.after >> number & 1) for number in numbers]
        for node in simulated.nodes[before:]
    ]
    # As many parts as streams, each of neighbours.
    assert waited_for == [[True, True, False], [True, True, True], [True, True, True]]
    assert simulated.races() == []
    assert [float(weight[0]) for weight in weights] == [5.0, 5.0, 5.0, 5.0, 5.0, 2.0]


@pytest.mark.parametrize(
    ("op", "arguments", "length"),
    [
        (
            aten._foreach_add_.List,
            ([torch.ones(2, 3), torch.ones(4)], [torch.ones(2, 3), torch.ones(4)]),
            2,
        ),
        (aten._foreach_sqrt.default, ([torch.ones(2), torch.ones(())],), 2),
        (aten._foreach_maximum_.List, ([torch.ones(2)] * 2, [torch.ones(2)] * 2), 2),
        (aten._foreach_mul_.ScalarList, ([torch.ones(2), torch.ones(4)], [1.0, 2.0]), 2),
        # Strides of dimensions of one element do not count.
        (aten._foreach_add_.List, ([torch.ones(4, 1)], [torch.ones(1, 4).t()]), 1),
        # Slow for one, and so for all: a gap, an expanded tensor, other strides or sizes, another dtype.
        (aten._foreach_sqrt.default, ([torch.ones(4, 4), torch.ones(4, 8)[:, :4]],), 0),
        (aten._foreach_sqrt.default, ([torch.ones(4), torch.ones(1).expand(4)],), 0),
        (aten._foreach_add_.List, ([torch.ones(2, 3)], [torch.ones(3, 2).t()]), 0),
        (aten._foreach_mul.List, ([torch.ones(3), torch.ones(1)], [torch.ones(1), torch.ones(1)]), 0),
        (aten._foreach_sqrt.default, ([torch.ones(2), torch.ones(2, dtype=torch.float64)],), 0),
        # One tensor with a number for each; results of all tensors; other ops.
        (aten._foreach_addcdiv_.Tensor, (*[[torch.ones(2)] * 2] * 3, torch.ones(2)), 0),
        (aten._foreach_norm.Scalar, ([torch.ones(2)] * 2,), 0),
        (
            aten._amp_foreach_non_finite_check_and_unscale_.default,
            ([torch.ones(2)] * 2, *[torch.ones(1)] * 2),
            0,
        ),
        (aten.cat.default, ([torch.ones(2)] * 2,), 0),
    ],
)
def test_ops_on_lists_that_may_run_in_parts(op: Any, arguments: Any, length: int) -> None:
    assert length_of(op, arguments, {}) == length


def test_a_fused_step_may_run_in_parts() -> None:
    ones = [torch.ones(2), torch.ones(3)]
    steps = [torch.ones(()), torch.ones(())]
    arguments = (ones, ones, ones, ones, [], steps)
    how = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8}
    assert length_of(aten._fused_adam_.default, arguments, {**how, "found_inf": torch.zeros(())}) == 2


def test_parts_are_merged_with_their_neighbours() -> None:
    assert merged([[3], [0, 2], [1], [4]], 2) == [[3, 0, 2], [1, 4]]
    assert merged([[3], [0]], 4) == [[3], [0]]
    assert merged([[0], [1], [2]], 1) == [[0, 1, 2]]


def test_memory_at_two_indices() -> None:
    assert not overlap([[(0, 4), (0, 4)], [(4, 8)], [(2, 2)]])
    assert overlap([[(0, 9)], [(10, 12)], [(4, 5)]])
    assert overlap([[(0, 9)], [(4, 5)]])
