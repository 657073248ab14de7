"""torchmetrics whose state is kept in the graph: which ones are, and that all come out as without it.

`tests/gpu/test_metrics_in_graph.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torchmetrics import Metric, MetricCollection, aggregation, classification, regression
from torchmetrics.image import PeakSignalNoiseRatio
from torchmetrics.text import Perplexity
from torchmetrics.wrappers import ClasswiseWrapper, MinMaxMetric, MultioutputWrapper, Running

from lightning_cudagraph import CaptureError, CUDAGraphCallback, VerificationError
from lightning_cudagraph.device.cuda.cuda_backend import CudaBackend
from lightning_cudagraph.device.emulator.emulator_backend import EmulatorBackend
from lightning_cudagraph.tensors.state import StaticState
from lightning_cudagraph.trainer.logs.logged_step import LoggedStep
from lightning_cudagraph.trainer.metrics.reads import MetricReads, metric_reads
from tests.harness import Net, Trace, assert_same, differences, loader, make, train

pytestmark = pytest.mark.declared

LISTS = "in a list"
SYNCS = "Python branch"
UNIQUE = "unique"
MASK = "boolean mask"
RULE = "another rule"
RESETS = "resets a metric"


def _labels(logits: Tensor, y: Tensor, x: Tensor, loss: Tensor) -> tuple[Tensor, ...]:
    return logits, y


def _classes(logits: Tensor, y: Tensor, x: Tensor, loss: Tensor) -> tuple[Tensor, ...]:
    return logits.argmax(-1), y


def _yes_or_no(logits: Tensor, y: Tensor, x: Tensor, loss: Tensor) -> tuple[Tensor, ...]:
    return (logits[:, 0] > 0).long(), (y > 1).long()


def _columns(logits: Tensor, y: Tensor, x: Tensor, loss: Tensor) -> tuple[Tensor, ...]:
    return logits[:, 0], x[:, 0]  # with strides, which sums follow


def _positive(logits: Tensor, y: Tensor, x: Tensor, loss: Tensor) -> tuple[Tensor, ...]:
    return logits[:, 0].exp(), x[:, 0].exp()


def _outputs(logits: Tensor, y: Tensor, x: Tensor, loss: Tensor) -> tuple[Tensor, ...]:
    return logits, x[:, :4].contiguous()


def _shares(logits: Tensor, y: Tensor, x: Tensor, loss: Tensor) -> tuple[Tensor, ...]:
    return logits.softmax(-1), x[:, :4].softmax(-1)


def _loss(logits: Tensor, y: Tensor, x: Tensor, loss: Tensor) -> tuple[Tensor, ...]:
    return (loss,)


def _tokens(logits: Tensor, y: Tensor, x: Tensor, loss: Tensor) -> tuple[Tensor, ...]:
    return logits.view(2, -1, 4), y.view(2, -1)


def _of(cls: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: cls(*args, **kwargs)


def _micro() -> Any:
    return classification.MulticlassAccuracy(4, average="micro")


def _sum() -> Any:
    return aggregation.SumMetric(nan_strategy="disable")


# By name: what makes the metric, what it is given, and why `update` and `forward` are called on the
# host; an empty reason: in the graph.
TABLE: dict[str, tuple[Callable[[], Any], Callable[..., tuple[Tensor, ...]], str, str]] = {
    "micro": (_micro, _labels, "", ""),
    "macro": (_of(classification.MulticlassAccuracy, 4), _labels, "", ""),
    "of_classes": (_micro, _classes, UNIQUE, UNIQUE),
    "ignoring": (
        _of(classification.MulticlassAccuracy, 4, average="micro", ignore_index=0),
        _labels,
        MASK,
        MASK,
    ),
    "f1": (_of(classification.MulticlassF1Score, 4, average="micro"), _labels, "", ""),
    "exact": (_of(classification.MulticlassExactMatch, 4), _tokens, "", ""),
    "confusion": (_of(classification.MulticlassConfusionMatrix, 4), _labels, "", ""),
    "auroc": (_of(classification.MulticlassAUROC, 4, thresholds=None), _labels, LISTS, LISTS),
    "calibration": (_of(classification.MulticlassCalibrationError, 4), _labels, LISTS, LISTS),
    "binary": (_of(classification.BinaryAccuracy), _yes_or_no, UNIQUE, UNIQUE),
    "unchecked": (_of(classification.BinaryAccuracy, validate_args=False), _yes_or_no, "", ""),
    "mse": (_of(regression.MeanSquaredError), _columns, "", ""),
    "rmse": (_of(regression.MeanSquaredError, squared=False), _columns, "", ""),
    "mses": (_of(regression.MeanSquaredError, num_outputs=4), _outputs, "", ""),
    "mae": (_of(regression.MeanAbsoluteError), _columns, "", ""),
    "mape": (_of(regression.MeanAbsolutePercentageError), _columns, "", ""),
    "msle": (_of(regression.MeanSquaredLogError), _positive, "", ""),
    "log_cosh": (_of(regression.LogCoshError), _columns, "", ""),
    "minkowski": (_of(regression.MinkowskiDistance, 3), _columns, "", ""),
    "tweedie": (_of(regression.TweedieDevianceScore, 1.5), _positive, SYNCS, SYNCS),
    "divergence": (_of(regression.KLDivergence), _shares, "", ""),
    "pearson": (_of(regression.PearsonCorrCoef), _columns, "", SYNCS),
    "r2": (_of(regression.R2Score), _columns, "", SYNCS),
    "explained": (_of(regression.ExplainedVariance), _columns, "", SYNCS),
    "spearman": (_of(regression.SpearmanCorrCoef), _columns, LISTS, LISTS),
    "relative": (_of(regression.RelativeSquaredError), _columns, "", ""),
    "perplexity": (_of(Perplexity), _tokens, MASK, MASK),
    "psnr": (_of(PeakSignalNoiseRatio, data_range=1.0), _outputs, "", RULE),
    "mean": (_of(aggregation.MeanMetric), _loss, SYNCS, SYNCS),
    "trusting": (_of(aggregation.MeanMetric, nan_strategy="disable"), _loss, "", ""),
    "sum": (_sum, _loss, "", ""),
    "highest": (_of(aggregation.MaxMetric, nan_strategy="disable"), _loss, "", ""),
    "cat": (_of(aggregation.CatMetric), _loss, LISTS, LISTS),
    "running": (lambda: Running(_sum(), 3), _loss, RESETS, RESETS),
    "extremes": (lambda: MinMaxMetric(_micro()), _labels, "", SYNCS),
    "by_class": (
        lambda: ClasswiseWrapper(regression.MeanSquaredError(num_outputs=4)),
        _outputs,
        "",
        "",
    ),
    "each": (
        lambda: MultioutputWrapper(regression.MeanSquaredError(), 4, remove_nans=False),
        _outputs,
        "",
        "",
    ),
}
if torch.cuda.is_available():
    # It adds up floats with `scatter_add_`, whose order differs from run to run on CUDA.
    del TABLE["calibration"]
# What torchmetrics has to say of few samples, of lists, and of metrics that have just been reset.
UNIMPORTANT = pytest.mark.filterwarnings("ignore::UserWarning:torchmetrics.*")
_ODD_BATCHES = ("exact", "perplexity")  # cannot be given a batch of three


def on_host(trace: Trace) -> dict[str, str]:
    """The metrics that the report says are called on the host, with the reason."""
    assert trace.callback is not None
    found: dict[str, str] = {}
    for line in str(trace.callback.summary).splitlines():
        _, said, rest = line.partition("called on the host after each replay: ")
        if said:
            names, _, reason = rest.partition(" (")
            found |= dict.fromkeys(names.replace("`", "").split(", "), reason)
    return found


def both(
    build: Callable[[], Net], tmp_path: Path, accelerator: str, replays: int = 12, **kwargs: Any
) -> tuple[Trace, Trace]:
    """Train without and with the callback, and compare."""
    kwargs["accelerator"] = accelerator
    plain = train(make(build), tmp_path / "plain", **kwargs)
    graph = train(make(build), tmp_path / "graph", CUDAGraphCallback(), **kwargs)
    assert_same(plain, graph)
    if hasattr(plain.module, "seen"):
        found = differences(plain.module.seen, graph.module.seen)  # type: ignore[union-attr]
        assert not found, f"what the host saw differs at {len(found)} places, the first: {found[:8]}"
    assert graph.counts.replayed >= replays, graph.counts
    return plain, graph


def books(metric: Any) -> Any:
    """All that the host can see of a metric."""
    if isinstance(metric, MetricCollection):
        return {name: books(member) for name, member in metric.items(keep_base=True, copy_state=False)}
    cache = metric._forward_cache
    kept = tree_map(lambda leaf: leaf.detach().clone(), cache) if cache is not None else ""
    states = {
        name: value.clone() for name, value in metric.metric_state.items() if torch.is_tensor(value)
    }
    return [metric._update_count, metric._computed is None, kept, states]


class Watched(Net):
    """Looks at its metrics after every step, on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def metrics(self) -> dict[str, Any]:
        return {name: module for name, module in self.named_children() if hasattr(module, "update")}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append({name: books(metric) for name, metric in self.metrics().items()})


