"""What CUDA does with external events, on which reading them after a replay rests."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch

from lightning_cudagraph import EventTimer, TimerError, TimerRegistry

LONG_CYCLES = 40_000_000  # some 20 ms


def test_a_reader_waits_for_the_replay_that_was_launched_last() -> None:
    timer = EventTimer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with timer:
            torch.cuda._sleep(LONG_CYCLES)
        torch.cuda._sleep(1000)
    for _ in range(3):
        graph.replay()
        behind = torch.cuda.Event()
        behind.record()
        assert not behind.query()
        elapsed_ms = timer.elapsed_time()
        # Had it not waited, all of the work would still be ahead.
        begin_s = time.perf_counter()
        behind.synchronize()
        assert time.perf_counter() - begin_s < 5e-3
        assert elapsed_ms > 5


def test_blocks_of_several_streams_are_waited_for() -> None:
    registry = TimerRegistry[str]()
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side), registry.time("long"):
            torch.cuda._sleep(LONG_CYCLES)
        with registry.time("short"):
            torch.cuda._sleep(1000)
        main.wait_stream(side)
    for _ in range(3):
        graph.replay()
        times_ms = dict(registry.elapsed_times())
        assert times_ms["long"] > 5
        assert times_ms["short"] < 5


def test_what_cuda_says_of_an_event_that_was_never_replayed() -> None:
    start, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        start.record()
        torch.cuda._sleep(1000)
        end.record()
    end.synchronize()
    with pytest.raises(RuntimeError, match=r"invalid resource handle|invalid argument"):
        start.elapsed_time(end)
    # It has harmed nothing.
    graph.replay()
    end.synchronize()
    assert start.elapsed_time(end) > 0


def test_an_error_of_a_timer_leaves_the_capture_whole() -> None:
    x = torch.zeros(8, device="cuda")
    timer = EventTimer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with timer:
            x += 1
        with pytest.raises(TimerError, match="during a capture"):
            timer.elapsed_time()
        x += 1
    graph.replay()
    assert timer.elapsed_time() > 0
    assert x.tolist() == [2.0] * 8


def test_a_timer_does_not_initialise_cuda() -> None:
    code = f"""
import torch
from lightning_cudagraph import EventTimer, Profiler
timer, seen = EventTimer(), []
with Profiler(lambda name, elapsed_ms: seen.append(name)) as profiler, timer, profiler.time("host"):
    torch.ones(8)
assert timer.elapsed_time() > 0 and seen == ["host"]
assert not torch.cuda.is_initialized()
with timer:
    torch.ones(8, device="cuda")
    torch.cuda._sleep({LONG_CYCLES})
assert torch.cuda.is_initialized() and timer.elapsed_time() > 5
with timer:
    torch.cuda._sleep({LONG_CYCLES})
assert 5 < timer.elapsed_time() < 1000
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
