"""Between plain replays only what has an effect is done, and whoever looks finds what Lightning leaves.

Nobody's hooks run between the steps of these runs, so that what looks at them is the loader: before each
batch, or before some. `tests/gpu/test_plain_replays.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torchmetrics import MeanSquaredError
from torchmetrics.classification import MulticlassAccuracy

from lightning_cudagraph import CUDAGraphCallback, LayerTimings
from lightning_cudagraph.compat import lightning_source
from lightning_cudagraph.trainer.logs.logged_step import LoggedStep
from lightning_cudagraph.trainer.logs.recorder import Logs
from lightning_cudagraph.trainer.training.steps import TrainingSteps
from tests.harness import Net, Trace, assert_same, differences, make, train

BATCHES = 14


def _never(index: int) -> bool:
    return False


class Looking:
    """Batches, and what is there before each that is looked at.

    Args:
        looks: whether to look before the batch of an index.
        act: called before each batch, with its index and the trainer.
    """

    def __init__(
        self,
        looks: Callable[[int], bool] = _never,
        act: Callable[[int, Any], None] = lambda index, trainer: None,
    ) -> None:
        self.looks = looks
        self.act = act
        self.seen: list[Any] = []
        self.trainer: Any = None

    def batches(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(1)
        for index in range(BATCHES):
            if self.trainer is not None:
                if self.looks(index):
                    self.seen.append(self.look())
                self.act(index, self.trainer)
            yield torch.randn(8, 12, generator=generator), torch.randint(0, 4, (8,), generator=generator)

    def __iter__(self) -> Iterator[Any]:
        return self.batches()

    def look(self) -> Any:
        trainer = self.trainer
        return {
            "callback_metrics": dict(trainer.callback_metrics),
            "logged_metrics": dict(trainer.logged_metrics),
            "progress_bar_metrics": dict(trainer.progress_bar_metrics),
            "loops": copy.deepcopy(trainer.fit_loop.state_dict()),
            "global_step": trainer.global_step,
            "batch_size": trainer._results.batch_size,
            "lr": [float(group["lr"]) for group in trainer.optimizers[0].param_groups],
            "gradients": [
                None if p.grad is None else p.grad.clone() for p in trainer.model.parameters()
            ],
        }


class Sized(Looking):
    """The same, with a length."""

    def __len__(self) -> int:
        return BATCHES


class Introduces(Callback):
    """Tells the loader its trainer."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.train_dataloader.trainer = trainer


class Both:
    """A plain run and one with the callback, equal, and how many steps were plain replays in the latter.

    Args:
        tmp_path: where they write.
        accelerator: where they run.
        monkeypatch: counts.
        loader: makes the loader of one run.
        callbacks: makes the other callbacks of one run.
        build: makes the module.
        timings: of the callback.
        kwargs: for the `Trainer`.
    """

    def __init__(
        self,
        tmp_path: Path,
        accelerator: str,
        monkeypatch: pytest.MonkeyPatch,
        loader: Callable[[], Looking],
        callbacks: Callable[[], tuple[Callback, ...]] = tuple,
        build: type[pl.LightningModule] = Net,
        timings: Any = None,
        **kwargs: Any,
    ) -> None:
        self.plain_replays = 0
        replay = TrainingSteps.replay

        def counted(*args: Any) -> Any:
            outputs = replay(*args)
            self.plain_replays += outputs is not None
            return outputs

        monkeypatch.setattr(TrainingSteps, "replay", counted)
        self.loaders = [loader(), loader()]
        self.traces: list[Trace] = [
            train(
                make(build),
                tmp_path / str(index),
                callback,
                accelerator=accelerator,
                train_loader=self.loaders[index],
                callbacks=(Introduces(), *callbacks()),
                watched=False,
                checkpoint_every=0,
                **{"enable_checkpointing": False, **kwargs},
            )
            for index, callback in enumerate((None, CUDAGraphCallback(timings=timings)))
        ]
        assert_same(*self.traces)
        assert not differences(*(trace.module.state_dict() for trace in self.traces if trace.module))
        assert not differences(*(loader.seen for loader in self.loaders))
        assert len(self.loaders[0].seen) == len(self.loaders[1].seen)


LOOKS: dict[str, Callable[[int], bool]] = {
    "never": _never,
    "always": lambda index: True,
    "sometimes": lambda index: index in (5, 6, 11),
}