class ManyMetrics(Watched):
    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method
        self.all = nn.ModuleDict({name: build() for name, (build, *_) in TABLE.items()})
        for metric in self.all.values():
            metric.persistent(True)

    def metrics(self) -> dict[str, Any]:
        return dict(self.all.items())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        for name, metric in self.all.items():
            if len(y) % 2 and name in _ODD_BATCHES:
                continue
            arguments = TABLE[name][1](logits, y, x, loss)
            if self.method == "update":
                metric.update(*arguments)
            else:
                metric(*arguments)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if batch_idx % 3 == 1:
            self.seen.append({name: metric.compute() for name, metric in self.all.items()})

    def on_train_epoch_end(self) -> None:
        if self.current_epoch % 2 == 0:
            for metric in self.all.values():
                metric.reset()


@pytest.mark.long
@UNIMPORTANT
@pytest.mark.parametrize("method", ["update", "forward"])
def test_which_metrics_are_in_the_graph(tmp_path: Path, accelerator: str, method: str) -> None:
    # With `forward`, the second epoch is warmed up again: a value that the step reads was reset.
    replays = 9 if method == "update" else 7
    _, graph = both(lambda: ManyMetrics(method), tmp_path, accelerator, replays, max_epochs=2)
    found = on_host(graph)
    expected = {f"all.{name}": row[2 if method == "update" else 3] for name, row in TABLE.items()}
    wrong = {
        name: (reason, found.get(name, ""))
        for name, reason in expected.items()
        if (not reason) != (name not in found) or reason not in found.get(name, "")
    }
    assert not wrong, "expected, and found"
    assert found.keys() <= expected.keys()


