"""Options of the Trainer, kinds of modules, and courses of a run: each is the run without the callback.

`tests/gpu/test_rows_trainer.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_cudagraph import CUDAGraphCallback, RunSummary
from lightning_cudagraph.errors import HookError
from tests.harness import Net, Trace, assert_same, differences, loader, make, train
from tests.rows import became, refused, row

RAGGED = "another batch signature"


@pytest.fixture(autouse=True)
def switches_as_before() -> Iterator[None]:
    """`deterministic` and `benchmark` of the Trainer stay on behind its back."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = False


# Option by option: keywords for the Trainer, replays, ragged batches.
OPTIONS: dict[str, tuple[dict[str, Any], int, int]] = {
    "limit_train_batches, int": ({"limit_train_batches": 5}, 12, 0),
    "limit_train_batches, float": ({"limit_train_batches": 0.5}, 9, 0),
    "limit_train_batches, all": ({"limit_train_batches": 1.0}, 18, 3),
    "limit_val_batches, int": ({"limit_val_batches": 1}, 18, 3),
    "limit_val_batches, float": ({"limit_val_batches": 0.5}, 18, 3),
    "limit_val_batches, none": ({"limit_val_batches": 0}, 18, 3),
    "max_steps": ({"max_steps": 10}, 6, 1),
    "max_steps at an epoch's end": ({"max_steps": 8, "max_epochs": -1}, 4, 1),
    "max_epochs": ({"max_epochs": 1}, 4, 1),
    "min_epochs": ({"min_epochs": 2}, 18, 3),
    "min_steps": ({"min_steps": 20, "max_epochs": 2}, 11, 2),
    "overfit_batches, int": ({"overfit_batches": 4}, 9, 0),
    "overfit_batches, float": ({"overfit_batches": 0.75}, 15, 0),
    "val_check_interval, int": ({"val_check_interval": 3}, 18, 3),
    "val_check_interval, every step": ({"val_check_interval": 1}, 18, 3),
    "val_check_interval, float": ({"val_check_interval": 0.25}, 18, 3),
    "val_check_interval, across epochs": (
        {"val_check_interval": 10, "check_val_every_n_epoch": None},
        18,
        3,
    ),
    "check_val_every_n_epoch": ({"check_val_every_n_epoch": 2}, 18, 3),
    "num_sanity_val_steps": ({"num_sanity_val_steps": 2}, 18, 3),
    "num_sanity_val_steps, all": ({"num_sanity_val_steps": -1}, 18, 3),
    "reload_dataloaders_every_n_epochs": ({"reload_dataloaders_every_n_epochs": 1}, 18, 3),
    "log_every_n_steps": ({"log_every_n_steps": 5}, 18, 3),
    "log_every_n_steps, 1000": ({"log_every_n_steps": 1000}, 18, 3),
    "enable_progress_bar": ({"enable_progress_bar": True}, 18, 3),
    "enable_model_summary": ({"enable_model_summary": True}, 18, 3),
    "enable_checkpointing=False": ({"enable_checkpointing": False, "checkpoint_every": 0}, 18, 3),
    "inference_mode=False": ({"inference_mode": False, "val_check_interval": 3}, 18, 3),
    "deterministic": ({"deterministic": True}, 18, 3),
    "deterministic, warn": ({"deterministic": "warn"}, 18, 3),
    "benchmark": ({"benchmark": True}, 18, 3),
    "use_distributed_sampler=False": ({"use_distributed_sampler": False}, 18, 3),
    "sync_batchnorm": ({"sync_batchnorm": True}, 18, 3),
    "max_time": ({"max_time": "00:01:00:00", "ignore": ("*time_elapsed*",)}, 18, 3),
    "fast_dev_run": ({"fast_dev_run": True}, 0, 0),
    "fast_dev_run, 6": ({"fast_dev_run": 6}, 3, 0),
    "logger=False": ({"logger": False}, 18, 3),
    "barebones": (
        {
            "barebones": True,
            "checkpoint_every": 0,
            "logger": None,
            "log_every_n_steps": None,
            "num_sanity_val_steps": None,
            "enable_progress_bar": None,
            "enable_model_summary": None,
        },
        18,
        3,
    ),
}


