"""State that no module, optimizer or loop of Lightning knows as its own.

Held in plain tensors, in lists, in nested optimizer state, or kept by whoever looks at gradients: the
verification must leave it alone, and replays must not overwrite it. `tests/gpu/test_outside.py` collects
these tests again, on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_cudagraph import CUDAGraphCallback, UnsupportedError, Verification, VerificationError
from lightning_cudagraph.capture.steps import Step
from lightning_cudagraph.trainer.training.captured_step import training_step
from tests.harness import Net, Trace, assert_same, differences, loader, make, train
from tests.optimizers import Own

O = torch.optim  # noqa: E741


class Center(Net):
    """A running mean in a plain tensor, used in the loss of the same step."""

    def on_fit_start(self) -> None:
        self.center = torch.zeros(4, device=self.device)
        self.bank = [torch.zeros(4, device=self.device)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        output["loss"] = output["loss"] + (output["logits"] - self.center).sum() * 0.01
        self.center.lerp_(output["logits"].mean(0), 0.1)
        self.bank[0].add_(output["logits"].sum(0))
        return output

    def outside(self) -> list[Tensor]:
        return [self.center, *self.bank]


class Unregistered(Net):
    """A parameter that the optimizer knows, and the module does not."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = [nn.Parameter(torch.ones(4))]

    def on_fit_start(self) -> None:
        self.extra[0].data = self.extra[0].data.to(self.device)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self(batch[0]) * self.extra[0], batch[1])

    def configure_optimizers(self) -> Any:
        return O.SGD([*self.parameters(), *self.extra], lr=0.1, momentum=0.9)

    def outside(self) -> list[Tensor]:
        return [self.extra[0].detach()]