class WrongClass(Net):
    """The labels of one batch have a class too many for the metric, and not for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(24, 5)
        self.confusion = classification.MulticlassConfusionMatrix(4, validate_args=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        self.confusion.update(logits[:, :4].argmax(-1), y + (x[:, 0] > 100).long() * 4)
        return nn.functional.cross_entropy(logits, y)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 5:
            batch[0][0, 0] = 1000.0


def test_a_class_too_many_is_an_error_still(tmp_path: Path, accelerator: str) -> None:
    if accelerator != "cpu":
        pytest.skip("an error of the device ends the process")
    with pytest.raises(RuntimeError, match="shape"):
        train(make(WrongClass), tmp_path / "plain", accelerator=accelerator)
    callback = CUDAGraphCallback()
    with pytest.raises(RuntimeError, match="index"):
        train(make(WrongClass), tmp_path / "graph", callback, accelerator=accelerator)
    assert callback.summary.fit.replayed >= 1


class Everyday(Watched):
    """One metric in all the ways of a tutorial; what it returns is part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = _micro()
        self.error = regression.MeanSquaredError()
        self.validated = _micro()
        for metric in self.metrics().values():
            metric.persistent(True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        loss = loss * (2 - self.accuracy(logits, y)) + self.error(logits[:, 0], x[:, 1])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True, prog_bar=True)
        self.log("error", self.error, on_step=False, on_epoch=True)
        self.log("now", self.accuracy(logits, y), on_step=True, on_epoch=True)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if self.global_step % 5 == 2:
            self.seen.append(self.accuracy.compute())
        if self.global_step % 7 == 3:
            self.error.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.validated(self(x), y)
        self.accuracy.update(self(x), y)  # the same object as in training
        self.log("val_accuracy", self.validated)

    def on_validation_epoch_end(self) -> None:
        self.seen.append(self.accuracy.compute())


