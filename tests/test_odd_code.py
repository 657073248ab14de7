"""Plausible code that a careless capture gets wrong: the same numbers, or a refusal."""

from __future__ import annotations

import cProfile
import logging
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loops.optimization.automatic import (
    Closure,
    ClosureResult,
    _AutomaticOptimization,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from lightning_cudagraph import CUDAGraphCallback, UnsupportedError
from tests.harness import Net, Trace, assert_same, make, train

log = logging.getLogger(__name__)


class ChangesAt(Net):
    """Something outside the step changes before step 13, in the middle of an epoch."""

    def change(self) -> None:
        raise AssertionError("overridden")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 13:
            self.change()


class GoesIntoEval(ChangesAt):
    def change(self) -> None:
        self.features[3].eval()


class Freezes(ChangesAt):
    def change(self) -> None:
        self.head.requires_grad_(False)


class RebindsABuffer(ChangesAt):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("temperature", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.temperature

    def change(self) -> None:
        self.temperature = self.temperature * 0.5


class Scaled(ChangesAt):
    """The output depends on a number, which the change makes another one."""

    def number(self) -> Any:
        raise AssertionError("overridden")

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.number()


class MovesToTheNextDeque(Scaled):
    """All members of the two, one after the other, stay the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = deque([0.5, 1.5]), deque([2.5])

    def number(self) -> Any:
        return sum(self.first) / sum(self.second)

    def change(self) -> None:
        self.second.appendleft(self.first.pop())


class MovesToTheNextList(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = [0.5, 1.5], [2.5]

    def number(self) -> Any:
        return sum(self.first) / sum(self.second)

    def change(self) -> None:
        self.second.append(self.first.pop(0))  # the garbage collector begins at the end


class RegistersABuffer(Scaled):
    def number(self) -> Any:
        return 1.0 + sum(buffer.sum() for buffer in self.head.buffers())

    def change(self) -> None:
        self.head.register_buffer("offset", torch.ones(()), persistent=False)


class MovesABuffer(Scaled):
    def __init__(self) -> None:
        super().__init__()
        for name, value in (("low", 0.5), ("high", 1.5)):
            self.head.register_buffer(name, torch.tensor(value))

    def number(self) -> Any:
        return next(self.head.buffers())

    def change(self) -> None:
        self.head.register_buffer("low", self.head._buffers.pop("low"))


class One:
    def number(self) -> float:
        return 1.0


class Two:
    def number(self) -> float:
        return 2.0


class AnotherBase(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.kind: Any = type("Kind", (type("Base", (One,), {}),), {})

    def number(self) -> Any:
        return self.kind().number()

    def change(self) -> None:
        self.kind.__base__.__bases__ = (Two,)


class AnotherFactory(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.numbers: Any = defaultdict(lambda: 1.0)

    def number(self) -> Any:
        return self.numbers.default_factory()

    def change(self) -> None:
        self.numbers.default_factory = lambda: 2.0


class AnotherCall(Scaled):
    """A special method, which no code mentions."""

    def __init__(self) -> None:
        super().__init__()
        self.called: Any = type("Called", (), {"__call__": lambda called: 1.0})()

    def number(self) -> Any:
        return self.called()

    def change(self) -> None:
        type(self.called).__call__ = lambda called: 2.0


class AnotherSign(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.zero = complex(0.0, 0.0)

    def number(self) -> Any:
        return 2.0 + math.copysign(1.0, self.zero.imag)

    def change(self) -> None:
        self.zero = complex(0.0, -0.0)


class ClampsStorages(ChangesAt):
    def change(self) -> None:
        for parameter in self.parameters():
            parameter.data = parameter.data.clamp(-0.2, 0.2)


class LoadsTheOptimizer(ChangesAt):
    def change(self) -> None:
        optimizer = self.trainer.optimizers[0]
        optimizer.load_state_dict(optimizer.state_dict())


class AnotherOptimizer(ChangesAt):
    def change(self) -> None:
        self.trainer.optimizers = [torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)]


class AddsAGroup(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.features.parameters(), lr=0.1, momentum=0.9)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.optimizers[0].add_param_group({"params": self.head.parameters(), "lr": 0.05})


class TensorLrThenFloats(Net):
    def configure_optimizers(self) -> Any:
        lr = torch.tensor(1e-2, device=self.device)
        return torch.optim.AdamW(self.parameters(), lr=lr, fused=True, capturable=True)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step >= 10:
            self.trainer.optimizers[0].param_groups[0]["lr"] = 0.01 / (1 + self.global_step)


class ClipsMoreThanItSteps(Net):
    """The gradients of what is not stepped add up, and count in the norm."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), lr=0.1)

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.5)


class TiedWeights(Net):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 12), nn.Linear(12, 12)
        self.down.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.down(self.up(x)))