class Teacher(Net):
    """A hidden module with running statistics, in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.Sequential(nn.Linear(12, 4), nn.BatchNorm1d(4))]

    def on_fit_start(self) -> None:
        self.hidden[0].to(self.device)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            target = self.hidden[0](batch[0])
        return (self(batch[0]) - target).square().mean()

    def outside(self) -> list[Tensor]:
        return list(self.hidden[0].state_dict().values())


class NestedState(Own):
    def update(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "buffers" not in state:
            state["buffers"] = [torch.zeros_like(p)]
        (momentum,) = state["buffers"]
        momentum.mul_(0.9).add_(p.grad)
        p.add_(momentum, alpha=-group["lr"])


class HoldsAnother(O.Optimizer):
    """Steps an optimizer inside itself, whose state is not its own."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        self.inner = O.SGD(params, lr=0.05, momentum=0.9)
        super().__init__(params, {"lr": 0.05})

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class KeepsGradients(Own):
    """Looks at the gradient of the step before, and keeps no copy of it."""

    def update(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        before = state.get("before")
        p.add_(p.grad if before is None else p.grad + 0.5 * before, alpha=-group["lr"])
        state["before"] = p.grad


class CountsInAList(Own):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.count = [0]

    def step(self, closure: Any = None) -> Any:
        self.count[0] += 1
        return super().step(closure)

    def update(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.add_(p.grad, alpha=-group["lr"] * (3.0 if self.count[0] % 7 == 0 else 1.0))


class CountsOnItsClass(Own):
    calls = 0

    def step(self, closure: Any = None) -> Any:
        type(self).calls += 1
        return super().step(closure)

    def update(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        # Late, so that no check of the first replays can see it.
        p.add_(p.grad, alpha=-group["lr"] * (3.0 if type(self).calls >= 15 else 1.0))


def counts_on_its_class() -> Net:
    CountsOnItsClass.calls = 0
    return Net(CountsOnItsClass)


BUILDS: dict[str, Callable[[], Net]] = {
    "plain tensors": Center,
    "an unregistered parameter": Unregistered,
    "a hidden module": Teacher,
    "nested optimizer state": lambda: Net(NestedState),
    "an optimizer in an optimizer": lambda: Net(HoldsAnother),
    "an optimizer that keeps gradients": lambda: Net(KeepsGradients),
    "an optimizer that counts on its class": counts_on_its_class,
    "an optimizer that counts in a list": lambda: Net(CountsInAList),
}


@pytest.mark.spread(2)
@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("scope", ["auto", "forward_backward"])
def test_same_as_plain(tmp_path: Path, accelerator: str, name: str, scope: Any) -> None:
    kwargs: dict[str, Any] = {"accelerator": accelerator, "checkpoint_every": 1000}
    modules = [make(BUILDS[name])]
    plain = train(modules[0], tmp_path / "plain", **kwargs)
    modules.append(make(BUILDS[name]))
    graph = train(modules[1], tmp_path / "graph", CUDAGraphCallback(scope=scope), **kwargs)
    assert_same(_logged(plain), _logged(graph))
    assert graph.counts.replayed >= 10
    if hasattr(modules[0], "outside"):
        assert not differences(modules[0].outside(), modules[1].outside())  # type: ignore[operator]
    assert graph.callback is not None
    assert "differ" not in str(graph.callback.summary)


def _logged(trace: Trace) -> Trace:
    trace.csv = trace.csv or "nothing is logged"
    return trace


@pytest.mark.long
def test_the_verification_would_change_it(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: with what modules know alone, the check itself moves the state."""
    monkeypatch.setattr(Step, "all_state", lambda step, written: step.state())
    modules = [make(Center) for _ in range(2)]
    train(modules[0], tmp_path / "plain", accelerator=accelerator)
    try:
        train(modules[1], tmp_path / "graph", CUDAGraphCallback(), accelerator=accelerator)
    except VerificationError:
        return
    assert differences(modules[0].outside(), modules[1].outside())  # type: ignore[operator]


class TwoHeads(Net):
    """Which head takes part depends on the kind of batch: the other has no gradient then."""

    def __init__(self) -> None:
        super().__init__(lambda p: O.SGD(p, lr=0.1, momentum=0.9))
        self.other = nn.Linear(24, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        head = self.head if "one" in batch else self.other
        return nn.functional.cross_entropy(head(self.features(batch["x"])), batch["y"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        return None


def _two_kinds() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    batches = [
        {
            "x": torch.randn(8, 12, generator=generator),
            "y": torch.randint(0, 4, (8,), generator=generator),
            "other" if index % 5 == 4 else "one": torch.zeros(1),
        }
        for index in range(20)
    ]
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


@pytest.mark.spread(2)
@pytest.mark.parametrize("scope", ["step", "forward_backward"])
def test_parameters_that_have_no_gradient_in_this_kind_of_batch(
    tmp_path: Path, accelerator: str, scope: Any
) -> None:
    kwargs: dict[str, Any] = {"accelerator": accelerator, "max_epochs": 2}
    plain = train(make(TwoHeads), tmp_path / "plain", train_loader=_two_kinds(), **kwargs)
    callback = CUDAGraphCallback(scope=scope)
    graph = train(make(TwoHeads), tmp_path / "graph", callback, train_loader=_two_kinds(), **kwargs)
    assert_same(_logged(plain), _logged(graph))
    assert graph.counts.replayed >= 20


class SteppedByHand(Net):
    """A parameter outside the optimizer, whose gradient is dropped after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.delta = nn.Parameter(torch.zeros(4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self(batch[0]) + self.delta, batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.delta += 0.1 * self.delta.grad.sign()  # type: ignore[union-attr]
        self.delta.grad = None

    def configure_optimizers(self) -> Any:
        return O.SGD([p for name, p in self.named_parameters() if name != "delta"], lr=0.1)


def test_a_parameter_stepped_by_hand(tmp_path: Path, accelerator: str) -> None:
    plain = train(make(SteppedByHand), tmp_path / "plain", accelerator=accelerator)
    graph = train(make(SteppedByHand), tmp_path / "graph", CUDAGraphCallback(), accelerator=accelerator)
    assert_same(_logged(plain), _logged(graph))
    assert graph.counts.replayed >= 10


class KeptNowAndThen(SteppedByHand):
    """Drops the gradient after most steps, and lets it add up over one of them."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step != 13:
            super().on_train_batch_end(outputs, batch, batch_idx)


def test_a_gradient_that_was_not_there_at_the_capture(tmp_path: Path, accelerator: str) -> None:
    kwargs: dict[str, Any] = {"accelerator": accelerator, "checkpoint_every": 1000}
    plain = train(make(KeptNowAndThen), tmp_path / "plain", **kwargs)
    graph = train(make(KeptNowAndThen), tmp_path / "graph", CUDAGraphCallback(), **kwargs)
    assert_same(_logged(plain), _logged(graph))
    # A step of another shape could have left it: this step is eager, and the graph stays.
    assert graph.counts.eager["a parameter that had no gradient before the step has one now"] == 1
    assert not graph.counts.recaptures


class ZeroesItsOwnWay(Own):
    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none=False)


def test_an_optimizer_with_a_zero_grad_of_its_own(tmp_path: Path, accelerator: str) -> None:
    def build() -> Net:
        return Net(ZeroesItsOwnWay)

    with pytest.raises(UnsupportedError, match=r"(?s)`.*ZeroesItsOwnWay` has a `zero_grad` of its own"):
        train(make(build), tmp_path / "raise", CUDAGraphCallback(), accelerator=accelerator)


def _drop_nothing(set_to_none: bool = True) -> None:
    pass


class DropsNothing(Net):
    """From one step on, and not in the next epoch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.current_epoch == 0 and batch_idx == 7:
            self.trainer.optimizers[0].zero_grad = _drop_nothing

    def on_train_epoch_end(self) -> None:
        vars(self.trainer.optimizers[0]).pop("zero_grad", None)


@pytest.mark.parametrize("verify", [None, Verification()])
def test_a_zero_grad_that_is_replaced_in_a_run(tmp_path: Path, accelerator: str, verify: Any) -> None:
    kwargs: dict[str, Any] = {"accelerator": accelerator, "watched": False}
    kwargs["train_loader"] = loader(batches=16)
    plain = train(make(DropsNothing), tmp_path / "plain", **kwargs)
    callback = CUDAGraphCallback(verify=verify)
    graph = train(make(DropsNothing), tmp_path / "graph", callback, **kwargs)
    assert not differences(plain.final, graph.final)
    assert graph.counts.replayed
    assert any("has a `zero_grad` of its own" in reason for reason in graph.counts.eager)


def test_control_without_a_look_at_zero_grad(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kwargs: dict[str, Any] = {"accelerator": accelerator, "watched": False}
    kwargs["train_loader"] = loader(batches=16)
    plain = train(make(DropsNothing), tmp_path / "plain", **kwargs)
    monkeypatch.setattr(training_step, "refuse_own_zero_grad", lambda optimizer: None)
    callback = CUDAGraphCallback(verify=None)
    graph = train(make(DropsNothing), tmp_path / "graph", callback, **kwargs)
    assert differences(plain.final["weights"], graph.final["weights"])


class Collects(Callback):
    """Keeps the gradients of every step, without copies."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.kept.append(pl_module.head.weight.grad)


class CollectsParts(Collects):
    """Keeps tensors that share memory with the gradients."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        gradient = pl_module.head.weight.grad
        self.kept += [gradient.detach(), gradient[0], gradient.view(-1)]


class CollectsArrays(Collects):
    """Keeps the gradients as arrays, which lie in the same memory on a CPU."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.kept.append(torch.from_numpy(pl_module.head.weight.grad.cpu().numpy()))


class CollectsInTheMiddle(Collects):
    """Keeps them before the optimizer steps, which makes a turn of the host, and writes into them."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """Nothing."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        pl_module.head.weight.grad.mul_(0.5)
        self.kept += [pl_module.head.weight.grad, pl_module.head.bias.grad.detach()]


class CollectsAtTheEnd(Collects):
    """Keeps those of every second batch."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if args[-1] % 2:
            super().on_train_batch_end(trainer, pl_module, *args)


COLLECTORS = [Collects, CollectsParts, CollectsArrays, CollectsInTheMiddle, CollectsAtTheEnd]


@pytest.mark.spread(2)
@pytest.mark.parametrize("collector", COLLECTORS)
@pytest.mark.parametrize("window", [1, 2, 3])
def test_gradients_that_somebody_keeps(
    tmp_path: Path, accelerator: str, collector: type[Collects], window: int
) -> None:
    """Also of a window of accumulation, in which an eager step adds to the ones that were kept."""
    collectors = [collector(), collector()]
    batches = loader(ragged=False, batches=9)
    kwargs: dict[str, Any] = {
        "accelerator": accelerator,
        "accumulate_grad_batches": window,
        "train_loader": batches,
    }
    plain = train(make(Net), tmp_path / "plain", callbacks=(collectors[0],), **kwargs)
    callback = CUDAGraphCallback()
    graph = train(make(Net), tmp_path / "graph", callback, callbacks=(collectors[1],), **kwargs)
    assert_same(plain, graph)
    assert not differences(collectors[0].kept, collectors[1].kept)
    # On a GPU the arrays are copies.
    copies = accelerator == "gpu" and collector is CollectsArrays
    reason = "user code holds a reference to a gradient, or to a part of one, or gave one other memory"
    assert graph.counts.recaptures == (() if copies else (reason,))
    assert graph.counts.replayed >= 5


class KeepsInPauses(Callback):
    """Keeps gradients in a hook that no step calls."""

    def __init__(self, name: str) -> None:
        self.kept: list[Tensor] = []
        setattr(self, name, self.keep)

    def keep(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.kept += [p.grad for p in pl_module.parameters() if p.grad is not None]


@pytest.mark.long
@pytest.mark.spread
@pytest.mark.parametrize("name", ["on_train_epoch_end", "on_save_checkpoint"])
def test_gradients_that_are_kept_in_pauses(tmp_path: Path, accelerator: str, name: str) -> None:
    """No user code runs between two steps of an epoch, so that references were not counted."""
    keepers = [KeepsInPauses(name), KeepsInPauses(name)]
    kwargs: dict[str, Any] = {
        "accelerator": accelerator,
        "train_loader": loader(ragged=False),
        "watched": False,
        "max_epochs": 4,
        "limit_val_batches": 0,  # which drops gradients
    }
    plain = train(make(Net), tmp_path / "plain", callbacks=(keepers[0],), **kwargs)
    callback = CUDAGraphCallback()
    graph = train(make(Net), tmp_path / "graph", callback, callbacks=(keepers[1],), **kwargs)
    assert_same(plain, graph)
    assert len(keepers[0].kept) > 12
    assert not differences(keepers[0].kept, keepers[1].kept)
    reason = "user code holds a reference to a gradient, or to a part of one, or gave one other memory"
    assert callback.summary.fit.recaptures == (reason,)
    assert callback.summary.fit.replayed > 9


@pytest.mark.long
@pytest.mark.parametrize("scope", ["step", "forward_backward"])
def test_gradients_that_somebody_keeps_by_scope(tmp_path: Path, accelerator: str, scope: Any) -> None:
    collectors = [Collects(), Collects()]
    kwargs: dict[str, Any] = {"accelerator": accelerator}
    plain = train(make(Net), tmp_path / "plain", callbacks=(collectors[0],), **kwargs)
    callback = CUDAGraphCallback(scope=scope)
    graph = train(make(Net), tmp_path / "graph", callback, callbacks=(collectors[1],), **kwargs)
    assert_same(plain, graph)
    assert not differences(collectors[0].kept, collectors[1].kept)
