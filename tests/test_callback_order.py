"""Where the callback stands among the others changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
)
from torch import Tensor

from lightning_cudagraph import CUDAGraphCallback
from tests.harness import Net, differences, make, train
from tests.rows import row


class Writes(Callback):
    """Changes what the step reads, and logs, in hooks before and after it."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.seen: list[Any] = []

    @property
    def state_key(self) -> str:
        return f"Writes {self.factor}"

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.head.weight.data.mul_(self.factor)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        batch[0].mul_(self.factor).add_(1.0)
        pl_module.features[1].running_mean.mul_(self.factor).add_(0.1)

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * self.factor + 1e-4
        self.seen.append(("zero", trainer.global_step))

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self.log(f"loss x {self.factor}", loss * self.factor)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        pl_module.head.bias.data.mul_(self.factor).add_(0.01)
        self.log(f"bias x {self.factor}", pl_module.head.bias.sum())
        self.seen.append(("end", trainer.global_step, outputs, dict(trainer.callback_metrics)))


class Raises(Callback):
    """Ends the run in the middle of an epoch."""

    def __init__(self, hook: str) -> None:
        def fail(trainer: Any, *args: Any) -> None:
            if trainer.global_step == 12:
                raise ZeroDivisionError(hook)

        setattr(self, hook, fail)


def _others(folder: Path) -> tuple[Callback, ...]:
    return (
        Writes(0.9),
        ModelCheckpoint(folder / "best", monitor="loss_epoch", filename="{epoch}-{loss_epoch:.6f}"),
        LearningRateMonitor("step"),
        EarlyStopping("val_loss", patience=1, min_delta=0.05),
        Writes(0.8),
    )


# First, second, among the others, last but one, and last.
@pytest.mark.long
@pytest.mark.parametrize("position", [0, 1, 4, -2, -1])
def test_any_position(tmp_path: Path, accelerator: str, position: int) -> None:
    done = row(
        tmp_path,
        accelerator,
        setting=lambda folder: {"callbacks": _others(folder)},
        position=position,
        max_epochs=6,
    )
    assert done.graph.counts.replayed == 11
    assert done.graph.final["global_step"] == 16  # it has been stopped early
    for plain, graph in zip(_writers(done.plain), _writers(done.graph), strict=True):
        assert not differences(plain.seen, graph.seen)


def _writers(trace: Any) -> list[Writes]:
    return [callback for callback in trace.trainer.callbacks if isinstance(callback, Writes)]


@pytest.mark.spread
@pytest.mark.parametrize("position", [0, -1])
@pytest.mark.parametrize(
    "hook", ["on_train_batch_start", "on_before_zero_grad", "on_after_backward", "on_train_batch_end"]
)
def test_one_that_raises(tmp_path: Path, accelerator: str, position: int, hook: str) -> None:
    done = row(
        tmp_path,
        accelerator,
        setting=lambda folder: {"callbacks": (Writes(0.9), Raises(hook), Writes(0.8))},
        position=position,
        raises=ZeroDivisionError,
    )
    assert done.graph.counts.replayed >= 5
    for plain, graph in zip(_writers(done.plain), _writers(done.graph), strict=True):
        assert not differences(plain.seen, graph.seen)
    # Nothing of ours is left in the trainer, which can train on.
    trainer, module = done.graph.trainer, done.graph.module
    assert trainer is not None
    assert module is not None
    assert "optimizer_step" not in vars(trainer.strategy)
    weights = [
        {name: value.clone() for name, value in trace.module.state_dict().items()}
        for trace in (done.plain, done.graph)
        if trace.module is not None
    ]
    assert not differences(*weights)


@pytest.mark.long
def test_two_orders_differ(tmp_path: Path, accelerator: str) -> None:
    """The comparison means something: the other callbacks do not commute."""
    runs = [
        train(make(Net), tmp_path / name, CUDAGraphCallback(), accelerator=accelerator, callbacks=order)
        for name, order in (("a", (Writes(0.9), Writes(0.8))), ("b", (Writes(0.8), Writes(0.9))))
    ]
    assert differences(runs[0].final["weights"], runs[1].final["weights"])


# What a graph repeats has no place for a list.
_IN_THE_GRAPH = {"on_before_backward", "on_after_backward", "on_before_optimizer_step"}
# Those that both have.
_HOOKS = sorted(
    name
    for name in vars(Callback)
    if name.startswith("on_") and hasattr(LightningModule, name) and name not in _IN_THE_GRAPH
)


def _telling(base: type, who: str, told: list[Any]) -> Any:
    """A module or a callback, each of whose hooks is told in one list for all."""

    def tells(name: str) -> Any:
        def hook(self: Any, *args: Any) -> None:
            told.append((who, name, [arg for arg in args if isinstance(arg, int)]))

        return hook

    return type(who, (base,), {name: tells(name) for name in _HOOKS})()


@pytest.mark.spread(2)
@pytest.mark.parametrize("position", [0, 1, -1])
def test_hooks_of_all_come_in_one_order(tmp_path: Path, accelerator: str, position: int) -> None:
    runs: list[list[Any]] = []

    def build() -> Net:
        module: Net = _telling(Net, "module", runs[-1])
        return module

    def setting(folder: Path) -> dict[str, Any]:
        runs.append([])
        names = ("first callback", "second callback")
        return {"callbacks": tuple(_telling(Callback, name, runs[-1]) for name in names)}

    done = row(tmp_path, accelerator, build, setting, position=position, watched=False)
    assert done.graph.counts.replayed >= 10
    plain, graph = runs
    assert plain == graph
    assert {name for _, name, _ in plain} >= {"on_train_batch_start", "on_before_zero_grad"}
