"""Batches go straight into the static buffers where nobody else sees them, and only there.

`tests/gpu/test_transfer.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_cudagraph import CUDAGraphCallback
from tests.harness import Apart, Net, differences, loader, make

STEPS = 3 * 8  # three epochs of seven full batches and a ragged one


class Run:
    """A run without any hooks that could see a batch, and how often Lightning itself moved one."""

    def __init__(
        self,
        tmp_path: Path,
        accelerator: str,
        monkeypatch: pytest.MonkeyPatch,
        callback: CUDAGraphCallback | None,
        build: Callable[[], pl.LightningModule] = Net,
        others: tuple[Callback, ...] = (),
        datamodule: pl.LightningDataModule | None = None,
        batches: Callable[[pl.LightningModule], Any] = lambda module: loader(),
        epochs: int = 3,
        **kwargs: Any,
    ) -> None:
        self.module = make(build)
        self.callback = callback
        self.counts = Apart(moved=0)
        move = pl.LightningModule._apply_batch_transfer_handler

        # Not `Strategy.batch_to_device`: a function there that is not Lightning's gets each batch.
        def counted(module: pl.LightningModule, *args: Any, **kwargs: Any) -> Any:
            self.counts["moved"] += int(bool(module.trainer.training))
            return move(module, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(pl.LightningModule, "_apply_batch_transfer_handler", counted)
            trainer = pl.Trainer(
                accelerator=accelerator,
                devices=1,
                max_epochs=epochs,
                logger=CSVLogger(tmp_path),
                log_every_n_steps=1,
                callbacks=[*others, *([] if callback is None else [callback])],
                enable_progress_bar=False,
                enable_model_summary=False,
                enable_checkpointing=False,
                **kwargs,
            )
            pl.seed_everything(7, verbose=False)
            if datamodule is None:
                trainer.fit(self.module, batches(self.module), loader(seed=1, batches=2))
            else:
                trainer.fit(self.module, datamodule=datamodule)
        self.csv = next(tmp_path.rglob("metrics.csv")).read_text()
        self.state = self.module.state_dict()


def assert_same(plain: Run, graph: Run) -> None:
    assert not differences(plain.state, graph.state)
    assert plain.csv == graph.csv


@pytest.mark.spread
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("pinned", [False, True])
def test_straight_into_the_buffers(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch, window: int, pinned: bool
) -> None:
    if pinned and accelerator == "cpu":
        pytest.skip("there is no memory to pin without a GPU")

    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            batches = loader()
            return torch.utils.data.DataLoader(batches.dataset, batch_size=8, pin_memory=pinned)

        def val_dataloader(self) -> Any:
            return loader(seed=1, batches=2)

    runs = [
        Run(
            tmp_path / name,
            accelerator,
            monkeypatch,
            callback,
            datamodule=Data(),
            accumulate_grad_batches=window,
        )
        for name, callback in (("plain", None), ("graph", CUDAGraphCallback()))
    ]
    assert_same(*runs)
    assert runs[0].counts["moved"] == STEPS
    # Until the first capture, and the ragged ones.
    assert runs[1].counts["moved"] < STEPS // 2


class Keeps(Callback):
    """Keeps batches, and looks at them at the end."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.kept.append(batch[0])


class KeepsInHook(Net):
    kept: list[Tensor]

    def on_train_start(self) -> None:
        self.kept = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.kept.append(batch[0])


class Scales(Net):
    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return [batch[0].to(device) * 2, batch[1].to(device)]


class AddsNoise(Net):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + torch.rand_like(batch[0]), batch[1]]


@pytest.mark.spread
@pytest.mark.parametrize("build", [Net, KeepsInHook, Scales, AddsNoise])
def test_others_get_batches_of_their_own(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch, build: type[Net]
) -> None:
    keepers = [Keeps(), Keeps()]
    runs = [
        Run(
            tmp_path / name,
            accelerator,
            monkeypatch,
            callback,
            build,
            (keeper,) if build is Net else (),
        )
        for name, callback, keeper in zip(
            ("plain", "graph"), (None, CUDAGraphCallback()), keepers, strict=True
        )
    ]
    assert_same(*runs)
    assert runs[1].counts["moved"] == STEPS
    assert not differences(keepers[0].kept, keepers[1].kept)
    if build is KeepsInHook:
        assert not differences(runs[0].module.kept, runs[1].module.kept)
        assert len(runs[1].module.kept) == STEPS  # type: ignore[arg-type]