# Those that are another way to say what the one beside them says, or that change nothing near a step.
LONG_OPTIONS = {
    "limit_train_batches, all",
    "limit_val_batches, float",
    "max_steps at an epoch's end",
    "max_epochs",
    "min_epochs",
    "overfit_batches, float",
    "val_check_interval, float",
    "num_sanity_val_steps, all",
    "log_every_n_steps, 1000",
    "enable_progress_bar",
    "enable_model_summary",
    "deterministic, warn",
    "use_distributed_sampler=False",
    "fast_dev_run",
}


@pytest.mark.spread(3)
@pytest.mark.parametrize("watched", [True, False], ids=["watched", "alone"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG_OPTIONS)) for name in OPTIONS]
)
@pytest.mark.filterwarnings(
    "ignore:You requested to overfit",
    "ignore:The number of training batches",
    "ignore:You are trying to `self.log",
    "ignore:Initializing optimizer states",
)
def test_options(tmp_path: Path, accelerator: str, name: str, watched: bool) -> None:
    kwargs, replayed, ragged = OPTIONS[name]
    done = row(tmp_path, accelerator, **kwargs, watched=watched)
    became(
        done.graph,
        replayed=replayed,
        captures=1 if replayed else 0,
        eager={RAGGED: ragged} if ragged else None,
    )


def test_no_batches_at_all(tmp_path: Path, accelerator: str) -> None:
    callback = CUDAGraphCallback()
    trainer = pl.Trainer(
        limit_train_batches=0,
        accelerator=accelerator,
        devices=1,
        max_epochs=1,
        callbacks=[callback],
        logger=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(make(Net), loader(), loader())
    assert not callback.summary.stages
    assert trainer.global_step == 0


def test_a_time_limit_that_is_reached(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that counts how often it is asked."""

    def setting(folder: Path) -> dict[str, Any]:
        clock = itertools.count(0.0, 1.0)
        monkeypatch.setattr(
            "lightning.pytorch.callbacks.timer.time",
            types.SimpleNamespace(monotonic=lambda: next(clock)),
        )
        return {"max_time": {"seconds": 14}, "max_epochs": -1}

    done = row(tmp_path, accelerator, Net, setting)
    assert 5 < done.graph.final["global_step"] < 16
    assert done.graph.counts.replayed > 2


class _Memory(Logger):
    """A logger of somebody's own, that keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.seen.append((dict(metrics), step))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append((args, kwargs))


class Described(Net):
    """Hyperparameters, an example input, and loading that need not be strict."""

    def __init__(self, width: int = 24, note: str = "some", nested: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.example_input_array = torch.zeros(2, 12)
        self.strict_loading = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        return {"loss": output["loss"] * (self.hparams["width"] / 24)}


@pytest.mark.long
@pytest.mark.parametrize("graph", [False, True], ids=["scalars", "log_graph"])
@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:.*:torch.jit.TracerWarning")
def test_several_loggers(tmp_path: Path, accelerator: str, graph: bool) -> None:
    memories = []

    def setting(folder: Path) -> dict[str, Any]:
        memories.append(_Memory())
        loggers = [
            CSVLogger(folder, flush_logs_every_n_steps=1),
            TensorBoardLogger(folder, log_graph=graph),
            memories[-1],
        ]
        return {"logger": loggers}

    done = row(
        tmp_path, accelerator, lambda: Described(nested={"a": [1, 2]}), setting, checkpoint_every=1000
    )
    became(done.graph, replayed=18, eager={RAGGED: 3})
    assert len(memories[0].seen) > 24
    times = ("step_ms/", "step_band_ms/", "layer_forward_ms/", "layer_backward_ms/", "step_count/")
    seen = [entry for entry in memories[1].seen if not _is_of_times(entry, times)]
    assert len(seen) == len(memories[1].seen) - 1, "the medians of the only window"
    assert not differences(memories[0].seen, seen)
    plain, ours = (_scalars(trace.folder) for trace in (done.plain, done.graph))
    assert [value for value in ours if not value[0].startswith("~")] == plain


def _is_of_times(entry: tuple[Any, Any], times: tuple[str, ...]) -> bool:
    values, _ = entry
    return isinstance(values, dict) and bool(values) and all(name.startswith(times) for name in values)


def _scalars(folder: Path) -> list[tuple[str, Any]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = folder.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file), size_guidance={"scalars": 0}).Reload()
    return [
        (tag, [(event.step, event.value) for event in events.Scalars(tag)])
        for tag in sorted(events.Tags()["scalars"])
    ]


class Tied(Net):
    """The same weights twice."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 12))
        self.features[3].weight = self.features[0].weight
        self.head = nn.Linear(12, 4)


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        for parameter in self.features.parameters():
            parameter.requires_grad_(False)
        self.features[1].eval()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class Checkpointed(Net):
    """Computes its features twice. The emulator cannot set a generator back inside the step."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(
            self.features,
            x.detach().requires_grad_(self.reentrant),
            use_reentrant=self.reentrant,
            preserve_rng_state=x.is_cuda,
        )
        return self.head(hidden)


class Reentrant(Checkpointed):
    reentrant = True


class SpectralNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.head)


class WeightNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.head)


class OldSpectralNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.spectral_norm(self.head)


class OldWeightNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.weight_norm(self.head)


class _Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT


class Parametrized(Net):
    """A parametrization of one's own, and a cached one."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Linear(12, 12)
        nn.utils.parametrize.register_parametrization(self.square, "weight", _Symmetric())

    def forward(self, x: Tensor) -> Tensor:
        with nn.utils.parametrize.cached():
            return super().forward(self.square(x) + self.square(x * 2))


class Synchronised(Net):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.SyncBatchNorm.convert_sync_batchnorm(self.features)


class MakesItsModel(Net):
    """Its layers are made in `configure_model`, its data in `prepare_data` and `setup`."""

    def __init__(self) -> None:
        super().__init__()
        self.later: nn.Module | None = None
        self.prepared = False

    def prepare_data(self) -> None:
        self.prepared = True

    def setup(self, stage: str) -> None:
        assert self.prepared
        self.scale = 0.5 if stage == "fit" else 2.0

    def configure_model(self) -> None:
        if self.later is None:
            self.later = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        assert self.later is not None
        return super().forward(self.later(x) * self.scale)


class ScalesItsLoss(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"] * 128

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            parameter.grad /= 128


class OwnBackward(Net):
    def backward(self, loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        (loss * 0.5).backward()


class Noisy(Net):
    """Random numbers of every kind, on the device."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.randn_like(x) * 0.1 + torch.rand(12, device=x.device)
        return super().forward(x * torch.bernoulli(torch.full_like(x, 0.9)))


MODULES = [
    Tied,
    Frozen,
    Checkpointed,
    Reentrant,
    SpectralNorm,
    WeightNorm,
    OldSpectralNorm,
    OldWeightNorm,
    Parametrized,
    Synchronised,
    MakesItsModel,
    ScalesItsLoss,
    OwnBackward,
    Noisy,
    Described,
]


@pytest.mark.spread(3)
@pytest.mark.parametrize("cls", MODULES)
@pytest.mark.filterwarnings(
    "ignore:`torch.nn.utils.weight_norm` is deprecated", "ignore:Found 1 module.* in eval mode"
)
def test_modules(tmp_path: Path, accelerator: str, cls: type[Net]) -> None:
    done = row(tmp_path, accelerator, cls, val_check_interval=4)
    became(done.graph, replayed=18, eager={RAGGED: 3})


class ItsOwnLoaders(Net):
    def train_dataloader(self) -> Any:
        return loader(seed=self.current_epoch)

    def val_dataloader(self) -> Any:
        return loader(seed=99, batches=1)


def _with_its_own_loaders(trainer: pl.Trainer, module: Any, *args: Any, **kwargs: Any) -> None:
    trainer.fit(module)


@pytest.mark.long
def test_loaders_of_the_module_that_are_made_anew(tmp_path: Path, accelerator: str) -> None:
    done = row(
        tmp_path,
        accelerator,
        ItsOwnLoaders,
        reload_dataloaders_every_n_epochs=1,
        fit=_with_its_own_loaders,
    )
    became(done.graph, replayed=18, eager={RAGGED: 3})


# How a run goes on, and ends.


