"""Ops on the host that each replay repeats.

On a CPU host and device are one. So here the device is torch's `meta`, whose tensors hold nothing: the
ops of the host run, and what they send to the device is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_cudagraph import CaptureError
from lightning_cudagraph.checks.walk.host_generators import generator_state
from lightning_cudagraph.device.generators import Generators
from lightning_cudagraph.device.host_work import HostInput, HostWork, host_work_of
from lightning_cudagraph.device.sentry.host_ops import INPUT_BYTES
from lightning_cudagraph.device.sentry.op_rewrites import Constants, HostMemory, RewritingSentry

META = torch.device("meta")
Step = Callable[..., Any]


class Memory(HostMemory):
    """Constants without pinned memory, of which there is none here."""

    def __init__(self) -> None:
        self._arena = torch.empty(1 << 20, dtype=torch.uint8)
        self._used_bytes = 0
        self.scalars = []

    def pinned(self, value: Tensor) -> Tensor:
        return super().pinned(value).to(META)


class Queue(HostInput):
    """A device that is behind: what it copies from, it reads when all launches are queued."""

    def __init__(self) -> None:
        super().__init__(META, INPUT_BYTES)
        self.sources: list[Tensor] = []

    @contextmanager
    def filled(self, size_bytes: int) -> Iterator[Tensor]:
        with super().filled(size_bytes) as source:
            self.sources.append(source)
            yield source


class Captured:
    """A step, captured for a device that computes nothing."""

    def __init__(self, step: Step) -> None:
        self.queue = Queue()
        self.work = [HostWork()]
        self.generators = Generators("meta", torch.Generator())
        memory = Memory()
        sentry = RewritingSentry(self.generators, memory, host_input=self.queue, device_type="meta")
        self.host = sentry.host_ops
        seen = generator_state(torch.default_generator)
        assert seen is not None
        before = seen[0]()
        with (
            host_work_of(self.work),
            self.host.draws.hidden(),
            sentry.watching(Constants(memory)),
        ):
            self.result = step()
            self.is_refused = seen[0]() != before  # by the audit
        assert seen[0]() == before
        self.host.register(self.generators)

    def launch(self) -> None:
        for work in self.work:
            with work.around_launch():
                pass

    def sent(self, *like: Tensor) -> list[list[Tensor]]:
        """The tensors that each launch has sent, in order, with the dtypes and shapes of `like`."""
        found = []
        for source in self.queue.sources:
            start, row = 0, []
            for each in like:
                start = -(-start // 64) * 64
                flat = source[start : start + each.nbytes].view(each.dtype)
                row.append(flat.as_strided(each.shape, torch.empty_like(each).stride()))
                start += each.nbytes
            found.append(row)
        return found


def _is_same(one: Any, other: Any) -> bool:
    return all(
        torch.equal(a, b) and a.dtype is b.dtype and a.stride() == b.stride()
        for a, b in zip(one, other, strict=True)
    )


table = torch.arange(4.0)
own = torch.Generator()


def noise(to: Step) -> None:
    z = torch.randn(8, 3)
    to(z.type_as(z))
    to(torch.ones(8, 1))  # a constant
    to(torch.rand(4, 5).t() * 2 - 1)


def in_place(to: Step) -> None:
    kept = torch.zeros(4)
    for _ in range(2):
        kept += torch.rand(4)
    to(kept)
    kept[1:].uniform_()
    to(kept)
    kept.mul_(2)[0] = 7
    to(kept)
    constant = torch.tensor([1.0, 2.0])
    constant.add_(torch.rand(2))
    constant += 1
    to(constant)
    shared = torch.ones(3)
    to(shared + torch.rand(3))
    shared.zero_()


def kinds(to: Step) -> None:
    to(torch.randperm(5), torch.int32)
    to(torch.bernoulli(torch.full((6,), 0.5)), torch.bool)
    to(torch.nn.functional.dropout(torch.ones(9)))
    to(torch.distributions.Beta(0.4, 0.4).sample((3,)))
    to(torch.rand(3, dtype=torch.float64), torch.float16)
    to(torch.multinomial(torch.ones(4), 2))
    to(torch.rand(2, generator=own))
    torch.rand(1)  # not used


def older(to: Step) -> None:
    to(table * torch.rand(4))


STEPS = [noise, in_place, kinds, older]


def _eagerly(step: Step) -> list[Tensor]:
    found: list[Tensor] = []

    def to(value: Tensor, dtype: torch.dtype | None = None) -> None:
        found.append(value.to(dtype or value.dtype).clone())

    step(to)
    return found


def _for_device(step: Step) -> Step:
    def captured() -> None:
        def to(value: Tensor, dtype: torch.dtype | None = None) -> None:
            moved = value.to(META, dtype or value.dtype)
            assert moved.shape == value.shape
            assert moved.stride() == torch.empty_like(value).stride()

        step(to)

    return captured


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        own.manual_seed(6)
        table.copy_(torch.arange(4.0))
        yield


def _states() -> list[Tensor]:
    return [torch.get_rng_state(), own.get_state()]


@pytest.mark.parametrize("step", STEPS)
def test_each_launch_draws_what_the_step_would(step: Step) -> None:
    captured = Captured(_for_device(step))
    assert not captured.is_refused
    start = _states()
    plain = []
    for index in range(4):
        table.fill_(index)
        torch.rand(2)  # between two steps, as a loader
        plain.append([each for each in _eagerly(step) if not _is_constant(each)])
    end = _states()
    torch.set_rng_state(start[0])
    own.set_state(start[1])
    for index in range(4):
        table.fill_(index)
        torch.rand(2)
        captured.launch()
    assert _is_same(_states(), end)
    sent = captured.sent(*plain[0])
    assert len(sent) == 4
    assert all(map(_is_same, sent, plain))
    assert not _is_same(sent[0], sent[1])


def _is_constant(value: Tensor) -> bool:
    return value.shape == (8, 1)


def test_one_memory_for_all_launches_would_be_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.empty(INPUT_BYTES, dtype=torch.uint8)

    @contextmanager
    def filled(self: Queue, size_bytes: int) -> Iterator[Tensor]:
        self.sources.append(memory[:size_bytes])
        yield self.sources[-1]

    monkeypatch.setattr(Queue, "filled", filled)
    with pytest.raises(AssertionError):
        test_each_launch_draws_what_the_step_would(noise)


def test_without_repeats_the_draws_are_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_cudagraph.device.taped_op.TapedOp.run", lambda self: None)
    with pytest.raises(AssertionError):
        test_each_launch_draws_what_the_step_would(noise)


def test_what_the_step_returns_of_it() -> None:
    def step() -> Tensor:
        z = torch.randn(3)
        z.to(META)
        return z.mean()

    captured = Captured(step)
    state = torch.get_rng_state()
    plain = [step() for _ in range(3)]
    torch.set_rng_state(state)
    for expected in plain:
        captured.launch()
        assert torch.equal(captured.result, expected)


def test_the_states_for_a_check() -> None:
    captured = Captured(_for_device(noise))
    of_device = torch.Generator().get_state()
    state = captured.generators.state(of_device)
    captured.launch()
    moved = captured.generators.state(of_device)
    assert not torch.equal(moved, state)
    assert torch.equal(captured.generators.set_extra_states(state), of_device)
    captured.launch()
    assert torch.equal(captured.generators.state(of_device), moved)
    unused = Captured(lambda: torch.ones(3).to(META))
    assert torch.equal(unused.generators.state(of_device), of_device)
    unused.launch()
    assert unused.queue.sources == []


def _branch() -> None:
    if torch.rand(()) < 0.5:
        torch.rand(3)


compiled: dict[str, Any] = {"__name__": "torch._inductor.output_code", "torch": torch}
exec("def draw():\n    return torch.rand(3)", compiled)

TAKES: dict[str, Step] = {
    "compiled": compiled["draw"],
    "item": lambda: torch.rand(()).item(),
    "branch": _branch,
    "float": lambda: float(torch.rand(())),
    "index": lambda: [1, 2][torch.randint(2, ())],
    "tolist": lambda: torch.rand(2).tolist(),
    "numpy": lambda: torch.rand(2).numpy(),
    "repr": lambda: repr(torch.rand(2)),
    "list": lambda: torch.tensor([torch.rand(()), 1.0]),
    "floats": lambda: torch.FloatTensor([torch.rand(2)[0]]),
    "operand": lambda: torch.empty(3, device=META) * torch.rand(()),
    "places": lambda: torch.empty(3, device=META)[torch.randperm(3)],
    "mask": lambda: torch.arange(3)[torch.rand(3) < 0.5],
    "nonzero": lambda: (torch.rand(3) < 0.5).nonzero().to(META),
    "later": lambda: (torch.rand(3).cumsum(0)[0] * 2).item(),
    "written": lambda: torch.zeros(3).add_(torch.rand(3)).sum().item(),
    "unseen": lambda: torch.ops.aten.randint.low_out(0, 5, [4], out=table),
}


@pytest.mark.parametrize("name", TAKES)
def test_what_the_host_takes_is_shown_to_the_audit(name: str) -> None:
    assert Captured(TAKES[name]).is_refused


@pytest.mark.parametrize("step", [lambda: torch.ones(()).item(), lambda: table.tolist(), _eagerly])
def test_other_reads_are_not(step: Step) -> None:
    assert not Captured(lambda: step(noise) if step is _eagerly else step()).is_refused


def test_a_generator_that_is_set_inside() -> None:
    def step() -> None:
        with torch.random.fork_rng(devices=[]):
            torch.rand(3).to(META)

    with pytest.raises(CaptureError, match="also sets their generator") as caught:
        Captured(step)
    assert caught.value.location is not None
    assert "torch.rand(3)" in caught.value.location.source


def test_too_much() -> None:
    with pytest.raises(CaptureError, match="more than 4 MiB that the host draws"):
        Captured(lambda: torch.rand(1 << 20).to(META).add(torch.rand(1).to(META)))


def test_an_eager_pass_of_a_check_draws_unseen_what_a_graph_draws() -> None:
    captured, other = Captured(lambda: torch.rand(3).to(META)), torch.Generator()
    seen, seen_of_other = generator_state(torch.default_generator), generator_state(other)
    assert seen is not None
    assert seen_of_other is not None
    before = seen[0](), seen_of_other[0]()
    with captured.generators.repeated():
        torch.rand(3)
        torch.rand(3, generator=other)
        assert seen[0]() == before[0]
        assert seen_of_other[0]() != before[1]
    assert seen[0]() != before[0]
