"""Callbacks that watch, stop, save or print beside ours: the same as without ours, bit for bit.

`tests/gpu/test_rows_watching.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch.callbacks.spike as spikes
import pytest
import torch
from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    LambdaCallback,
    ModelSummary,
    OnExceptionCheckpoint,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
    device_stats_monitor,
    throughput_monitor,
    timer,
)
from torch.utils.data import DataLoader

from lightning_cudagraph import CUDAGraphCallback, UnsupportedError
from lightning_cudagraph.device.sentry.sentry import Sentry
from tests.harness import FULL_BATCHES, Net, Trace, assert_same, loader, make, train
from tests.rows import became, refused, row

pytestmark = pytest.mark.long

ONE_SHAPE = {"another batch signature": 3}


def alone(make_callback: Callable[[], Any]) -> Callable[[Path], dict[str, Any]]:
    """A run with one more callback."""
    return lambda folder: {"callbacks": (make_callback(),)}


@pytest.fixture
def clock() -> Any:
    """A clock that goes on by one second whenever somebody looks at it."""
    ticks = itertools.count()
    look = lambda: float(next(ticks))  # noqa: E731
    return SimpleNamespace(monotonic=look, perf_counter=look)


@pytest.mark.spread
@pytest.mark.parametrize("watched", [True, False], ids=["watched", "alone"])
@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_timer(
    tmp_path: Path,
    accelerator: str,
    monkeypatch: pytest.MonkeyPatch,
    clock: Any,
    interval: str,
    watched: bool,
) -> None:
    monkeypatch.setattr(timer, "time", clock)
    duration = timedelta(seconds=14 if interval == "step" else 3)
    done = row(
        tmp_path,
        accelerator,
        setting=alone(lambda: Timer(duration, interval=interval)),
        watched=watched,
        max_epochs=6,
    )
    assert done.graph.final["should_stop"]
    assert 3 < done.graph.final["global_step"] < 48
    assert done.graph.counts.replayed


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:FLOPs not found for")  # of some GPUs, which Lightning does not know
def test_throughput_monitor(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch, clock: Any
) -> None:
    monkeypatch.setattr(throughput_monitor, "time", clock)

    class WithFlops(Net):
        flops_per_batch = 1000

    done = row(
        tmp_path,
        accelerator,
        WithFlops,
        alone(lambda: ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=3)),
    )
    became(done.graph, replayed=18, eager=ONE_SHAPE)
    report = str(done.graph.callback.summary)  # type: ignore[union-attr]
    assert report.count("`ThroughputMonitor` waits for the GPU after every batch") == 1
    assert "train/samples" in done.graph.csv or "train|samples" in done.graph.csv


@pytest.mark.long
def test_device_stats_monitor(tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(device_stats_monitor, "_PSUTIL_AVAILABLE", True)
    monkeypatch.setattr(
        CPUAccelerator, "get_device_stats", lambda self, device: {"cpu_percent": float(next(ticks))}
    )
    done = row(
        tmp_path,
        accelerator,
        setting=alone(DeviceStatsMonitor),
        ignore=("DeviceStatsMonitor", "cpu_percent"),
    )
    became(done.graph, replayed=18, eager=ONE_SHAPE)
    assert "DeviceStatsMonitor.on_train_batch_end" in done.graph.csv


@pytest.mark.long
def test_model_summary(tmp_path: Path, accelerator: str) -> None:
    done = row(tmp_path, accelerator, setting=alone(lambda: ModelSummary(max_depth=-1)))
    became(done.graph, replayed=18, eager=ONE_SHAPE)


@pytest.mark.spread(2)
@pytest.mark.parametrize("bar", ["tqdm", "rich"])
def test_progress_bars(
    tmp_path: Path, accelerator: str, capfd: pytest.CaptureFixture[str], bar: str
) -> None:
    """What the bar shows in each step, but for times and rates."""

    def run(folder: str, ours: CUDAGraphCallback | None) -> tuple[Trace, list[str]]:
        if bar == "rich":
            pytest.importorskip("rich")
            from lightning.pytorch.callbacks import RichProgressBar

            shown: Any = RichProgressBar(refresh_rate=1)
        else:
            shown = TQDMProgressBar(refresh_rate=1)
        capfd.readouterr()
        trace = train(
            make(Net),
            tmp_path / folder,
            ours,
            accelerator=accelerator,
            callbacks=(shown,),
            enable_progress_bar=True,
        )
        out = capfd.readouterr()
        return trace, re.findall(r"Epoch \d+|loss_(?:step|epoch)[=:] ?[\d.]+", out.out + out.err)

    plain, shown_plain = run("plain", None)
    graph, shown_graph = run("graph", CUDAGraphCallback())
    assert_same(plain, graph)
    became(graph, replayed=18, eager=ONE_SHAPE)
    assert shown_plain == shown_graph
    assert "reads logged values" not in str(graph.callback and str(graph.callback.summary))
    assert bar == "rich" or len(shown_graph) > 48


@pytest.mark.long
@pytest.mark.parametrize("watched", [True, False], ids=["watched", "alone"])
def test_lambda_callback_on_the_host(tmp_path: Path, accelerator: str, watched: bool) -> None:
    """Hooks made of functions log, move the learning rate, and replace a parameter's memory."""

    def starts(trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 1e-2 / (1 + trainer.global_step)

    def ends(trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        module.log("seen", outputs["loss"] * 2, on_step=True, on_epoch=True)
        if trainer.global_step == 13:
            module.head.weight.data = module.head.weight.data.clone()

    def epoch(trainer: Any, module: Any) -> None:
        module.log("at_end", trainer.callback_metrics["loss_step"])

    done = row(
        tmp_path,
        accelerator,
        setting=alone(
            lambda: LambdaCallback(
                on_train_batch_start=starts, on_train_batch_end=ends, on_train_epoch_end=epoch
            )
        ),
        watched=watched,
    )
    became(
        done.graph,
        replayed=15,
        captures=2,
        because=["the address of parameter `head.weight`"],
        eager={"another batch signature": 2},
    )
    assert "seen_epoch" in done.graph.csv


class Fails(Net):
    """Raises at one step, in one place."""

    def __init__(self, step: int, place: str) -> None:
        super().__init__()
        self.step, self.place = step, place
        self.armed = False

    def due(self, place: str) -> bool:
        return self.place == place and self.trainer.global_step == self.step

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.armed = self.due("training_step")
        if self.due("on_train_batch_start"):
            raise ValueError("on purpose")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        if self.armed:
            raise ValueError("on purpose")
        return output

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.due("on_train_batch_end"):
            raise KeyboardInterrupt


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("step", "place"),
    [
        (1, "training_step"),  # in warm-up
        (3, "training_step"),  # in the capture
        (12, "training_step"),  # where a replay would have been
        (12, "on_train_batch_start"),
        (12, "on_train_batch_end"),
    ],
)
# Lightning looks for something to resume from, and says that there is nothing.
@pytest.mark.filterwarnings(
    "ignore:.*was called without a model",
    "ignore:.*no last checkpoint",
    "ignore:The dirpath has changed",
    "ignore:You're resuming from a checkpoint that ended before the epoch ended",
)
def test_checkpoint_on_exception(tmp_path: Path, accelerator: str, step: int, place: str) -> None:
    raises = SystemExit if place == "on_train_batch_end" else ValueError
    done = row(
        tmp_path,
        accelerator,
        lambda: Fails(step, place),
        lambda folder: {"callbacks": (OnExceptionCheckpoint(folder / "ended"),)},
        raises=raises,
    )
    saved = done.graph.checkpoints["ended/on_exception.ckpt"]
    assert saved["global_step"] == step
    assert [name for name, *_ in done.graph.hooks][-2:] == ["on_exception", "on_save_checkpoint"]
    # It goes on from there.
    path = str(tmp_path / "graph" / "ended" / "on_exception.ckpt")
    resumed = train(
        make(Net), tmp_path / "resumed", CUDAGraphCallback(), accelerator=accelerator, ckpt_path=path
    )
    assert resumed.final["global_step"] == 24


class FailsInCaptures(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        if any(isinstance(mode, Sentry) for mode in modes):
            raise ValueError("not in here")
        return super().training_step(batch, batch_idx)


def test_an_exception_that_only_a_capture_raises(tmp_path: Path, accelerator: str) -> None:
    match = r"raised ValueError in the capture: not in here\. Eagerly, .*, it did not[.:]\s+"
    match += r"found at .*test_rows_watching.py:\d+ \(`raise ValueError"
    done = refused(tmp_path, accelerator, FailsInCaptures, match=match)
    became(done.graph, replayed=0, captures=0, eager={"not in here": 21})


class WritesTheNumber(Net):
    """`json` wants an `int`, and takes no object in its place."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.line = json.dumps({"step": batch_idx})
        return super().training_step(batch, batch_idx)


def test_code_that_insists_on_the_type_of_a_number(tmp_path: Path, accelerator: str) -> None:
    match = r"(?s)raised TypeError in the capture: .*is not JSON serializable\. .*"
    match += r"found at .*test_rows_watching.py:\d+ \(`self.line = json.dumps.*Use the number in a hook"
    with pytest.raises(UnsupportedError, match=match):
        train(make(WritesTheNumber), tmp_path, CUDAGraphCallback(), accelerator=accelerator)


class WithoutNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        del self.features[1]


@pytest.mark.spread
@pytest.mark.parametrize("spike", [False, True])
def test_spike_detection(tmp_path: Path, accelerator: str, spike: bool) -> None:
    def setting(folder: Path) -> dict[str, Any]:
        batches = list(loader(ragged=False))
        if spike:
            batches[-1] = [batches[-1][0] * 1e4, batches[-1][1]]
        detection = spikes.SpikeDetection(rtol=3.0, warmup=3, exclude_batches_path=folder / "skip.json")
        return {"callbacks": (detection,), "train_loader": DataLoader(batches, batch_size=None)}

    raises = TrainingSpikeException if spike else None
    done = row(tmp_path, accelerator, WithoutNorm, setting, raises=raises)
    if spike:
        found = [json.loads((tmp_path / run / "skip.json").read_text()) for run in ("plain", "graph")]
        assert found == [[FULL_BATCHES - 2, FULL_BATCHES - 1]] * 2
    assert done.graph.counts.replayed == (FULL_BATCHES - 3 if spike else 3 * FULL_BATCHES - 3)
    assert torch.equal(done.plain.steps[4]["outputs"]["loss"], done.graph.steps[4]["outputs"]["loss"])