class Recurrent(Net):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 12, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.lstm(x.view(-1, 4, 3))[0][:, -1])


class Checkpointed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12))

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.block, x, use_reentrant=False, preserve_rng_state=False)
        return super().forward(x)


class DetachedHead(Net):
    """A timed layer whose backward pass never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = nn.Linear(24, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.features(x)
        self.log("probe", self.probe(hidden).mean())
        return self.head(hidden)


class WritesToALog(Net):
    def forward(self, x: Tensor) -> Tensor:
        log.info("a batch of %s", x.shape)
        return super().forward(x)


@dataclass
class Output:
    hidden: Tensor
    label: str = "x"


class ReturnsADataclass(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        return {"loss": result["loss"], "out": Output(result["logits"])}


class DoublePrecisionHead(Net):
    def __init__(self) -> None:
        super().__init__(lambda p: torch.optim.SGD(p, lr=0.0123456, momentum=0.9))
        self.head = self.head.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).double()).float()


class ClassAttribute(ChangesAt):
    weight = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"] * self.weight

    def change(self) -> None:
        self.weight = 0.5


class LossWeightPerEpoch(Net):
    weight = 1.0

    def on_train_epoch_start(self) -> None:
        self.weight = 0.5**self.current_epoch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"] * self.weight


class DropoutPerEpoch(Net):
    def on_train_epoch_start(self) -> None:
        self.features[3].p = 0.3 - 0.1 * self.current_epoch


class TensorAttribute(ChangesAt):
    def on_fit_start(self) -> None:
        self.class_weight = torch.ones(4, device=self.device)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self(batch[0]), batch[1], weight=self.class_weight)

    def change(self) -> None:
        self.class_weight = torch.tensor([1.0, 2.0, 3.0, 4.0], device=self.device)


class SwapsTheLoss(ChangesAt):
    def __init__(self) -> None:
        super().__init__()
        self.loss_fn = nn.functional.cross_entropy

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss_fn(self(batch[0]), batch[1])

    def change(self) -> None:
        self.loss_fn = nn.functional.multi_margin_loss


TEMPERATURE = 1.0


class ReadsAModulesGlobal(ChangesAt):
    def on_fit_start(self) -> None:
        globals()["TEMPERATURE"] = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / TEMPERATURE

    def change(self) -> None:
        globals()["TEMPERATURE"] = 2.0


class HParams(ChangesAt):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"] * self.hparams.scale

    def change(self) -> None:
        self.hparams.scale = 0.5


class ZeroesEveryFourth(Net):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 4 == 0:
            optimizer.zero_grad()


class Adversarial(Net):
    """Trains on batches that are moved along the gradient of the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        x.requires_grad_()
        nn.functional.cross_entropy(self(x), y).backward(inputs=[x])
        return nn.functional.cross_entropy(self(x.detach() + 0.1 * x.grad.sign()), y)


