"""Lightning's profilers beside a graph: the same run, and they see its replays.

`tests/gpu/test_rows_profilers.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

import cProfile
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from torch.autograd import DeviceType

from lightning_cudagraph import CaptureError, CUDAGraphCallback
from tests.harness import Net, make, train
from tests.rows import became, row

pytestmark = pytest.mark.long

REPLAY = "[CUDAGraphCallback]replay.training_step"
STEP = "[Strategy]SingleDeviceStrategy.training_step"


# The actions that are in the graph, and that only eager steps and warm-up have.
INSIDE = {
    *("training_step", "backward", "optimizer_zero_grad", "configure_gradient_clipping"),
    *("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
}


class Kept:
    """Makes the profiler of each run, and keeps the last two, with what they have seen."""

    def __init__(self, cls: type, **kwargs: Any) -> None:
        self.cls, self.kwargs = cls, kwargs

    def __call__(self, folder: Path) -> dict[str, Any]:
        self.before = getattr(self, "made", None)
        self.made = self.cls(dirpath=folder, filename="profile", **self.kwargs)
        return {"profiler": self.made}


@pytest.mark.long
@pytest.mark.parametrize("watched", [True, False], ids=["watched", "alone"])
def test_simple(tmp_path: Path, accelerator: str, watched: bool) -> None:
    kept = Kept(SimpleProfiler)
    done = row(tmp_path, accelerator, setting=kept, watched=watched)
    became(done.graph, replayed=18, eager={"another batch signature": 3})
    durations = kept.made.recorded_durations
    # Neither the capture nor the rehearsals of verified replays count as steps.
    assert len(durations["run_training_batch"]) == 24
    assert len(durations[REPLAY]) == 18
    assert len(durations[STEP]) == 6
    plain = kept.before.recorded_durations  # type: ignore[union-attr]
    seldom = {name for name, times in plain.items() if len(durations.get(name, ())) != len(times)}
    transfers = set() if watched else {"transfer_batch_to_device", "on_after_batch_transfer"}
    assert {name.rpartition(".")[2] for name in seldom} == INSIDE | transfers
    report = str(done.graph.callback.summary)  # type: ignore[union-attr]
    assert report.count(f"`SimpleProfiler` sees each replay as `{REPLAY}`") == 1
    assert "replay.training_step" in next((tmp_path / "graph").glob("*profile*.txt")).read_text()


@pytest.mark.long
def test_advanced(tmp_path: Path, accelerator: str) -> None:
    kept = Kept(AdvancedProfiler)
    done = row(tmp_path, accelerator, setting=kept)
    became(done.graph, replayed=18, eager={"another batch signature": 3})
    assert "replay.training_step" in next((tmp_path / "graph").glob("*profile*.txt")).read_text()


class ReadsTheClock(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        output["loss"] = output["loss"] * (1 + time.time() % 1)
        return output


@pytest.mark.spread
@pytest.mark.filterwarnings("ignore:.*Profiler clears events at the end of each cycle")
@pytest.mark.parametrize("profiler", [None, "simple", "advanced", "pytorch"])
def test_the_audit_is_not_switched_off(tmp_path: Path, accelerator: str, profiler: str | None) -> None:
    kwargs: dict[str, Any] = {"accelerator": accelerator, "profiler": profiler}
    trace = train(make(ReadsTheClock), tmp_path, CUDAGraphCallback(), raises=CaptureError, **kwargs)
    assert "a read of `time.time()`" in str(trace.error)
    # Lightning leaves it running after an exception, and torch does not bear two of them.
    trace.trainer.profiler.teardown("fit")  # type: ignore[union-attr]


class ProfilesItself(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with self.trainer.profiler.profile("my action"):
            return super().training_step(batch, batch_idx)


@pytest.mark.long
@pytest.mark.parametrize("profiler", ["simple", "advanced"])
def test_actions_of_the_users_own(tmp_path: Path, accelerator: str, profiler: str) -> None:
    done = row(tmp_path, accelerator, ProfilesItself, profiler=profiler)
    became(done.graph, replayed=18, eager={"another batch signature": 3})


class HasAProfilerInside(ReadsTheClock):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with cProfile.Profile():
            return super().training_step(batch, batch_idx)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="cProfile has a hook of its own since 3.12")
def test_a_profiler_of_the_interpreter_inside_the_step(tmp_path: Path, accelerator: str) -> None:
    with pytest.raises(CaptureError, match="switches on a profiler of the interpreter"):
        train(make(HasAProfilerInside), tmp_path, CUDAGraphCallback(), accelerator=accelerator)


@pytest.mark.spread(2)
@pytest.mark.parametrize("names", [True, False], ids=["names", "no names"])
@pytest.mark.filterwarnings("ignore:.*Profiler clears events at the end of each cycle")
def test_pytorch(tmp_path: Path, accelerator: str, names: bool) -> None:
    """The trace begins and ends at the steps that the schedule says, also among replays."""
    traced: list[dict[str, int]] = []

    def ready(profiler: Any) -> None:
        # On a GPU there are annotations of its own, under the same names.
        events = [e for e in profiler.key_averages() if e.device_type == DeviceType.CPU]
        traced.append({event.key: event.count for event in events})

    kept = Kept(
        PyTorchProfiler,
        record_module_names=names,
        on_trace_ready=ready,
        schedule=torch.profiler.schedule(wait=8, warmup=2, active=4, repeat=1),
    )
    # In validation, Lightning's schedule would go on with steps of its own.
    done = row(tmp_path, accelerator, setting=kept, limit_val_batches=0)
    became(done.graph, replayed=18, eager={"another batch signature": 3})
    plain, graph = traced
    assert plain[f"[pl][profile]{STEP}"] == graph[f"[pl][profile]{REPLAY}"] == 4
    assert f"[pl][profile]{STEP}" not in graph
    assert any("[pl][module]" in name for name in plain) == names


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*Profiler clears events at the end of each cycle")
def test_pytorch_by_default(tmp_path: Path, accelerator: str) -> None:
    done = row(tmp_path, accelerator, setting=Kept(PyTorchProfiler), limit_val_batches=0)
    became(done.graph, replayed=18, eager={"another batch signature": 3})
    report = str(done.graph.callback.summary)  # type: ignore[union-attr]
    # What CUDA's part of it does to events, nobody does to the emulator's.
    assert ("delays the first events of a graph" in report) == (accelerator == "gpu")
