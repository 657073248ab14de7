"""Optimizers whose step torch.compile has compiled: captured as they are, or what is missing is said.

`tests/gpu/test_compiled_optimizers.py` collects these tests again, on CUDA, with kernels of Inductor's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cudagraph import CUDAGraphCallback, GraphedStep, UnsupportedError
from lightning_cudagraph.optim import compiled
from lightning_cudagraph.optim.compiled import is_compiled
from tests import test_fp16
from tests.harness import Net, Trace, assert_same, differences, loader, make, train
from tests.loops import device_of
from tests.test_fp16 import Overflows

O = torch.optim  # noqa: E741

# The same on both devices: ops of torch, which the emulator sees, in graphs of Dynamo's.
BACKEND: str | None = "eager"

# of torch, where it imports its own compiler, and where that looks at every attribute
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:`torch.jit.*deprecated:DeprecationWarning",
        "ignore:TensorFloat32 tensor cores",
        "ignore:The .grad attribute of a Tensor that is not a leaf",
        "ignore:Dynamo does not know how to trace the builtin",
        # of optimizers that are made fit for CUDA graphs, where they run without one
        "ignore:This instance was constructed with capturable=True",
    ),
]


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


Make = Callable[[Any, Any], O.Optimizer]

# Nothing of these has to be changed for a graph.
FIT: dict[str, Make] = {
    "Adam": lambda p, lr: O.Adam(p, lr=lr, capturable=True),
    "AdamW-single": lambda p, lr: O.AdamW(p, lr=lr, capturable=True, amsgrad=True, foreach=False),
    "AdamW-foreach": lambda p, lr: O.AdamW(p, lr=lr, capturable=True, maximize=True, foreach=True),
    "AdamW-fused": lambda p, lr: O.AdamW(p, lr=lr, capturable=True, fused=True),
    "SGD": lambda p, lr: O.SGD(p, lr=lr),
    "SGD-momentum": lambda p, lr: O.SGD(p, lr=lr, momentum=0.9, nesterov=True, weight_decay=0.1),
    "RMSprop": lambda p, lr: O.RMSprop(p, lr=lr, capturable=True, momentum=0.5),
}

How = Callable[[Any], Callable[[], Any]]


def in_place(optimizer: Any) -> Callable[[], Any]:
    optimizer.step = torch.compile(optimizer.step, backend=BACKEND)
    return lambda: optimizer.step()


def beside(optimizer: Any) -> Callable[[], Any]:
    return torch.compile(optimizer.step, backend=BACKEND)


def in_a_function(optimizer: Any) -> Callable[[], Any]:
    def function() -> None:
        optimizer.step()

    return torch.compile(function, backend=BACKEND)


def both(optimizer: Any) -> Callable[[], Any]:
    in_place(optimizer)
    return in_a_function(optimizer)


class Loop:
    """A loop with a schedule that moves the learning rate after every step, and clipping."""

    def __init__(self, device: str, make: Make, how: How, lr: Any = None) -> None:
        torch.compiler.reset()
        torch.manual_seed(1)
        self.device = device
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.GELU(), nn.Linear(16, 2)).to(
            device
        )
        rate = torch.tensor(0.05, device=device) if lr is None else lr
        self.optimizer = make(self.model.parameters(), rate)
        # First, because torch's schedulers cannot do with a step that is compiled.
        self.scheduler = O.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=20)
        self.step_optimizer = how(self.optimizer)
        self.scaler: Any = None

    def step(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        if self.scaler is None:
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.step_optimizer()
            return loss
        self.scaler.scale(loss * 64).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def run(
        self, graphed: bool, between: Callable[[Loop, int], None] | None = None, **kwargs: Any
    ) -> tuple[dict[str, Any], GraphedStep[..., Any]]:
        x = torch.randn(14, 8, 6, generator=torch.Generator().manual_seed(2)).to(self.device)
        losses = []
        graph = GraphedStep(self.step, self.model, self.optimizer, **kwargs)
        with graph:
            call = graph if graphed else self.step
            for index, batch in enumerate(x):
                losses.append(call(batch).detach().clone())
                self.scheduler.step()
                if between is not None:
                    between(self, index)
        state = {
            "losses": losses,
            "weights": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
        }
        return state, graph


def assert_replayed(
    accelerator: str,
    make: Make,
    how: How,
    replays: int = 11,
    between: Callable[[Loop, int], None] | None = None,
) -> GraphedStep[..., Any]:
    """Fail unless the graphed loop does the same as the plain one, with a compiled step in both."""
    plain, _ = Loop(device_of(accelerator), make, how).run(False, between)
    graphed, graph = Loop(device_of(accelerator), make, how).run(True, between)
    assert not differences(plain, graphed)
    assert graph.summary.calls.replayed == replays, graph.summary
    assert not graph.summary.calls.eager
    return graph


@pytest.mark.long
@pytest.mark.spread(5)
@pytest.mark.parametrize("form", ["Adam", "AdamW-single", "AdamW-fused", "SGD-momentum", "RMSprop"])
def test_a_step_compiled_in_its_place(accelerator: str, form: str) -> None:
    graph = assert_replayed(accelerator, FIT[form], in_place)
    assert "a capture without torch.compile showed the Python" in str(graph.summary)


@pytest.mark.long
@pytest.mark.parametrize("how", [beside, in_a_function, both], ids=lambda how: how.__name__)
def test_where_it_is_compiled(accelerator: str, how: How) -> None:
    assert_replayed(accelerator, FIT["Adam"], how)


@pytest.mark.long
def test_a_function_that_calls_a_step_compiled_in_its_place(accelerator: str) -> None:
    """Of SGD: uncompiled, an op of it takes the learning rate as a number."""
    assert_replayed(accelerator, FIT["SGD-momentum"], both)


@pytest.mark.long
def test_a_state_that_is_loaded(accelerator: str) -> None:
    """Other tensors in the place of those that were compiled for: warmed up, and captured anew."""

    def between(loop: Loop, index: int) -> None:
        if index == 6:
            loop.optimizer.load_state_dict(loop.optimizer.state_dict())

    graph = assert_replayed(accelerator, FIT["Adam"], in_place, replays=8, between=between)
    assert graph.summary.calls.captures == 2


def uncompiled(optimizer: Any) -> Callable[[], Any]:
    return lambda: optimizer.step()


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "replays"), [(in_place, 8), (uncompiled, 4)], ids=["no longer", "later"]
)
def test_a_step_that_is_compiled_later_or_no_longer(accelerator: str, how: How, replays: int) -> None:
    """Other kernels: the graph is dropped. What is compiled later is compiled beside what is changed."""

    def between(loop: Loop, index: int) -> None:
        if index != 6:
            return
        if how is uncompiled:
            in_place(loop.optimizer)
        else:
            loop.optimizer.step = loop.optimizer.step._torchdynamo_orig_callable

    graph = assert_replayed(accelerator, FIT["SGD-momentum"], how, replays=8, between=between)
    assert graph.summary.calls.captures == 2


@pytest.mark.long
def test_a_learning_rate_that_becomes_a_float(accelerator: str) -> None:
    """The step is not changed for a graph then, either."""

    def between(loop: Loop, index: int) -> None:
        if index == 6:
            loop.optimizer.param_groups[0]["lr"] = 0.02

    def run(graphed: bool) -> tuple[dict[str, Any], GraphedStep[..., Any]]:
        loop = Loop(device_of(accelerator), FIT["Adam"], in_place)
        return loop.run(graphed, between, on_unsupported="eager")

    (plain, _), (graphed, graph) = run(False), run(True)
    assert not differences(plain, graphed)
    assert graph.summary.calls.replayed == 4
    assert sum(graph.summary.calls.eager.values()) == 4
    assert "`lr` of param group 0 is a float" in str(graph.summary)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # the first step is skipped
def test_with_a_scaler_of_ones_own(accelerator: str) -> None:
    def run(graphed: bool) -> tuple[dict[str, Any], GraphedStep[..., Any]]:
        loop = Loop(device_of(accelerator), FIT["SGD-momentum"], in_place)
        # As large as it gets: some gradients overflow, and steps are skipped, again and again.
        loop.scaler = torch.amp.GradScaler(loop.device, init_scale=2.0**126, growth_interval=3)
        return loop.run(graphed, scaler=loop.scaler)

    (plain, _), (graphed, graph) = run(False), run(True)
    assert not differences(plain, graphed)
    assert graph.summary.calls.replayed >= 5
    assert plain["scaler"]["scale"] < 2.0**126


REFUSED: dict[str, tuple[Make, How, Any, str]] = {
    "float": (FIT["Adam"], in_place, 0.1, r"`lr` of param group 0 is a float; expected a tensor on"),
    "float-SGD": (FIT["SGD"], in_place, 0.1, r"`step` of the `SGD` is compiled with its learning rate"),
    "on-the-host": (
        lambda p, lr: O.Adam(p, lr=lr),
        in_place,
        None,
        r"param group 0 has `capturable=False`; expected True",
    ),
    "beside": (
        FIT["Adam"],
        beside,
        0.1,
        r"calls `Adam.step` as it was before.*assign the compiled step",
    ),
    "in-a-function": (FIT["Adam"], in_a_function, 0.1, r"Compiled code calls `Adam.step\(\)`"),
    "SGD-in-a-function": (FIT["SGD"], in_a_function, None, r"Compiled code calls `SGD.step\(\)`"),
}


@pytest.mark.spread(2)
@pytest.mark.parametrize("case", REFUSED)
def test_what_a_graph_would_have_to_change(accelerator: str, case: str) -> None:
    form, how, lr, message = REFUSED[case]
    with pytest.raises(UnsupportedError, match=f"(?s){message}"):
        Loop(device_of(accelerator), form, how, lr).run(True)


class Own(O.Optimizer):
    """Somebody's own."""

    def __init__(self, parameters: Any, lr: Any) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad * group["lr"])


