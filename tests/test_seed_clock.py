"""The programs of `tests/gpu/test_seed_clock.py` on the emulator, which captures by a function."""

from __future__ import annotations

import pytest
import torch

from lightning_cudagraph import EventTimer, Profiler, TimerError, TimerRegistry
from lightning_cudagraph.device.emulator.emulator_backend import EmulatorBackend
from tests.gpu import test_seed_clock as programs


def test_a_timer() -> None:
    timer = EventTimer()
    static_a, static_b = torch.empty(200, 200), torch.empty(200, 200)

    def captured() -> None:
        for _ in range(10):
            with timer():
                _ = static_a + static_b
            with pytest.raises(TimerError, match="during a capture"):
                timer.elapsed_time()

    graph, _ = EmulatorBackend().capture(captured)
    static_a.copy_(torch.randn(200, 200))
    static_b.copy_(torch.randn(200, 200))
    graph.replay()
    timer.synchronize()
    assert timer.elapsed_time() > 0


def test_a_registry() -> None:
    registry = TimerRegistry[int]()
    static_a, static_b = torch.ones(200, 200), torch.ones(200, 200)

    def captured() -> None:
        for i in range(10):
            with registry.time(context=i):
                _ = static_a + static_b

    graph, _ = EmulatorBackend().capture(captured)
    for _ in range(3):
        graph.replay()
        times_ms = dict(registry.elapsed_times())
        assert [*times_ms] == list(range(10))
        assert min(times_ms.values()) > 0


def test_a_profiler(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with Profiler(programs.dump_fn) as profiler:
        monkeypatch.setattr(programs, "profiler", profiler, raising=False)
        model = programs.Model()
        static_input = torch.randn(1000, 1000)
        graph, _ = EmulatorBackend().capture(lambda: model(static_input))
        for _ in range(3):
            static_input.normal_()
            graph.replay()
    lines = capsys.readouterr().out.splitlines()
    expected = [f"[Layer {n}] {op} took " for n in range(5) for op in ("add", "relu")] * 3
    assert len(lines) == len(expected)
    for line, begin in zip(lines, expected, strict=True):
        assert line.startswith(begin)