@pytest.mark.long
@pytest.mark.parametrize("looks", LOOKS)
@pytest.mark.parametrize("window", [1, 3])
def test_whoever_looks_finds_what_is_there(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch, looks: str, window: int
) -> None:
    runs = Both(
        tmp_path,
        accelerator,
        monkeypatch,
        lambda: Sized(LOOKS[looks]),
        accumulate_grad_batches=window,
        log_every_n_steps=4,
    )
    assert runs.plain_replays > 18
    assert bool(runs.loaders[0].seen) is (looks != "never")


def test_what_was_seen_stays(tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics that somebody keeps are of the step that he asked about, also after later replays."""
    copies: list[Any] = []

    class Keeps(Sized):
        def look(self) -> Any:
            found = super().look()
            copies.append(copy.deepcopy(found))
            return found

    runs = Both(tmp_path, accelerator, monkeypatch, lambda: Keeps(LOOKS["always"]))
    assert runs.plain_replays > 18
    half = len(copies) // 2
    assert not differences(copies[:half], runs.loaders[0].seen)
    assert not differences(copies[half:], runs.loaders[1].seen)


@pytest.mark.spread(2)
@pytest.mark.parametrize("name", ["callback_metrics", "logged_metrics", "progress_bar_metrics"])
def test_a_dictionary_that_is_kept(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Lightning updates the same dictionary after every step; who has it need not ask again."""

    class Keeps(Sized):
        kept: Any = None

        def look(self) -> Any:
            self.kept = getattr(self.trainer, name) if self.kept is None else self.kept
            return dict(self.kept)

    runs = Both(
        tmp_path,
        accelerator,
        monkeypatch,
        lambda: Keeps(lambda index: index > 5),
        log_every_n_steps=50,
    )
    assert runs.plain_replays > 18
    seen = [found["loss_step"] for found in runs.loaders[0].seen]
    assert len({float(value) for value in seen}) > 20


def test_who_looks_in_inference_mode_gets_plain_tensors(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values were made in a step, wherever they are asked for."""

    class Infers(Sized):
        def look(self) -> Any:
            with torch.inference_mode():
                found = dict(self.trainer.callback_metrics)
            return found, [value.is_inference() for value in found.values()]

    runs = Both(
        tmp_path, accelerator, monkeypatch, lambda: Infers(LOOKS["sometimes"]), log_every_n_steps=50
    )
    assert runs.plain_replays > 18
    assert any(runs.loaders[1].seen[-1][1]) is False


def test_who_looks_while_another_thread_does(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values that a thread is about to hand over are there for all."""
    begun, asked = threading.Event(), threading.Event()
    hand_over, settle = LoggedStep.hand_over, Logs.settle
    main = threading.current_thread()

    def halting(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is not main:
            begun.set()
            asked.wait()
        return hand_over(*args, **kwargs)

    def telling(logs: Logs) -> None:
        if begun.is_set() and threading.current_thread() is main:
            asked.set()
        settle(logs)

    monkeypatch.setattr(LoggedStep, "hand_over", halting)
    monkeypatch.setattr(Logs, "settle", telling)
    in_threads: list[Any] = []

    class InTwoThreads(Sized):
        def look(self) -> Any:
            trainer = self.trainer
            begun.clear()
            asked.clear()
            other = threading.Thread(target=lambda: in_threads.append(dict(trainer.callback_metrics)))
            other.start()
            while other.is_alive() and not begun.is_set():
                other.join(0.001)
            found = dict(trainer.callback_metrics)
            asked.set()
            other.join()
            return found

    runs = Both(
        tmp_path,
        accelerator,
        monkeypatch,
        lambda: InTwoThreads(lambda index: index % 3 == 2),
        log_every_n_steps=50,
    )
    assert runs.plain_replays > 18
    half = len(in_threads) // 2
    assert not differences(in_threads[:half], in_threads[half:])


CASES: dict[str, dict[str, Any]] = {
    "validation in mid-epoch": {"val_check_interval": 5},
    "validation every so many batches of the run": {
        "val_check_interval": 9,
        "check_val_every_n_epoch": None,
    },
    "validation every second epoch": {"check_val_every_n_epoch": 2},
    "the number of steps": {"max_steps": 17, "max_epochs": -1},
    "the number of batches": {"limit_train_batches": 9},
    "windows that do not fit": {"accumulate_grad_batches": 4, "log_every_n_steps": 2},
    "no logging": {"log_every_n_steps": 0},
    "every step": {"log_every_n_steps": 1},
    "timed steps": {"timings": LayerTimings()},
    "some timed steps": {"timings": LayerTimings(every_n_steps=3)},
}


@pytest.mark.spread(2)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", [Sized, Looking])
def test_the_loop_ends_and_validates_where_it_would(
    tmp_path: Path,
    accelerator: str,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    kind: type[Looking],
) -> None:
    kwargs = dict(CASES[case])
    if kind is Looking and "interval" in str(kwargs):
        kwargs["check_val_every_n_epoch"] = None  # Lightning asks for it, where there is no length
    runs = Both(
        tmp_path,
        accelerator,
        monkeypatch,
        lambda: kind(LOOKS["sometimes"]),
        **kwargs,
    )
    assert runs.plain_replays > 8


class ByEpoch(Net):
    """A schedule that moves once an epoch."""

    def configure_optimizers(self) -> Any:
        found = super().configure_optimizers()
        found["lr_scheduler"]["interval"] = "epoch"
        return found


class OnPlateau(Net):
    """A schedule that asks for a logged value in every step."""

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        schedule = {"scheduler": scheduler, "interval": "step", "monitor": "loss_step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


@pytest.mark.spread(2)
@pytest.mark.parametrize("build", [Net, ByEpoch, OnPlateau])
def test_schedules(
    tmp_path: Path,
    accelerator: str,
    monkeypatch: pytest.MonkeyPatch,
    build: type[pl.LightningModule],
) -> None:
    runs = Both(tmp_path, accelerator, monkeypatch, lambda: Sized(LOOKS["always"]), build=build)
    assert runs.plain_replays > 18
    rates = {seen["lr"][0] for seen in runs.loaders[1].seen}
    assert len(rates) > (10 if build is Net else 2)


class Interrupted(Exception):
    pass


def _stops(index: int, trainer: Any) -> None:
    if index == 9 and trainer.current_epoch == 1:
        trainer.should_stop = True


def _raises(index: int, trainer: Any) -> None:
    if index == 9 and trainer.current_epoch == 1:
        raise Interrupted


@pytest.mark.spread(2)
@pytest.mark.parametrize("how", ["should_stop", "an exception", "min_steps"])
def test_a_loader_ends_the_run(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    act = _raises if how == "an exception" else _stops
    runs = Both(
        tmp_path,
        accelerator,
        monkeypatch,
        lambda: Sized(LOOKS["sometimes"], act),
        raises=Interrupted if act is _raises else None,
        min_steps=BATCHES + 12 if how == "min_steps" else None,
    )
    assert runs.plain_replays > 8
    plain, graph = (trace.trainer for trace in runs.traces)
    assert plain is not None
    assert graph is not None
    assert (
        plain.global_step
        == graph.global_step
        == BATCHES + (12 if how == "min_steps" else 10) - (act is _raises)
    )
    assert not differences(dict(plain.callback_metrics), dict(graph.callback_metrics))
    assert not differences(dict(plain.logged_metrics), dict(graph.logged_metrics))
    assert not differences(plain.fit_loop.state_dict(), graph.fit_loop.state_dict())


class StopsOnPlateau(OnPlateau):
    """A schedule of its own, which stops the run after the rest of a batch."""

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        super().lr_scheduler_step(scheduler, metric)
        if self.global_step == BATCHES + 10:
            self.trainer.should_stop = True


def test_a_plateau_ends_the_run(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Both(tmp_path, accelerator, monkeypatch, lambda: Sized(), build=StopsOnPlateau)
    assert runs.plain_replays > 8
    for trace in runs.traces:
        assert trace.trainer is not None
        assert trace.trainer.global_step == BATCHES + 10


@pytest.mark.long
def test_ctrl_c(tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def act(index: int, trainer: Any) -> None:
        if index == 9 and trainer.current_epoch == 1:
            raise KeyboardInterrupt

    runs = Both(
        tmp_path,
        accelerator,
        monkeypatch,
        lambda: Sized(act=act),
        raises=SystemExit,
    )
    assert runs.plain_replays > 8
    plain, graph = (trace.trainer for trace in runs.traces)
    assert plain is not None
    assert graph is not None
    assert graph.interrupted
    assert not differences(plain.fit_loop.state_dict(), graph.fit_loop.state_dict())
    assert not differences(dict(plain.callback_metrics), dict(graph.callback_metrics))


OTHERS: dict[str, Callable[[], tuple[Callback, ...]]] = {
    "an early stopping": lambda: (
        EarlyStopping("loss_step", patience=1, check_on_train_epoch_end=True),
    ),
    "a monitor": lambda: (LearningRateMonitor("step"),),
    "a checkpoint": lambda: (ModelCheckpoint(every_n_train_steps=3, monitor="loss_step"),),
    "a progress bar": lambda: (TQDMProgressBar(),),
}


@pytest.mark.spread(2)
@pytest.mark.parametrize("which", OTHERS)
def test_lightnings_own_callbacks(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """They are called after every step, and find its values."""
    runs = Both(
        tmp_path,
        accelerator,
        monkeypatch,
        lambda: Sized(LOOKS["sometimes"]),
        OTHERS[which],
        enable_checkpointing=which == "a checkpoint",
        enable_progress_bar=which == "a progress bar",
    )
    assert runs.plain_replays > 8


class Comes(Callback):
    """A callback that is there from the middle of an epoch on."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.seen.append((outputs, batch, batch_idx, dict(trainer.callback_metrics)))


@pytest.mark.long
def test_a_callback_that_is_added_in_mid_epoch(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    added: list[Comes] = []

    def act(index: int, trainer: Any) -> None:
        if index == 9 and trainer.current_epoch == 1:
            added.append(Comes())
            trainer.callbacks.append(added[-1])

    runs = Both(tmp_path, accelerator, monkeypatch, lambda: Sized(LOOKS["sometimes"], act))
    assert runs.plain_replays > 8
    plain, graph = added
    assert len(plain.seen) == BATCHES * 2 - 9
    assert not differences(plain.seen, graph.seen)


@pytest.mark.long
@pytest.mark.spread
@pytest.mark.parametrize("how", ["a new list", "in the place of another"])
def test_the_callbacks_are_others_in_mid_epoch(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    added: list[Comes] = []

    def act(index: int, trainer: Any) -> None:
        if index == 9 and trainer.current_epoch == 1:
            added.append(Comes())
            if how == "a new list":
                trainer.callbacks = [*trainer.callbacks, added[-1]]
            else:
                kinds = [type(callback) for callback in trainer.callbacks]
                trainer.callbacks[kinds.index(Introduces)] = added[-1]

    runs = Both(tmp_path, accelerator, monkeypatch, lambda: Sized(LOOKS["sometimes"], act))
    assert runs.plain_replays > 8
    plain, graph = added
    assert len(plain.seen) == BATCHES * 2 - 9
    assert not differences(plain.seen, graph.seen)


@pytest.mark.spread(2)
@pytest.mark.parametrize("name", ["check_val_every_n_epoch", "limit_val_batches"])
def test_validation_is_switched_on_in_mid_epoch(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def act(index: int, trainer: Any) -> None:
        if index == 3 and trainer.current_epoch == 1:
            setattr(trainer, name, 1)
            if name == "limit_val_batches":
                trainer.fit_loop.epoch_loop.val_loop._max_batches = [1]

    runs = Both(
        tmp_path,
        accelerator,
        monkeypatch,
        lambda: Sized(LOOKS["always"], act),
        val_check_interval=5,
        **{name: 0 if name == "limit_val_batches" else 4},
    )
    assert runs.plain_replays > 18
    seen = runs.loaders[1].seen
    assert "val_loss" not in seen[BATCHES + 4]["callback_metrics"]
    assert "val_loss" in seen[BATCHES + 5]["callback_metrics"]


class Notes(CSVLogger):
    """A logger that looks at the trainer when it is told something."""

    trainer: Any
    seen: list[Any]

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        found = (metrics, step, dict(self.trainer.callback_metrics), self.trainer.global_step)
        self.seen.append(found)
        super().log_metrics(metrics, step)


@pytest.mark.long
def test_a_logger_that_looks(tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loggers: list[Notes] = []

    class Meets(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.logger.trainer, trainer.logger.seen = trainer, []
            loggers.append(trainer.logger)

    runs = Both(
        tmp_path,
        accelerator,
        monkeypatch,
        Sized,
        lambda: (Meets(),),
        logger=Notes(tmp_path / "notes"),
        log_every_n_steps=3,
    )
    assert runs.plain_replays > 18
    assert len(loggers) == 2


class KeepsGradients(Notes):
    """One that keeps gradients of the second epoch's steps and later ones, without a copy."""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if self.trainer.current_epoch > 0:
            self.seen.append([p.grad for p in self.trainer.model.parameters()])
        CSVLogger.log_metrics(self, metrics, step)


@pytest.mark.spread
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("kind", [Notes, KeepsGradients])
def test_a_logger_that_keeps_gradients(
    tmp_path: Path,
    accelerator: str,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Notes],
    window: int,
) -> None:
    loggers: list[Notes] = []

    class Meets(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            loggers.append(kind(tmp_path / str(len(loggers))))
            loggers[-1].trainer, loggers[-1].seen = trainer, []
            trainer.loggers = [loggers[-1]]

    runs = Both(
        tmp_path,
        accelerator,
        monkeypatch,
        Sized,
        lambda: (Meets(),),
        accumulate_grad_batches=window,
        log_every_n_steps=4,
    )
    kept = "user code holds a reference to a gradient, or to a part of one, or gave one other memory"
    assert runs.plain_replays > (18 if kind is Notes else 0)
    assert runs.traces[1].counts.replayed > 20
    assert runs.traces[1].counts.recaptures == ((kept,) if kind is KeepsGradients else ())
    plain, graph = loggers
    assert len(plain.seen) == len(graph.seen) > 3
    assert not differences(plain.seen, graph.seen)


class Watched(Net):
    """A hook of the user's runs after every step."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.latest = outputs["loss"]


def test_lightnings_own_loop_with_another_lightning(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lightning_source, "_KNOWN", frozenset())
    runs = Both(tmp_path, accelerator, monkeypatch, lambda: Sized(LOOKS["always"]))
    assert runs.plain_replays == 0
    assert runs.traces[1].counts.replayed > 20


@pytest.mark.long
def test_a_module_with_a_hook_that_keeps_a_tensor(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Both(tmp_path, accelerator, monkeypatch, lambda: Sized(LOOKS["always"]), build=Watched)
    assert runs.plain_replays > 18


class Changes(Net):
    """What the step multiplies with is set by the loader."""

    factor = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = super().training_step(batch, batch_idx)
        found["loss"] = found["loss"] * self.factor
        return found


def test_what_the_loader_changes_is_seen(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(index: int, trainer: Any) -> None:
        if index == 9 and trainer.current_epoch == 0:
            trainer.lightning_module.factor = 0.5
        if index == 10 and trainer.current_epoch == 1:
            vars(trainer.lightning_module.head)["_parameters"]["bias"] = torch.nn.Parameter(
                trainer.lightning_module.head.bias.detach().clone()
            )

    runs = Both(tmp_path, accelerator, monkeypatch, lambda: Sized(LOOKS["always"], act), build=Changes)
    assert runs.plain_replays > 10
    assert len(runs.traces[1].counts.recaptures) == 2


class Nothing(pl.LightningModule):
    """Logs nothing, and keeps a moving mean in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(12, 1)
        self.mean = torch.zeros(())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.layer(batch[0]).square().mean()
        self.mean = 0.9 * self.mean.to(loss.device) + 0.1 * loss.detach()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Silent(Nothing):
    """Logs nothing, and carries nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch[0]).square().mean()


@pytest.mark.parametrize("build", [Silent, Nothing])
def test_nothing_is_logged(
    tmp_path: Path,
    accelerator: str,
    monkeypatch: pytest.MonkeyPatch,
    build: type[Nothing],
) -> None:
    runs = Both(tmp_path, accelerator, monkeypatch, lambda: Sized(LOOKS["sometimes"]), build=build)
    assert runs.plain_replays > 18
    plain, graph = (trace.module for trace in runs.traces)
    assert not differences(plain.mean, graph.mean)  # type: ignore[union-attr]


class Measures(Net):
    """Metrics whose states are in the graph; one is logged as an object."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(4, average="micro")
        self.error = MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = super().training_step(batch, batch_idx)
        self.accuracy(found["logits"], batch[1])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.error.update(found["logits"].amax(-1), batch[1].float())
        return found


class Metering(Sized):
    """Looks at the states of metrics too."""

    def look(self) -> Any:
        found = super().look()
        module = self.trainer.lightning_module
        for name in ("accuracy", "error"):
            metric = getattr(module, name)
            state = {k: v.clone() for k, v in metric.metric_state.items()}
            found[name] = (state, metric._update_count, metric._computed)
        return found


@pytest.mark.spread(2)
@pytest.mark.parametrize("looks", LOOKS)
def test_metrics(tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch, looks: str) -> None:
    runs = Both(tmp_path, accelerator, monkeypatch, lambda: Metering(LOOKS[looks]), build=Measures)
    assert runs.plain_replays > 18
    plain, graph = (trace.module for trace in runs.traces)
    assert plain is not None
    assert graph is not None
    assert not differences(plain.error.compute(), graph.error.compute())


@pytest.mark.long
def test_tensorboard_gets_the_same(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = iter("01")

    class Logs(TensorBoardLogger):
        pass

    class Writes(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.loggers = [Logs(tmp_path / next(folders), name="", version="")]

    runs = Both(
        tmp_path,
        accelerator,
        monkeypatch,
        Sized,
        lambda: (Writes(),),
        log_every_n_steps=5,
    )
    assert runs.plain_replays > 18
    found = []
    for folder in "01":
        events = EventAccumulator(str(tmp_path / folder))
        events.Reload()
        found.append(
            {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
        )
    assert found[0] == found[1]
    assert len(found[0]["loss_step"]) > 5