def test_an_optimizer_of_which_nothing_is_known(accelerator: str) -> None:
    with pytest.raises(UnsupportedError, match="`Own` is compiled, and the class is not one of torch's"):
        Loop(device_of(accelerator), Own, in_place).run(True)


# In Lightning.


class Manual(Net):
    """Lightning's wrapper gives the step a closure that does nothing, and Dynamo sees that."""

    graphed = False

    def __init__(self) -> None:
        super().__init__(lambda p: FIT["Adam"](p, torch.tensor(0.01, device=self.device)))
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        found = super().configure_optimizers()
        in_place(found["optimizer"])
        return found

    def on_fit_start(self) -> None:
        self.part: Any = self.one_step
        if self.graphed:
            self.part = self.graph = GraphedStep(self.one_step, optimizers=self.optimizers())

    def on_fit_end(self) -> None:
        if self.graphed:
            self.graph.close()

    def one_step(self, x: Tensor, y: Tensor) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self(x), y)
        self.manual_backward(loss)
        optimizer.step()
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.part(*batch))
        self.lr_schedulers().step()  # type: ignore[union-attr]


class ManualGraphed(Manual):
    graphed = True


@pytest.mark.long
def test_manual_optimization(tmp_path: Path, accelerator: str) -> None:
    def run(cls: type[Manual]) -> Trace:
        torch.compiler.reset()
        kwargs: dict[str, Any] = {"train_loader": loader(ragged=False), "checkpoint_every": 0}
        return train(make(cls), tmp_path / cls.__name__, accelerator=accelerator, **kwargs)

    plain, graphed = run(Manual), run(ManualGraphed)
    assert_same(plain, graphed)
    module: Any = graphed.module
    assert module.graph.summary.calls.replayed == 18


