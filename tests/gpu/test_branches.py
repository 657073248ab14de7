"""Captures on several streams of a GPU: what no mode sees, memory that is used again, and races."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_cudagraph.device.cuda.cuda_backend import CudaBackend
from lightning_cudagraph.device.streams.branches import Branches
from lightning_cudagraph.device.streams.dataflow import Flow, HeldMemory
from tests.harness import differences

_DEVICE = torch.device("cuda", 0)
_LARGE = 4096  # a product of two such matrices takes a while, and what does not wait for it comes first


def _replayed(
    step: Callable[[], Any], streams: int, inputs: list[Tensor], state: list[Tensor], replays: int = 20
) -> tuple[list[list[Tensor]], Branches | None]:
    """What replays of a step come to, each on other inputs, and the streams of its capture."""
    seen: list[Branches] = []
    torch.manual_seed(0)
    first = [tensor.clone() for tensor in (*inputs, *state)]
    backend = CudaBackend(_DEVICE, streams=streams)
    with backend.on_side_stream():
        step()
    run = Branches.run

    def spy(self: Branches, *args: Any) -> Any:
        if self not in seen:
            seen.append(self)
        return run(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Branches, "run", spy)
        graph, outputs = backend.capture(step)
    with torch.no_grad():
        for tensor, value in zip((*inputs, *state), first, strict=True):
            tensor.copy_(value)
    found = []
    generator = torch.Generator(_DEVICE).manual_seed(1)
    torch.manual_seed(2)
    for _ in range(replays):
        for tensor in inputs:
            tensor.normal_(generator=generator)
        graph.replay()
        found.append([tensor.clone() for tensor in (*outputs, *state)])
    torch.cuda.synchronize()
    backend.release(graph)
    with torch.no_grad():
        for tensor, value in zip((*inputs, *state), first, strict=True):
            tensor.copy_(value)
    return found, seen[0] if seen else None


def _slow(x: Tensor, times: int = 4) -> Tensor:
    """The same numbers, on another memory, and late."""
    wide = torch.ones(_LARGE, _LARGE, device=x.device)
    for _ in range(times):
        wide = wide @ wide * (1.0 / _LARGE)
    return x + (wide[: x.shape[0], :1] - 1.0)


def _race(x: Tensor, buffer: Tensor) -> Callable[[], list[Tensor]]:
    def step() -> list[Tensor]:
        late = _slow(x)
        read = buffer * 2.0  # before it is written
        buffer.copy_(late)
        late_read = _slow(buffer) + buffer
        buffer.mul_(0.5)
        return [read, late_read, buffer + 1.0]

    return step


def test_a_race_that_waits_come_right_in() -> None:
    x, buffer = torch.randn(2, 64, 32, device=_DEVICE)
    one, none = _replayed(_race(x, buffer), 1, [x], [buffer])
    assert none is None
    for streams in (2, 4, 8):
        several, branches = _replayed(_race(x, buffer), streams, [x], [buffer])
        assert branches is not None
        assert branches.used > 1
        assert differences(one, several) == []


# What an op writes counts as read by it, too: write after write shows in `test_dataflow` alone, where
# ops say themselves what they do.
@pytest.mark.parametrize("rule", ["_read_after_write", "_write_after_read"])
def test_without_a_rule_the_race_is_lost(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, buffer = torch.randn(2, 64, 32, device=_DEVICE)
    one, _ = _replayed(_race(x, buffer), 1, [x], [buffer])
    monkeypatch.setattr(Flow, rule, lambda flow, piece: iter(()))
    several, _ = _replayed(_race(x, buffer), 4, [x], [buffer])
    assert differences(one, several) != []


def test_memory_is_not_given_again_while_another_stream_uses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.randn(64, 32, device=_DEVICE)

    def step() -> list[Tensor]:
        outputs = []
        for index in range(4):
            late = _slow(x)
            made = x + index  # on a stream that waits for nothing
            outputs.append(late + made)  # and read on another one, once that has come so far
            del made
            outputs.append(x * 3.0)  # is given the same memory, if it is free
        return outputs

    one, _ = _replayed(step, 1, [x], [])
    several, branches = _replayed(step, 4, [x], [])
    assert branches is not None
    assert branches.used > 1
    assert differences(one, several) == []
    # Without it: what is freed is given again at once, to whoever asks on the stream that it is from.
    monkeypatch.setattr(HeldMemory, "use", lambda *args: None)
    made = Flow.made
    early: list[int] = []

    def unsafe(flow: Flow, *args: Any) -> list[int]:
        early.extend(made(flow, *args))
        return []  # or the capture would end, and go on with one stream

    monkeypatch.setattr(Flow, "made", unsafe)
    racing, _ = _replayed(step, 4, [x], [])
    assert early  # which is how it would be seen
    assert differences(one, racing) != []


def _with_a_triton_kernel(x: Tensor, buffer: Tensor) -> Callable[[], list[Tensor]]:
    triton = pytest.importorskip("triton")
    language: Any = pytest.importorskip("triton.language")

    @triton.jit  # type: ignore[untyped-decorator]
    def add_in_place(target, source, size, block: language.constexpr):  # type: ignore[no-untyped-def]
        places = language.program_id(0) * block + language.arange(0, block)
        inside = places < size
        old = language.load(target + places, mask=inside)
        new = language.load(source + places, mask=inside)
        language.store(target + places, old * 0.5 + new, mask=inside)

    def step() -> list[Tensor]:
        late, other = _slow(x), x * 3.0
        add_in_place[(8,)](buffer, late, buffer.numel(), 256)
        add_in_place[(8,)](other, buffer, other.numel(), 256)
        return [buffer * 2.0, other + 1.0, _slow(other), x - buffer]

    return step


def test_a_triton_kernel_comes_after_all_and_before_all() -> None:
    x, buffer = torch.randn(2, 64, 32, device=_DEVICE)
    one, _ = _replayed(_with_a_triton_kernel(x, buffer), 1, [x], [buffer])
    several, branches = _replayed(_with_a_triton_kernel(x, buffer), 4, [x], [buffer])
    assert branches is not None
    assert list(branches.barriers.values()) == [1]  # two kernels, one after the other
    assert differences(one, several) == []


def test_a_kernel_that_is_not_noticed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    x, buffer = torch.randn(2, 64, 32, device=_DEVICE)
    one, _ = _replayed(_with_a_triton_kernel(x, buffer), 1, [x], [buffer])
    notice = Branches._notice

    def blind(self: Branches) -> None:
        if self._nodes:
            self._left = self._position(self._own)
        else:
            notice(self)

    monkeypatch.setattr(Branches, "_notice", blind)
    several, branches = _replayed(_with_a_triton_kernel(x, buffer), 4, [x], [buffer])
    assert branches is not None
    assert not branches.barriers
    assert differences(one, several) != []


def _spans_ms(backend: CudaBackend, step: Callable[[], Any], marks: list[Any]) -> list[float]:
    """The times between the marks of a step, in its third replay."""
    with backend.on_side_stream():
        _slow(torch.randn(64, 32, device=_DEVICE))
    graph, _ = backend.capture(step)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    spans_ms = [begin.elapsed_time(end) for begin, end in pairwise(marks)]
    backend.release(graph)
    return spans_ms


def test_a_mark_waits_for_ops_on_all_streams() -> None:
    """The end of a layer is that of its ops, wherever they are."""
    x = torch.randn(64, 32, device=_DEVICE)
    took_ms = []
    for streams in (1, 4):
        backend = CudaBackend(_DEVICE, streams=streams)
        begin, end = backend.event(), backend.event()

        def step(
            backend: CudaBackend = backend, begin: Any = begin, end: Any = end
        ) -> tuple[Tensor, Tensor]:
            other = x + 1.0
            backend.mark(begin)
            layer = _slow(x, 8)
            backend.mark(end)
            return layer, other * 2.0

        took_ms.extend(_spans_ms(backend, step, [begin, end]))
    # That it took no time would be the mistake; some more or less is not.
    assert took_ms[1] > 0.5 * took_ms[0] > 0.5


@pytest.mark.parametrize("streams", [1, 4])
def test_many_marks_are_passed_in_order(streams: int) -> None:
    """Each comes after the ops before it, and after the mark before it.

    On six branches in turn, events cost less, and came out of order, in spans of -7 ms, where many
    processes shared a GPU.
    """
    x = torch.randn(64, 32, device=_DEVICE)
    backend = CudaBackend(_DEVICE, streams=streams)
    marks = [backend.event() for _ in range(18)]

    def step() -> list[Tensor]:
        outputs: list[Tensor] = []
        for mark in marks:
            backend.mark(mark)
            last = outputs[-1] if outputs else x
            outputs.append(_slow(last, 1) if mark is not marks[-2] else last + 1.0)
        return outputs

    spans_ms = _spans_ms(backend, step, marks)
    *long_ms, short_ms = spans_ms
    assert min(long_ms) > 0.5, spans_ms  # a product of these sizes takes more
    assert short_ms >= 0.0, spans_ms


def test_a_stream_of_the_steps_own() -> None:
    x, buffer = torch.randn(2, 64, 32, device=_DEVICE)
    own = torch.cuda.Stream(_DEVICE)

    def step() -> list[Tensor]:
        late = _slow(x)
        current = torch.cuda.current_stream()
        own.wait_stream(current)
        with torch.cuda.stream(own):
            beside = _slow(late * 2.0)
            buffer.add_(late)
        here = x * 4.0
        current.wait_stream(own)
        beside.record_stream(current)
        return [beside + here, buffer * 1.0]

    one, _ = _replayed(step, 1, [x], [buffer])
    several, branches = _replayed(step, 4, [x], [buffer])
    assert branches is not None
    assert differences(one, several) == []


def test_an_op_of_the_users_own_is_waited_for() -> None:
    @torch.library.custom_op("lightning_cudagraph_tests::halve_and_add", mutates_args=("target",))
    def halve_and_add(target: Tensor, source: Tensor) -> None:
        target.mul_(0.5).add_(source)

    x, buffer = torch.randn(2, 64, 32, device=_DEVICE)

    def step() -> list[Tensor]:
        late = _slow(x)
        halve_and_add(buffer, late)
        return [buffer * 2.0, late + 1.0]

    one, _ = _replayed(step, 1, [x], [buffer])
    several, branches = _replayed(step, 4, [x], [buffer])
    assert branches is not None
    assert any("halve_and_add" in what for what in branches.barriers)
    assert differences(one, several) == []


def test_an_error_that_the_step_gets_over() -> None:
    x = torch.randn(64, 32, device=_DEVICE)

    def step() -> list[Tensor]:
        late = _slow(x)
        with pytest.raises(RuntimeError):
            torch.mm(late, late)
        return [late * 2.0, x + 1.0]

    one, _ = _replayed(step, 1, [x], [])
    several, _ = _replayed(step, 4, [x], [])
    assert differences(one, several) == []


def test_a_failed_capture_leaves_nothing_open() -> None:
    x = torch.randn(64, 32, device=_DEVICE)

    def fails() -> list[Tensor]:
        _slow(x)
        raise ValueError("in the middle")

    backend = CudaBackend(_DEVICE, streams=4)
    with backend.on_side_stream():
        _slow(x)
    with pytest.raises(ValueError, match="in the middle"):
        backend.capture(fails)
    assert torch.rand(3, device=_DEVICE).shape == (3,)
    graph, outputs = backend.capture(lambda: [_slow(x), torch.rand_like(x)])
    graph.replay()
    assert torch.allclose(outputs[0], x, atol=1e-3)
    backend.release(graph)


def _programs() -> Iterator[Callable[[list[Tensor], list[Tensor]], list[Tensor]]]:
    """Steps of random ops: views, writes in place, lists of tensors, and memory that is freed."""
    for seed in range(12):

        def program(inputs: list[Tensor], state: list[Tensor], seed: int = seed) -> list[Tensor]:
            draw = random.Random(seed)
            live = [*inputs, *state]
            for _ in range(60):
                one, other = draw.choice(live), draw.choice(live)
                kind = draw.randrange(9)
                if kind == 0:
                    live.append(one + 0.5 * other)
                elif kind == 1:
                    live.append((one @ other.t() @ other).tanh())
                elif kind == 2:
                    draw.choice(state)[draw.randrange(32) :].mul_(0.9).add_(one[:1])
                elif kind == 3:
                    half = draw.choice(state)[:, :16]
                    half.copy_(one[:, 16:].clone())
                elif kind == 4:
                    torch._foreach_mul_([draw.choice(state)[:8], draw.choice(state)[8:16]], 0.99)
                elif kind == 5:
                    live.append(torch.nn.functional.dropout(one, 0.2))
                elif kind == 6 and len(live) > 8:
                    live.pop(draw.randrange(len(inputs) + len(state), len(live)))
                elif kind == 7:
                    live.append(_slow(one, 1))
                else:
                    live.append(torch.cat([one[:32], other[32:]]).softmax(1))
            return [sum(live[len(inputs) + len(state) :], torch.zeros_like(inputs[0])), *live[-3:]]

        yield program


@pytest.mark.parametrize("program", list(_programs()))
def test_random_steps(program: Callable[[list[Tensor], list[Tensor]], list[Tensor]]) -> None:
    inputs = [torch.randn(64, 32, device=_DEVICE) for _ in range(2)]
    state = [torch.randn(64, 32, device=_DEVICE) for _ in range(4)]

    def step() -> list[Tensor]:
        return [tensor.clone() for tensor in program(inputs, state)]

    with torch.no_grad():
        one, _ = _replayed(step, 1, inputs, state, replays=10)
        for streams in (2, 8):
            several, branches = _replayed(step, streams, inputs, state, replays=10)
            assert branches is not None
            assert 1 < branches.used <= streams
            assert differences(one, several) == []
