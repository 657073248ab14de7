"""`self.log` in a captured step comes out as without the callback: at every step, and in the files.

`tests/gpu/test_logs.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

import queue
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_cudagraph import CaptureError, CUDAGraphCallback, Verification
from tests.harness import Apart, Net, Trace, assert_same, differences, loader, make, train

pytestmark = [
    pytest.mark.filterwarnings("ignore:You called `self.log.*needs to be floating"),
    # A NaN is logged on purpose; the progress bar and CSV files take it.
    pytest.mark.filterwarnings("ignore:.*All-NaN"),
]


class Results(Callback):
    """What Lightning keeps of each logged name, after every step and at the ends of epochs."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def _look(self, trainer: Any) -> None:
        results = trainer.fit_loop.epoch_loop._results
        now: dict[str, Any] = {
            "batch_size": results.batch_size,
            "current_fx": trainer._logger_connector._current_fx,
        }
        for key, metric in results.items():
            now[key] = {
                name: copied.clone() if isinstance(copied := vars(metric).get(name), Tensor) else copied
                for name in (
                    *("value", "cumulated_batch_size", "_computed", "_forward_cache"),
                    *("_update_count", "has_reset"),
                )
                if metric.is_tensor or name not in ("value", "_forward_cache", "_computed")
            }
        self.seen.append(now)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self._look(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._look(trainer)


class FromACallback(Callback):
    """Logs from a callback's hooks on the host."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        pl_module.log("of_callback/start", float(batch_idx), on_step=True, on_epoch=True)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.log("of_callback/end", outputs["loss"] * 3, on_step=True, on_epoch=True, reduce_fx="sum")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.log("of_callback/epoch", trainer.callback_metrics["both"] + 1)


class Everything(Net):
    """All arguments of `self.log`, all kinds of values, from everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.mean_metric = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        both: dict[str, Any] = {"on_step": True, "on_epoch": True}
        self.log("both", loss, prog_bar=True, **both)
        self.log("only_step", loss * 2, on_step=True, on_epoch=False)
        self.log("only_epoch", loss * 3, on_step=False, on_epoch=True)
        self.log("default", loss * 4)
        for reduce_fx in ("min", "max", "sum", "mean", torch.min, torch.sum, max, sum):
            name = reduce_fx if isinstance(reduce_fx, str) else f"of_{reduce_fx.__module__}"
            word = getattr(reduce_fx, "__name__", reduce_fx)
            self.log(f"{name}/{word}", logits.mean(), reduce_fx=reduce_fx, **both)
        self.log("explicit", loss, batch_size=3, **both)
        self.log("synced", loss, sync_dist=True, **both)
        self.log("no_idx", loss, add_dataloader_idx=False, on_epoch=True)
        self.log("quiet", loss, logger=False, **both)
        self.log("first_rank", loss, rank_zero_only=True, **both)
        self.log("integer", y.sum(), **both)
        self.log("largest_integer", y.max(), reduce_fx="max", **both)
        self.log("boolean", logits.mean() > 0, **both)
        self.log("half", logits.mean().half(), **both)
        self.log("bfloat16", logits.mean().bfloat16(), reduce_fx="sum", **both)
        self.log("double", logits.double().mean(), **both)
        self.log("double_min", logits.double().mean(), reduce_fx="min", **both)
        self.log("one_element", logits[:1, :1], **both)
        self.log("not_a_number", loss.detach() * float("nan"), **both)
        self.log("nan_max", logits.mean() / (y.sum() * 0), reduce_fx="max", **both)
        self.log("twice", loss, **both)
        self.log("twice", loss * 0.5, **both)
        self.log("python_float", 0.1, **both)
        self.log("python_int", 7, reduce_fx="sum", **both)
        self.log("python_bool", True, on_step=True)
        self.log("numpy", np.float32(0.3), on_epoch=True)
        self.log_dict({"dict/number": 1.5, "dict/tensor": loss}, **both)
        self.mean_metric(loss)
        self.log("metric", self.mean_metric, **both)
        return {"loss": loss}

    def on_before_backward(self, loss: Tensor) -> None:
        self.log("before_backward", loss, on_step=True, on_epoch=True)

    def on_after_backward(self) -> None:
        self.log("same_name", self.head.weight.grad.abs().max(), on_step=True)
        self.log("gradient", self.head.bias.grad.norm(), on_step=True, on_epoch=True, reduce_fx="max")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("same_name", self.head.weight.grad.abs().sum(), on_step=True)
        self.log("python_in_hook", 2, on_step=True, on_epoch=True)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.log("clip", self.head.weight.grad.norm(), on_step=True, on_epoch=True)
        super().configure_gradient_clipping(optimizer, *args, **kwargs)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("start", float(batch_idx), on_step=True, on_epoch=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("end", outputs["loss"], on_step=True, on_epoch=True, prog_bar=True)

    def on_train_epoch_end(self) -> None:
        self.log("epoch_end", self.head.bias.sum())


def _both(
    tmp_path: Path, build: Callable[[], Net], callback: CUDAGraphCallback | None = None, **kwargs: Any
) -> tuple[Trace, Trace]:
    """The plain run, and the one with the callback, the same in all that Lightning keeps."""
    watchers = Results(), Results()
    others = kwargs.pop("callbacks", lambda: ())
    plain = train(make(build), tmp_path / "plain", callbacks=(watchers[0], *others()), **kwargs)
    callback = callback or CUDAGraphCallback()
    graph = train(
        make(build), tmp_path / "graph", callback, callbacks=(watchers[1], *others()), **kwargs
    )
    assert_same(plain, graph)
    assert watchers[0].seen
    found = differences(watchers[0].seen, watchers[1].seen)
    assert not found, found[:8]
    return plain, graph


@pytest.fixture
def host_updates(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """For each name in each collection of results, in order: how often the host has added to it."""
    found = Apart()
    original = _ResultMetric.forward

    def counted(self: _ResultMetric, *args: Any) -> None:
        found.setdefault(id(self), [self, 0])[1] += 1  # kept, so that no id comes twice
        original(self, *args)

    monkeypatch.setattr(_ResultMetric, "forward", counted)

    class Counts(list[Any]):
        def of(self, name: str) -> list[int]:
            return [count for metric, count in found.values() if metric.meta.name == name]

    return Counts()


@pytest.mark.long
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("window", [1, 2])
def test_everything(
    tmp_path: Path, accelerator: str, window: int, every: int, host_updates: Any
) -> None:
    """With ragged last batches, validation in the middle of an epoch, and logs from callbacks."""
    _, graph = _both(
        tmp_path,
        Everything,
        callbacks=lambda: (FromACallback(),),
        accelerator=accelerator,
        accumulate_grad_batches=window,
        log_every_n_steps=every,
        train_loader=loader(batches=9),
        val_check_interval=4,
    )
    assert graph.counts.captures >= window
    assert graph.counts.recaptures == ()
    assert graph.counts.replayed >= 16
    for name in ("both", "mean/mean", "max/max", "of_torch/sum", "integer", "double", "python_float"):
        eager, captured = host_updates.of(name)
        assert eager == 30
        # Warm-up, ragged batches, a first replay of each graph, and the first batch of each epoch.
        assert captured <= 15, name
    # What the host alone can do right.
    for name in ("twice", "of_builtins/max"):
        eager, captured = host_updates.of(name)
        assert eager == captured


@pytest.mark.long
@pytest.mark.parametrize("scope", ["step", "forward_backward"])
@pytest.mark.parametrize("timings", [True, False])
def test_graphs_that_share_sums(
    tmp_path: Path, accelerator: str, scope: Any, timings: bool, host_updates: Any
) -> None:
    """Captures that take turns, and one for each place in the window, add to the same sums."""
    arguments: dict[str, Any] = {} if timings else {"timings": None}
    _, graph = _both(
        tmp_path,
        Net,
        CUDAGraphCallback(scope=scope, **arguments),
        accelerator=accelerator,
        accumulate_grad_batches=3,
        train_loader=loader(ragged=False, batches=13),
        max_epochs=3,
    )
    assert graph.counts.captures >= (1 if scope == "forward_backward" else 2)
    eager, captured = host_updates.of("loss")
    assert eager == 39
    assert captured <= 26


class FromOverrides(Net):
    """Logs where an epoch starts, around the optimizer's step, and in a backward pass of its own."""

    def on_train_epoch_start(self) -> None:
        self.log("epoch_start", float(self.current_epoch))
        self.log("epoch_start_weight", self.head.weight.sum())

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.log("in_backward", loss * 2, on_step=True, on_epoch=True)
        loss.backward()
        self.log("in_backward_peak", self.head.weight.grad.max(), on_step=True, reduce_fx="max")

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        self.log("before_step", float(batch_idx), on_step=True, on_epoch=True)
        optimizer.step(closure=optimizer_closure)
        self.log("after_step", self.head.weight.sum(), on_step=True, on_epoch=True, prog_bar=True)


@pytest.mark.long
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("scope", ["step", "forward_backward"])
def test_overrides(tmp_path: Path, accelerator: str, scope: Any, window: int) -> None:
    _, graph = _both(
        tmp_path,
        FromOverrides,
        CUDAGraphCallback(scope=scope),
        accelerator=accelerator,
        accumulate_grad_batches=window,
        max_epochs=4,
        val_check_interval=4,
    )
    assert graph.counts.replayed >= 20
    assert graph.counts.recaptures == ()
    logged = {name for step in graph.steps for name in step["logged_metrics"]}
    assert {"in_backward_step", "in_backward_peak", "before_step_step", "after_step_step"} <= logged
    assert {"epoch_start", "epoch_start_weight", "in_backward_epoch", "after_step_epoch"} <= logged


class InTheMiddle(Callback):
    """Logs on the host in the middle of a replay, under a name that the graph logs too."""

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self.log("before_backward", loss * 2, on_step=True, on_epoch=True)
        self.log("in_the_middle", loss * 3, on_step=True, on_epoch=True, reduce_fx="max")


@pytest.mark.long
def test_a_name_that_a_hook_on_the_host_logs_too(tmp_path: Path, accelerator: str) -> None:
    _, graph = _both(
        tmp_path, Everything, callbacks=lambda: (InTheMiddle(),), accelerator=accelerator, max_epochs=4
    )
    assert graph.counts.replayed >= 20


def _scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(next(folder.rglob("events.*")).parent), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


@pytest.mark.long
@pytest.mark.parametrize("every", [1, 3])
def test_tensorboard(tmp_path: Path, accelerator: str, every: int) -> None:
    kwargs: dict[str, Any] = {
        "accelerator": accelerator,
        "log_every_n_steps": every,
        "val_check_interval": 4,
        "max_epochs": 2,
    }
    found = []
    # Without the times of layers, which only one of them can have.
    for name, callback in (("plain", None), ("graph", CUDAGraphCallback(timings=None))):
        logger = TensorBoardLogger(tmp_path / name)
        trace = train(make(Everything), tmp_path / name, callback, logger=logger, **kwargs)
        found.append(_scalars(tmp_path / name))
    assert trace.counts.replayed >= 8
    assert found[0].keys() == found[1].keys()
    assert {"both_step", "both_epoch", "python_float_step", "val_loss", "clip_step"} <= found[0].keys()
    found = [{tag: repr(points) for tag, points in scalars.items()} for scalars in found]  # NaNs
    assert found[0] == found[1]


@pytest.mark.long
def test_fit_twice(tmp_path: Path, accelerator: str) -> None:
    """The second fit finds what the first has left in Lightning's results."""
    ends = []
    for name, callback in (("plain", None), ("graph", CUDAGraphCallback())):
        trace = train(make(Everything), tmp_path / name, callback, accelerator=accelerator, max_epochs=2)
        trainer, module = trace.trainer, trace.module
        assert trainer is not None
        assert module is not None
        trainer.fit_loop.max_epochs = 4
        trainer.fit(module, loader(), loader(seed=1, batches=2))
        results = trainer.fit_loop.epoch_loop._results
        ends.append((dict(trainer.callback_metrics), {k: vars(m)["value"] for k, m in results.items()}))
        if callback is not None:
            assert callback.summary.fit.replayed >= 6
    ends = [(m, {k: v for k, v in r.items() if isinstance(v, Tensor)}) for m, r in ends]
    assert not differences(ends[0], ends[1])
    assert all(value.device.type == "cpu" for value in ends[1][1].values())


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The dirpath has changed", "ignore:You're resuming from a checkpoint")
def test_resume_in_the_middle_of_an_epoch(tmp_path: Path, accelerator: str) -> None:
    first = train(make(Everything), tmp_path / "first", accelerator=accelerator, max_epochs=1)
    name = next(name for name, saved in first.checkpoints.items() if saved["global_step"] == 4)
    path = tmp_path / "first" / "ckpt" / name
    _, graph = _both(tmp_path, Everything, accelerator=accelerator, ckpt_path=str(path), max_epochs=4)
    assert graph.counts.replayed >= 12


class Weighted(Net):
    """Logs a Python number that changes with the epoch, as an attribute that guards compare."""

    weight = 1.0

    def on_train_epoch_start(self) -> None:
        self.weight = 1 / (1 + self.current_epoch // 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        size = int(4 * self.weight)
        self.log("weight", self.weight, on_step=True, on_epoch=True)
        self.log("weighted", output["loss"], batch_size=size, on_step=True, on_epoch=True)
        return output


@pytest.mark.long
def test_a_number_that_changes_with_the_epoch(tmp_path: Path, accelerator: str) -> None:
    plain, graph = _both(
        tmp_path, Weighted, accelerator=accelerator, train_loader=loader(batches=9), max_epochs=6
    )
    assert {step["logged_metrics"]["weight_step"].item() for step in plain.steps} > {1.0, 0.5}
    assert graph.counts.captures == 3
    assert graph.counts.replayed >= 30


@pytest.mark.long
@pytest.mark.parametrize("epoch_batches", [2, 3])
def test_a_number_that_changes_once_during_the_warm_up(
    tmp_path: Path, accelerator: str, epoch_batches: int
) -> None:
    """That is no reason to refuse the step."""
    _, graph = _both(
        tmp_path,
        Weighted,
        accelerator=accelerator,
        train_loader=loader(ragged=False, batches=epoch_batches),
        max_epochs=8,
    )
    assert graph.counts.replayed >= 1


class Counted(Net):
    """Logs a Python number that a hook changes before every step."""

    number = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.number += 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("number", self.number)
        return super().training_step(batch, batch_idx)


class CountedBatches(Counted):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = Net.training_step(self, batch, batch_idx)
        self.log("sized", output["loss"], on_epoch=True, batch_size=self.number)
        return output


_DATABASE = sqlite3.connect(":memory:", check_same_thread=False)
_DATABASE.execute("create table changes (number)")
_SO_FAR = [0]  # at the beginning of a run


class Hidden(Net):
    """Logs a Python number that changes once, long after the warm-up, where no guard looks."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: queue.Queue[int] = queue.Queue()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 10:
            self.kept.put(1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("kept", float(self.kept.qsize()), on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)


class HiddenSize(Hidden):
    """The same for the number of samples that a value counts for."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = Net.training_step(self, batch, batch_idx)
        self.log("sized", output["loss"], on_epoch=True, batch_size=1 + self.kept.qsize())
        return output


class OfADatabase(Net):
    """Counts a value for so many samples as a database has had changes, which no guard sees."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            _DATABASE.execute("insert into changes values (1)")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.log(
            "sized", output["loss"], on_epoch=True, batch_size=1 + _DATABASE.total_changes - _SO_FAR[0]
        )
        return output


class OnTheHost(Net):
    """Logs a tensor in host memory that a hook fills, long after the warm-up."""

    def __init__(self) -> None:
        super().__init__()
        self.held = [torch.zeros(())]  # not moved to the device with the module

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step >= 10:
            self.held[0].fill_(self.current_epoch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("held", self.held[0], on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)


@pytest.mark.long
@pytest.mark.parametrize("cls", [Counted, CountedBatches])
def test_a_number_that_changes(tmp_path: Path, accelerator: str, cls: type[Net]) -> None:
    """The step is captured again; what changed is named."""
    _, graph = _both(tmp_path, cls, accelerator=accelerator)
    assert graph.counts.captures == 5
    assert f"`number` of the `{cls.__name__}` changed from 4 to 5" in graph.counts.recaptures[0]


@pytest.mark.spread
@pytest.mark.parametrize("cls", [Hidden, HiddenSize])
def test_a_number_that_changes_after_the_capture(
    tmp_path: Path, accelerator: str, cls: type[Net]
) -> None:
    callback = CUDAGraphCallback(verify=Verification(every_n_steps=1))
    _, graph = _both(tmp_path, cls, callback, accelerator=accelerator)
    assert graph.counts.captures == 2
    assert graph.counts.replayed > 8
    assert f"`kept.unfinished_tasks` of the `{cls.__name__}` changed" in graph.counts.recaptures[0]


def test_a_batch_size_that_no_guard_sees(tmp_path: Path, accelerator: str) -> None:
    """A verified replay finds it."""

    def build() -> Net:
        _SO_FAR[0] = _DATABASE.total_changes
        return OfADatabase()

    callback = CUDAGraphCallback(verify=Verification(every_n_steps=1))
    _both(tmp_path, build, callback, accelerator=accelerator)


def test_a_tensor_on_the_host_that_changes(tmp_path: Path, accelerator: str) -> None:
    plain, graph = _both(tmp_path, OnTheHost, accelerator=accelerator)
    assert len({step["logged_metrics"]["held_step"].item() for step in plain.steps}) == 3
    assert graph.counts.replayed > 8


def _twice(self: Net, loss: Tensor) -> None:
    self.log("name", loss)
    self.log("name", loss, prog_bar=True)


def _vector(self: Net, loss: Tensor) -> None:
    self.log("name", loss.expand(2))


def _unknown_reduction(self: Net, loss: Tensor) -> None:
    self.log("name", loss, reduce_fx="median")


def _neither(self: Net, loss: Tensor) -> None:
    self.log("name", loss, on_step=False, on_epoch=False)


def _nested(self: Net, loss: Tensor) -> None:
    self.log("name", {"a": {"b": loss}})


@pytest.mark.spread
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("misuse", [_twice, _vector, _unknown_reduction, _neither, _nested])
def test_misuse(
    tmp_path: Path, accelerator: str, misuse: Callable[[Net, Tensor], None], later: bool
) -> None:
    """Lightning's own error; also where the step comes to it only after the warm-up."""

    class Misused(Net):
        misused = not later

        def on_train_epoch_start(self) -> None:
            self.misused = not later or self.current_epoch > 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            output = super().training_step(batch, batch_idx)
            if self.misused:
                misuse(self, output["loss"])
            return output

    texts = []
    for name, callback in (("plain", None), ("graph", CUDAGraphCallback())):
        with pytest.raises(Exception, match=r"`self\.log") as caught:
            train(make(Misused), tmp_path / name, callback, accelerator=accelerator)
        texts.append((type(caught.value), str(caught.value).split("tensor(")[0]))
    assert texts[0] == texts[1]


class Refused(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.log("extra", output["loss"], on_step=True, on_epoch=True, reduce_fx="max")
        return {"loss": output["loss"], "read": float(output["loss"].detach())}


def test_a_refused_capture_leaves_the_results(tmp_path: Path, accelerator: str) -> None:
    callback = CUDAGraphCallback(on_unsupported="eager")
    _, graph = _both(tmp_path, Refused, callback, accelerator=accelerator)
    assert graph.counts.captures == 0


class KeepsAutograd(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.log("kept", output["loss"], enable_graph=True)
        return output


def test_a_logged_value_with_autograds_graph_is_refused(tmp_path: Path, accelerator: str) -> None:
    match = r"`self\.log\('kept', \.\.\., enable_graph=True\)` in `training_step` keeps autograd's graph"
    with pytest.raises(CaptureError, match=f"(?s){match}"):
        train(make(KeepsAutograd), tmp_path, CUDAGraphCallback(), accelerator=accelerator)


class Effects(Net):
    effect: Callable[[Any, Tensor], None]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        type(self).effect(self, output["loss"].detach())
        return output


def _print(self: Any, loss: Tensor) -> None:
    print("a step")


def _self_print(self: Any, loss: Tensor) -> None:
    self.print("a step")


def _add_scalar(self: Any, loss: Tensor) -> None:
    self.logger.experiment.add_scalar("mine", 1.0, 0)


def _add_scalar_of_tensor(self: Any, loss: Tensor) -> None:
    self.logger.experiment.add_scalar("mine", loss, 0)


def _add_histogram(self: Any, loss: Tensor) -> None:
    self.logger.experiment.add_histogram("mine", self.head.weight, 0)


def _log_metrics(self: Any, loss: Tensor) -> None:
    self.logger.log_metrics({"mine": 1.0}, step=0)


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("effect", "named"),
    [
        (_print, "print"),
        (_self_print, "self.print"),
        (_add_scalar, "add_scalar"),
        (_add_scalar_of_tensor, "add_scalar"),
        (_add_histogram, "add_histogram"),
        (_log_metrics, "log_metrics"),
    ],
)
def test_effects_are_named(
    tmp_path: Path, accelerator: str, effect: Callable[[Any, Tensor], None], named: str, capsys: Any
) -> None:
    cls: Any = type("Effects", (Effects,), {"effect": staticmethod(effect)})
    kwargs: dict[str, Any] = {"accelerator": accelerator, "max_epochs": 1, "checkpoint_every": 100}
    logger = TensorBoardLogger(tmp_path / "raise")
    line = effect.__code__.co_firstlineno + 1
    with pytest.raises(CaptureError, match=rf"(?s){named}.*test_logs.py:{line} "):
        train(make(cls), tmp_path / "raise", CUDAGraphCallback(), logger=logger, **kwargs)
    said, found = [], []
    for name, callback in (
        ("plain", None),
        ("graph", CUDAGraphCallback(on_unsupported="eager", timings=None)),
    ):
        capsys.readouterr()
        train(make(cls), tmp_path / name, callback, logger=TensorBoardLogger(tmp_path / name), **kwargs)
        said.append(capsys.readouterr().out.count("a step"))
        found.append(_scalars(tmp_path / name))
    assert callback is not None
    assert callback.summary.fit.replayed == 0
    assert said[0] == said[1]
    assert found[0] == found[1]