def in_stairs(optimizer: O.Optimizer) -> Any:
    """Dynamo compiles anew for each float."""
    return O.lr_scheduler.StepLR(optimizer, 8)


class Compiled(Overflows):
    """Its optimizer's step is compiled, after the schedule has been made."""

    def __init__(self, make_optimizer: Make, lr: float | None = None) -> None:
        super().__init__(lambda parameters: make_optimizer(parameters, self.rate()), lr and in_stairs)
        self.lr = lr

    def rate(self) -> Any:
        return torch.tensor(0.01, device=self.device) if self.lr is None else self.lr

    def configure_optimizers(self) -> Any:
        found = super().configure_optimizers()
        in_place(found["optimizer"])
        return found


def fp16(
    folder: Path, accelerator: str, callback: CUDAGraphCallback | None, *args: Any, **kwargs: Any
) -> Trace:
    torch.compiler.reset()
    found, scales = test_fp16.run(
        folder,
        accelerator,
        lambda: Compiled(*args),
        callback,
        train_loader=loader(ragged=False),
        **kwargs,
    )
    assert scales.skipped > 0
    return found


@pytest.mark.long
@pytest.mark.parametrize("form", ["AdamW-single", "SGD-momentum"])
def test_with_a_gradient_scaler(tmp_path: Path, accelerator: str, form: str) -> None:
    """Lightning calls the closure before the step then; steps are skipped where gradients overflow."""
    callback = CUDAGraphCallback(timings=None)
    plain = fp16(tmp_path / "plain", accelerator, None, FIT[form], gradient_clip_val=0.1)
    graph = fp16(tmp_path / "graph", accelerator, callback, FIT[form], gradient_clip_val=0.1)
    assert_same(plain, graph)
    assert graph.counts.replayed == 18
    assert "the optimizer steps eagerly" not in str(callback.summary)


@pytest.mark.long
def test_behind_a_graph(tmp_path: Path, accelerator: str) -> None:
    """With a float for its learning rate, and a graph of forward and backward."""

    def adam(parameters: Any, lr: Any) -> O.Optimizer:
        return O.Adam(parameters, lr=lr)

    callback = CUDAGraphCallback(timings=None)
    plain = fp16(tmp_path / "plain", accelerator, None, adam, 0.01)
    graph = fp16(tmp_path / "graph", accelerator, callback, adam, 0.01)
    assert_same(plain, graph)
    assert graph.counts.replayed == 18
    assert "the optimizer steps eagerly: `step` of the `Adam` is compiled with its" in str(
        callback.summary
    )
    with pytest.raises(UnsupportedError, match="`lr` of param group 0 is a float"):
        fp16(tmp_path / "step", accelerator, CUDAGraphCallback(scope="step"), adam, 0.01)


