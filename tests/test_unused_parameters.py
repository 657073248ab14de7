"""The parameters of a wrapper that processes have used, put together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lightning_cudagraph.processes.unused_parameters import UnusedParameters, UsedParameters


def _of(used: set[int], dropped: set[int]) -> UsedParameters:
    return UsedParameters(frozenset(used), frozenset(range(4)) - used, frozenset(dropped))


def test_gradients_that_no_process_uses_are_dropped() -> None:
    wrapper: Any = SimpleNamespace()
    unused = UnusedParameters(wrapper)
    assert not unused.settle([[_of({0, 1}, {2, 3})], [_of({0, 1}, {2, 3})]])
    # Another process uses what one has dropped; or none uses what one has kept.
    assert unused.settle([[_of({0, 1}, {2, 3})], [_of({0, 2}, {3})]])
    assert unused.settle([[_of({0, 1}, {3})], [_of({0, 1}, {2, 3})]])
    assert not unused.settle([[_of({0, 1}, {3})], [_of({0, 2}, {3})]])


def test_each_pass_counts_by_itself() -> None:
    wrapper: Any = SimpleNamespace()
    unused = UnusedParameters(wrapper)
    one, other = _of({0}, {1, 2, 3}), _of({1}, {0, 2, 3})
    assert not unused.settle([[one, other], [one, other]])
    assert unused.settle([[one, other], [other, one]])
    assert unused.settle([[one], [one, other]])  # one process has failed in between
    assert not unused.settle([[], []])