@pytest.mark.long
@UNIMPORTANT
@pytest.mark.parametrize("window", [1, 2])
def test_everyday(tmp_path: Path, accelerator: str, window: int) -> None:
    _, graph = both(
        Everyday,
        tmp_path,
        accelerator,
        replays=9,
        max_epochs=4,
        val_check_interval=4,
        accumulate_grad_batches=window,
    )
    assert on_host(graph) == {}


@pytest.mark.long
@UNIMPORTANT
def test_captures_that_take_turns(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EmulatorBackend, "graphs_per_step", 2)
    _, graph = both(Everyday, tmp_path, accelerator, val_check_interval=4)
    assert on_host(graph) == {}


@pytest.mark.long
@UNIMPORTANT
def test_evaluation(tmp_path: Path, accelerator: str) -> None:
    kwargs: dict[str, Any] = {"accelerator": accelerator, "val_check_interval": 4, "max_epochs": 2}
    plain = train(make(Everyday), tmp_path / "plain", **kwargs)
    callback = CUDAGraphCallback(evaluation=True)
    graph = train(make(Everyday), tmp_path / "graph", callback, **kwargs)
    assert_same(plain, graph)
    assert differences(plain.module.seen, graph.module.seen) == []  # type: ignore[union-attr]
    assert graph.counts.replayed >= 9
    assert callback.summary.validate.replayed >= 4
    assert on_host(graph) == {}


@pytest.mark.long
def test_a_fault_in_the_states_is_found(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks of replays look at the states too."""
    capturing = False
    write_back = StaticState.write_back

    def faulty(self: StaticState) -> None:
        if capturing:
            self.put_back()  # the values stay where nobody looks for them
        else:
            write_back(self)

    for backend in (EmulatorBackend, CudaBackend):

        def capture(
            self: Any, body: Any, *args: Any, plain: Any = backend.capture, **kwargs: Any
        ) -> Any:
            nonlocal capturing
            capturing = True
            try:
                return plain(self, body, *args, **kwargs)
            finally:
                capturing = False

        monkeypatch.setattr(backend, "capture", capture)
    monkeypatch.setattr(StaticState, "write_back", faulty)
    with pytest.raises(VerificationError, match=r"(?s)state `.*` of the metric `accuracy`"):
        train(make(Everyday), tmp_path, CUDAGraphCallback(), accelerator=accelerator)


@pytest.mark.long
@UNIMPORTANT
@pytest.mark.filterwarnings("ignore:The dirpath has changed", "ignore:You.re resuming")
def test_resume_in_the_middle_of_an_epoch(tmp_path: Path, accelerator: str) -> None:
    first = train(make(Everyday), tmp_path / "first", accelerator=accelerator, max_epochs=1)
    assert "epoch=0-step=4.ckpt" in first.checkpoints
    both(
        Everyday,
        tmp_path,
        accelerator,
        ckpt_path=str(tmp_path / "first" / "ckpt" / "epoch=0-step=4.ckpt"),
    )


class Collections(Watched):
    def __init__(self, groups: bool | list[list[str]] = True) -> None:
        super().__init__()
        kwargs: dict[str, Any] = {"num_classes": 4, "average": "micro"}
        rates = {
            "precision": classification.MulticlassPrecision(**kwargs),
            "recall": classification.MulticlassRecall(**kwargs),
            "auroc": classification.MulticlassAUROC(4, thresholds=None),
        }
        errors = {"mse": regression.MeanSquaredError(), "mae": regression.MeanAbsoluteError()}
        self.updated = MetricCollection(rates, prefix="all_", compute_groups=groups)
        self.called = MetricCollection(rates, postfix="_now", compute_groups=groups).clone()
        self.errors = MetricCollection(errors, prefix="train_").clone()
        self.by_class = MetricCollection(
            {"mses": ClasswiseWrapper(regression.MeanSquaredError(num_outputs=4))}
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.updated.update(logits.softmax(-1), y)
        self.called(logits.softmax(-1), y)
        self.log_dict({"p": self.called["precision"], "r": self.called["recall"]}, on_epoch=True)
        now = self.errors(logits[:, 0], x[:, 0])
        self.log_dict({f"{name}_now": value for name, value in now.items()})
        self.log_dict(self.errors, on_step=False, on_epoch=True)
        self.log_dict(self.by_class(logits, x[:, :4].contiguous()))
        self.log("loss", loss + now["train_mae"])
        return loss + now["train_mae"]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if batch_idx % 3 == 1:
            self.seen.append(self.updated.compute())
            self.seen.append(self.updated["all_recall"].compute())  # copies the states of its group
        if self.global_step % 7 == 5:
            self.updated.reset()

    def on_train_epoch_end(self) -> None:
        self.updated.reset()
        self.called.reset()


@pytest.mark.long
@UNIMPORTANT
@pytest.mark.parametrize("groups", [True, False, [["precision", "recall"], ["auroc"]]])
def test_collections(tmp_path: Path, accelerator: str, groups: bool | list[list[str]]) -> None:
    _, graph = both(lambda: Collections(groups), tmp_path, accelerator)
    found = on_host(graph)
    whole = isinstance(groups, list)  # its groups are there from the start, so that `forward` is odd
    expected = {"updated.auroc"} | ({"called"} if whole else {"called.auroc"})
    assert found.keys() == expected


class Twice(Watched):
    """The same metrics called in several ways in one step."""

    def __init__(self) -> None:
        super().__init__()
        self.both = _micro()
        self.alone = _micro()
        self.group = MetricCollection(
            {
                "accuracy": self.alone,
                "recall": classification.MulticlassRecall(4, average="micro"),
            }
        )
        self.inner = _sum()
        self.outer = Running(self.inner, 3)
        self.one = regression.MeanSquaredError()
        self.same = self.one

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.both.update(logits, y)
        self.log("both", self.both(logits.flip(0), y))
        self.log("all", self.both)
        self.both.update(logits.flip(0), y)
        self.group.update(logits, y)
        self.group["recall"].update(logits, y)
        self.alone.update(logits.flip(0), y)
        self.inner.update(loss)
        self.outer.update(loss)
        self.one.update(logits[:, 0], x[:, 0])
        self.same.update(logits[:, 1], x[:, 1])
        self.log("loss", loss)
        return loss


@pytest.mark.long
def test_several_calls_in_one_step(tmp_path: Path, accelerator: str) -> None:
    _, graph = both(Twice, tmp_path, accelerator)
    found = on_host(graph)
    # A group shares a state that `update` rebinds in one member, and this one is called alone too.
    assert found.keys() == {"alone", "group.recall", "inner", "outer"}


class OwnMean(Metric):
    """Tensors alone."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")
        self.weight = 1.0

    def update(self, value: Tensor) -> None:
        self.total = self.total + value.detach().sum() * self.weight
        self.count += value.numel()

    def compute(self) -> Tensor:
        return self.total / self.count


