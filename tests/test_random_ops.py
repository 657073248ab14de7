"""Random ops on several streams: of views, in place, over lists, in memory that is shared or given back.

They are captured and replayed as a step is, on changing data, and compared with the same ops run one
after the other. `tests/gpu/test_random_ops.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.device.cuda.cuda_backend import CudaBackend
from lightning_cudagraph.device.emulator.emulator_backend import EmulatorBackend
from lightning_cudagraph.device.streams.branches import SentBackError
from lightning_cudagraph.device.streams.dataflow import Flow, HeldMemory
from lightning_cudagraph.tensors import writes

Op = tuple[str, int, int, int]
Make = Callable[[int], Backend]

_NAMES = "new new mm place place place list view drop drop random norm sort spectrum copy"
_KINDS = tuple(_NAMES.split())
_REPLAYS = 5
_OLDER = 5  # the last of them lies in the memory of the first
_CHANNELS = 4


@pytest.fixture
def make_backend(accelerator: str) -> Make:
    """Backends with so many streams."""
    if accelerator == "gpu":
        return lambda streams: CudaBackend(torch.device("cuda", 0), streams)
    return EmulatorBackend


class Step:
    """Some ops on some tensors.

    Args:
        ops: what is done: a kind, and three numbers, of which each kind makes what it likes.
        device: where.
    """

    def __init__(self, ops: list[Op], device: torch.device) -> None:
        self.ops = ops
        # Large enough on a GPU that some ops are still running when others begin.
        self.size = 1 << 16 if device.type == "cuda" else 64
        generator = torch.Generator().manual_seed(0)
        self.x = torch.zeros(self.size, device=device)
        self.older = [torch.randn(self.size, generator=generator).to(device) for _ in range(_OLDER - 1)]
        self.older.append(torch.from_dlpack(self.older[0])[self.size // 4 :])
        self.statistics = [torch.zeros(_CHANNELS, device=device), torch.ones(_CHANNELS, device=device)]

    def run(self) -> list[Tensor]:
        """Do it, and return what is left."""
        tensors = [self.x, *self.older]
        for kind, target, other, number in self.ops:
            a, b = tensors[target % len(tensors)], tensors[other % len(tensors)]
            if a is self.x and kind in ("place", "list", "copy"):
                a = tensors[1]
            n = min(len(a), len(b))
            if kind == "new":
                tensors.append((a[:n] * b[:n]).sin() if number % 2 else torch.cat([a[:n], b[-n:]])[::2])
            elif kind == "mm":
                side = max(1, int(n**0.5))
                # Products may be summed in another order where memory is aligned in another way.
                left, right = (t[: side * side].clone().view(side, side) for t in (a, b))
                tensors.append((left @ right.t()).flatten().tanh())
            elif kind == "place":
                a[:n].lerp_(b[:n].cos(), 0.25) if number % 2 else a[-n:].mul_(0.5).add_(-b[:n])
            elif kind == "copy":
                a[number % 3 : n : 2] = 0.5
                a[:n].copy_(b[:n].flip(0))
            elif kind == "list":
                c = tensors[number % len(tensors)]
                c = tensors[2] if c is self.x else c
                # One kernel takes a list in no order: what it writes must not overlap.
                c = c.clone() if _overlap(a, c) else c
                torch._foreach_mul_([a, c], 0.5)
                torch._foreach_add_([a[:n], c[: len(c) // 2]], [b[:n].sin(), c[: len(c) // 2].cos()])
            elif kind == "view":
                start = number % max(1, len(a) // 2)
                tensors.append(a[start : start + max(8, len(a) // 2)])
            elif kind == "drop" and len(tensors) > _OLDER + 1:
                del tensors[_OLDER + 1 + target % (len(tensors) - _OLDER - 1)]
            elif kind == "random":
                tensors.append(torch.nn.functional.dropout(a, 0.3))
            elif kind == "norm" and len(a) >= 2 * _CHANNELS:
                rows = a[: len(a) // _CHANNELS * _CHANNELS].view(-1, _CHANNELS)
                mean, variance = self.statistics
                normed = torch.nn.functional.batch_norm(rows, mean, variance, training=True)
                tensors.append(normed.flatten() + mean.sum())
            elif kind == "sort":
                tensors.append(a.sort(descending=bool(number % 2)).values + a.max())
            elif kind == "spectrum":
                tensors.append(torch.fft.rfft(a).abs())
            del a, b  # memory of what was dropped is given to others
        return [*self.older, *self.statistics, *tensors[_OLDER + 1 :]]


def _overlap(one: Tensor, other: Tensor) -> bool:
    (begin, end), (its_begin, its_end) = (
        (t.data_ptr(), t[-1:].data_ptr() + t.element_size()) for t in (one, other)
    )
    return begin < its_end and its_begin < end


def _bits(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone().view(torch.int32) for tensor in tensors]


def _batches(step: Step) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(_REPLAYS):
        yield torch.randn(step.size, generator=generator).to(step.x.device)


def _results(step: Step, run: Callable[[], list[Tensor]]) -> list[list[Tensor]]:
    torch.manual_seed(3)
    results = []
    for batch in _batches(step):
        step.x.copy_(batch)
        results.append(_bits(run()))
    return results


def _is_same(ops: list[Op], backend: Backend) -> bool:
    """Whether replays come to what the ops come to one after the other."""
    with torch.no_grad():
        plain = Step(ops, backend.device)
        expected = _results(plain, plain.run)
        step = Step(ops, backend.device)
        with backend.on_side_stream():
            Step(ops, backend.device).run()
        graph, left = backend.capture(step.run)
        try:

            def replay() -> list[Tensor]:
                with backend.on_side_stream():
                    graph.replay()
                return left

            found = _results(step, replay)
        finally:
            backend.synchronize()
            backend.release(graph)
    return all(
        torch.equal(one, other)
        for ones, others in zip(expected, found, strict=True)
        for one, other in zip(ones, others, strict=True)
    )


pytestmark = pytest.mark.usefixtures("hypothesis_leaves_no_clock")

_number = st.integers(0, 31)
_ops = st.lists(st.tuples(st.sampled_from(_KINDS), _number, _number, _number), min_size=10, max_size=30)


@pytest.mark.spread(2, first=1)
@pytest.mark.parametrize("streams", [2, 4])
def test_random_ops(make_backend: Make, streams: int, accelerator: str) -> None:
    backend = make_backend(streams)

    @settings(
        database=None,
        deadline=None,
        derandomize=True,
        max_examples=12 if accelerator == "gpu" else 40,  # a capture takes a while there
        suppress_health_check=list(HealthCheck),
    )
    @given(_ops)
    def check(ops: list[Op]) -> None:
        assert _is_same(ops, backend)

    check()


def _random_ops(seed: int) -> list[Op]:
    draw = random.Random(seed)
    return [(draw.choice(_KINDS), *(draw.randrange(32) for _ in range(3))) for _ in range(30)]  # type: ignore[misc]


def _none(flow: Flow, piece: Any) -> Iterator[int]:
    return iter(())


def _goes_wrong(backend: Backend, among: int) -> bool:
    """Whether one of some programs comes to other numbers, or is refused."""
    try:
        return not all(_is_same(_random_ops(seed), backend) for seed in range(among))
    except SentBackError:
        return True


def test_controls_begin_from_what_is_right(make_backend: Make) -> None:
    assert not _goes_wrong(make_backend(4), 10)


@pytest.mark.parametrize("rule", ["_read_after_write", "_write_after_read"])
def test_without_a_rule(make_backend: Make, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Flow, rule, _none)
    assert _goes_wrong(make_backend(4), 60)


def test_without_writes_after_writes(
    make_backend: Make, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if accelerator == "gpu":
        # The emulator's generator is written by ops that do not read it; `test_dataflow.py` has others.
        pytest.skip("what an op of torch's writes counts as read by it too, so that another rule holds")
    monkeypatch.setattr(Flow, "_write_after_write", _none)
    assert _goes_wrong(make_backend(4), 200)


def test_without_what_is_kept(
    make_backend: Make, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if accelerator != "gpu":
        pytest.skip("the emulator gives each tensor memory of its own")
    monkeypatch.setattr(HeldMemory, "use", lambda *args: None)
    assert _goes_wrong(make_backend(4), 60)


def test_without_the_table_of_undeclared_writes(
    make_backend: Make, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writes, "UNDECLARED_WRITES", {})
    if accelerator == "gpu":
        monkeypatch.setattr(torch.backends.cudnn, "enabled", False)  # `native_batch_norm` then
    assert _goes_wrong(make_backend(4), 200)