def test_a_hook_that_comes_later(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A callback that joins at the end of an epoch sees batches that stay."""

    class Joins(Callback):
        def __init__(self) -> None:
            self.keeper = Keeps()

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == 1:
                trainer.callbacks.append(self.keeper)

    joins = [Joins(), Joins()]
    runs = [
        Run(tmp_path / name, accelerator, monkeypatch, callback, Net, (one,))
        for name, callback, one in zip(
            ("plain", "graph"), (None, CUDAGraphCallback()), joins, strict=True
        )
    ]
    assert_same(*runs)
    assert runs[1].counts["moved"] < STEPS
    assert len(joins[1].keeper.kept) == 8
    assert not differences(joins[0].keeper.kept, joins[1].keeper.kept)


class KeepsInStep(Net):
    """Keeps its batch, and compares the next one with it."""

    def __init__(self) -> None:
        super().__init__()
        self.before = torch.zeros(8, 12)

    def on_fit_start(self) -> None:
        self.before = self.before.to(self.device)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        moved = (x - self.before).abs().mean()
        self.before = x
        self.log("moved", moved, on_epoch=True)
        loss = super().training_step(batch, batch_idx)["loss"]
        return loss * (1 + 0.1 * moved)


@pytest.mark.spread
@pytest.mark.parametrize("window", [1, 2])
def test_a_step_that_keeps_its_batch(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    """Seven batches: the last one of an epoch has a place of its own, and warms up between replays."""

    runs = [
        Run(
            tmp_path / name,
            accelerator,
            monkeypatch,
            callback,
            KeepsInStep,
            epochs=6,
            batches=lambda module: loader(ragged=False),
            accumulate_grad_batches=window,
        )
        for name, callback in (("plain", None), ("graph", CUDAGraphCallback()))
    ]
    assert_same(*runs)
    callback = runs[1].callback
    assert callback is not None
    assert callback.summary.fit.replayed >= 20
    assert runs[1].counts["moved"] < 6 * 7


class MovesBatches(Callback):
    """Moves a batch of its own at the beginning of an epoch, and looks at it at the end."""

    def __init__(self) -> None:
        self.moved: list[Tensor] = []
        self.seen: list[Tensor] = []

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.moved = trainer.strategy.batch_to_device([torch.full((8, 12), 3.0), torch.zeros(8).long()])

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.seen.append(self.moved[0].clone())


class MovesAhead:
    """A loader that moves its batches itself, one before it is asked for it."""

    def __init__(self, module: pl.LightningModule) -> None:
        self.module = module
        self.batches = list(loader(ragged=False))

    def __iter__(self) -> Any:
        move = self.module.trainer.strategy.batch_to_device
        ahead = move(self.batches[0])
        for batch in self.batches[1:]:
            behind, ahead = ahead, move(batch)
            yield behind
        yield ahead


def test_calls_of_the_users_own(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    movers = [MovesBatches(), MovesBatches()]
    runs = [
        Run(tmp_path / name, accelerator, monkeypatch, callback, Net, (mover,))
        for name, callback, mover in zip(
            ("plain", "graph"), (None, CUDAGraphCallback()), movers, strict=True
        )
    ]
    assert_same(*runs)
    assert [bool((x == 3).all()) for x in movers[1].seen] == [True] * 3
    assert runs[1].counts["moved"] < STEPS


def test_a_loader_that_moves_its_batches_ahead(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [
        Run(tmp_path / name, accelerator, monkeypatch, callback, Net, batches=MovesAhead)
        for name, callback in (("plain", None), ("graph", CUDAGraphCallback()))
    ]
    assert_same(*runs)
    callback = runs[1].callback
    assert callback is not None
    assert callback.summary.fit.replayed >= 15
