"""Tensors that steps and hooks put anew into attributes of modules go from one replay to the next.

`tests/gpu/test_carried.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_cudagraph import CUDAGraphCallback
from lightning_cudagraph.checks.rebound_attributes import ReboundAttributes
from tests.harness import Net, assert_same, differences, loader, make, train
from tests.rows import became, refused, row

RAGGED = {"another batch signature": 3}


class Base(Net):
    """Its step ends with what a class does to its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Any = torch.zeros(12)

    def to_device(self, x: Tensor) -> None:
        """Plain tensors are not moved with the module."""
        if self.mean.device != x.device:
            self.mean = self.mean.to(x.device)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        if self.global_rank == 0:
            self.to_device(x)
        logits = self(self.take(x))
        loss = nn.functional.cross_entropy(logits, y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def take(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def seen(self) -> Any:
        return {name: value for name, value in vars(self).items() if isinstance(value, (Tensor, tuple))}


class MovingMean(Base):
    def take(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return x - self.mean


class InATuple(Base):
    """Nested, with a None and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = None

    def take(self, x: Tensor) -> Tensor:
        if self.state is None:
            self.state = ((x.mean(0), None), 3, x.std(0))
        (mean, _), three, deviation = self.state
        self.state = ((0.5 * (mean + x.mean(0)), None), 3, 0.5 * (deviation + x.std(0)))
        return (x - mean) / deviation * three


class Shifts(Base):
    """What was, is the one before: each attribute takes over the tensor of another."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Any = torch.zeros(12)

    def to_device(self, x: Tensor) -> None:
        super().to_device(x)
        if self.before.device != x.device:
            self.before = self.before.to(x.device)

    def take(self, x: Tensor) -> Tensor:
        self.before, self.mean = self.mean, 0.9 * self.mean + x.mean(0)
        return x - self.before


class Swaps(Shifts):
    def take(self, x: Tensor) -> Tensor:
        self.before, self.mean = self.mean + x.mean(0), self.before
        return x - self.before + self.mean


class KeepsWithGradients(Base):
    """The tensor that it keeps has a graph of autograd behind it, which the next step cuts off."""

    def take(self, x: Tensor) -> Tensor:
        x = x - self.mean.detach()
        self.mean = x.mean(0) * self.head.weight.mean()
        return x


class KeepsAViewOfItsBatch(Base):
    def take(self, x: Tensor) -> Tensor:
        mixed = x + 0.1 * self.mean
        self.mean = x[0]
        return mixed


class SetOnTheHost(Base):
    """A hook hands a tensor to each step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.mean = torch.full((12,), float(self.global_step), device=self.device)

    def take(self, x: Tensor) -> Tensor:
        return x + 0.01 * self.mean


class SetOnBothSides(MovingMean):
    """A hook puts another tensor there now and then, or changes the one that is there."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step % 5 == 0:
            self.mean = torch.ones(12, device=self.device)
        elif self.global_step % 3 == 0:
            self.mean.mul_(2)
        elif self.global_step % 4 == 0:
            self.mean.data = self.mean.data + 1


class InASubmodule(MovingMean):
    def __init__(self) -> None:
        super().__init__()
        self.head.register_forward_pre_hook(self.keep)

    @staticmethod
    def keep(module: nn.Module, args: Any) -> None:
        module.last = args[0].detach().mean() + getattr(module, "last", 0.0)  # type: ignore[assignment]


class ChangedByValidation(MovingMean):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.mean = self.mean + batch[0].mean(0)


CARRIED = [
    MovingMean,
    InATuple,
    Shifts,
    Swaps,
    KeepsWithGradients,
    KeepsAViewOfItsBatch,
    SetOnTheHost,
    SetOnBothSides,
    InASubmodule,
    ChangedByValidation,
]


class _Keeps(Callback):
    """Keeps, without copies, what the module has after each step."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.kept.append((pl_module.seen(), getattr(pl_module.head, "last", None)))


@pytest.mark.spread
@pytest.mark.parametrize("cls", CARRIED)
@pytest.mark.parametrize("scope", ["auto", "forward_backward"])
def test_carried(tmp_path: Path, accelerator: str, cls: type[Base], scope: Any) -> None:
    keeps: list[_Keeps] = []

    def setting(folder: Path) -> dict[str, Any]:
        keeps.append(_Keeps())
        return {"callbacks": (keeps[-1],)}

    done = row(
        tmp_path,
        accelerator,
        cls,
        setting,
        ours=lambda: CUDAGraphCallback(scope=scope),
        val_check_interval=5,
    )
    became(done.graph, replayed=18, eager=RAGGED)
    assert len(keeps[0].kept) == 24
    assert not differences(keeps[0].kept, keeps[1].kept)


def test_an_attribute_that_would_not_be_copied_in(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison means something: buffers that nobody fills are seen."""
    monkeypatch.setattr("lightning_cudagraph.checks.rebound_attributes._copy", lambda into, values: None)
    graph = train(make(SetOnTheHost), tmp_path / "b", CUDAGraphCallback(), accelerator=accelerator)
    monkeypatch.undo()
    plain = train(make(SetOnTheHost), tmp_path / "a", accelerator=accelerator)
    assert differences(plain.final["weights"], graph.final["weights"])


class WritesInPlaceFirst(Base):
    """Changes the tensor that it has given out before."""

    def take(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9)
        self.mean = self.mean + x.mean(0)
        return x - self.mean


class WritesIntoWhatAHookHasSet(SetOnTheHost):
    def take(self, x: Tensor) -> Tensor:
        return x + 0.01 * self.mean.mul_(0.5)


class GoesBackInTime(Base):
    """Truncates nothing: gradients go back into the steps before."""

    def take(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + x.mean(0) * self.head.bias.mean()
        return x - self.mean

    def backward(self, loss: Tensor) -> None:
        loss.backward(retain_graph=True)

    def configure_optimizers(self) -> Any:
        # In-place updates of weights that are read again would be an error of autograd's.
        return torch.optim.SGD([self.features[0].bias], lr=0.1)


class AView(Base):
    """What it keeps goes on changing with the weights."""

    def take(self, x: Tensor) -> Tensor:
        mixed = x + self.mean.sum()
        self.mean = self.head.weight.detach()[0][:12]
        return mixed


class ChangesItsShape(Base):
    def take(self, x: Tensor) -> Tensor:
        self.mean = torch.cat([self.mean, x.mean(0)[:1]])
        return x - self.mean.mean()


class PutsItTwice(Base):
    """Two attributes with one memory, in which the host can write."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Any = torch.zeros(6)

    def take(self, x: Tensor) -> Tensor:
        shift = self.last.to(x.device).sum()
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.last = self.mean[:6]
        return x - self.mean + shift


REFUSED: dict[type[Base], str] = {
    PutsItTwice: "puts the same memory into",
    WritesInPlaceFirst: "writes in place into `mean` of the `WritesInPlaceFirst`",
    WritesIntoWhatAHookHasSet: "writes in place into `mean` of the",
    GoesBackInTime: "sets or changes `mean` of the",
    AView: "sets or changes `mean` of the",
    ChangesItsShape: "sets or changes `mean` of the",
}


@pytest.mark.spread
@pytest.mark.parametrize("cls", REFUSED)
def test_not_carried(tmp_path: Path, accelerator: str, cls: type[Base]) -> None:
    refused(tmp_path, accelerator, cls, match=REFUSED[cls])


class HooksInTheMiddle(MovingMean):
    """Looks at what the step has put there, on the host, before the step is over."""

    def __init__(self) -> None:
        super().__init__()
        self.looked: list[Tensor] = []

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.looked.append(self.mean)


def test_a_hook_in_the_middle(tmp_path: Path, accelerator: str) -> None:
    done = refused(
        tmp_path,
        accelerator,
        HooksInTheMiddle,
        match=r"on_before_zero_grad` .* tensor into `mean` of the ",
    )
    looked = [trace.module.looked for trace in (done.plain, done.graph)]  # type: ignore[union-attr]
    assert not differences(*looked)


class StartsAnew(MovingMean):
    def on_train_epoch_start(self) -> None:
        self.mean = torch.zeros(12, device=self.device)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step == 13:
            self.mean = torch.zeros(1, device=self.device)


@pytest.mark.long
def test_another_form_in_the_middle_of_a_run(tmp_path: Path, accelerator: str) -> None:
    done = row(tmp_path, accelerator, StartsAnew)
    assert done.graph.counts.captures == 1
    reason = "`mean` of the `StartsAnew` holds tensors of another form than in the graph"
    assert done.graph.counts.eager[reason] == 1


def test_nothing_to_carry() -> None:
    """Attributes that stay are left alone: their tensors stay the same objects."""
    module = make(MovingMean)
    carried = ReboundAttributes(module, torch.device("cpu"), frozenset(), lambda module: False)
    kept = module.mean
    for _ in range(3):
        carried.watch()
    carried.place()
    assert module.mean is kept
    module.mean = kept + 1
    carried.watch()
    carried.place()
    assert module.mean is not kept
    carried.take_out()
    assert torch.equal(module.mean, kept + 1)


@pytest.mark.long
def test_batches_of_another_form_in_between(tmp_path: Path, accelerator: str) -> None:
    """Eager steps take over the state that replays have left, and the other way round."""
    plain = train(
        make(MovingMean), tmp_path / "a", accelerator=accelerator, train_loader=_mixed(), max_epochs=2
    )
    graph = train(
        make(MovingMean),
        tmp_path / "b",
        CUDAGraphCallback(),
        accelerator=accelerator,
        train_loader=_mixed(),
        max_epochs=2,
    )
    assert_same(plain, graph)
    assert sum(graph.counts.eager.values()) >= 4
    assert graph.counts.replayed >= 10


def _mixed() -> Any:
    batches = [*loader(ragged=False, batches=12)]
    for index in (5, 9):
        batches[index] = [member[:5] for member in batches[index]]
    return torch.utils.data.DataLoader(batches, batch_size=None)


class CountsInValidation(MovingMean):
    """Validation has a moving mean of its own, and reads that of training."""

    def __init__(self) -> None:
        super().__init__()
        self.of_validation: Any = torch.zeros(12)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        if self.of_validation.device != x.device:
            self.of_validation = self.of_validation.to(x.device)
        self.of_validation = 0.5 * self.of_validation + x.mean(0)
        logits = self(x - self.mean - self.of_validation)
        self.log("val_loss", nn.functional.cross_entropy(logits, y))


@pytest.mark.long
@pytest.mark.parametrize("inference_mode", [False, True])
def test_in_validation(tmp_path: Path, accelerator: str, inference_mode: bool) -> None:
    done = row(
        tmp_path,
        accelerator,
        CountsInValidation,
        lambda folder: {"val_loader": loader(ragged=False, seed=1, batches=6)},
        ours=lambda: CUDAGraphCallback(evaluation=True),
        val_check_interval=4,
        inference_mode=inference_mode,
    )
    assert done.graph.counts.replayed == 18
    callback = done.graph.callback
    assert callback is not None
    assert callback.summary.validate.replayed > 10


class _KeepsAnActivation(Net):
    """The last batch of each epoch leaves a tensor of another shape there."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        self.act = out.detach()
        return out


@pytest.mark.long
def test_a_ragged_batch_leaves_another_form(tmp_path: Path, accelerator: str) -> None:
    """The step behind it is eager, and the graph goes on afterwards."""
    callback = CUDAGraphCallback(verify=None)
    epochs = 4
    plain = train(make(_KeepsAnActivation), tmp_path / "p", accelerator=accelerator, max_epochs=epochs)
    graph = train(
        make(_KeepsAnActivation), tmp_path / "g", callback, accelerator=accelerator, max_epochs=epochs
    )
    assert_same(plain, graph)
    assert graph.counts.captures == 1
    assert graph.counts.replayed == 8 * epochs - 3 - epochs - (epochs - 1)
    assert any("`act` of" in reason for reason in graph.counts.eager)
    assert torch.equal(plain.module.act, graph.module.act)


class _AnotherFormForGood(_KeepsAnActivation):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.current_epoch:
            self.act = out.detach()[0]
        return out


def test_another_form_for_good_is_captured_anew(tmp_path: Path, accelerator: str) -> None:
    callback = CUDAGraphCallback(verify=None)
    plain = train(make(_AnotherFormForGood), tmp_path / "p", accelerator=accelerator, max_epochs=4)
    graph = train(
        make(_AnotherFormForGood), tmp_path / "g", callback, accelerator=accelerator, max_epochs=4
    )
    assert_same(plain, graph)
    assert graph.counts.recaptures[0] == "`act` of the `_AnotherFormForGood` changed"


class _HoldsNestedTensors(Base):
    """Nested tensors, new ones in the first steps."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step < 8:
            parts = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
            self.nested, self.in_a_list, self.in_a_tuple = parts, [parts], (parts, torch.ones(1))

    def take(self, x: Tensor) -> Tensor:
        return x * len(self.in_a_list) * self.nested.dim()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_not_carried(tmp_path: Path, accelerator: str) -> None:
    kwargs: dict[str, Any] = {"accelerator": accelerator, "max_epochs": 2}
    kwargs["train_loader"] = loader(ragged=False)
    plain = train(make(_HoldsNestedTensors), tmp_path / "plain", **kwargs)
    graph = train(make(_HoldsNestedTensors), tmp_path / "graph", CUDAGraphCallback(), **kwargs)
    assert_same(plain, graph)
    assert graph.counts.replayed


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_scale_is_not_carried() -> None:
    """A captured step reads the scale of a quantized tensor on the host."""
    module: Any = nn.Module()
    carried = ReboundAttributes(module, torch.device("cpu"), frozenset(), lambda child: False)
    for scale in (0.1, 0.2):
        module.packed = packed = torch.quantize_per_tensor(torch.ones(2), scale, 0, torch.qint8)
        carried.watch()
    carried.place()
    assert module.packed is packed
