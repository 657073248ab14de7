"""Lightning's own callbacks beside ours: a row for each, the same as without ours, bit for bit.

`tests/gpu/test_rows_callbacks.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BatchSizeFinder,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    model_checkpoint,
)
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from lightning_cudagraph import CUDAGraphCallback
from tests.harness import Net, Trace, assert_same, loader, make, train
from tests.rows import became, row

ONE_SHAPE = {"another batch signature": 3}  # the ragged batch of each of three epochs


def alone(make_callback: Callable[[], Any]) -> Callable[[Path], dict[str, Any]]:
    """A run with one more callback."""
    return lambda folder: {"callbacks": (make_callback(),)}


class Drifts(Net):
    """Ends elsewhere if it is watched by somebody."""

    def on_train_start(self) -> None:
        if any(isinstance(callback, CUDAGraphCallback) for callback in self.trainer.callbacks):
            self.head.bias.data.add_(1e-7)


def test_a_row_sees_a_difference(tmp_path: Path, accelerator: str) -> None:
    with pytest.raises(AssertionError, match="differ at"):
        row(tmp_path, accelerator, Drifts)


def saving(**kwargs: Any) -> Any:
    return lambda folder: {"callbacks": (ModelCheckpoint(folder / "more", **kwargs),)}


SAVERS: dict[str, dict[str, Any]] = {
    "top-k": {"monitor": "val_loss", "save_top_k": 2, "filename": "{val_loss:.9f}", "save_last": "link"},
    "every-2-steps": {"monitor": "loss_step", "save_top_k": 3, "every_n_train_steps": 2, "mode": "max"},
    "every-step": {"every_n_train_steps": 1, "save_top_k": 1, "save_last": True},
    "train-epoch-end": {
        "monitor": "loss",
        "save_on_train_epoch_end": True,
        "every_n_epochs": 2,
        "save_weights_only": True,
    },
    "every-epoch": {"every_n_epochs": 1, "save_top_k": -1, "save_on_train_epoch_end": False},
}


@pytest.mark.spread(2)
@pytest.mark.parametrize("name", SAVERS)
@pytest.mark.parametrize("watched", [True, False], ids=["watched", "alone"])
def test_model_checkpoint(tmp_path: Path, accelerator: str, name: str, watched: bool) -> None:
    done = row(
        tmp_path, accelerator, setting=saving(**SAVERS[name]), watched=watched, checkpoint_every=0
    )
    became(done.graph, replayed=18, eager=ONE_SHAPE)
    assert [*done.graph.checkpoints]


@pytest.mark.long
def test_model_checkpoint_by_the_clock(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: float(next(ticks)))
    monkeypatch.setattr(model_checkpoint, "time", clock)
    done = row(
        tmp_path, accelerator, setting=saving(train_time_interval=timedelta(seconds=5), save_top_k=-1)
    )
    became(done.graph, replayed=18, eager=ONE_SHAPE)


@pytest.mark.spread
@pytest.mark.parametrize("watched", [True, False], ids=["watched", "alone"])
@pytest.mark.parametrize("metric", ["loss_epoch", "val_loss", "loss_step"])
def test_early_stopping(tmp_path: Path, accelerator: str, metric: str, watched: bool) -> None:
    on_train = metric != "val_loss"
    setting = alone(
        lambda: EarlyStopping(metric, patience=1, min_delta=0.5, check_on_train_epoch_end=on_train)
    )
    done = row(tmp_path, accelerator, setting=setting, watched=watched, max_epochs=6)
    assert done.graph.final["should_stop"]
    became(done.graph, replayed=11, eager={"another batch signature": 2})


@pytest.mark.spread(2)
@pytest.mark.parametrize("interval", ["step", "epoch", None])
def test_learning_rate_monitor(tmp_path: Path, accelerator: str, interval: Any) -> None:
    watch = lambda: LearningRateMonitor(interval, log_momentum=True, log_weight_decay=True)  # noqa: E731
    done = row(tmp_path, accelerator, setting=alone(watch))
    became(done.graph, replayed=18, eager=ONE_SHAPE)
    assert "lr-AdamW" in done.graph.csv
    for trace in (done.plain, done.graph):
        trainer = trace.trainer
        (seen,) = [c.lrs for c in trainer.callbacks if isinstance(c, LearningRateMonitor)]  # type: ignore[union-attr]
        # Numbers, and not one tensor in all places.
        assert all(isinstance(lr, float) for lrs in seen.values() for lr in lrs)
        assert len({lr for lrs in seen.values() for lr in lrs}) > (2 if interval == "epoch" else 20)
    assert "lr-AdamW-momentum" in done.graph.csv


class Tunable(Net):
    """With a learning rate that can be searched for, and no schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-2

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, fused=True)


