"""Runs that change what a step reads between two steps, in every way there is to change it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from lightning_cudagraph import CUDAGraphCallback
from lightning_cudagraph.checks.guards.guards import Guards
from lightning_cudagraph.errors import CaptureError
from tests.harness import BATCH_SIZE, Net, Trace, assert_same, differences, loader, make, train


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Changing(Net):
    """Changes something in the middle of an epoch."""

    def __init__(self) -> None:
        super().__init__(momentum)
        self.act: nn.Module = nn.Tanh()
        self.prepare()

    def prepare(self) -> None:
        """Make what will change."""

    def change(self) -> None:
        """Change it."""

    def factor(self) -> Any:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x)) * self.factor()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 10:
            self.change()


class Parameter(Changing):
    def change(self) -> None:
        self.head.weight = nn.Parameter(self.head.weight.detach() * 0.5)


class Assigned(Changing):
    def change(self) -> None:
        self.load_state_dict({k: v.clone() for k, v in self.state_dict().items()}, assign=True)


class Submodule(Changing):
    def change(self) -> None:
        self.act = nn.Sigmoid()


class ForwardHook(Changing):
    def change(self) -> None:
        self.act.register_forward_hook(lambda module, args, output: output * 2)


class TensorHook(Changing):
    def change(self) -> None:
        self.head.weight.register_hook(lambda gradient: gradient * 0.5)


class CodeOfALayer(Changing):
    def prepare(self) -> None:
        class Own(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x

        def other(self: Any, x: Tensor) -> Tensor:
            return x * 3.0

        self.act, self.code = Own(), other.__code__

    def change(self) -> None:
        type(self.act).forward.__code__ = self.code


class Seed(Changing):
    def change(self) -> None:
        torch.manual_seed(3)

    def factor(self) -> Any:
        return 1.0 + (torch.initial_seed() == 3)


class Multiplies:
    """A hook with a number that is in no object of the model."""

    def __init__(self) -> None:
        self.gain = 1.0

    def __call__(self, module: Any, args: Any, output: Any) -> Any:
        return output * self.gain

    def gradient(self, gradient: Tensor) -> Tensor:
        return gradient * self.gain


class HookObject(Changing):
    def prepare(self) -> None:
        self.act.register_forward_hook(Multiplies())

    def change(self) -> None:
        (hook,) = self.act._forward_hooks.values()
        hook.gain = 3.0  # type: ignore[attr-defined]


class HookMethod(Changing):
    def prepare(self) -> None:
        self.head.weight.register_hook(Multiplies().gradient)

    def change(self) -> None:
        (hook,) = self.head.weight._backward_hooks.values()  # type: ignore[union-attr]
        hook.__self__.gain = 3.0


class ScalesOps(TorchFunctionMode):
    gain = 1.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * self.gain if func is torch.tanh else out

    def unpack(self, saved: Tensor) -> Tensor:
        return saved * self.gain if saved.is_floating_point() else saved


class ModeOfTorch(Changing):
    def prepare(self) -> None:
        self.stack = ExitStack()

    def on_train_start(self) -> None:
        self.entered = ScalesOps()
        self.enter()

    def enter(self) -> None:
        self.stack.enter_context(self.entered)

    def on_train_end(self) -> None:
        self.stack.close()

    def change(self) -> None:
        self.entered.gain = 3.0


class SavedTensors(ModeOfTorch):
    def enter(self) -> None:
        hooks = torch.autograd.graph.saved_tensors_hooks(torch.clone, self.entered.unpack)
        self.stack.enter_context(hooks)


class HookOfTorch(Changing):
    def prepare(self) -> None:
        nn.utils.spectral_norm(self.head)

    def change(self) -> None:
        (hook,) = self.head._forward_pre_hooks.values()
        hook.n_power_iterations = 4  # type: ignore[attr-defined]


class StateCleared(Changing):
    def change(self) -> None:
        self.trainer.optimizers[0].state.clear()


class StateRebound(Changing):
    def change(self) -> None:
        optimizer = self.trainer.optimizers[0]
        for parameter in optimizer.state:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


class StateMoved(Changing):
    def change(self) -> None:
        for state in self.trainer.optimizers[0].state.values():
            state["momentum_buffer"].data = state["momentum_buffer"].data * 0.5


class CountersMoved(Changing):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def change(self) -> None:
        for state in self.trainer.optimizers[0].state.values():
            state["step"].data = torch.tensor(2.0)


class StepReplaced(Changing):
    def change(self) -> None:
        optimizer = self.trainer.optimizers[0]
        own = optimizer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            loss = own(*args, **kwargs)
            _decay(optimizer, args, kwargs)
            return loss

        optimizer.step = step


class StrategyMethod(Changing):
    def change(self) -> None:
        strategy: Any = self.trainer.strategy
        own = strategy.backward
        strategy.backward = lambda loss, *args, **kwargs: own(loss * 2, *args, **kwargs)


class PrecisionMethod(Changing):
    def change(self) -> None:
        plugin: Any = self.trainer.precision_plugin
        own = plugin.pre_backward
        plugin.pre_backward = lambda loss, module: own(loss * 2, module)


class AddedGroup(Changing):
    def prepare(self) -> None:
        self.aux = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.aux(x)

    def configure_optimizers(self) -> Any:
        return momentum([*self.features.parameters(), *self.head.parameters()])

    def change(self) -> None:
        self.trainer.optimizers[0].add_param_group({"params": list(self.aux.parameters())})


def _decay(optimizer: Any, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        torch._foreach_mul_([p.detach() for p in group["params"]], 0.9)


class StepHook(Changing):
    def change(self) -> None:
        self.trainer.optimizers[0].register_step_post_hook(_decay)


class Scale:
    def __init__(self, factor: float) -> None:
        self.gain = factor

    def __call__(self) -> float:
        return self.gain


class Mode(enum.Enum):
    ONCE = 1
    THRICE = 3


class Replaced(Changing):
    def prepare(self) -> None:
        self.scale: Any = Scale(1.0)

    def change(self) -> None:
        self.scale = Scale(3.0)

    def factor(self) -> Any:
        return self.scale()


class Partial(Replaced):
    def prepare(self) -> None:
        self.scale = partial(max, 0.0, 1.0)

    def change(self) -> None:
        self.scale = partial(max, 0.0, 3.0)


class EnumMember(Changing):
    def prepare(self) -> None:
        self.mode = Mode.ONCE

    def change(self) -> None:
        self.mode = Mode.THRICE

    def factor(self) -> Any:
        return 3.0 if self.mode is Mode.THRICE else 1.0


class Generator(Changing):
    def prepare(self) -> None:
        self.noise = torch.Generator().manual_seed(0)

    def change(self) -> None:
        self.noise = torch.Generator().manual_seed(1)

    def factor(self) -> Any:
        return 2.0 if self.noise.initial_seed() else 1.0


class Method(Changing):
    def change(self) -> None:
        self.factor = lambda: 3.0  # type: ignore[method-assign]


class Forward(Changing):
    def change(self) -> None:
        head = self.head
        head.forward = lambda x: nn.functional.linear(x, head.weight) * 2  # type: ignore[method-assign]


class NumpyNumber(Changing):
    def prepare(self) -> None:
        self.gain = np.float32(1)

    def change(self) -> None:
        self.gain = np.float32(3)

    def factor(self) -> Any:
        return float(self.gain)


class NumpyArray(NumpyNumber):
    def prepare(self) -> None:
        self.gain: Any = np.ones(2)

    def change(self) -> None:
        self.gain[0] = 3

    def factor(self) -> Any:
        return float(self.gain[0])


class OddMember(Changing):
    def prepare(self) -> None:
        self.options = {"gain": 1.0, "mode": Mode.ONCE, "scale": Scale(1.0)}

    def change(self) -> None:
        self.options["gain"] = 3.0

    def factor(self) -> Any:
        return self.options["gain"]


class Hparams(Changing):
    def prepare(self) -> None:
        self.save_hyperparameters({"gain": 1.0, "mode": Mode.ONCE})

    def change(self) -> None:
        self.hparams.gain = 3.0

    def factor(self) -> Any:
        return self.hparams.gain


class SecondLevel(Changing):
    def prepare(self) -> None:
        self.outer: Any = Scale(0.0)
        self.outer.gain = Scale(1.0)

    def change(self) -> None:
        self.outer.gain.gain = 3.0

    def factor(self) -> Any:
        return self.outer.gain.gain


class InAList(SecondLevel):
    def prepare(self) -> None:
        self.outer = [Scale(1.0)]

    def change(self) -> None:
        self.outer[0].gain = 3.0

    def factor(self) -> Any:
        return self.outer[0]()


class ByText(NumpyNumber):
    def factor(self) -> Any:
        return float(getattr(self, "gain"))  # noqa: B009


class OfTheTrainer(Changing):
    def change(self) -> None:
        self.trainer.gain = 3.0  # type: ignore[attr-defined]

    def factor(self) -> Any:
        return getattr(self.trainer, "gain", 1.0)


class OfACallback(Changing):
    def change(self) -> None:
        self.trainer.callbacks[-2].gain = 3.0  # type: ignore[attr-defined]

    def factor(self) -> Any:
        return next(c.gain for c in self.trainer.callbacks if isinstance(c, Gain))


class Gain(Callback):
    gain = 1.0


class Data(LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.gain = 1.0

    def train_dataloader(self) -> Any:
        return loader()


class OfTheData(Changing):
    def change(self) -> None:
        self.data.gain = 3.0

    def prepare(self) -> None:
        self.data = Data()

    def factor(self) -> Any:
        return self.data.gain


class HiddenMode(Changing):
    def prepare(self) -> None:
        self.teachers = [nn.Dropout(0.5).eval()]

    def forward(self, x: Tensor) -> Tensor:
        return self.teachers[0](super().forward(x))

    def change(self) -> None:
        self.teachers[0].train()


class HiddenParameter(Changing):
    def prepare(self) -> None:
        self.teachers = [nn.Linear(12, 4).requires_grad_(False)]

    def on_fit_start(self) -> None:
        self.teachers[0].to(self.device)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.teachers[0](x)

    def change(self) -> None:
        self.teachers[0].weight.data = torch.zeros_like(self.teachers[0].weight)


class OfABuffer(Changing):
    def prepare(self) -> None:
        self.offset: Any
        self.register_buffer("offset", torch.zeros(()))

    def on_fit_start(self) -> None:  # on the device: a move there makes another tensor
        self.offset.gain = 1.0

    def change(self) -> None:
        self.offset.gain = 3.0

    def factor(self) -> Any:
        return self.offset.gain


class InAParameterList(Changing):
    def prepare(self) -> None:
        self.gains: Any = nn.ParameterList([1.0])

    def change(self) -> None:
        self.gains[0] = 3.0

    def factor(self) -> Any:
        return self.gains[0]


class InAParameterDict(InAParameterList):
    def prepare(self) -> None:
        self.gains = nn.ParameterDict({"up": 1.0})

    def change(self) -> None:
        self.gains.update({"up": 3.0})

    def factor(self) -> Any:
        return self.gains["up"]


class OfLightning(Changing):
    def prepare(self) -> None:
        self.strict_loading = True

    def change(self) -> None:
        self.strict_loading = False

    def factor(self) -> Any:
        return 1.0 if self.strict_loading else 3.0


class ByDefaults(torch.optim.SGD):
    """Takes the rate from its own defaults."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                with torch.no_grad():
                    parameter.sub_(parameter.grad, alpha=self.defaults["lr"])
        return loss


