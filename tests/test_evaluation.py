"""Captured evaluation comes out as without the callback, and so does the training around it.

`tests/gpu/test_evaluation.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

import copy
import pickle
import queue
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.utils.prune
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MeanMetric, Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from lightning_cudagraph import (
    CaptureError,
    ConfigurationError,
    CUDAGraphCallback,
    UnsupportedError,
    VerificationError,
)
from lightning_cudagraph.device.cuda.capture_errors import meaning_of
from lightning_cudagraph.trainer.evaluation import EvaluationStep
from tests.harness import Net, Trace, differences, loader, make, train
from tests.rows import row
from tests.test_clean import THEIR_OWN, code_of_libraries

# Each dataloader has full batches and a last one that is smaller.
_IGNORED = (
    "ignore:.*does not have many workers",
    "ignore:.*shuffling enabled",
)


def evaluating(**kwargs: Any) -> CUDAGraphCallback:
    return CUDAGraphCallback(evaluation=True, **kwargs)


class Evaluated(Net):
    """Logs of all kinds from validation, and an output."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.log("val_loss", loss, prog_bar=True)
        self.log("val_both", loss * 2, on_step=True, on_epoch=True)
        self.log("val_peak", logits.max(), reduce_fx="max", on_step=True)
        self.log_dict({"val_sum": logits.sum()}, reduce_fx="sum", batch_size=2)
        return {"logits": logits, "pair": [loss, "text", None]}

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.validation_step(batch, batch_idx, dataloader_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self(batch[0]).softmax(-1)


def validations() -> list[Any]:
    return [loader(seed=1, batches=2), loader(seed=2, batches=3)]


def evaluation_of(trace: Trace) -> Any:
    assert trace.callback is not None
    return trace.callback.summary.validate


@pytest.mark.spread(2)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_fit(tmp_path: Path, accelerator: str, precision: str) -> None:
    done = row(
        tmp_path,
        accelerator,
        Evaluated,
        lambda folder: {
            "val_loader": validations(),
            "callbacks": (
                ModelCheckpoint(folder / "best", monitor="val_loss/dataloader_idx_0"),
                EarlyStopping("val_loss/dataloader_idx_1", patience=5, min_delta=1.0),
            ),
        },
        ours=evaluating,
        max_epochs=4,
        val_check_interval=3,
        num_sanity_val_steps=2,
        precision=precision,
    )
    counts = evaluation_of(done.graph)
    # Each of two dataloaders has two signatures.
    assert counts.captures == 4
    assert counts.replayed > 10
    assert not counts.eager
    assert not counts.recaptures
    # The graph of training lives on.
    assert done.graph.counts.captures == 1
    assert not done.graph.counts.recaptures
    assert done.graph.callback is not None
    assert (
        f"  validate  {counts.warmed_up} warmed up, {counts.replayed} replayed, 0 eager; captured 4"
        in str(done.graph.callback.summary)
    )


class Measured(Evaluated):
    """Metrics in validation: logged as objects and as values, computed and reset by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(4)
        self.by_value = MulticlassAccuracy(4, average="micro")
        self.mean = MeanMetric()
        self.confusion = MulticlassConfusionMatrix(4)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        returned = super().validation_step(batch, batch_idx, dataloader_idx)
        logits = returned["logits"]
        self.accuracy(logits, batch[1])
        self.log("val_accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("val_value", self.by_value(logits, batch[1]))
        self.mean.update(returned["pair"][0])
        self.log("val_mean", self.mean)
        self.confusion.update(logits, batch[1])
        return returned

    def on_validation_epoch_end(self) -> None:
        self.log("val_confused", self.confusion.compute().float().std())
        self.confusion.reset()

    on_test_epoch_end = on_validation_epoch_end


@pytest.mark.long
@pytest.mark.parametrize("window", [1, 2])
def test_metrics(tmp_path: Path, accelerator: str, window: int) -> None:
    done = row(
        tmp_path,
        accelerator,
        Measured,
        ours=evaluating,
        val_loader=loader(seed=1, batches=3),
        val_check_interval=3,
        num_sanity_val_steps=-1,
        accumulate_grad_batches=window,
    )
    assert evaluation_of(done.graph).replayed > 10
    assert done.graph.counts.replayed > 10
    assert not done.graph.counts.recaptures


class _Keeper(Callback):
    """Keeps outputs as they are handed out, without a copy."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.kept.append(outputs)

    def on_test_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.kept.append(outputs)


class _Writer(BasePredictionWriter):
    """Keeps predictions as a writer is given them."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.kept: list[Any] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, *args: Any) -> None:
        self.kept.append((prediction, args[0], args[2:]))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.kept.append((predictions, indices))


class Session:
    """One trainer for several runs, and all that they hand out."""

    def __init__(
        self, build: Callable[[], pl.LightningModule], folder: Path, callback: Any, **kwargs: Any
    ) -> None:
        self.module = make(build)
        self.keeper, self.writer = _Keeper(), _Writer()
        self.callback = callback
        self.results: list[Any] = []
        ours = [] if callback is None else [callback]
        self.trainer = pl.Trainer(
            callbacks=[self.keeper, *ours, self.writer],
            devices=1,
            logger=CSVLogger(folder),
            log_every_n_steps=1,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            num_sanity_val_steps=0,
            **{"max_epochs": 2, **kwargs},
        )

    def run(self, kind: str, loaders: Any) -> None:
        pl.seed_everything(7, verbose=False)
        if kind == "fit":
            self.trainer.fit(self.module, loader(), loaders)
        elif kind == "predict":
            self.results.append(self.trainer.predict(self.module, loaders))
        else:
            result = getattr(self.trainer, kind)(self.module, loaders, verbose=False)
            self.results.append((result, dict(self.trainer.callback_metrics)))
        assert not {"validation_step", "test_step", "predict_step"} & vars(self.trainer.strategy).keys()

    def all(self) -> Any:
        files = sorted(Path(self.trainer.logger.save_dir).rglob("metrics.csv"))
        return (
            self.keeper.kept,
            self.writer.kept,
            self.results,
            self.module.state_dict(),
            torch.get_rng_state(),
            [path.read_text() for path in files],
        )


def sessions(
    tmp_path: Path, build: Callable[[], pl.LightningModule], callback: CUDAGraphCallback, **kwargs: Any
) -> tuple[Session, Session]:
    return (
        Session(build, tmp_path / "plain", None, **kwargs),
        Session(build, tmp_path / "graph", callback, **kwargs),
    )


def assert_same_sessions(plain: Session, graph: Session) -> None:
    found = differences(plain.all(), graph.all())
    assert not found, found[:8]


@pytest.mark.spread
@pytest.mark.filterwarnings(*_IGNORED)
@pytest.mark.parametrize("inference_mode", [True, False])
@pytest.mark.parametrize("kind", ["validate", "test", "predict"])
def test_alone(tmp_path: Path, accelerator: str, kind: str, inference_mode: bool) -> None:
    both = sessions(
        tmp_path, Evaluated, evaluating(), accelerator=accelerator, inference_mode=inference_mode
    )
    for session in both:
        for _ in range(2):  # modules go to the CPU in between
            session.run(kind, [loader(seed=1), loader(seed=2, batches=6)])
    assert_same_sessions(*both)
    summary = both[1].callback.summary
    assert {*summary.stages} == {kind}
    counts = summary.stages[kind]
    assert (counts.captures, counts.replayed, counts.warmed_up) == (2, 7, 8)
    assert not counts.eager
    assert f"  {kind:<10}8 warmed up, 7 replayed, 0 eager; captured 2 time(s)" in str(summary)
    kept = both[1].writer.kept if kind == "predict" else both[1].keeper.kept
    assert len(kept) == 2 * (15 + (kind == "predict"))


@pytest.mark.spread
@pytest.mark.filterwarnings(*_IGNORED)
@pytest.mark.parametrize("limit", [6, 0.8])
@pytest.mark.parametrize("kind", ["validate", "test", "predict"])
def test_limited(tmp_path: Path, accelerator: str, kind: str, limit: float) -> None:
    limits: dict[str, Any] = {f"limit_{'val' if kind == 'validate' else kind}_batches": limit}
    both = sessions(tmp_path, Evaluated, evaluating(), accelerator=accelerator, **limits)
    for session in both:
        session.run(kind, loader(seed=1))
    assert_same_sessions(*both)
    counts = both[1].callback.summary.stages[kind]
    assert (counts.warmed_up, counts.replayed) == (3, 3)


@pytest.mark.long
@pytest.mark.filterwarnings(*_IGNORED)
@pytest.mark.parametrize("inference_mode", [True, False])
def test_metrics_alone(tmp_path: Path, accelerator: str, inference_mode: bool) -> None:
    both = sessions(
        tmp_path, Measured, evaluating(), accelerator=accelerator, inference_mode=inference_mode
    )
    for session in both:
        session.run("validate", [loader(seed=1), loader(seed=2, batches=6)])
        session.run("test", loader(seed=1))
        assert session.callback is None or session.callback.summary.test.replayed == 4
    assert_same_sessions(*both)


@pytest.mark.long
@pytest.mark.filterwarnings(*_IGNORED)
# In inference mode, states of metrics made in one run cannot be written in a `fit`: a plain run fails.
@pytest.mark.parametrize(("cls", "inference_mode"), [(Evaluated, True), (Measured, False)])
def test_one_after_another(
    tmp_path: Path, accelerator: str, cls: type[Net], inference_mode: bool
) -> None:
    both = sessions(
        tmp_path,
        cls,
        evaluating(),
        accelerator=accelerator,
        val_check_interval=4,
        inference_mode=inference_mode,
    )
    for session in both:
        for kind in ("validate", "fit", "test", "validate", "predict", "fit"):
            if kind == "fit":
                session.trainer.fit_loop.max_epochs += 2
            session.run(kind, loader(seed=1))
            if session.callback is not None:
                stages = {"fit", "validate"} if kind == "fit" else {kind}
                found = session.callback.summary.stages
                assert {*found} == stages
                assert all(stage.replayed > 0 for stage in found.values()), kind
    assert_same_sessions(*both)


class DropsOut(Evaluated):
    """Dropout in evaluation, as for an estimate of the uncertainty."""

    def on_validation_model_eval(self) -> None:
        self.eval()
        self.features[3].train()


@pytest.mark.long
@pytest.mark.parametrize("cls", [DropsOut, Evaluated])
def test_unwatched(tmp_path: Path, accelerator: str, cls: type[Net]) -> None:
    """Without anybody's code between two batches, as most evaluations are."""
    done = row(
        tmp_path,
        accelerator,
        cls,
        ours=evaluating,
        val_loader=loader(seed=1, batches=5),
        val_check_interval=4,
        watched=False,
        checkpoint_every=0,
    )
    assert evaluation_of(done.graph).captures == 2
    assert evaluation_of(done.graph).replayed > 20
    assert not done.graph.counts.recaptures


class MovesWeights(Evaluated):
    """Weights that change between two validations in all the ways that people know."""

    def on_train_epoch_end(self) -> None:
        epoch = self.current_epoch
        with torch.no_grad():
            if epoch == 0:
                self.head.weight.copy_(torch.ones_like(self.head.weight))
            elif epoch == 1:
                self.load_state_dict({n: t * 0.5 for n, t in self.state_dict().items()})
            elif epoch == 2:
                self.head.bias.data = self.head.bias.data + 1.0
            elif epoch == 3:
                self.features[0] = nn.Linear(12, 24).to(self.device)


@pytest.mark.long
def test_weights_that_move(tmp_path: Path, accelerator: str) -> None:
    """Written in place, they are read where they are; elsewhere, the graph is captured anew."""
    done = row(
        tmp_path,
        accelerator,
        MovesWeights,
        ours=evaluating,
        val_loader=loader(seed=1, batches=5, ragged=False),
        limit_train_batches=4,
        max_epochs=6,
        val_check_interval=2,
    )
    counts = evaluation_of(done.graph)
    assert counts.captures == 3
    assert [("head.bias" in r, "features.0" in r) for r in counts.recaptures] == [
        (True, False),
        (False, True),
    ], counts.recaptures
    assert counts.replayed == 60 - 3 * 3


@pytest.mark.long
def test_averaged_weights(tmp_path: Path, accelerator: str) -> None:
    done = row(
        tmp_path,
        accelerator,
        Evaluated,
        lambda folder: {"callbacks": (EMAWeightAveraging(decay=0.9),)},
        ours=evaluating,
        val_loader=loader(seed=1, batches=5),
    )
    assert evaluation_of(done.graph).replayed > 8
    assert not evaluation_of(done.graph).recaptures


class Counts(Evaluated):
    """A buffer that validation writes, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def on_validation_epoch_start(self) -> None:
        self.seen.zero_()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += batch[0].mean() + 1
        self.log("seen", self.seen)
        return super().validation_step(batch, batch_idx)


@pytest.mark.long
def test_buffers(tmp_path: Path, accelerator: str) -> None:
    done = row(tmp_path, accelerator, Counts, ours=evaluating, max_epochs=6)
    assert evaluation_of(done.graph).replayed > 4


@pytest.mark.long
@pytest.mark.filterwarnings(*_IGNORED)
def test_buffers_alone(tmp_path: Path, accelerator: str) -> None:
    both = sessions(tmp_path, Counts, evaluating(), accelerator=accelerator)
    for session in both:
        session.run("validate", loader(seed=1))
        session.run("fit", loader(seed=1))
        session.run("validate", loader(seed=1))
    assert_same_sessions(*both)
    assert both[1].callback.summary.validate.replayed == 4


class Item(Evaluated):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("item", super().validation_step(batch, batch_idx)["logits"].mean().item())


class Prints(Evaluated):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        print("a batch")
        return super().validation_step(batch, batch_idx)


class UsesIndex(Evaluated):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if float(batch_idx) < 0:
            return None
        return super().validation_step(batch, batch_idx)


class ReturnsIndex(Evaluated):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {**super().validation_step(batch, batch_idx), "index": batch_idx}


class Appends(Evaluated):
    def on_validation_epoch_start(self) -> None:
        self.outputs: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.outputs.append(super().validation_step(batch, batch_idx)["logits"])

    def on_validation_epoch_end(self) -> None:
        self.log("all", torch.cat(self.outputs).std())


class LogsNumber(Evaluated):
    counted = 0

    def on_validation_batch_start(self, *args: Any) -> None:
        self.counted += 1

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("same", 0.5)
        self.log("number", float(self.counted))


class ReturnsMetric(Evaluated):
    def __init__(self) -> None:
        super().__init__()
        self.by_value = CatMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.by_value(self(batch[0]).mean())


class WritesInference(Evaluated):
    def on_validation_epoch_start(self) -> None:
        self.made_here = torch.zeros((), device=self.device)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.made_here += batch[0].mean()
        self.log("made_here", self.made_here)


@pytest.mark.spread(4)
@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Item, r"`.item\(\)`.*test_evaluation.py:\d+"),
        (Prints, r"`print`.*test_evaluation.py:\d+.*`on_validation_batch_end`"),
        (UsesIndex, r"read of `batch_idx`.*test_evaluation.py:\d+.*Compare it with plain numbers"),
        (ReturnsIndex, r"read of `batch_idx`.*`on_validation_batch_start`"),
        (Appends, r"The validation step sets or changes `outputs`.*test_evaluation.py:\d+"),
        (ReturnsMetric, r"use of what the metric `by_value` returns"),
    ],
)
def test_refused(tmp_path: Path, accelerator: str, cls: type[Net], message: str) -> None:
    """Named with the user's line where it is asked for; else eager, beside training with its graph."""
    kwargs: dict[str, Any] = {
        "accelerator": accelerator,
        "val_loader": loader(seed=1, batches=4, ragged=False),
    }
    with pytest.raises(CaptureError, match=f"(?s){message}.*leave out `evaluation=True`"):
        train(make(cls), tmp_path / "raises", evaluating(), **kwargs)
    done = row(
        tmp_path, build=cls, ours=lambda: evaluating(on_unsupported="eager"), **kwargs, max_epochs=3
    )
    counts = evaluation_of(done.graph)
    assert counts.captures == counts.replayed == 0
    assert counts.warmed_up == 3
    assert sum(counts.eager.values()) == 9
    assert done.graph.counts.captures == 1
    assert done.graph.counts.replayed > 15
    (reason,) = counts.eager
    assert done.graph.callback is not None
    assert f"9 eager: {reason}" in str(done.graph.callback.summary)


@pytest.mark.long
def test_a_logged_number_that_changes(tmp_path: Path, accelerator: str) -> None:
    val_loader = loader(seed=1, batches=4, ragged=False)
    done = row(tmp_path, accelerator, LogsNumber, ours=evaluating, val_loader=val_loader, max_epochs=3)
    counts = evaluation_of(done.graph)
    assert counts.captures == 3
    assert counts.replayed > 0


def test_out_of_memory(tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The remedy is one for evaluation, which has one graph with or without timings."""

    def exhausted(*args: Any, **kwargs: Any) -> Any:
        raise meaning_of(torch.OutOfMemoryError("CUDA out of memory."))

    monkeypatch.setattr(EvaluationStep, "record", exhausted)
    message = r"capture of the validation step ran out of memory: .* Use smaller batches\."
    with pytest.raises(CaptureError, match=f"(?s){message}") as raised:
        Session(Net, tmp_path, evaluating(), accelerator=accelerator).run("validate", loader(seed=1))
    assert "timings" not in str(raised.value)


@pytest.mark.filterwarnings(*_IGNORED)
def test_tensors_of_inference_mode(tmp_path: Path, accelerator: str) -> None:
    """These cannot be written outside of it; reading them is fine."""
    with pytest.raises(CaptureError, match=r"(?s)made in inference mode.*inference_mode=False"):
        Session(WritesInference, tmp_path, evaluating(), accelerator=accelerator).run(
            "validate", loader(seed=1)
        )
    both = sessions(
        tmp_path, WritesInference, evaluating(), accelerator=accelerator, inference_mode=False
    )
    for session in both:
        session.run("validate", loader(seed=1))
    assert_same_sessions(*both)
    assert both[1].callback.summary.validate.replayed == 4


@pytest.mark.long
def test_harmless(tmp_path: Path, accelerator: str, capsys: Any) -> None:
    done = row(
        tmp_path,
        accelerator,
        Prints,
        ours=lambda: evaluating(harmless=["print"], verify=None),
        val_loader=loader(seed=1, batches=4, ragged=False),
    )
    assert evaluation_of(done.graph).replayed == 9


class Forces(Evaluated):
    """Gradients by the input, in validation."""

    detaches = True

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.enable_grad():
            x = batch[0].clone().requires_grad_()
            energy = self(x).square().sum()
            (force,) = torch.autograd.grad(energy, x)
        self.log("force", force.std())
        return {"energy": energy.detach() if self.detaches else energy, "force": force}


class KeepsGraph(Forces):
    detaches = False


class Backward(Evaluated):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.enable_grad():
            self(batch[0]).sum().backward()


@pytest.mark.long
def test_gradients_inside(tmp_path: Path, accelerator: str) -> None:
    done = row(tmp_path, accelerator, Forces, ours=evaluating, inference_mode=False, max_epochs=4)
    assert evaluation_of(done.graph).replayed > 4


@pytest.mark.long
@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (KeepsGraph, r"output of `validation_step` holds a tensor with autograd's graph"),
        (Backward, r"`validation_step` leaves gradients in `features.0.weight`"),
    ],
)
def test_gradients_outside(tmp_path: Path, accelerator: str, cls: type[Net], message: str) -> None:
    done = row(
        tmp_path,
        accelerator,
        cls,
        ours=lambda: evaluating(on_unsupported="eager"),
        inference_mode=False,
        val_loader=loader(seed=1, batches=4, ragged=False),
    )
    assert message.split("`")[-1] in next(iter(evaluation_of(done.graph).eager))
    assert done.graph.counts.replayed > 15
    with pytest.raises(CaptureError, match=f"(?s){message}"):
        train(
            make(cls),
            tmp_path / "raises",
            evaluating(),
            accelerator=accelerator,
            inference_mode=False,
            val_loader=loader(seed=1, batches=4, ragged=False),
        )


class Shapes(Evaluated):
    """Validation batches of many lengths."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_mean", batch.square().mean(), batch_size=len(batch))


@pytest.mark.long
def test_more_signatures_than_graphs(tmp_path: Path, accelerator: str) -> None:
    lengths = [torch.randn(1 + i % 10, 12) for i in range(40)]
    batches = DataLoader(lengths, batch_size=None)
    ours = partial(evaluating, max_graphs=8)
    done = row(tmp_path, accelerator, Shapes, ours=ours, val_loader=batches, max_epochs=3)
    counts = evaluation_of(done.graph)
    assert counts.captures == 8
    assert counts.warmed_up == 10 * 3
    assert all("more than 8 batch signatures" in reason for reason in counts.eager)
    assert sum(counts.eager.values()) == 2 * 9
    assert counts.replayed == 120 - 30 - 18


class CountsPairs(Shapes):
    """Leaves something on the host in steps on two samples alone, in an object that is written in C."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = bytearray()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if len(batch) == 2:
            self.pairs.extend(b".")
        super().validation_step(batch, batch_idx)


def test_effects_of_one_signature(tmp_path: Path, accelerator: str) -> None:
    """The last warm-up step before the capture is one on another signature, which has no effects."""
    sizes = [2, 2, 1, 2, 1, 2, 2]
    batches = DataLoader([torch.randn(size, 12) for size in sizes], batch_size=None)
    message = r"The validation step sets or changes `pairs` .*test_evaluation\.py"
    session = Session(CountsPairs, tmp_path, evaluating(), accelerator=accelerator)
    with pytest.raises(CaptureError, match=f"(?s){message}"):
        session.run("validate", batches)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:lightning_cudagraph. all steps eager", "ignore:You have turned on")
def test_training_without_a_graph(tmp_path: Path, accelerator: str) -> None:
    done = row(
        tmp_path,
        accelerator,
        Evaluated,
        ours=lambda: evaluating(on_unsupported="eager"),
        val_loader=loader(seed=1, batches=4),
        checkpoint_every=0,
        detect_anomaly=True,
    )
    assert evaluation_of(done.graph).replayed > 5
    assert done.graph.counts.steps == 0
    assert done.graph.callback is not None
    report = str(done.graph.callback.summary)
    assert "detect_anomaly" in report
    assert "  validate  " in report


class Iterates(Evaluated):
    def validation_step(self, dataloader_iter: Any) -> Any:
        batch, _, _ = next(dataloader_iter)
        self.log("val_loss", self(batch[0].to(self.device)).mean(), batch_size=len(batch[0]))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*dataloader_iter", "ignore:lightning_cudagraph. all batches of")
def test_steps_that_fetch(tmp_path: Path, accelerator: str) -> None:
    done = row(tmp_path, accelerator, Iterates, ours=lambda: evaluating(on_unsupported="eager"))
    assert evaluation_of(done.graph).steps == 0
    assert done.graph.callback is not None
    assert "`Iterates.validation_step` takes `dataloader_iter`" in str(done.graph.callback.summary)
    with pytest.raises(UnsupportedError, match="dataloader_iter"):
        train(make(Iterates), tmp_path / "raises", evaluating(), accelerator=accelerator)


class Parts(Evaluated):
    """Ops that consist of others, which autocast deals with one by one; and a generator of one's own."""

    def on_validation_start(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(5)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        x = batch[0]
        product = torch.einsum("bi,bj->ij", x, x)
        noise = torch.randn(x.shape, generator=self.generator, device=x.device)
        return {
            "product": product,
            "noisy": torch.tensordot(x + noise, product.float(), dims=([1], [0])),
        }


@pytest.mark.filterwarnings(*_IGNORED)
@pytest.mark.spread(2)
@pytest.mark.parametrize("inference_mode", [True, False])
def test_ops_of_parts(tmp_path: Path, accelerator: str, inference_mode: bool) -> None:
    both = sessions(
        tmp_path,
        Parts,
        evaluating(),
        accelerator=accelerator,
        inference_mode=inference_mode,
        precision="bf16-mixed",
    )
    for session in both:
        session.run("validate", loader(seed=1))
    assert_same_sessions(*both)
    assert both[1].keeper.kept[0]["product"].dtype is torch.bfloat16
    assert both[1].callback.summary.validate.replayed == 4


class Shares(Evaluated):
    """One metric for the steps of training and of validation, which is reset in between."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(4, average="micro")
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.accuracy.update(output["logits"], batch[1])
        self.mean(output["loss"].detach())
        return output

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        returned = super().validation_step(batch, batch_idx, dataloader_idx)
        self.log("val_accuracy", self.accuracy(returned["logits"], batch[1]))
        self.mean.update(returned["pair"][0])
        return returned

    def on_validation_epoch_end(self) -> None:
        self.log("val_mean", self.mean.compute())
        self.mean.reset()

    def on_train_epoch_end(self) -> None:
        self.log("both_accuracy", self.accuracy.compute())
        self.accuracy.reset()


@pytest.mark.long
def test_metrics_of_both(tmp_path: Path, accelerator: str) -> None:
    done = row(
        tmp_path,
        accelerator,
        Shares,
        ours=evaluating,
        val_loader=validations(),
        val_check_interval=2,
        max_epochs=4,
    )
    assert evaluation_of(done.graph).replayed > 10
    assert done.graph.counts.replayed > 10


class Strided(Evaluated):
    """Outputs that lie in memory in other ways than one after the other; and nothing, in a test."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        return [logits[:, 1:3], logits.t(), logits[:1].expand(5, 4), logits[:, 0]]

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log_dict({f"sum_{i}": output.sum() for i, output in enumerate(outputs)}, on_step=True)
        for i, output in enumerate(outputs):
            self.log(f"stride_{i}", float(sum(n * 100**d for d, n in enumerate(output.stride()))))

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return None


@pytest.mark.filterwarnings(*_IGNORED)
def test_strides(tmp_path: Path, accelerator: str) -> None:
    both = sessions(tmp_path, Strided, evaluating(), accelerator=accelerator)
    for session in both:
        session.run("validate", loader(seed=1))
        session.run("test", loader(seed=1))
        assert session.callback is None or session.callback.summary.test.replayed == 4
    assert_same_sessions(*both)


class Positions(Metric):
    """Its size depends on values, which an op that consists of others hides."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, labels: Tensor) -> None:
        self.total += torch.where(labels > 1)[0].sum()

    def compute(self) -> Tensor:
        return self.total


class Positioned(Evaluated):
    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.positions.update(batch[1])
        self.log("positions", self.positions)
        return super().validation_step(batch, batch_idx, dataloader_idx)


@pytest.mark.spread
@pytest.mark.filterwarnings(*_IGNORED)
@pytest.mark.parametrize("inference_mode", [True, False])
def test_metrics_on_the_host(tmp_path: Path, accelerator: str, inference_mode: bool) -> None:
    both = sessions(
        tmp_path, Positioned, evaluating(), accelerator=accelerator, inference_mode=inference_mode
    )
    for session in both:
        session.run("validate", loader(seed=1))
    assert_same_sessions(*both)
    assert both[1].callback.summary.validate.replayed == 4
    assert "called on the host after each replay: `positions`" in str(both[1].callback.summary)


class Pruned(Evaluated):
    """Weights that hooks of torch compute before each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.prune.l1_unstructured(self.head, "weight", 0.3)
        nn.utils.spectral_norm(self.features[0])

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("head", self.head.weight.norm() + self.features[0].weight.norm(), on_step=True)


@pytest.mark.long
def test_recomputed_weights(tmp_path: Path, accelerator: str) -> None:
    done = row(
        tmp_path,
        accelerator,
        Pruned,
        ours=evaluating,
        val_loader=loader(seed=1, batches=4),
        val_check_interval=4,
    )
    assert evaluation_of(done.graph).replayed > 10
    assert done.graph.counts.replayed > 10


class FailsLate(Evaluated):
    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 5:
            raise ValueError("late")


@pytest.mark.filterwarnings(*_IGNORED)
@pytest.mark.parametrize("kind", ["fit", "validate"])
def test_nothing_is_left_after_an_error(tmp_path: Path, accelerator: str, kind: str) -> None:
    session = Session(FailsLate, tmp_path, evaluating(), accelerator=accelerator)
    with pytest.raises(ValueError, match="late"):
        session.run(kind, loader(seed=1))
    assert session.callback.summary.validate.replayed > 0
    assert session.callback._runs.evaluation is None
    assert session.callback._runs._backend is None
    assert "validation_step" not in vars(session.trainer.strategy)


def test_off_and_wrong(tmp_path: Path, accelerator: str) -> None:
    trace = train(
        make(Evaluated),
        tmp_path,
        evaluating(backend="off"),
        accelerator=accelerator,
        max_epochs=1,
    )
    assert evaluation_of(trace).steps == 0
    with pytest.raises(ConfigurationError, match="evaluation='yes'"):
        CUDAGraphCallback(evaluation="yes")  # type: ignore[arg-type]


class Plainest(Evaluated):
    """A step without an index."""

    def validation_step(self, batch: Any) -> Any:
        return super().validation_step(batch, 0)


class Combined(Evaluated):
    """A step that is given batches of two dataloaders at once."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = sum(nn.functional.cross_entropy(self(x), y) for x, y in batch.values())
        self.log("val_loss", loss, batch_size=8)
        return loss


class ByLoader(Evaluated):
    """A step that does another thing for another dataloader."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        if dataloader_idx == 0:
            return super().validation_step(batch, batch_idx, dataloader_idx)
        self.log(f"other_{dataloader_idx}", self(batch[0]).std() * dataloader_idx)
        self.log(f"same_{dataloader_idx}", batch[0].mean(), add_dataloader_idx=dataloader_idx == 1)
        return None


class Sometimes(Evaluated):
    """A step that asks for the stage and the epoch."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.sanity_checking:
            return None
        self.log("val", self(batch[0]).mean() * (1 + self.current_epoch // 2))
        return None


@pytest.mark.spread
@pytest.mark.parametrize(
    ("cls", "loaders", "captures"),
    [
        (Plainest, lambda: loader(seed=1, batches=4), 2),
        (
            Combined,
            lambda: CombinedLoader(
                {"a": loader(seed=1), "b": loader(seed=2, batches=9)}, "max_size_cycle"
            ),
            3,
        ),
        (ByLoader, lambda: [*validations(), loader(seed=4)], 6),
    ],
)
@pytest.mark.parametrize("position", [0, -1])
def test_kinds_of_steps(
    tmp_path: Path,
    accelerator: str,
    cls: type[Net],
    loaders: Callable[[], Any],
    captures: int,
    position: int,
) -> None:
    """With the callback before and behind all others."""
    done = row(
        tmp_path,
        accelerator,
        cls,
        lambda folder: {"val_loader": loaders()},
        ours=evaluating,
        num_sanity_val_steps=2,
        max_epochs=5,
        limit_train_batches=5,
        position=position,
        checkpoint_every=0,
    )
    counts = evaluation_of(done.graph)
    assert counts.captures == captures, counts
    assert counts.replayed > 0
    assert not counts.eager


@pytest.mark.long
def test_values_that_move_seldom(tmp_path: Path, accelerator: str) -> None:
    done = row(
        tmp_path,
        accelerator,
        Sometimes,
        ours=evaluating,
        val_loader=loader(seed=1, batches=6, ragged=False),
        num_sanity_val_steps=6,
    )
    counts = evaluation_of(done.graph)
    assert counts.captures == 3
    assert all("`current_epoch` changed" in reason for reason in counts.recaptures)
    assert counts.replayed == 3 * 3


class Hides(Evaluated):
    """A value that no guard looks at, in an object of Python's library."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: queue.Queue[float] = queue.Queue()
        self.scales.put(1.0)

    def on_validation_batch_start(self, *args: Any) -> None:
        self.scales.queue[0] += 0.5

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]) * self.scales.queue[0]


