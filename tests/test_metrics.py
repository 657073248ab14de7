"""torchmetrics inside the captured step come out as without the callback.

`tests/gpu/test_metrics.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric, MeanSquaredError, MetricCollection, SumMetric
from torchmetrics.aggregation import CatMetric
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassPrecision,
    MulticlassRecall,
)
from torchmetrics.wrappers import MinMaxMetric, Running

from lightning_cudagraph import CaptureError, CUDAGraphCallback
from tests.harness import Net, assert_same, make, train


class Measured(Net):
    """Metrics in all the ways that people use them."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(4, average="micro")
        self.macro = MulticlassAccuracy(4, average="macro")
        self.mean = MeanMetric()
        self.auroc = MulticlassAUROC(4, thresholds=None)  # keeps all it is given
        self.confusion = MulticlassConfusionMatrix(4)
        self.together = MetricCollection(
            [MulticlassPrecision(4), MulticlassRecall(4), MulticlassF1Score(4)], prefix="all_"
        )
        self.updated = MetricCollection({"error": MeanSquaredError(), "second": MeanSquaredError()})
        self.kept = CatMetric()
        self.extremes = MinMaxMetric(MeanMetric())
        self.recent = Running(SumMetric(), window=3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        value = self.accuracy(logits, y)
        self.log("accuracy_value", value, on_step=True, on_epoch=True)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.macro.update(logits, y)
        self.log("macro", self.macro, on_epoch=True, on_step=False)
        self.mean(loss)
        self.log("mean", self.mean, prog_bar=True)
        self.auroc.update(logits.softmax(-1), y)
        self.confusion.update(logits, y)
        self.log_dict(self.together(logits, y), on_step=True)
        self.updated.update(logits, torch.eye(4, device=y.device)[y])
        self.log_dict(self.updated, on_step=False, on_epoch=True)
        self.kept.update(loss)
        self.extremes.update(loss)
        self.log("recent", self.recent(loss))
        self.log("loss", loss)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("auroc", self.auroc.compute())
        self.log("confused", self.confusion.compute().float().std())
        self.log("kept", self.kept.compute().float().sum())
        self.log("highest", self.extremes.compute()["max"])
        for metric in (self.auroc, self.confusion, self.kept):
            metric.reset()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*MulticlassAUROC.*", "ignore:.*samples in the buffer")
@pytest.mark.parametrize("window", [1, 2])
def test_metrics(tmp_path: Path, accelerator: str, window: int) -> None:
    kwargs: dict[str, Any] = {
        "accelerator": accelerator,
        "accumulate_grad_batches": window,
        "max_epochs": 4,
        "val_check_interval": 4,
    }
    plain = train(make(Measured), tmp_path / "plain", **kwargs)
    graph = train(make(Measured), tmp_path / "graph", CUDAGraphCallback(), **kwargs)
    assert_same(plain, graph)
    assert graph.counts.captures >= 1
    assert graph.counts.replayed >= 12


class Looks(Measured):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        return nn.functional.cross_entropy(logits, batch[1]) * (1 + self.auroc(logits, batch[1]))

    def on_train_epoch_end(self) -> None:
        self.auroc.reset()


class Computes(Measured):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("now", self.accuracy.compute())
        return loss


@pytest.mark.spread(2)
@pytest.mark.filterwarnings("ignore::UserWarning:torchmetrics.*")  # few samples, and lists
@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Looks, r"use of what the metric `auroc` returns.*test_metrics.py:\d+"),
        (Computes, r"`accuracy.compute\(\)`.*test_metrics.py:\d+"),
    ],
)
def test_what_is_known_only_after_the_replay(
    tmp_path: Path, accelerator: str, cls: type[Net], message: str
) -> None:
    with pytest.raises(CaptureError, match=f"(?s){message}"):
        train(make(cls), tmp_path / "raise", CUDAGraphCallback(), accelerator=accelerator)
    plain = train(make(cls), tmp_path / "plain", accelerator=accelerator)
    callback = CUDAGraphCallback(on_unsupported="eager")
    eager = train(make(cls), tmp_path / "eager", callback, accelerator=accelerator)
    plain.csv, eager.csv = plain.csv or "-", eager.csv or "-"
    assert_same(plain, eager)


@pytest.mark.long
def test_metrics_are_whole_afterwards(tmp_path: Path, accelerator: str) -> None:
    module = make(Measured)
    names = set(vars(module.accuracy))  # type: ignore[arg-type]
    train(module, tmp_path, CUDAGraphCallback(), accelerator=accelerator, max_epochs=1)
    assert set(vars(module.accuracy)) == names  # type: ignore[arg-type]
    module.cpu()
    assert torch.is_tensor(module.accuracy(torch.rand(3, 4), torch.tensor([0, 1, 2])))  # type: ignore[operator]


