"""The host's time between replays, by part, and what the report says of it.

`tests/gpu/test_host_times.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from lightning.pytorch.plugins.precision import MixedPrecision

from lightning_cudagraph import CUDAGraphCallback
from lightning_cudagraph.device.emulator.emulator_backend import EmulatorBackend
from lightning_cudagraph.device.host_work import LateValue
from lightning_cudagraph.trainer.common.profilers import draws_late
from lightning_cudagraph.trainer.training.times import host_times
from lightning_cudagraph.trainer.training.times.host_times import (
    DEVICE,
    LOADER,
    LOGGERS,
    HostTimes,
    host_lines,
)
from tests.harness import Net, loader, make, train
from tests.test_batch_hooks import Twice

BATCHES = 40
SLOW_S = 0.004


class Slow(Callback):
    """Takes its time in the hook after a step."""

    def on_train_batch_end(self, *args: Any) -> None:
        time.sleep(SLOW_S)


class SeesZero(Callback):
    """Runs at a graph break."""

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        pass


class Ends(Net):
    """A module with hooks around the step and the transfer."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        pass


@pytest.fixture
def measured(accelerator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third step is measured, on the emulator too."""
    if accelerator != "gpu":
        monkeypatch.setattr(host_times, "has_speed", lambda backend: True)
    monkeypatch.setattr(host_times, "_EVERY_N_STEPS", 3)
    monkeypatch.setattr(host_times, "_MIN_STEPS", 5)


@pytest.mark.usefixtures("measured")
def test_who_has_the_time(tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Twice(
        tmp_path,
        accelerator,
        monkeypatch,
        lambda: (Slow(), SeesZero(), TQDMProgressBar()),
        Ends,
        lambda: CUDAGraphCallback(),
        train_loader=loader(ragged=False, batches=BATCHES),
        enable_progress_bar=True,
        log_every_n_steps=10,
    )
    report = str(runs.traces[1].callback and runs.traces[1].callback.summary)
    (line,) = (line for line in report.splitlines() if line.startswith("  host  "))
    assert "the device waits for it, at " in line
    parts = dict(part.rsplit(" ", 1) for part in line.partition("steps): ")[2].split(", "))
    assert float(parts["`Slow.on_train_batch_end`"]) > SLOW_S * 1e6 * 0.9
    assert float(parts["this package and Lightning's loop"]) > 0
    steps_ms = runs.traces[1].callback.summary.fit.replay_ms  # type: ignore[union-attr]
    assert steps_ms is not None
    assert sum(map(float, parts.values())) < 3 * steps_ms * 1e3


def made_times(monkeypatch: pytest.MonkeyPatch) -> list[HostTimes]:
    """The times of the runs from now on."""
    found: list[HostTimes] = []
    begin = HostTimes.__init__

    def begins(self: HostTimes, *args: Any) -> None:
        begin(self, *args)
        found.append(self)

    monkeypatch.setattr(HostTimes, "__init__", begins)
    return found


@pytest.mark.usefixtures("measured")
def test_every_part_is_named(tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = made_times(monkeypatch)
    train(
        make(Ends),
        tmp_path,
        CUDAGraphCallback(timings=None),
        accelerator=accelerator,
        callbacks=(SeesZero(), TQDMProgressBar()),
        train_loader=loader(ragged=False, batches=BATCHES),
        watched=False,
        enable_progress_bar=True,
        checkpoint_every=0,
        enable_checkpointing=False,
        log_every_n_steps=4,
    )
    (times,) = found
    assert times.steps >= 5
    assert times.launches <= times.steps
    expected = {
        "`Ends.on_before_batch_transfer`",
        "`Ends.on_train_batch_start`",
        "`TQDMProgressBar.on_train_batch_end`",
        "hooks in the middle of the step",
        "learning rate schedulers",
        "this package and Lightning's loop",
        LOADER,
        LOGGERS,
    }
    assert times.parts_us.keys() == expected
    assert all(time_us > 0 for time_us in times.parts_us.values())


@pytest.mark.long
@pytest.mark.usefixtures("measured")
def test_waits_for_the_outcome_of_a_step(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are shown apart from this package's own time."""
    found, own = made_times(monkeypatch), LateValue.read

    def reads(flag: LateValue) -> bool:
        time.sleep(SLOW_S)
        return own(flag)

    monkeypatch.setattr(LateValue, "read", reads)
    device = "cuda" if accelerator == "gpu" else "cpu"
    train(
        make(lambda: Net(lambda p: torch.optim.AdamW(p, lr=1e-3))),
        tmp_path,
        CUDAGraphCallback(timings=None),
        accelerator=accelerator,
        plugins=[MixedPrecision("16-mixed", device, torch.amp.GradScaler(device, init_scale=2.0**10))],
        callbacks=(SeesZero(),),
        train_loader=loader(ragged=False, batches=BATCHES),
        watched=False,
        checkpoint_every=0,
        log_every_n_steps=4,
    )
    (times,) = found
    assert times.parts_us[DEVICE] > SLOW_S * 1e6 * 0.9


class Told(HostTimes):
    """Times that are given."""

    def __init__(self, parts_us: dict[str, float], waiting: int) -> None:
        super().__init__(EmulatorBackend())
        self.steps = self.launches = 100
        self.waiting = waiting
        self._total_s.update({part: time_us * 100 / 1e6 for part, time_us in parts_us.items()})


def test_what_the_report_says() -> None:
    own = "this package and Lightning's loop"
    times = Told({own: 60.0, LOADER: 90.0, "`EMA.on_train_batch_end`": 450.0, "`A.b`": 2.0}, 97)
    line, remedy = host_lines(times, [])
    looks, _, parts = line.partition("; ")
    assert looks == "  host      the device waits for it, at 97% of 100 launches that were looked at"
    assert parts == (
        f"us a step (100 steps): `EMA.on_train_batch_end` 450, the loader 90, {own} 60, the rest 2"
    )
    assert remedy.strip().startswith("a loader with more `num_workers`")
    times = Told({own: 60.0, "`TQDMProgressBar.on_train_batch_end`": 112.0, LOGGERS: 30.0}, 97)
    assert [line.strip() for line in host_lines(times, [TQDMProgressBar()])[1:]] == [
        "`TQDMProgressBar(refresh_rate=50)` draws less often than 1",
        "`Trainer(log_every_n_steps=...)` with a larger number logs less often",
    ]
    assert host_lines(Told({own: 60.0}, 4), []) == [
        "  host      ahead of the device, which was busy at 96% of 100 launches that were looked at"
    ]
    assert host_lines(HostTimes(EmulatorBackend()), []) == []


def test_a_wait_is_no_time_of_the_part_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loggers read counters, for example, and these wait for the device."""
    now_s = waited_s = 0.0
    monkeypatch.setattr(host_times, "has_speed", lambda backend: True)
    monkeypatch.setattr(host_times, "_EVERY_N_STEPS", 1)
    monkeypatch.setattr(host_times, "perf_counter", lambda: now_s)
    times = HostTimes(EmulatorBackend())
    times.waits.append(lambda: waited_s)
    for _ in range(4):
        times.begin()
        now_s += 1
        with times.of(LOGGERS):
            now_s, waited_s = now_s + 5, waited_s + 3
    times.begin()
    assert {part: us / 1e6 for part, us in times.parts_us.items()} == pytest.approx(
        {DEVICE: 3, LOGGERS: 2, "this package and Lightning's loop": 1}
    )


@pytest.mark.parametrize(("refresh_rate", "is_late"), [(1, True), (50, False)])
def test_a_bar_that_is_drawn_seldom_waits_for_the_value(refresh_rate: int, is_late: bool) -> None:
    assert draws_late(TQDMProgressBar(refresh_rate=refresh_rate)) == is_late
