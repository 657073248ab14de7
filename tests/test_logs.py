"""`self.log` in a captured step comes out as without the callback: at every step, and in the files.

`tests/gpu/test_logs.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_cudagraph import CUDAGraphCallback
from tests.harness import Net, Trace, assert_same, differences, loader, make, train

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
        self.log("step", loss * 2, on_step=True, on_epoch=False)
        self.log("epoch", loss * 3, on_step=False, on_epoch=True)
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


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("window", [1, 2])
def test_everything(
    tmp_path: Path, accelerator: str, window: int, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    original = _ResultMetric.forward

    def counted(self: _ResultMetric, *args: Any) -> None:
        calls.append(self.meta.fx)
        original(self, *args)

    monkeypatch.setattr(_ResultMetric, "forward", counted)
    _, graph = _both(
        tmp_path,
        Everything,
        callbacks=lambda: (FromACallback(),),
        accelerator=accelerator,
        accumulate_grad_batches=window,
        log_every_n_steps=every,
        train_loader=loader(batches=9),
        max_epochs=4,
        val_check_interval=4,
    )
    assert graph.counts.captures >= window
    assert graph.counts.recaptures == []
    assert graph.counts.replayed >= 24
    steps = [name for name in calls if name == "training_step"]
    assert len(steps) < 0.8 * len(calls)