class _Deferred(Net):
    """A step with deferred metrics: one looks for NaN, one keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.kept = CatMetric()
        self.register_buffer("seen", torch.zeros(4))
        self.drop = nn.Dropout(0.3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self.drop(self(x))
        loss = nn.functional.cross_entropy(logits, y)
        self.use(logits, loss)
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        return self.returned(loss)

    def use(self, logits: Any, loss: Any) -> None:
        self.mean(loss.detach())

    def returned(self, loss: Any) -> Any:
        return loss

    def on_train_epoch_end(self) -> None:
        if self.kept._update_count:
            self.log("kept", self.kept.compute().float().square().mean())
            self.kept.reset()


class DividesTheLoss(_Deferred):
    def use(self, logits: Any, loss: Any) -> None:
        self.mean(loss)

    def returned(self, loss: Any) -> Any:
        loss /= 4
        return loss


class WritesIntoWhatIsKept(_Deferred):
    def use(self, logits: Any, loss: Any) -> None:
        values = logits.detach().clone()
        self.kept.update(values)
        self.mean(values)
        values.clamp_(-0.1, 0.1).mul_(2)


class GivesAWeight(_Deferred):
    def use(self, logits: Any, loss: Any) -> None:
        self.mean(next(self.parameters()))


class GivesABuffer(_Deferred):
    def use(self, logits: Any, loss: Any) -> None:
        self.mean(self.seen)
        self.seen += logits.detach().sum(0)


class Multiplies(CatMetric):
    def update(self, value: Any) -> None:
        super().update(value.float() @ torch.eye(value.shape[1], device=value.device))


class MultipliesUnderAutocast(_Deferred):
    def __init__(self) -> None:
        super().__init__()
        self.kept = Multiplies()

    def use(self, logits: Any, loss: Any) -> None:
        self.mean(loss.detach())
        self.kept.update(logits.detach())


class Draws(CatMetric):
    def update(self, value: Any) -> None:
        super().update(value * torch.rand_like(value))


class DrawsLast(_Deferred):
    def __init__(self) -> None:
        super().__init__()
        self.kept = Draws()

    def use(self, logits: Any, loss: Any) -> None:
        self.mean(loss.detach())
        self.kept.update(loss.detach())


class DrawsFirst(DrawsLast):
    def returned(self, loss: Any) -> Any:
        return self.drop(loss.expand(4)).mean()


class KeepsAWeight(_Deferred):
    def use(self, logits: Any, loss: Any) -> None:
        self.mean(loss.detach())
        self.kept.update(next(self.parameters()).detach())


@pytest.mark.spread
@pytest.mark.filterwarnings("ignore::UserWarning:torchmetrics.*")
@pytest.mark.parametrize(
    ("cls", "precision"),
    [
        (DividesTheLoss, "32-true"),
        (WritesIntoWhatIsKept, "32-true"),
        (GivesAWeight, "32-true"),
        (GivesABuffer, "32-true"),
        (MultipliesUnderAutocast, "bf16-mixed"),
        (DrawsLast, "32-true"),
    ],
)
def test_a_deferred_metric_sees_what_an_eager_one_sees(
    tmp_path: Path, accelerator: str, cls: type[Net], precision: Any
) -> None:
    kwargs: dict[str, Any] = {"accelerator": accelerator, "max_epochs": 3, "precision": precision}
    plain = train(make(cls), tmp_path / "plain", **kwargs)
    graph = train(make(cls), tmp_path / "graph", CUDAGraphCallback(), **kwargs)
    assert_same(plain, graph)
    assert graph.counts.replayed >= 12
    assert "`mean` (it needs a Python branch" in str(graph.summary)


@pytest.mark.spread
@pytest.mark.filterwarnings("ignore::UserWarning:torchmetrics.*")
@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (DrawsFirst, r"random numbers by the metric `kept`.*test_metrics.py:\d+"),
        (KeepsAWeight, r"metric `kept` with a parameter or a buffer.*test_metrics.py:\d+.*clone"),
    ],
)
def test_a_deferred_metric_that_would_see_something_else_is_refused(
    tmp_path: Path, accelerator: str, cls: type[Net], message: str
) -> None:
    with pytest.raises(CaptureError, match=f"(?s){message}"):
        train(make(cls), tmp_path / "raise", CUDAGraphCallback(), accelerator=accelerator)