@pytest.mark.usefixtures("only_numbers_are_checked")
@pytest.mark.filterwarnings(*_IGNORED)
def test_verified(tmp_path: Path, accelerator: str) -> None:
    """What no guard sees shows in the outputs, which are compared."""
    kwargs: dict[str, Any] = {"accelerator": accelerator}
    with pytest.raises(VerificationError, match=r"the output of `validation_step`"):
        Session(Hides, tmp_path / "raises", evaluating(), **kwargs).run("validate", loader(seed=1))
    both = sessions(tmp_path, Hides, evaluating(on_unsupported="eager"), **kwargs)
    for session in both:
        session.run("validate", loader(seed=1))
    assert_same_sessions(*both)
    assert both[1].callback.summary.validate.replayed == 1
    unchecked = Session(Hides, tmp_path / "wrong", evaluating(verify=None), **kwargs)
    unchecked.run("validate", loader(seed=1))
    assert differences(both[0].all(), unchecked.all())


class _Copies(Callback):
    """Copies the strategy and our callback in the middle of an evaluation."""

    def __init__(self) -> None:
        self.copies: list[Any] = []

    def on_validation_batch_end(self, trainer: Any, *args: Any) -> None:
        if args[3] == 5:
            self.copies.append(copy.deepcopy(trainer.strategy))
            self.copies += [pickle.loads(pickle.dumps(c)) for c in trainer.callbacks[1:2]]