class Counts(OwnMean):
    """Counts on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def update(self, value: Tensor) -> None:
        self.n += 1
        super().update(value * self.n)


class Keeps(OwnMean):
    """Keeps a list that is no state."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[Tensor] = []

    def update(self, value: Tensor) -> None:
        self.history.append(value.detach())
        super().update(value)


class Asks(OwnMean):
    """Weighs by the number of the call."""

    def update(self, value: Tensor) -> None:
        super().update(value * self._update_count)


class Swaps(OwnMean):
    """A state is the one that another was before."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("before", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, value: Tensor) -> None:
        self.before = self.total
        super().update(value)


class Shares(OwnMean):
    """Two states in one memory."""

    def __init__(self) -> None:
        super().__init__()
        zero = torch.zeros(())
        self.add_state("one", zero, dist_reduce_fx="sum")
        self.add_state("other", zero, dist_reduce_fx="sum")

    def update(self, value: Tensor) -> None:
        self.one += value.detach().sum()
        super().update(value)


class Remembers(OwnMean):
    """Another attribute is a new tensor each time."""

    last: Tensor

    def update(self, value: Tensor) -> None:
        self.last = value.detach()
        super().update(value)


class Grows(OwnMean):
    """A state gets longer."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("longer", torch.zeros(1), dist_reduce_fx="sum")

    def update(self, value: Tensor) -> None:
        self.longer = torch.cat([self.longer, self.longer[-1:] + value.detach().reshape(1)])
        super().update(value)


class Draws(OwnMean):
    """Adds noise."""

    def update(self, value: Tensor) -> None:
        super().update(value + torch.rand_like(value))


class Says(OwnMean):
    """Prints."""

    def update(self, value: Tensor) -> None:
        print("a call")
        super().update(value)