SEARCHES: dict[str, dict[str, Any]] = {
    "to-its-end": {"num_training_steps": 20, "early_stop_threshold": None},
    "stopped-early": {"num_training_steps": 40, "max_lr": 1e3, "early_stop_threshold": 2.0},
    "only-looking": {"num_training_steps": 12, "update_attr": False},
}


@pytest.mark.long
@pytest.mark.parametrize("watched", [True, False], ids=["watched", "alone"])
@pytest.mark.parametrize("name", SEARCHES)
def test_learning_rate_finder(tmp_path: Path, accelerator: str, name: str, watched: bool) -> None:
    setting = alone(lambda: LearningRateFinder(**SEARCHES[name]))
    done = row(tmp_path, accelerator, Tunable, setting, watched=watched, max_epochs=5)
    became(done.graph, replayed=32, eager={"another batch signature": 5})
    assert (done.plain.module.lr, done.plain.module.lr != 1e-2) == (  # type: ignore[union-attr]
        done.graph.module.lr,  # type: ignore[union-attr]
        name != "only-looking",
    )


class SearchesAgain(LearningRateFinder):
    """As in Lightning's documentation: searches at the start of some epochs.

    Our seat in the loop is taken by then, so that steps of the search are replayed too. In lightning
    2.6, searches after the first epoch end before their first step, with and without us.
    """

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pass

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch in (0, 2):
            self.lr_find(trainer, pl_module)


@pytest.mark.long
@pytest.mark.parametrize("watched", [True, False], ids=["watched", "alone"])
def test_learning_rate_finder_in_later_epochs(tmp_path: Path, accelerator: str, watched: bool) -> None:
    setting = alone(lambda: SearchesAgain(num_training_steps=20, early_stop_threshold=None))
    done = row(tmp_path, accelerator, Tunable, setting, watched=watched, max_epochs=4)
    loaded = "a state was loaded into the optimizer"
    became(
        done.graph,
        replayed=37,
        captures=3,
        because=[loaded, loaded],
        eager={"another batch signature": 6},
    )


class Sized(Tunable):
    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2

    def train_dataloader(self) -> Any:
        return DataLoader(loader().dataset, batch_size=self.batch_size)


def test_batch_size_finder(tmp_path: Path, accelerator: str) -> None:
    def fit(trainer: Any, module: Any, train_loader: Any, val_loader: Any, **kwargs: Any) -> None:
        trainer.fit(module, val_dataloaders=val_loader, **kwargs)

    search = lambda: BatchSizeFinder(steps_per_trial=2, init_val=4, max_trials=2)  # noqa: E731
    done = row(tmp_path, accelerator, Sized, alone(search), fit=fit)
    assert done.plain.module.batch_size == done.graph.module.batch_size == 8  # type: ignore[union-attr]
    became(done.graph, replayed=18, eager=ONE_SHAPE)


@pytest.mark.long
@pytest.mark.parametrize("watched", [True, False], ids=["watched", "alone"])
def test_gradient_accumulation_scheduler(tmp_path: Path, accelerator: str, watched: bool) -> None:
    setting = alone(lambda: GradientAccumulationScheduler({0: 1, 2: 2}))
    done = row(tmp_path, accelerator, Tunable, setting, watched=watched, max_epochs=5)
    became(
        done.graph,
        replayed=26,
        captures=3,
        because=["`accumulate_grad_batches` of the trainer changed from 1 to 2"],
        eager={"another batch signature": 5},
    )


class WithBackbone(Net):
    def __init__(self, fused: bool = True) -> None:
        super().__init__()
        self.fused = fused
        self.backbone = self.features

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.head.parameters(), lr=1e-2, fused=self.fused)