def test_copies(tmp_path: Path, accelerator: str) -> None:
    callback, copies = evaluating(), _Copies()
    trace = train(
        make(Evaluated),
        tmp_path,
        callback,
        accelerator=accelerator,
        val_loader=loader(seed=1),
        callbacks=(copies,),
        position=1,
        max_epochs=1,
    )
    assert evaluation_of(trace).replayed > 0
    strategy, ours = copies.copies
    assert strategy.validation_step.__self__ is strategy
    assert (ours._runs.evaluation, ours._runs._backend, ours._runs.training) == (None, None, None)
    assert ours.summary.validate.replayed == 3


@pytest.mark.filterwarnings(*_IGNORED)
def test_nothing_is_left(tmp_path: Path, accelerator: str) -> None:
    for folder in ("a", "b"):  # fills caches
        Session(Evaluated, tmp_path / folder, evaluating(), accelerator=accelerator).run(
            "validate", loader(seed=1)
        )
    before = code_of_libraries()
    both = sessions(tmp_path, Evaluated, evaluating(), accelerator=accelerator)
    for session in both:
        session.run("validate", loader(seed=1))
    assert both[1].callback.summary.validate.replayed > 0
    after = code_of_libraries()
    assert {name for name, identity in before.items() if after.get(name) != identity} <= THEIR_OWN
    plain, graph = (
        [set(vars(part)) for part in (s.trainer.strategy, s.trainer.validate_loop, *s.module.modules())]
        for s in both
    )
    assert plain == graph


class Returns(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


class EvaluatesInside(Callback):
    """Takes a step of validation in the middle of each step of training."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        if trainer.current_epoch > 0:
            batch = trainer.strategy.batch_to_device(next(iter(trainer.val_dataloaders)))
            pl_module.eval()
            with torch.no_grad():
                self.found.append(trainer.strategy.validation_step(batch, 0).clone())
            pl_module.train()


@pytest.mark.filterwarnings(*_IGNORED)
def test_in_the_middle_of_a_replay(tmp_path: Path, accelerator: str) -> None:
    """Graphs share their memory: that of validation would write where the backward pass reads."""
    found: list[EvaluatesInside] = []

    def setting(folder: Path) -> dict[str, Any]:
        found.append(EvaluatesInside())
        return {"callbacks": (found[-1],)}

    done = row(tmp_path, accelerator, Returns, setting, ours=evaluating)
    assert done.graph.counts.replayed == 18
    counts = evaluation_of(done.graph)
    assert counts.replayed > 0
    assert counts.eager["in the middle of another step that is replayed"] == 14
    assert not differences(found[0].found, found[1].found)