class Defaults(Changing):
    def configure_optimizers(self) -> Any:
        return ByDefaults(self.parameters(), lr=0.1)

    def change(self) -> None:
        self.trainer.optimizers[0].defaults["lr"] = 0.01


class LargeAndEqual(Changing):
    """A large array changes, and at the same time an equal list comes for another."""

    def prepare(self) -> None:
        self.rows, self.weights = np.ones(10_000), [0.5]

    def factor(self) -> Any:
        return float(self.rows[-1]) * self.weights[0]

    def change(self) -> None:
        self.rows[-1] = 3.0
        self.weights = [0.5]


class LargeAndCopied(LargeAndEqual):
    """A large array changes, and an equal copy comes for it."""

    def change(self) -> None:
        self.rows[-1] = 3.0
        self.rows = self.rows.copy()


class Scaled(torch.optim.SGD):
    """Multiplies gradients by what it holds."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.scale: Any = Scale(1.0)
        self.param_groups[0]["gains"] = np.ones(1)

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                with torch.no_grad():
                    rate = group["lr"] * self.scale() * float(group["gains"][0])
                    parameter.sub_(parameter.grad * rate)
        return loss


class OfAnOptimizer(Changing):
    def configure_optimizers(self) -> Any:
        return Scaled(self.parameters())

    def change(self) -> None:
        self.trainer.optimizers[0].scale.gain = 3.0


class NewInAnOptimizer(OfAnOptimizer):
    def change(self) -> None:
        self.trainer.optimizers[0].scale = lambda: 3.0


class OfAGroup(OfAnOptimizer):
    def change(self) -> None:
        self.trainer.optimizers[0].param_groups[0]["gains"][0] = 3.0


def closure() -> Net:
    gain: Any = 1.0
    table = {"gain": 1.0, "mode": Mode.ONCE}

    class Closure(Changing):
        def factor(self) -> Any:
            return gain * table["gain"]

        def change(self) -> None:
            nonlocal gain
            gain = 3.0

    return Closure()


def table() -> Net:
    table = {"gain": 1.0, "mode": Mode.ONCE}

    class Table(Changing):
        def factor(self) -> Any:
            return table["gain"]

        def change(self) -> None:
            table["gain"] = 3.0

    return Table()


CHANGES: list[tuple[Callable[[], Net], str]] = [
    (Parameter, "the parameter `head.weight` changed from a `Parameter`"),
    (Assigned, "the parameter `features.0.weight` changed from a `Parameter`"),
    (Submodule, "the module `act` changed from a `Tanh`"),
    (ForwardHook, "`_forward_hooks` of `act` changed from none"),
    (TensorHook, "`_backward_hooks` of parameter `head.weight` changed from none"),
    (CodeOfALayer, "`forward.__code__` of the class `CodeOfALayer.prepare.<locals>.Own` changed"),
    (Seed, "`torch.initial_seed()` changed from "),
    (HookObject, "`gain` of the hook `Multiplies` changed from 1.0 to 3.0"),
    (HookMethod, "`gain` of the hook `Multiplies.gradient` changed from 1.0 to 3.0"),
    (ModeOfTorch, "`gain` of the mode `ScalesOps` was set to 3.0"),
    (SavedTensors, "`gain` of the hook `ScalesOps.unpack` was set to 3.0"),
    (HookOfTorch, "`n_power_iterations` of the hook `SpectralNorm` changed from 1 to 4"),
    (StateCleared, "`momentum_buffer` of parameter 0 in param group 0 of the optimizer was removed"),
    (StateRebound, "`momentum_buffer` of parameter 0 in param group 0 of the optimizer changed from a"),
    (StateMoved, "`momentum_buffer` of parameter 0 in param group 0 of the optimizer changed from a"),
    (CountersMoved, "`step` of parameter 0 in param group 0 of the optimizer changed from a"),
    (StepReplaced, "`step` of the `SGD` was replaced"),
    (StrategyMethod, "`backward` of the `SingleDeviceStrategy` was replaced"),
    (PrecisionMethod, "`pre_backward` of the `Precision` was replaced"),
    (AddedGroup, "the number of param groups of the optimizer changed from 1 to 2"),
    (StepHook, "the number of hooks around the step of the optimizer changed from 0 to 1"),
    (Replaced, "`scale` of the `Replaced` changed"),
    (Partial, "`scale` of the `Partial` changed"),
    (EnumMember, "`mode` of the `EnumMember` changed"),
    (Generator, "`noise` of the `Generator` changed"),
    (Method, "`factor` of the `Method` was set"),
    (Forward, "`forward` of `head` was set"),
    (NumpyNumber, "`gain` of the `NumpyNumber` changed"),
    (NumpyArray, "`gain` of the `NumpyArray` changed"),
    (OddMember, "`options['gain']` of the `OddMember` changed from 1.0 to 3.0"),
    (Hparams, "hparams['gain']` of the `Hparams` changed from 1.0 to 3.0"),
    (SecondLevel, "`outer.gain.gain` of the `SecondLevel` changed from 1.0 to 3.0"),
    (InAList, "`outer[0].gain` of the `InAList` changed from 1.0 to 3.0"),
    (ByText, "`gain` of the `ByText` changed"),
    (OfTheTrainer, "`gain` of the `Trainer` was set to 3.0"),
    (OfACallback, ".gain` of the `Trainer` was set to 3.0"),
    (OfTheData, "`data.gain` of the `OfTheData` changed from 1.0 to 3.0"),
    (HiddenMode, "`training` of `teachers[0]` changed from False to True"),
    (HiddenParameter, "the address of parameter `teachers[0].weight` changed"),
    (OfABuffer, "`gain` of buffer `offset` changed from 1.0 to 3.0"),
    (InAParameterList, "`0` of `gains` changed from 1.0 to 3.0"),
    (InAParameterDict, "`up` of `gains` changed from 1.0 to 3.0"),
    (OfLightning, "`_strict_loading` of the `OfLightning` changed from True to False"),
    (LargeAndEqual, "`rows` of the `LargeAndEqual` changed"),
    (LargeAndCopied, "`rows` of the `LargeAndCopied` changed"),
    (Defaults, "`defaults['lr']` of the optimizer `ByDefaults` changed from 0.1 to 0.01"),
    (OfAnOptimizer, "`scale.gain` of the optimizer `Scaled` changed from 1.0 to 3.0"),
    (NewInAnOptimizer, "`scale` of the optimizer `Scaled` changed"),
    (OfAGroup, "`param_groups[0]['gains']` of the optimizer `Scaled` changed"),
    (closure, "`gain` of the closure of `factor` changed from 1.0 to 3.0"),
    (table, "`table['gain']` of the closure of `factor` changed from 1.0 to 3.0"),
]


def _pair(build: Any, tmp_path: Path, accelerator: str, **arguments: Any) -> tuple[Trace, Trace]:
    def run(name: str, callback: CUDAGraphCallback | None) -> Trace:
        return train(
            make(build),
            tmp_path / name,
            callback,
            accelerator=accelerator,
            callbacks=(Gain(),),
            checkpoint_every=1000,
            train_loader=loader(ragged=False, batches=24),
            max_epochs=1,
        )

    return run("plain", None), run("graph", CUDAGraphCallback(verify=None, **arguments))


@pytest.mark.spread(3)
@pytest.mark.parametrize(("build", "words"), CHANGES, ids=lambda v: getattr(v, "__name__", ""))
def test_is_captured_anew(build: Any, words: str, tmp_path: Path, accelerator: str) -> None:
    plain, graph = _pair(build, tmp_path, accelerator)
    assert_same(plain, graph)
    (reason,) = graph.counts.recaptures
    assert words in reason
    assert graph.counts.replayed > 12


@pytest.mark.long
@pytest.mark.parametrize("build", [AddedGroup, Parameter, Submodule])
def test_is_captured_anew_behind(build: Any, tmp_path: Path, accelerator: str) -> None:
    plain, graph = _pair(build, tmp_path, accelerator, scope="forward_backward")
    assert_same(plain, graph)
    assert len(graph.counts.recaptures) == 1


@pytest.mark.long
@pytest.mark.parametrize("build", [Submodule, Replaced, HiddenMode, closure])
def test_these_runs_would_be_wrong(
    build: Any, tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Guards, "changed", lambda self: None)
    plain, graph = _pair(build, tmp_path, accelerator)
    assert differences(plain.final["weights"], graph.final["weights"])


class Restless(Changing):
    """Sets, at every step, what the step does not mention, or to what it was."""

    def prepare(self) -> None:
        self.weights = [0.5, 0.5]
        self.scale = Scale(1.0)

    def factor(self) -> Any:
        return sum(self.weights) * self.scale()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.weights = [0.5, 0.5]
        self.scale.gain = float(str(1.0))
        self.scale.calls = batch_idx  # type: ignore[attr-defined]
        self.results = {"batch": batch}  # a name of Lightning's and torch's
        nn.Linear(1, 1).register_forward_hook(print)


@pytest.mark.long
def test_what_stays_the_same_is_left_alone(tmp_path: Path, accelerator: str) -> None:
    plain, graph = _pair(Restless, tmp_path, accelerator)
    assert_same(plain, graph)
    assert not graph.counts.recaptures


def test_harmless_names_are_not_compared(tmp_path: Path, accelerator: str) -> None:
    _, graph = _pair(Replaced, tmp_path, accelerator, harmless=["scale"])
    assert not graph.counts.recaptures


class ReadsTable(Net):
    def __init__(self, length: int = 0) -> None:
        super().__init__(momentum)
        self.table = np.ones(length)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(self.table[-1])


@pytest.mark.spread
@pytest.mark.parametrize("length", [8_000, 10_000])
def test_the_report_names_what_is_compared_in_pauses_only(
    tmp_path: Path, accelerator: str, length: int
) -> None:
    callback = CUDAGraphCallback()
    train(make(partial(ReadsTable, length)), tmp_path, callback, accelerator=accelerator)
    is_named = "compared in pauses only" in str(callback.summary)
    assert is_named == (length * 8 > 1 << 16)
    assert not is_named or "`table` of the `ReadsTable`" in str(callback.summary)


class BeforeAnotherShape(LargeAndEqual):
    """A change of a part that is compared in pauses alone, before the first step of another shape."""

    def change(self) -> None:
        self.rows[-1] = 3.0


class SwitchBeforeAnotherShape(Changing):
    def factor(self) -> Any:
        third = torch.full((1,), 1 / 3, device=self.device)
        return (1 + (third.double() - 1 / 3) * 1e6).float()

    def change(self) -> None:
        torch.set_default_dtype(torch.float64)


@pytest.mark.spread
@pytest.mark.parametrize(
    ("build", "words"),
    [
        (BeforeAnotherShape, "`rows` of the `BeforeAnotherShape` changed"),
        (SwitchBeforeAnotherShape, "`torch.get_default_dtype()` changed from torch.float32"),
    ],
)
def test_a_capture_of_another_shape_hides_no_change(
    build: Any, words: str, tmp_path: Path, accelerator: str
) -> None:
    data = loader(ragged=False, batches=24).dataset
    sizes = [BATCH_SIZE] * 10 + [BATCH_SIZE // 2] * 12 + [BATCH_SIZE] * 8
    ends = [*accumulate(sizes)]
    batches = [[*range(end - size, end)] for size, end in zip(sizes, ends, strict=True)]
    runs = []
    try:
        for name, callback in (("plain", None), ("graph", CUDAGraphCallback(verify=None))):
            batches_of = DataLoader(data, batch_sampler=batches)
            module = make(build)
            runs.append(
                train(
                    module,
                    tmp_path / name,
                    callback,
                    accelerator=accelerator,
                    checkpoint_every=1000,
                    train_loader=batches_of,
                    max_epochs=1,
                )
            )
            torch.set_default_dtype(torch.float32)
    finally:
        torch.set_default_dtype(torch.float32)
    plain, graph = runs
    assert_same(plain, graph)
    (reason,) = graph.counts.recaptures
    assert words in reason
    assert graph.counts.replayed > 10


# In code of each part of the package that runs in a capture.
OURS = ("label", "place", "cost", "waits", "moved", "results", "namespace", "known", "number")


class NamedLikeOurs(Net):
    """Attributes that the host changes in every step, with names that the capturing code uses too.

    It lies in a layer of torch's: of attributes that only a class of the user's has, those count that
    code of the user's mentions, and no others.
    """

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for name in OURS:
            setattr(self.head, name, batch_idx)


@pytest.mark.spread
@pytest.mark.parametrize("streams", [1, 2])
def test_names_of_what_captures_are_not_the_steps(
    tmp_path: Path, accelerator: str, streams: int
) -> None:
    plain, graph = _pair(NamedLikeOurs, tmp_path, accelerator, streams=streams)
    assert_same(plain, graph)
    assert not graph.counts.recaptures


class Collects(Callback):
    """Its method is a hook inside the step."""

    def __init__(self) -> None:
        self.seen = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.head.register_forward_hook(self.hook)

    def hook(self, module: Any, args: Any, output: Any) -> None:
        self.seen += 1


def test_a_callback_whose_method_is_a_hook(tmp_path: Path, accelerator: str) -> None:
    with pytest.raises(CaptureError, match=r"sets or changes `_forward_hooks\[\d+\].seen` of `head`"):
        train(make(Net), tmp_path, CUDAGraphCallback(), accelerator=accelerator, callbacks=(Collects(),))


class CollectsAndCounts(Callback):
    """Its method is a hook that collects in validation; the step names its counter for another's."""

    def __init__(self) -> None:
        self.steps = 0
        self.features: list[Tensor] = []
        self.kinds: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.features.register_forward_hook(self.hook)
        kinds = self.kinds

        def keep(module: Any, args: Any, output: Any) -> None:
            if not module.training:
                kinds["act"] = output

        pl_module.act.register_forward_hook(keep)

    def hook(self, module: Any, args: Any, output: Any) -> None:
        if not module.training:
            self.features.append(output)

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps += 1