class StopsAfter(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step == 10:
            self.trainer.should_stop = True


class StopsAtValidation(Net):
    def on_validation_end(self) -> None:
        self.trainer.should_stop = self.current_epoch == 1


class EndsEpochsEarly(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 5 else None


class EndsAnEpochAtOnce(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 1 else None


class Prolongs(Net):
    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 1:
            self.trainer.fit_loop.max_epochs = 4


class Shortens(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step == 10:
            self.trainer.fit_loop.max_epochs = 2


class LimitsSteps(Net):
    def on_train_epoch_end(self) -> None:
        self.trainer.fit_loop.epoch_loop.max_steps = 19


COURSES: dict[str, tuple[type[Net], dict[str, Any], int, int]] = {
    "should_stop": (StopsAfter, {}, 6, 1),
    "should_stop, min_steps": (StopsAfter, {"min_steps": 14}, 10, 1),
    "should_stop, min_epochs": (StopsAfter, {"min_epochs": 2}, 11, 2),
    "should_stop at validation": (StopsAtValidation, {}, 11, 2),
    "-1 in every epoch": (EndsEpochsEarly, {}, 12, 0),
    "-1 for a whole epoch": (EndsAnEpochAtOnce, {}, 11, 2),
    "max_epochs raised": (Prolongs, {}, 25, 4),
    "max_epochs lowered": (Shortens, {}, 11, 2),
    "max_steps set": (LimitsSteps, {}, 14, 2),
}


@pytest.mark.spread(3)
@pytest.mark.parametrize("watched", [True, False], ids=["watched", "alone"])
@pytest.mark.parametrize("name", COURSES)
def test_courses(tmp_path: Path, accelerator: str, name: str, watched: bool) -> None:
    cls, kwargs, replayed, ragged = COURSES[name]
    done = row(tmp_path, accelerator, cls, **kwargs, watched=watched)
    became(done.graph, replayed=replayed, eager={RAGGED: ragged} if ragged else None)


MOMENTS = [
    "on_train_batch_start",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_save_checkpoint",
    "on_before_batch_transfer",
    "optimizer_step",
    "lr_scheduler_step",
]


def _failing(moment: str, error: BaseException) -> type[Net]:
    def hook(self: Net, *args: Any, **kwargs: Any) -> Any:
        if self.global_step >= 10:
            raise error
        return getattr(super(cls, self), moment)(*args, **kwargs)

    cls: type[Net] = type("Fails", (Net,), {moment: hook})
    return cls


@pytest.mark.spread(2)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_exceptions(tmp_path: Path, accelerator: str, moment: str, kind: type[BaseException]) -> None:
    raises = SystemExit if kind is KeyboardInterrupt else kind
    done = row(
        tmp_path,
        accelerator,
        lambda: _failing(moment, kind("now"))(),
        raises=raises,
        val_check_interval=4,
    )
    assert done.graph.counts.replayed >= 5
    for trace in (done.plain, done.graph):
        assert any(name == "on_exception" for name, *_ in trace.hooks)
    plain, graph = done.plain, done.graph
    assert not differences(plain.module.state_dict(), graph.module.state_dict())  # type: ignore[union-attr]
    states = [trace.trainer.optimizers[0].state_dict() for trace in (plain, graph)]  # type: ignore[union-attr]
    assert not differences(*states)
    loops = [trace.trainer.fit_loop.state_dict() for trace in (plain, graph)]  # type: ignore[union-attr]
    assert not differences(*loops)


class _BreaksOff:
    """A loader that fails in its second epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        for index, batch in enumerate(loader()):
            if self.epoch == 2 and index == 3:
                raise ValueError("no more data")
            yield batch


def test_a_loader_that_fails(tmp_path: Path, accelerator: str) -> None:
    done = row(
        tmp_path, accelerator, Net, lambda folder: {"train_loader": _BreaksOff()}, raises=ValueError
    )
    # One less than were given: a loader without a length is asked one batch ahead.
    assert done.graph.counts.replayed == 6


# Validation that a hook asks for: it works, or fails, as without the callback.


def _runs_the_loop(module: pl.LightningModule) -> None:
    module.trainer.fit_loop.epoch_loop.val_loop.run()


def _runs_the_loop_as_lightning_does(module: pl.LightningModule) -> None:
    trainer = module.trainer
    logs, trainer.validating = trainer._logger_connector, True
    is_first = logs._first_loop_iter
    _runs_the_loop(module)
    logs._first_loop_iter, trainer.training = is_first, True


def _validates(module: pl.LightningModule) -> None:
    module.trainer.validate(module, verbose=False)


def _validates_and_goes_on(module: pl.LightningModule) -> None:
    _validates(module)
    module.trainer.training = True


def _validates_with_others(module: pl.LightningModule) -> None:
    module.trainer.validate(module, loader(seed=5, batches=2), verbose=False)


# What is asked for, in which hook, by which module, and how it fails.
ASKING: dict[str, tuple[Callable[[Any], None], str, type[Net], type[Exception] | None]] = {
    "loop, epoch's end": (_runs_the_loop, "on_train_epoch_end", Net, None),
    "loop, validation's end": (_runs_the_loop, "on_validation_end", Net, None),
    "loop, batch's end": (_runs_the_loop, "on_train_batch_end", Net, AssertionError),
    "whole loop, batch's end": (_runs_the_loop_as_lightning_does, "on_train_batch_end", Net, None),
    "whole loop, in a step": (_runs_the_loop_as_lightning_does, "on_before_zero_grad", Net, None),
    "validate, epoch's start": (_validates, "on_train_epoch_start", ItsOwnLoaders, AssertionError),
    "validate, epoch's end": (_validates, "on_train_epoch_end", ItsOwnLoaders, AssertionError),
    "validate, going on": (_validates_and_goes_on, "on_train_epoch_end", ItsOwnLoaders, None),
    "validate, validation's end": (_validates, "on_validation_end", ItsOwnLoaders, None),
    "validate, batch's end": (_validates, "on_train_batch_end", ItsOwnLoaders, AssertionError),
    "validate, forgotten loaders": (
        _validates_with_others,
        "on_validation_end",
        Net,
        MisconfigurationException,
    ),
}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:lightning_cudagraph. the graphs of a `fit` were released after step")
@pytest.mark.parametrize("evaluation", [False, True], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", ASKING)
def test_validation_in_a_hook(tmp_path: Path, accelerator: str, name: str, evaluation: bool) -> None:
    ask, hook, cls, raises = ASKING[name]
    callback = CUDAGraphCallback(evaluation=evaluation)
    if accelerator == "gpu" and cls is ItsOwnLoaders and raises is None:
        raises = RuntimeError  # `validate` leaves the weights on the CPU

    def once(self: Any, *args: Any) -> None:
        if self.global_step > 8 and not self.has_asked:
            self.has_asked = True
            ask(self)

    done = row(
        tmp_path,
        accelerator,
        type("Asks", (cls,), {hook: once, "has_asked": False}),
        ours=lambda: callback,
        fit=_with_its_own_loaders if cls is ItsOwnLoaders else pl.Trainer.fit,
        raises=raises,
    )
    assert done.graph.module.has_asked  # type: ignore[union-attr]
    states = [trace.module.state_dict() for trace in (done.plain, done.graph)]  # type: ignore[union-attr]
    assert not differences(*states)
    if "loop" in name and raises is None:
        assert done.graph.counts.replayed >= 15
    if "validate" in name and raises is None:
        assert "its later steps are eager: `trainer.validate` was called before its end" in str(
            callback.summary
        )


@pytest.mark.filterwarnings("ignore:lightning_cudagraph. the graphs of a `fit` were released after step")
def test_each_run_has_its_own_report(tmp_path: Path) -> None:
    """An evaluation that a hook of a `fit` calls, and that `fit`, which it has taken down."""
    callback, inner = CUDAGraphCallback(timings=None, evaluation=True), list[RunSummary]()

    class Asks(ItsOwnLoaders):
        def val_dataloader(self) -> Any:
            return loader(seed=99, batches=8, ragged=False)

        def on_train_epoch_end(self) -> None:
            if not inner:
                self.trainer.validate(self, verbose=False)
                self.trainer.training = True  # as it was, so that the `fit` goes on
                inner.append(callback.summary)

    trainer = pl.Trainer(
        accelerator="cpu",  # where `validate` leaves the weights, too
        max_epochs=2,
        callbacks=[callback],
        limit_val_batches=8,
        check_val_every_n_epoch=5,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(make(Asks))
    (validated,) = inner
    assert [*validated.stages] == ["validate"]
    assert validated.validate.steps == 8
    assert not validated.notes
    assert [*callback.summary.stages] == ["fit"]
    assert "`trainer.validate` was called before its end" in str(callback.summary)


def test_validation_after_a_fit_that_failed(tmp_path: Path, accelerator: str) -> None:
    """Where another callback's error kept ours from hearing of it: no warning."""

    class Fails(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == 5:
                raise ValueError("mine")

        def on_exception(self, *args: Any) -> None:
            raise KeyError("also mine")

    trainer = pl.Trainer(
        accelerator=accelerator,
        devices=1,
        max_epochs=1,
        callbacks=[Fails(), CUDAGraphCallback()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = make(Net)
    with pytest.raises(KeyError, match="also mine"):
        trainer.fit(module, loader())
    trainer.validate(module, loader(), verbose=False)


@pytest.mark.spread
@pytest.mark.parametrize("at", [1, 3, 10], ids=["warm-up", "capture", "replay"])
def test_validation_in_a_step(tmp_path: Path, accelerator: str, at: int) -> None:
    class Asks(Net):
        def on_before_zero_grad(self, optimizer: Any) -> None:
            if self.global_step == at:
                _validates_with_others(self)

    # The Trainer that ends has taken the weights to the CPU, if they were not there.
    with pytest.raises(RuntimeError if accelerator == "gpu" else AssertionError):
        train(make(Asks), tmp_path / "plain", accelerator=accelerator)
    with pytest.raises(HookError, match=r"In the middle of a step, a hook called `trainer\.validate`"):
        train(make(Asks), tmp_path / "graph", CUDAGraphCallback(), accelerator=accelerator)


# Several runs, one after the other.


@pytest.mark.long
def test_a_fit_after_a_fit_that_failed(tmp_path: Path, accelerator: str) -> None:
    class FailsOnce(Net):
        failed = False

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.global_step == 10 and not self.failed:
                self.failed = True
                raise ValueError("once")

    def fit(trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(ValueError, match="once"):
            trainer.fit(*args, **kwargs)
        trainer.fit(*args, **kwargs)

    done = row(tmp_path, accelerator, FailsOnce, fit=fit)
    assert done.graph.counts.replayed >= 6


def _twice(trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
    trainer.fit(*args, **kwargs)
    trainer.fit_loop.max_epochs = 5
    trainer.fit(*args, **kwargs)


def _validates_in_between(trainer: pl.Trainer, module: Any, *loaders: Any, **kwargs: Any) -> None:
    trainer.validate(module, loaders[1], verbose=False)
    trainer.fit(module, *loaders, **kwargs)
    trainer.validate(module, loaders[1], verbose=False)
    trainer.fit_loop.max_epochs = 5
    trainer.fit(module, *loaders, **kwargs)
    trainer.validate(module, loaders[1], verbose=False)


@pytest.mark.long
@pytest.mark.parametrize("fit", [_twice, _validates_in_between])
def test_fit_twice(tmp_path: Path, accelerator: str, fit: Callable[..., None]) -> None:
    done = row(tmp_path, accelerator, fit=fit)
    assert done.graph.final["global_step"] == 40
    # The counts are those of the second fit: the first one's graphs are gone.
    became(done.graph, replayed=16 - 3 - 2, eager={RAGGED: 2})


@pytest.mark.long
def test_another_trainer_for_the_same_module(tmp_path: Path, accelerator: str) -> None:
    def twice(folder: str, callback: Callable[[], CUDAGraphCallback | None]) -> list[Trace]:
        module = make(Net)
        return [
            train(module, tmp_path / folder / str(i), callback(), accelerator=accelerator)
            for i in range(2)
        ]

    shared = CUDAGraphCallback()
    runs = [twice("plain", lambda: None), twice("new", CUDAGraphCallback), twice("one", lambda: shared)]
    for other in runs[1:]:
        for plain, graph in zip(runs[0], other, strict=True):
            assert_same(plain, graph)
            became(graph, replayed=18, eager={RAGGED: 3})


# Resuming.


class Reseeded(Net):
    """Draws its dropout from a seed for each step, because Lightning saves no random state."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(self.global_step)


def _callback(name: str) -> CUDAGraphCallback | None:
    """As a run is made with it, or without."""
    return {
        "plain": lambda: None,
        "graph": CUDAGraphCallback,
        "other": lambda: CUDAGraphCallback(scope="forward_backward", warmup_steps=2, timings=None),
    }[name]()


@pytest.mark.long
@pytest.mark.parametrize("step", [12, 16], ids=["mid-epoch", "epoch's end"])
@pytest.mark.parametrize("weights_only", [False, True], ids=["all", "weights_only"])
@pytest.mark.filterwarnings(
    "ignore:The dirpath has changed", "ignore:You're resuming from a checkpoint that ended before"
)
def test_resuming_with_and_without(
    tmp_path: Path, accelerator: str, step: int, weights_only: bool
) -> None:
    """Files of runs with and without the callback, resumed with it and without, are all the same."""

    def fit(trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        trainer.fit(*args, **{**kwargs, "weights_only": weights_only})

    kwargs: dict[str, Any] = {"accelerator": accelerator, "fit": fit}
    runs: dict[str, Trace] = {}
    for first in ("plain", "graph"):
        done = train(make(Reseeded), tmp_path / first, _callback(first), max_epochs=2, **kwargs)
        (file,) = (done.folder / "ckpt").glob(f"*step={step}.ckpt")
        for then in ("plain", "graph", "other"):
            runs[f"{first}-{then}"] = train(
                make(Reseeded),
                tmp_path / f"{first}-{then}",
                _callback(then),
                ckpt_path=str(file),
                **kwargs,
            )
    expected = runs.pop("plain-plain")
    for name, resumed in runs.items():
        for part in ("weights", "optimizer", "schedulers", "rng_cpu", "rng_device", "loops"):
            assert not differences(expected.final[part], resumed.final[part]), (name, part)
        # The callbacks' states name the folder of the first run.
        steps = [[{**step, "callbacks": None} for step in run.steps] for run in (expected, resumed)]
        assert not differences(*steps), name
        assert resumed.csv == expected.csv
        if resumed.callback is not None:
            assert resumed.counts.replayed >= 4


class Partial(Net):
    """Saves its head alone, and loads what there is."""

    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = False

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if "head" in name}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_state_that_is_loaded_in_part(tmp_path: Path, accelerator: str) -> None:
    first = train(make(Partial), tmp_path / "first", accelerator=accelerator, max_epochs=1)
    last = str(first.folder / "ckpt" / "last.ckpt")
    done = row(tmp_path, accelerator, Partial, ckpt_path=last)
    became(done.graph, replayed=16 - 3 - 2, eager={RAGGED: 2})


# What is refused, and what fails without us too.


class Adversarial(Net):
    """Two optimizers by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(nn.functional.cross_entropy(self(batch[0]), batch[1]))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.features, self.head)]


class SeveralOptimizers(Net):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.features, self.head)]


def test_several_optimizers_by_hand(tmp_path: Path, accelerator: str) -> None:
    done = row(tmp_path, accelerator, Adversarial, checkpoint_every=0)
    became(done.graph, replayed=18)  # the ragged batch has a warm-up of its own


def test_several_optimizers_fail_without_us_too(tmp_path: Path, accelerator: str) -> None:
    errors = []
    for name in ("plain", "graph"):
        with pytest.raises(RuntimeError) as caught:
            train(make(SeveralOptimizers), tmp_path / name, _callback(name), accelerator=accelerator)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]
    assert "multiple optimizers is only supported with manual optimization" in errors[0]


@pytest.mark.long
def test_anomalies(tmp_path: Path, accelerator: str) -> None:
    kwargs: dict[str, Any] = {"detect_anomaly": True}
    refused(tmp_path, accelerator, match=r"`Trainer\(detect_anomaly=True\)`", **kwargs)


# The command line.


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader()

    def val_dataloader(self) -> Any:
        return loader(seed=1, batches=2)


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_the_command_line(tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train"])
    weights = []
    for ours in ([], [{"class_path": "lightning_cudagraph.CUDAGraphCallback"}]):
        cli = LightningCLI(
            Net,
            Data,
            seed_everything_default=3,
            save_config_kwargs={"overwrite": True},
            args={
                "fit": {
                    "trainer": {
                        "accelerator": accelerator,
                        "devices": 1,
                        "max_epochs": 2,
                        "callbacks": ours,
                        "default_root_dir": str(tmp_path),
                        "enable_progress_bar": False,
                        "enable_model_summary": False,
                        "num_sanity_val_steps": 0,
                        "log_every_n_steps": 1,
                    }
                },
                "subcommand": "fit",
            },
        )
        weights.append(cli.model.state_dict())
        if ours:
            callback = next(c for c in cli.trainer.callbacks if isinstance(c, CUDAGraphCallback))
            assert callback.summary.fit.replayed == 11
    assert not differences(*weights)