OWN: dict[str, tuple[type[Metric], str]] = {
    "own": (OwnMean, ""),
    "counts": (Counts, "sets or changes `n`"),
    "keeps": (Keeps, "sets or changes `history`"),
    "asks": (Asks, "reads `_update_count`"),
    "swaps": (Swaps, ""),
    "shares": (Shares, "in the same memory"),
    "remembers": (Remembers, "sets or changes `last`"),
    "grows": (Grows, "changes what the state `longer`"),
    "draws": (Draws, "draws random numbers"),
    "says": (Says, "`print`"),
}


class OwnMetrics(Watched):
    def __init__(self) -> None:
        super().__init__()
        for name, (cls, _) in OWN.items():
            self.add_module(name, cls())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        for name in OWN:
            self.get_submodule(name).update(loss)
        self.log("own", self.get_submodule("own"))
        self.log("loss", loss)
        return loss


@pytest.mark.long
def test_own_metrics(tmp_path: Path, accelerator: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain = train(make(OwnMetrics), tmp_path / "plain", accelerator=accelerator)
    said = capsys.readouterr().out.count("a call")
    callback = CUDAGraphCallback()
    graph = train(make(OwnMetrics), tmp_path / "graph", callback, accelerator=accelerator)
    assert capsys.readouterr().out.count("a call") == said == 24
    assert_same(plain, graph)
    assert differences(plain.module.seen, graph.module.seen) == []  # type: ignore[union-attr]
    assert graph.counts.replayed >= 12
    found = on_host(graph)
    if accelerator == "gpu":
        found.setdefault("shares", OWN["shares"][1])  # moved to the GPU, its states lie apart
    wrong = {n: found.get(n) for n, (_, why) in OWN.items() if bool(why) != (n in found)}
    assert not wrong
    for name, reason in found.items():
        assert OWN[name][1] in reason


class Hidden(Watched):
    """Metrics made late, and in a place that no module knows."""

    def setup(self, stage: str) -> None:
        self.late = _micro().to(self.device)
        self.hidden = {"train": {"error": [regression.MeanSquaredError()]}}

    def metrics(self) -> dict[str, Any]:
        return {"late": self.late, "hidden": self.hidden["train"]["error"][0]}

    def on_fit_start(self) -> None:
        for metric in self.metrics().values():
            metric.to(self.device)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        self.log("late", self.late(logits, y))
        self.log("hidden", self.hidden["train"]["error"][0](logits[:, 0], x[:, 0]))
        return nn.functional.cross_entropy(logits, y)


@pytest.mark.long
def test_metrics_that_no_module_knows(tmp_path: Path, accelerator: str) -> None:
    _, graph = both(Hidden, tmp_path, accelerator)
    assert on_host(graph) == {}


OUTSIDE = _micro()


class Outside(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        OUTSIDE.to(logits.device).update(logits, batch[1])
        return nn.functional.cross_entropy(logits, batch[1])


def test_a_metric_outside_the_model(tmp_path: Path, accelerator: str) -> None:
    with pytest.raises(CaptureError, match=r"(?s)`MulticlassAccuracy` that is no attribute.*py:\d+"):
        train(make(Outside), tmp_path, CUDAGraphCallback(), accelerator=accelerator)
    assert isinstance(OUTSIDE.update_count, int)
    OUTSIDE.reset()


class Meddles(Watched):
    """The host changes a metric, and keeps states, while the graph is there."""

    def __init__(self) -> None:
        super().__init__()
        self.own = OwnMean()
        self.error = regression.MeanSquaredError()
        self.kept: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.own(loss)
        self.error.update(logits[:, 0], x[:, 0])
        self.log("own", self.own)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.kept.append((self.own.total, self.own.count, self.error.sum_squared_error))
        if self.global_step == 7:
            self.own.weight = 0.5
        if self.global_step == 12:
            self.error.set_dtype(torch.float64)
        if self.global_step == 17:
            one = torch.ones((), device=self.device)
            state = {"total": one, "count": 3 * one.long()}
            self.own.persistent(True)
            self.own.load_state_dict(state)

    def on_train_end(self) -> None:
        self.seen += self.kept  # tensors that an eager step writes into have changed, the others not


@pytest.mark.long
def test_the_host_changes_a_metric(tmp_path: Path, accelerator: str) -> None:
    _, graph = both(Meddles, tmp_path, accelerator, 9)
    assert on_host(graph) == {}
    assert len(graph.counts.recaptures) == 2
    assert "`weight` of `own`" in graph.counts.recaptures[0]
    assert "state `sum_squared_error` of the metric `error`" in graph.counts.recaptures[1]


class Fails(Watched):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = _micro()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        self.log("accuracy", self.accuracy(logits, batch[1]))
        loss = nn.functional.cross_entropy(logits, batch[1])
        return loss * 1.0 if loss.item() > 0 else loss


def test_a_capture_that_fails_leaves_metrics_alone(tmp_path: Path, accelerator: str) -> None:
    plain = train(make(Fails), tmp_path / "plain", accelerator=accelerator)
    callback = CUDAGraphCallback(on_unsupported="eager")
    eager = train(make(Fails), tmp_path / "eager", callback, accelerator=accelerator)
    assert eager.counts.replayed == 0
    assert_same(plain, eager)
    assert differences(plain.module.seen, eager.module.seen) == []  # type: ignore[union-attr]


class Cheap(Net):
    def __init__(self, metrics: int) -> None:
        super().__init__()
        self.all = nn.ModuleList([_micro() for _ in range(metrics)])
        self.ops = -1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        for metric in self.all:
            metric(logits, batch[1])
        return nn.functional.cross_entropy(logits, batch[1])


class _Ops(TorchDispatchMode):
    """Counts what is launched from the host; replays of the emulator launch below it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.long
def test_a_metric_in_the_graph_launches_nothing(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: dict[int, list[str]] = {}
    for metrics in (1, 6):
        per_step: list[list[str]] = []

        def counted(
            self: Any, *args: Any, per_step: Any = per_step, plain: Any = LoggedStep.hand_over
        ) -> Any:
            with _Ops() as counter:
                result = plain(self, *args)
            per_step.append(counter.ops)
            return result

        with monkeypatch.context() as patch:
            patch.setattr(LoggedStep, "hand_over", counted)
            _, graph = both(lambda m=metrics: Cheap(m), tmp_path / str(metrics), accelerator)
        assert on_host(graph) == {}
        launched[metrics] = per_step[-1]
    # One copy of all the results together, however many there are; the rest are views of it.
    assert [op for op in launched[6] if "clone" in op] == ["aten.clone.default"]
    assert launched[1] == launched[6]


class OfTheHost(Net):
    """The step reads what the host has put into a metric once in an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.best = aggregation.MaxMetric(nan_strategy="disable")
        self.kept = aggregation.CatMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss * self.factor()

    def factor(self) -> Any:
        return 1.0

    def on_train_epoch_end(self) -> None:
        self.best.update(torch.tensor(0.3 * (1 + self.current_epoch), device=self.device))
        self.best.compute()
        self.kept.update(torch.ones(2, device=self.device))


class ReadsState(OfTheHost):
    def factor(self) -> Any:
        return 1 + self.best.max_value.clamp(0, 1)


class ReadsCount(OfTheHost):
    def factor(self) -> Any:
        return 1 + self.best.update_count


class ReadsCalled(OfTheHost):
    def factor(self) -> Any:
        return 0.5 if self.best.update_called else 1.0


class ReadsComputed(OfTheHost):
    def factor(self) -> Any:
        return 2.0 if self.best._computed is None else self.best._computed


class ReadsLength(OfTheHost):
    def factor(self) -> Any:
        return 1 + len(self.kept.value)


class ReadsByText(OfTheHost):
    def factor(self) -> Any:
        return 1 + vars(self.best)["_update_count"]


OF_THE_HOST = {
    ReadsState: r"`max_value` of a `MaxMetric` changed",
    ReadsCount: r"`_update_count` of a `MaxMetric` changed from 0 to 1",
    ReadsCalled: r"`_update_count` of a `MaxMetric` changed from 0 to 1",
    ReadsComputed: r"`_computed` of a `MaxMetric` changed",
    ReadsLength: r"`value[0]` of a `CatMetric` was set",
    ReadsByText: r"of a `MaxMetric` changed",
}


@pytest.mark.spread(2)
@pytest.mark.parametrize("cls", OF_THE_HOST, ids=lambda cls: cls.__name__)
def test_a_metric_of_the_host_that_the_step_reads(
    tmp_path: Path, accelerator: str, cls: type[Net]
) -> None:
    plain = train(make(cls), tmp_path / "plain", accelerator=accelerator)
    callback = CUDAGraphCallback(verify=None)
    graph = train(make(cls), tmp_path / "graph", callback, accelerator=accelerator)
    assert_same(plain, graph)
    assert graph.counts.captures == 3
    assert graph.counts.replayed == 12
    assert OF_THE_HOST[cls] in graph.counts.recaptures[0]


class Unread(OfTheHost):
    """Other things have the names of states."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.best.update(self.head.weight.detach().max())
        self.running(self.head.weight.detach())
        return super().training_step(batch, batch_idx)

    def __init__(self) -> None:
        super().__init__()
        self.running = aggregation.MeanMetric()  # has states `mean_value` and `weight`


@pytest.mark.long
def test_names_of_states_are_not_reads(tmp_path: Path, accelerator: str) -> None:
    _, graph = both(Unread, tmp_path, accelerator)
    assert not graph.counts.recaptures


class ReadsPutOff(Net):
    def __init__(self) -> None:
        super().__init__()
        self.mean = aggregation.MeanMetric()
        self.sure = _sum()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        before = self.before()
        self.mean.update(loss.detach())
        self.sure.update(loss.detach())
        return loss * before / self.after()

    def before(self) -> Any:
        return 1.0

    def after(self) -> Any:
        return 1.0


class After(ReadsPutOff):
    def after(self) -> Any:
        return self.mean.mean_value


class Before(ReadsPutOff):
    def before(self) -> Any:
        return 1 / (1 + self.mean.weight)


class CountAfter(ReadsPutOff):
    def after(self) -> Any:
        return self.mean.update_count


class CountInGraph(ReadsPutOff):
    def after(self) -> Any:
        return self.sure._update_count


PUT_OFF = {
    After: r"a read of `mean_value` of the metric `mean`.*put off.*test_metrics_in_graph\.py:\d+",
    Before: r"a read of `weight` of the metric `mean`.*put off.*test_metrics_in_graph\.py:\d+",
    CountAfter: r"a read of `_update_count` of the metric `mean`.*test_metrics_in_graph\.py:\d+",
    CountInGraph: r"a read of `_update_count` of a `SumMetric`.*test_metrics_in_graph\.py:\d+",
}


@pytest.mark.long
@pytest.mark.spread(2)
@pytest.mark.parametrize("cls", PUT_OFF, ids=lambda cls: cls.__name__)
def test_the_state_of_a_metric_that_is_put_off_is_not_read(
    tmp_path: Path, accelerator: str, cls: type[Net]
) -> None:
    plainly = Metric.__getattribute__
    with pytest.raises(CaptureError, match=f"(?s){PUT_OFF[cls]}"):
        train(make(cls), tmp_path / "raise", CUDAGraphCallback(), accelerator=accelerator)
    assert Metric.__getattribute__ is plainly
    plain = train(make(cls), tmp_path / "plain", accelerator=accelerator)
    callback = CUDAGraphCallback(on_unsupported="eager")
    eager = train(make(cls), tmp_path / "eager", callback, accelerator=accelerator)
    assert eager.counts.replayed == 0
    assert_same(plain, eager)


def test_reads_are_noted_inside_one_another() -> None:
    plainly = Metric.__getattribute__
    metric, outer, inner = aggregation.MeanMetric(), MetricReads(), MetricReads()
    names = frozenset({"weight", "mean_value"})
    with metric_reads(outer.note):
        with metric_reads(inner.note):
            _ = metric.weight
        _ = metric.mean_value
    assert Metric.__getattribute__ is plainly
    assert [reads.first_of(metric, names) is not None for reads in (inner, outer)] == [True, True]
    assert inner.first_of(metric, frozenset({"mean_value"})) is None
    assert outer.first_of(metric, frozenset({"mean_value"})) is not None


class ReadsPutOffInEvaluation(Net):
    def __init__(self) -> None:
        super().__init__()
        self.mean = aggregation.MeanMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.mean.update(nn.functional.cross_entropy(self(batch[0]), batch[1]))
        self.log("running", self.mean.mean_value / self.mean.weight)


def test_nor_in_evaluation(tmp_path: Path, accelerator: str) -> None:
    with pytest.raises(CaptureError, match="a read of `mean_value` of the metric `mean`"):
        train(
            make(ReadsPutOffInEvaluation),
            tmp_path,
            CUDAGraphCallback(evaluation=True),
            accelerator=accelerator,
            val_loader=loader(seed=1, batches=6),
        )