class After(Net):
    """Its compiled step comes after the closure, and is given none."""

    def configure_optimizers(self) -> Any:
        found = super().configure_optimizers()
        self.fast = beside(found["optimizer"])
        return found

    def optimizer_step(self, *args: Any, optimizer_closure: Any = None) -> None:
        args[3]() if optimizer_closure is None else optimizer_closure()
        self.fast()


@pytest.mark.long
def test_after_the_closure(tmp_path: Path, accelerator: str) -> None:
    def run(name: str, callback: CUDAGraphCallback | None = None) -> Trace:
        torch.compiler.reset()
        module = make(lambda: After(lambda parameters: O.Adam(parameters, lr=0.01), in_stairs))
        return train(
            module,
            tmp_path / name,
            callback,
            accelerator=accelerator,
            train_loader=loader(ragged=False),
            checkpoint_every=0,
        )

    plain, graph = run("plain"), run("graph", CUDAGraphCallback(timings=None))
    assert_same(plain, graph)
    assert graph.counts.replayed == 18


class InPlace(Net):
    def configure_optimizers(self) -> Any:
        found = super().configure_optimizers()
        in_place(found["optimizer"])
        return found


class Late(Net):
    def on_train_start(self) -> None:
        in_place(self.optimizers().optimizer)


class Hook(Net):
    @torch.compile(backend="eager")
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None):
        optimizer.step(closure=optimizer_closure)


AROUND = {
    InPlace: "`step` of the `AdamW` is compiled, and Lightning calls forward and backward pass in it",
    Late: "`step` of the `AdamW` is compiled, and Lightning calls forward and backward pass in it",
    Hook: r"`Hook.optimizer_step` \(.*test_compiled_optimizers.py:\d+\) is compiled, and Lightning",
}


@pytest.mark.spread(2)
@pytest.mark.parametrize("cls", AROUND, ids=lambda cls: cls.__name__)
def test_what_lightning_calls_the_whole_step_in(
    tmp_path: Path, accelerator: str, cls: type[Net]
) -> None:
    with pytest.raises(UnsupportedError, match=f"(?s){AROUND[cls]}"):
        train(make(cls), tmp_path, CUDAGraphCallback(), accelerator=accelerator)


# What Dynamo leaves alone.


class _LeftAlone:
    @torch._dynamo.disable
    def step(self) -> Tensor:
        return torch.ones(1).sin()


def _can_be_compiled() -> bool:
    """Whether `torch.compile` may be given a method that Dynamo leaves alone: 2.10 loses `self`."""
    try:
        torch.compile(_LeftAlone().step, backend="eager")()
    except TypeError:
        return False
    return True


@pytest.mark.parametrize("cls", [O.LBFGS, O.SparseAdam], ids=lambda cls: cls.__name__)
def test_steps_that_dynamo_leaves_alone(cls: type[O.Optimizer]) -> None:
    """It wraps them as it wraps what it compiles, as soon as anything is."""
    torch.compile(torch.sin, backend="eager")(torch.ones(1))
    optimizer = cls([nn.Parameter(torch.ones(2))])
    assert hasattr(optimizer.step, "_torchdynamo_orig_callable")
    assert not is_compiled(optimizer.step)
    if _can_be_compiled():
        in_place(optimizer)
        assert not is_compiled(optimizer.step)  # nor is it then: Dynamo does nothing but call it
    other = O.Adam([nn.Parameter(torch.ones(2))])
    assert not is_compiled(other.step)
    in_place(other)
    assert is_compiled(other.step)


LEFT_ALONE = {
    O.LBFGS: "LBFGS` calls its closure as often as the loss decides",
    O.SparseAdam: "The optimizer is a `SparseAdam`",
}


@pytest.mark.parametrize("cls", LEFT_ALONE, ids=lambda cls: cls.__name__)
def test_what_is_said_of_them(tmp_path: Path, accelerator: str, cls: type[O.Optimizer]) -> None:
    torch.compile(torch.sin, backend="eager")(torch.ones(1))
    callback = CUDAGraphCallback(scope="step")
    with pytest.raises(UnsupportedError, match=f"(?s){LEFT_ALONE[cls]}"):
        train(make(lambda: Net(cls)), tmp_path, callback, accelerator=accelerator)


def test_the_first_compilation_of_a_process_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes much in torch, such as the checks of distributions."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("compiled")

    step = O.LBFGS.step
    monkeypatch.setattr(O.LBFGS, "step", getattr(step, "_torchdynamo_orig_callable", step))
    monkeypatch.setattr(torch, "compile", fail)
    compiled._wrapper_code.cache_clear()
    assert not compiled.is_in_compiled_code()