class NamesSteps(Changing):
    """Its optimizer takes the learning rate, which moves in each step, as the argument of an op."""

    steps = 1

    def prepare(self) -> None:
        self.make_optimizer = OwnRate

    def factor(self) -> Any:
        return self.steps


class OwnRate(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(parameter.grad, alpha=-group["lr"])
        return loss


@pytest.mark.long
def test_hooks_that_collect_in_validation(tmp_path: Path, accelerator: str) -> None:
    runs = []
    for callback in (None, CUDAGraphCallback()):
        collects = CollectsAndCounts()
        trace = train(
            make(NamesSteps),
            tmp_path / ("graph" if callback else "plain"),
            callback,
            accelerator=accelerator,
            callbacks=(collects,),
            train_loader=loader(ragged=False, batches=12),
            val_check_interval=3,
            max_epochs=2,
        )
        runs.append((trace, len(collects.features), collects.steps))
    (plain, *kept), (graph, *kept_too) = runs
    assert_same(plain, graph)
    assert kept == kept_too
    assert not graph.counts.recaptures
    assert graph.counts.replayed > 16


class FreezesLoose(Changing):
    """A parameter that the optimizer knows, and no module."""

    def prepare(self) -> None:
        self.make_optimizer = self.with_loose

    def with_loose(self, parameters: Any) -> torch.optim.Optimizer:
        self.loose = [nn.Parameter(torch.ones((), device=self.head.weight.device))]
        return torch.optim.SGD([*parameters, *self.loose], lr=0.1)

    def factor(self) -> Any:
        return self.loose[0]

    def change(self) -> None:
        self.loose[0].requires_grad_(False)


class HooksLoose(FreezesLoose):
    def change(self) -> None:
        self.loose[0].register_hook(lambda gradient: gradient * 0.1)


@pytest.mark.spread(2)
@pytest.mark.parametrize("build", [FreezesLoose, HooksLoose])
def test_a_parameter_that_no_module_knows(build: Any, tmp_path: Path, accelerator: str) -> None:
    plain, graph = _pair(build, tmp_path, accelerator)
    assert_same(plain, graph)
    (reason,) = graph.counts.recaptures
    assert "of the parameter 6 in param group 0 of the optimizer changed" in reason
    assert torch.equal(*(run.module.loose[0].detach() for run in (plain, graph)))  # type: ignore[union-attr]


class GradientOfTheHost(Net):
    """The host puts a gradient on a parameter that the step leaves alone."""

    def __init__(self) -> None:
        super().__init__(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        self.extra = nn.Parameter(torch.ones(3))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2 == 1 and self.current_epoch > 0:
            self.extra.grad = torch.ones(3, device=self.device)


@pytest.mark.spread
@pytest.mark.parametrize("window", [1, 3])
def test_a_gradient_of_the_host(tmp_path: Path, accelerator: str, window: int) -> None:
    plain, graph = (
        train(
            make(GradientOfTheHost),
            tmp_path / ("graph" if callback else "plain"),
            callback,
            accelerator=accelerator,
            accumulate_grad_batches=window,
        )
        for callback in (None, CUDAGraphCallback())
    )
    assert graph.counts.replayed
    assert_same(plain, graph)


class _CountsUnderAnotherName(Net):
    """A counter that decides late, under a name that is put together: a later check finds it."""

    counted, bound, word = 0, 9, "count"

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        return logits * 0.5 if getattr(self, self.word + "ed") > self.bound else logits

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.counted += 1


@pytest.mark.long
def test_a_late_finding_tells_of_the_replays_before_it(tmp_path: Path, accelerator: str) -> None:
    callback = CUDAGraphCallback()
    train(make(_CountsUnderAnotherName), tmp_path, callback, accelerator=accelerator, max_epochs=3)
    reasons = " ".join(callback.summary.fit.recaptures)
    assert "replays since the check before may have had other numbers than eager steps" in reasons