class OneHot(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        labels = nn.functional.one_hot(y, num_classes=4).float()
        return nn.functional.mse_loss(self(x).softmax(-1), labels)


class IndexesWithIndex(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"] + self.head.weight[batch_idx % 2].sum()


class SetsTheLrInside(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.05


SAME: list[type[Net]] = [
    ZeroesEveryFourth,
    ClassAttribute,
    LossWeightPerEpoch,
    DropoutPerEpoch,
    TensorAttribute,
    SwapsTheLoss,
    ReadsAModulesGlobal,
    HParams,
    GoesIntoEval,
    Freezes,
    RebindsABuffer,
    MovesToTheNextDeque,
    MovesToTheNextList,
    RegistersABuffer,
    MovesABuffer,
    AnotherBase,
    AnotherFactory,
    AnotherCall,
    AnotherSign,
    ClampsStorages,
    LoadsTheOptimizer,
    AnotherOptimizer,
    AddsAGroup,
    TensorLrThenFloats,
    ClipsMoreThanItSteps,
    TiedWeights,
    Recurrent,
    Checkpointed,
    DetachedHead,
    WritesToALog,
    ReturnsADataclass,
    DoublePrecisionHead,
    Adversarial,
    IndexesWithIndex,
    OneHot,
    SetsTheLrInside,
]


@pytest.mark.spread(2)
@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
@pytest.mark.parametrize("cls", SAME, ids=lambda cls: cls.__name__)
def test_same(tmp_path: Path, accelerator: str, cls: type[Net]) -> None:
    plain = train(make(cls), tmp_path / "plain", accelerator=accelerator)
    graph = train(make(cls), tmp_path / "graph", CUDAGraphCallback(), accelerator=accelerator)
    assert_same(plain, graph)
    assert graph.counts.replayed > 10


class LossWeightPerStep(Net):
    weight = 1.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.weight = 0.9**self.global_step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"] * self.weight


@pytest.mark.long
def test_what_changes_every_step_ends_without_a_graph(tmp_path: Path, accelerator: str) -> None:
    kwargs: dict[str, Any] = {"accelerator": accelerator, "max_epochs": 5}
    plain = train(make(LossWeightPerStep), tmp_path / "plain", **kwargs)
    graph = train(make(LossWeightPerStep), tmp_path / "graph", CUDAGraphCallback(timings=None), **kwargs)
    assert_same(plain, graph)
    assert "`weight` of the `LossWeightPerStep` changed from" in graph.counts.recaptures[0]
    assert any("given up after 8 captures" in reason for reason in graph.counts.eager)


class CountsForItself(Net):
    """Attributes that change, and that the step does not mention, are nobody's business."""

    seen = 0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen = self.seen + 1
        self.last_outputs = outputs


@pytest.mark.long
def test_what_the_step_does_not_mention_may_change(tmp_path: Path, accelerator: str) -> None:
    plain = train(make(CountsForItself), tmp_path / "plain", accelerator=accelerator)
    callback = CUDAGraphCallback()
    graph = train(make(CountsForItself), tmp_path / "graph", callback, accelerator=accelerator)
    assert_same(plain, graph)
    assert graph.counts.captures == 1


class IndexTimesTensor(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"] * (batch_idx + 1)


class TensorTimesIndex(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"] * batch_idx


class FloatTimesIndex(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"] * (1 + 0.1 * batch_idx)


class CountsToIndex(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"] + sum(range(batch_idx))


class ReturnsIndex(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx)["loss"], "index": batch_idx}


class SwapsStorageInside(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.head.bias.data = self.head.bias.data * 0.9
        return super().training_step(batch, batch_idx)["loss"]


class WritesIntoTheBatch(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch[0].mul_(0.5)
        return super().training_step(batch, batch_idx)["loss"]


class SparseInside(Net):
    def forward(self, x: Tensor) -> Tensor:
        neighbours = torch.eye(x.shape[1], device=x.device).to_sparse()
        return super().forward(torch.sparse.mm(neighbours, x.t()).t())


class SparseRowsInside(Net):
    def forward(self, x: Tensor) -> Tensor:
        neighbours = torch.eye(x.shape[1], device=x.device).to_sparse_csr()
        return super().forward(torch.sparse.mm(neighbours, x.t()).t())


REFUSED: dict[type[Net], str] = {
    SparseRowsInside: r"layout `torch.sparse_c.*`\.\n  found at .*test_odd_code\.py",
    SparseInside: r"hold a tensor of the layout `torch.sparse_coo`\.\n  found at .*test_odd_code\.py",
    IndexTimesTensor: "`batch_idx`",
    TensorTimesIndex: "`batch_idx`",
    FloatTimesIndex: "`batch_idx`",
    CountsToIndex: "`batch_idx`",
    ReturnsIndex: "read of `batch_idx`",
    SwapsStorageInside: "gives `head.bias` another storage",
    WritesIntoTheBatch: r"writes into `batch\[0\]` in place\.\n  found at .*test_odd_code\.py",
}


@pytest.mark.spread(2)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("cls", REFUSED, ids=lambda cls: cls.__name__)
def test_refused_and_the_same_eagerly(tmp_path: Path, accelerator: str, cls: type[Net]) -> None:
    with pytest.raises(UnsupportedError, match=f"(?s){REFUSED[cls]}"):
        train(make(cls), tmp_path / "raise", CUDAGraphCallback(), accelerator=accelerator)
    callback = CUDAGraphCallback(on_unsupported="eager")
    plain = train(make(cls), tmp_path / "plain", accelerator=accelerator)
    eager = train(make(cls), tmp_path / "eager", callback, accelerator=accelerator)
    assert_same(plain, eager)


class Sharing(MutableMapping[str, Any]):
    """A mapping whose shallow copy shares its items."""

    def __init__(self, items: Any) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


@dataclass
class WithHidden:
    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        self.twice = self.x * 2


@dataclass
class Fields:
    x: Tensor
    y: Tensor
    extra: dict[str, Any] = field(default_factory=dict)


class MyTensor(Tensor):
    pass


def _xy(index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(8, 12, generator=generator), torch.randint(0, 4, (8,), generator=generator)


def _shared(index: int) -> Any:
    x, y = _xy(index)
    return Sharing({"x": x, "y": y})


def _hidden(index: int) -> Any:
    return WithHidden(*_xy(index))


def _subclass(index: int) -> Any:
    x, y = _xy(index)
    return Fields(x.as_subclass(MyTensor), y)


def _opaque(index: int) -> Any:
    return Fields(*_xy(index), {"when": object()})


def _expanded(index: int) -> Any:
    x, y = _xy(index)
    return Fields(x[:1].expand(8, 12), y)


def _fields(index: int) -> Any:
    return Fields(*_xy(index), {"ids": [1, 2], "name": "a", "none": None})


class Batches(Dataset[Any]):
    def __init__(self, build: Callable[[int], Any]) -> None:
        self.build = build

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.build(index)


class TakesFields(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = (batch["x"], batch["y"]) if isinstance(batch, Sharing) else (batch.x, batch.y)
        return nn.functional.cross_entropy(self(x.as_subclass(Tensor)), y)


@pytest.mark.spread
@pytest.mark.parametrize("build", [_fields, _expanded])
def test_batches_that_can_be_copied(tmp_path: Path, accelerator: str, build: Any) -> None:
    kwargs: dict[str, Any] = {"train_loader": DataLoader(Batches(build), batch_size=None)}
    kwargs["accelerator"] = accelerator
    plain = train(make(TakesFields), tmp_path / "plain", **kwargs)
    graph = train(make(TakesFields), tmp_path / "graph", CUDAGraphCallback(), **kwargs)
    assert_same(plain, graph)
    assert graph.counts.captures == 1


@pytest.mark.spread
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (_shared, r"a `Sharing` that cannot be copied"),
        (_hidden, r"`batch` is a `WithHidden`, which holds a tensor at `batch.twice`"),
        (_subclass, r"`batch.x` is a `MyTensor`"),
        (_opaque, r"`batch.extra\['when'\]` is a `object`"),
    ],
)
def test_batches_that_cannot_be_copied(
    tmp_path: Path, accelerator: str, build: Any, message: str
) -> None:
    kwargs: dict[str, Any] = {"train_loader": DataLoader(Batches(build), batch_size=None)}
    kwargs["accelerator"] = accelerator
    with pytest.raises(UnsupportedError, match=f"(?s){message}"):
        train(make(TakesFields), tmp_path / "raise", CUDAGraphCallback(), **kwargs)
    callback = CUDAGraphCallback(on_unsupported="eager")
    eager = train(make(TakesFields), tmp_path / "eager", callback, **kwargs)
    assert eager.counts.captures == 0
    assert eager.final["global_step"] == 24


class BreaksOnException(Callback):
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        raise RuntimeError("while handling another")


class FailsOnce(Net):
    fails = True

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.fails and self.global_step == 6:
            raise ValueError("once")


@pytest.mark.long
def test_a_fit_after_one_that_never_reached_our_hooks(tmp_path: Path, accelerator: str) -> None:
    import lightning.pytorch as pl

    from tests.harness import loader

    callback = CUDAGraphCallback()
    trainer = pl.Trainer(
        callbacks=[BreaksOnException(), callback],
        accelerator=accelerator,
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = make(FailsOnce)
    with pytest.raises(RuntimeError, match="while handling another"):
        trainer.fit(module, loader(), loader(batches=1))
    FailsOnce.fails = False
    try:
        trainer.fit_loop.epoch_loop.reset()
        trainer.fit(module, loader(), loader(batches=1))
    finally:
        FailsOnce.fails = True
    assert "optimizer_step" not in vars(trainer.strategy)
    assert "_make_closure" not in vars(trainer.fit_loop.epoch_loop.automatic_optimization)


class OwnClosure(Closure):
    """A closure of user code, which halves the loss."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step_fn = self._step_fn

        def half() -> ClosureResult:
            result = step_fn()
            result.closure_loss = result.closure_loss / 2
            return result

        self._step_fn = half
        return super().__call__(*args, **kwargs)


class MakesClosures(Callback):
    """A callback that sets another method of the automatic optimization."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        optimization = trainer.fit_loop.epoch_loop.automatic_optimization
        make_closure = optimization._make_closure

        def own(*args: Any, **kwargs: Any) -> OwnClosure:
            closure = make_closure(*args, **kwargs)
            return OwnClosure(closure._step_fn, closure._backward_fn, closure._zero_grad_fn)

        optimization._make_closure = own


class Skips(Callback):
    """A callback with an automatic optimization of its own, which leaves out every third batch."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        class Own(_AutomaticOptimization):
            def run(self, optimizer: Any, batch_idx: int, kwargs: Any) -> Any:
                left_out = batch_idx % 3 == 2
                return {} if left_out else super().run(optimizer, batch_idx, kwargs)

        trainer.fit_loop.epoch_loop.automatic_optimization = Own(trainer)


@pytest.mark.parametrize("kind", [MakesClosures, Skips])
def test_the_automatic_optimization_of_user_code_is_called(
    tmp_path: Path, accelerator: str, kind: type[Callback]
) -> None:
    def fit(name: str, callback: CUDAGraphCallback | None = None) -> Trace:
        callbacks = (kind(),)
        folder = tmp_path / name
        return train(make(Net), folder, callback, callbacks=callbacks, accelerator=accelerator)

    graph = fit("graph", CUDAGraphCallback())
    assert_same(fit("plain"), graph)
    is_captured = kind is Skips
    assert ("without one of Lightning's closures" in str(graph.summary)) is not is_captured
    assert (graph.counts.replayed > 0) is is_captured


@pytest.mark.long
def test_under_a_profiler(tmp_path: Path, accelerator: str) -> None:
    plain = train(make(Net), tmp_path / "plain", accelerator=accelerator)
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        graph = train(make(Net), tmp_path / "graph", CUDAGraphCallback(), accelerator=accelerator)
    finally:
        profiler.disable()
    assert_same(plain, graph)
    assert graph.counts.captures == 1


@pytest.mark.long
def test_pictures_beside_the_times(tmp_path: Path, accelerator: str) -> None:
    """Records of others go through TensorBoard's own hands."""

    class Draws(Net):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.global_step == 15:
                noise = torch.rand(3, 128, 128, generator=torch.Generator().manual_seed(0))
                self.logger.experiment.add_image("noise", noise, 15)

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path / "tb")
    train(make(Draws), tmp_path, CUDAGraphCallback(), accelerator=accelerator, logger=logger)
    accumulator = EventAccumulator(logger.log_dir)
    accumulator.Reload()
    assert accumulator.Images("noise")[0].width == 128
    assert accumulator.Scalars("~step_ms/total")
