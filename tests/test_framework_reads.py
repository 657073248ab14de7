"""Steps that read numbers from objects of torch's and Lightning's, such as learning rates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping
from torch.utils.data import DataLoader, TensorDataset

from lightning_cudagraph import CUDAGraphCallback
from tests.harness import Net, Trace, assert_same, fused_adamw, loader, make, train


class Stepwise(Net):
    """Its learning rate is another in every epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "epoch"}}


def reads(read: Callable[[Any], Any], base: type[Net] = Stepwise) -> Callable[[], Net]:
    """A module whose step logs what `read` finds, and multiplies the loss with it."""

    class Reads(base):  # type: ignore[valid-type, misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            found = super().training_step(batch, batch_idx)
            self.log("read", float(read(self)), on_epoch=True)
            return {**found, "loss": found["loss"] * (1 + float(read(self)))}

    return Reads


RATES = {
    "optimizers": lambda self: self.optimizers().param_groups[0]["lr"],
    "trainer.optimizers": lambda self: self.trainer.optimizers[0].param_groups[0]["lr"],
    "wrapped": lambda self: self.optimizers().optimizer.param_groups[0]["lr"],
    "strategy": lambda self: self.trainer.strategy.optimizers[0].param_groups[0].get("lr"),
    "last_lr": lambda self: self.lr_schedulers()._last_lr[0],
    "last_epoch": lambda self: self.lr_schedulers().last_epoch,
    "configs": lambda self: self.trainer.lr_scheduler_configs[0].scheduler.last_epoch,
    "progress": lambda self: self.trainer.fit_loop.epoch_progress.current.completed,
}


def _pair(build: Any, tmp_path: Path, accelerator: str, **kwargs: Any) -> tuple[Trace, Trace]:
    """Runs without and with graphs; no replay is verified, which could find it by chance."""
    evaluation = kwargs.pop("evaluation", False)
    make_kwargs = kwargs.pop("make_kwargs", dict)

    def run(name: str, callback: CUDAGraphCallback | None) -> Trace:
        arguments = {"accelerator": accelerator, **kwargs, **make_kwargs()}
        return train(make(build), tmp_path / name, callback, **arguments)

    return run("plain", None), run("graph", CUDAGraphCallback(verify=None, evaluation=evaluation))


@pytest.mark.spread(4)
@pytest.mark.parametrize("read", RATES.values(), ids=RATES)
def test_a_graph_for_each_learning_rate(
    read: Callable[[Any], Any], tmp_path: Path, accelerator: str
) -> None:
    plain, graph = _pair(reads(read), tmp_path, accelerator)
    assert_same(plain, graph)
    assert graph.counts.captures == 3
    assert graph.counts.replayed == 12


def _waits() -> dict[str, Any]:
    return {"callbacks": (EarlyStopping("val_loss", patience=50, min_delta=10.0),)}


@pytest.mark.long
@pytest.mark.parametrize(
    "read",
    [
        lambda self: self.trainer.early_stopping_callback.wait_count,
        lambda self: next(c for c in self.trainer.callbacks if hasattr(c, "wait_count")).wait_count,
    ],
    ids=["property", "list"],
)
def test_attributes_of_lightnings_callbacks(
    read: Callable[[Any], Any], tmp_path: Path, accelerator: str
) -> None:
    plain, graph = _pair(reads(read), tmp_path, accelerator, max_epochs=4, make_kwargs=_waits)
    assert_same(plain, graph)
    assert len(graph.counts.recaptures) >= 2
    assert all("wait_count" in reason for reason in graph.counts.recaptures)


class _Data(TensorDataset):
    difficulty = 0.0


class _Harder(Callback):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.train_dataloader.dataset.difficulty = float(trainer.current_epoch)


def _harder() -> dict[str, Any]:
    data = _Data(*loader(ragged=False).dataset.tensors)  # type: ignore[attr-defined]
    return {"train_loader": DataLoader(data, batch_size=8), "callbacks": (_Harder(),)}


@pytest.mark.long
def test_attributes_of_the_dataset(tmp_path: Path, accelerator: str) -> None:
    build = reads(lambda self: self.trainer.train_dataloader.dataset.difficulty)
    plain, graph = _pair(build, tmp_path, accelerator, make_kwargs=_harder)
    assert_same(plain, graph)
    assert graph.counts.captures == 3


class LogsATensor(Stepwise):
    """A tensor that is made on the device is as frozen as the number."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("rate", torch.full((), self.optimizers().param_groups[0]["lr"], device=self.device))
        return super().training_step(batch, batch_idx)


def test_a_tensor_made_of_a_number(tmp_path: Path, accelerator: str) -> None:
    plain, graph = _pair(LogsATensor, tmp_path, accelerator)
    assert_same(plain, graph)
    assert graph.counts.captures == 3


def _delayed(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0 if n < 12 else 0.9 ** (n - 11))


class Delayed(Net):
    def __init__(self) -> None:
        super().__init__(fused_adamw, _delayed)


@pytest.mark.long
def test_a_rate_that_begins_to_move_at_every_step(tmp_path: Path, accelerator: str) -> None:
    class Weighs(Delayed):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            found = super().training_step(batch, batch_idx)
            rate = self.optimizers().param_groups[0]["lr"]  # type: ignore[union-attr]
            return {**found, "loss": found["loss"] * (1 + rate)}

    plain, graph = _pair(Weighs, tmp_path, accelerator, max_epochs=6)
    assert_same(plain, graph)
    assert graph.counts.replayed > 6
    assert all("['lr']" in reason for reason in graph.counts.recaptures)


class Penalised(Net):
    """Its learning rate moves at every step, and of param groups it wants the parameters alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = super().training_step(batch, batch_idx)
        groups = self.optimizers().param_groups  # type: ignore[union-attr]
        penalty = torch.stack([p.square().sum() for group in groups for p in group["params"]]).sum()
        return {**found, "loss": found["loss"] + 1e-3 * penalty}


def test_parameters_of_the_groups_alone(tmp_path: Path, accelerator: str) -> None:
    plain, graph = _pair(Penalised, tmp_path, accelerator)
    assert_same(plain, graph)
    assert graph.counts.captures == 1
    assert graph.counts.replayed > 12


@pytest.mark.spread(2)
@pytest.mark.parametrize("name", ["optimizers", "last_epoch", "progress"])
def test_evaluation(name: str, tmp_path: Path, accelerator: str) -> None:
    read = RATES[name]

    class Reads(Stepwise):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, _ = batch
            self.log("read", float(read(self)))
            self.log("scaled", self(x).mean() * float(read(self)))

    def long_validation() -> dict[str, Any]:
        return {"val_loader": loader(seed=1, ragged=False, batches=8)}

    plain, graph = _pair(Reads, tmp_path, accelerator, evaluation=True, make_kwargs=long_validation)
    assert_same(plain, graph)
    counts = graph.callback.summary.validate
    assert counts is not None
    assert counts.captures == 3
    assert counts.replayed == 15