class OwnFinetuning(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 2:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=1e-3)


FINETUNINGS: dict[str, Callable[[], Any]] = {
    "backbone": lambda: BackboneFinetuning(unfreeze_backbone_at_epoch=1, train_bn=False),
    "bn-trained": lambda: BackboneFinetuning(unfreeze_backbone_at_epoch=2, train_bn=True),
    "own": OwnFinetuning,
}


@pytest.mark.spread
@pytest.mark.parametrize("watched", [True, False], ids=["watched", "alone"])
@pytest.mark.parametrize("name", FINETUNINGS)
def test_finetuning(tmp_path: Path, accelerator: str, name: str, watched: bool) -> None:
    setting = alone(FINETUNINGS[name])
    done = row(tmp_path, accelerator, WithBackbone, setting, watched=watched, max_epochs=4)
    became(
        done.graph,
        replayed=22,
        captures=2,
        because=["the number of param groups of the optimizer changed"],
        eager={"another batch signature": 4},
    )


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_finetuning_resumed_without_the_callback(tmp_path: Path, accelerator: str) -> None:
    """What finetuning keeps of the param groups is as the user has them, so that it loads anywhere."""

    def run(folder: str, ours: CUDAGraphCallback | None, **kwargs: Any) -> Trace:
        return train(
            make(lambda: WithBackbone(fused=False)),
            tmp_path / folder,
            ours,
            accelerator=accelerator,
            callbacks=(FINETUNINGS["own"](),),
            **kwargs,
        )

    run("first", CUDAGraphCallback())
    last = str(tmp_path / "first" / "ckpt" / "last.ckpt")
    resumed = run("resumed", None, ckpt_path=last, max_epochs=4)
    assert resumed.final["global_step"] == 32
    assert not any(group["capturable"] for group in resumed.final["optimizer"]["param_groups"])


@pytest.mark.long
def test_finetuning_in_the_arithmetic_of_a_graph(tmp_path: Path, accelerator: str) -> None:
    """A param group that is added later computes as the first one does."""

    def run(folder: str, ours: CUDAGraphCallback) -> Trace:
        return train(
            make(lambda: WithBackbone(fused=False)),
            tmp_path / folder,
            ours,
            accelerator=accelerator,
            callbacks=(FINETUNINGS["own"](),),
            max_epochs=4,
        )

    eager = run("eager", CUDAGraphCallback(warmup_steps=10**6))
    graph = run("graph", CUDAGraphCallback())
    assert_same(eager, graph)
    assert graph.counts.replayed == 22
    assert not any(group["capturable"] for group in graph.final["optimizer"]["param_groups"])


class _Tuned(Net):
    """With what a tuner sets."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-2
        self.batch_size = 2

    def train_dataloader(self) -> Any:
        return DataLoader(loader().dataset, batch_size=self.batch_size)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, fused=True)


@pytest.mark.long
def test_a_tuner_looks_for_a_learning_rate(tmp_path: Path, accelerator: str) -> None:
    def fit(trainer: pl.Trainer, module: _Tuned, train: Any, validation: Any, **kwargs: Any) -> None:
        Tuner(trainer).lr_find(module, train, validation, num_training=20, early_stop_threshold=None)
        trainer.fit(module, train, validation, **kwargs)

    done = row(tmp_path, accelerator, _Tuned, fit=fit)
    assert done.plain.module.lr == done.graph.module.lr != 1e-2
    assert done.graph.counts.replayed > 0


@pytest.mark.long
def test_a_tuner_looks_for_a_batch_size(tmp_path: Path, accelerator: str) -> None:
    def fit(trainer: pl.Trainer, module: _Tuned, train: Any, validation: Any, **kwargs: Any) -> None:
        tuner = Tuner(trainer)
        tuner.scale_batch_size(module, None, validation, steps_per_trial=2, init_val=4, max_trials=2)
        trainer.fit(module, val_dataloaders=validation, **kwargs)

    done = row(tmp_path, accelerator, _Tuned, fit=fit)
    assert done.plain.module.batch_size == done.graph.module.batch_size != 2
    assert done.graph.counts.replayed > 0
