"""Compiled modules, functions and steps, in a graph: compiled in warm-up, looked at, and replayed."""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from functorch.compile import make_boxed_func
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import _disable_current_modes

from lightning_cudagraph import (
    CaptureError,
    ConfigurationError,
    CUDAGraphCallback,
    CUDAGraphError,
    GraphedStep,
    LayerTimings,
    UnsupportedError,
    Verification,
)
from lightning_cudagraph.device.sentry import compiled, inductor
from lightning_cudagraph.device.sentry.inductor import without_its_graphs
from tests.harness import Net, Trace, assert_same, loader, make, train
from tests.loops import device_of

# The same on both devices: ops of torch, which the emulator sees, in graphs of Dynamo's.
BACKEND = "eager"
SCALE = 1.0

# of torch, where it imports its own compiler, and where that looks at every attribute
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:`torch.jit.*deprecated:DeprecationWarning",
        "ignore:TensorFloat32 tensor cores",
        "ignore:The .grad attribute of a Tensor that is not a leaf",
        "ignore:Dynamo does not know how to trace the builtin",
        "ignore:\\s*Online softmax is disabled on the fly",
    ),
]


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


class Part(Net):
    """One of its layers is an `OptimizedModule`."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.features: Any = torch.compile(self.features, backend="aot_eager")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).relu()


class InPlace(Net):
    """`module.compile()` of two of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        for block in self.blocks:
            block.compile(backend=BACKEND)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.features(x)))


class Function(Net):
    """A compiled method, which a hook can give another number to read, or something to do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.calls = 0
        self.fast = torch.compile(self.both, backend=BACKEND)

    def both(self, x: Tensor) -> Tensor:
        return self.head(self.features(x)) * self.scale * SCALE

    def forward(self, x: Tensor) -> Tensor:
        return self.fast(x)


def fit(build: Callable[[], Any], path: Path, *args: Any, **kwargs: Any) -> Trace:
    """Train a module that nothing was compiled for before."""
    torch.compiler.reset()
    kwargs.setdefault("train_loader", loader(ragged=False))
    return train(make(build), path, *args, **kwargs)


# Other tests train with `Part` and `Function` in any case.
@pytest.mark.spread(3, first=1)
@pytest.mark.parametrize("timings", [None, LayerTimings()], ids=["untimed", "timed"])
@pytest.mark.parametrize("cls", [Part, InPlace, Function], ids=lambda cls: cls.__name__)
def test_compiled_parts(
    tmp_path: Path, accelerator: str, cls: type[Net], timings: LayerTimings | None
) -> None:
    plain = fit(cls, tmp_path / "plain", accelerator=accelerator)
    callback = CUDAGraphCallback(timings=timings)
    before = compiled.compilations()
    graph = fit(cls, tmp_path / "graph", callback, accelerator=accelerator)
    assert compiled.compilations() > before
    assert_same(plain, graph)
    assert graph.counts.replayed == 18
    assert "a capture without torch.compile showed the Python" in str(callback.summary)


class OfOthers(torch.optim.Optimizer):
    """Of another package: its step is captured with a mode of its own on."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(parameter.grad, alpha=-self.param_groups[0]["lr"])
        return loss


@pytest.mark.long
def test_compiled_parts_inside_an_optimizer_of_others(tmp_path: Path, accelerator: str) -> None:
    def made() -> Any:
        return Part(make_optimizer=OfOthers)

    plain = train(make(made), tmp_path / "plain", accelerator=accelerator)
    graph = train(make(made), tmp_path / "graph", CUDAGraphCallback(), accelerator=accelerator)
    assert_same(plain, graph)
    assert graph.counts.replayed == 18


def _memory_of_its_own(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """As in code of Inductor's: memory is taken where no dispatch sees it, and ops write into it."""

    def run(*args: Any) -> Any:
        results = []
        for result in module(*args):
            if isinstance(result, Tensor) and result.is_floating_point():
                with _disable_current_modes():
                    taken = torch.empty_like(result)
                result = torch.mul(result, 1.0, out=taken)
            results.append(result)
        return results

    return make_boxed_func(run)


class OwnMemory(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head: Any = torch.compile(self.head, backend=aot_autograd(fw_compiler=_memory_of_its_own))


@pytest.mark.long
def test_memory_that_compiled_code_takes_is_no_state(tmp_path: Path, accelerator: str) -> None:
    plain = fit(OwnMemory, tmp_path / "plain", accelerator=accelerator)
    callback = CUDAGraphCallback(timings=None)
    graph = fit(OwnMemory, tmp_path / "graph", callback, accelerator=accelerator)
    assert_same(plain, graph)
    assert graph.counts.replayed == 18


class CountsWhereCompiled(Net):
    """In a tensor that no module registers; a look at the Python alone would not see it."""

    def __init__(self) -> None:
        super().__init__()
        vars(self)["count"] = torch.ones(())
        self.fast = torch.compile(self.both, backend="aot_eager")

    def on_fit_start(self) -> None:
        vars(self)["count"] = self.count.to(self.device)

    def both(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            self.count.add_(1.0)
        return self.head(self.features(x)) * (1 + 0.001 * self.count)

    def forward(self, x: Tensor) -> Tensor:
        return self.fast(x)


@pytest.mark.long
@pytest.mark.parametrize("verify_replays", [0, 2])
def test_what_is_written_only_where_compiled(
    tmp_path: Path, accelerator: str, verify_replays: int
) -> None:
    plain = fit(CountsWhereCompiled, tmp_path / "plain", accelerator=accelerator)
    callback = CUDAGraphCallback(timings=None, verify=Verification(replays=verify_replays))
    graph = fit(CountsWhereCompiled, tmp_path / "graph", callback, accelerator=accelerator)
    assert_same(plain, graph)
    assert float(plain.module.count) == float(graph.module.count) > 20
    assert graph.counts.replayed == 18


@pytest.mark.long
def test_a_ragged_batch_is_compiled_beside_the_graph(tmp_path: Path, accelerator: str) -> None:
    """What Dynamo makes of its size may serve the other batches from then on; checks know of that."""
    data = loader()
    plain = fit(Part, tmp_path / "plain", accelerator=accelerator, train_loader=data)
    callback = CUDAGraphCallback(timings=None, verify=Verification(every_n_steps=2))
    graph = fit(Part, tmp_path / "graph", callback, accelerator=accelerator, train_loader=data)
    assert_same(plain, graph)
    assert graph.counts.replayed == 18


@pytest.mark.long
def test_nothing_is_compiled_in_the_capture(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    held = compiled.CompiledCode.held

    def counting(self: Any, body: Callable[[], Any]) -> Any:
        counted.append(compiled.compilations())
        try:
            return held(self, body)
        finally:
            counted.append(compiled.compilations())

    monkeypatch.setattr(compiled.CompiledCode, "held", counting)
    fit(Function, tmp_path, CUDAGraphCallback(), accelerator=accelerator)
    assert len({*counted}) == 1
    assert counted[0] > 0


class Quiet(Net):
    """Logs nothing: torch.compile of the whole does not get on with `self.log` in all versions."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)


@pytest.mark.long
def test_a_compiled_lightning_module(tmp_path: Path, accelerator: str) -> None:
    """Lightning takes it apart, and compiles its steps."""

    def run(name: str, callback: CUDAGraphCallback | None = None) -> Trace:
        torch.compiler.reset()
        module: Any = torch.compile(make(Quiet), backend=BACKEND)
        return train(module, tmp_path / name, callback, accelerator=accelerator)

    plain, graph = run("plain"), run("graph", callback := CUDAGraphCallback())
    assert_same(plain, graph)
    assert graph.counts.replayed == 18
    assert "not timed: layers: the step is compiled as a whole" in str(callback.summary)


@pytest.mark.long
def test_compile_is_one_word(tmp_path: Path, accelerator: str) -> None:
    """With this backend compiled steps have the numbers of others; so that both runs are one."""
    before = {name: vars(pl.LightningModule)[name] for name in ("log", "log_dict")}
    callback = CUDAGraphCallback(compile=True)
    if accelerator == "gpu":
        callback = CUDAGraphCallback(compile=True, timings=None)
    plain = fit(Net, tmp_path / "plain", accelerator=accelerator)
    with torch.compiler.set_stance("default", force_backend=BACKEND):
        graph = fit(Net, tmp_path / "graph", callback, accelerator=accelerator)
    assert_same(plain, graph)
    assert graph.counts.replayed == 18
    assert compiled.compilations() > 0
    # Nothing of it is left, and nothing of it is in the checkpoints.
    assert "training_step" not in vars(graph.module)
    assert {name: vars(pl.LightningModule)[name] for name in before} == before
    for saved in graph.checkpoints.values():
        assert not any("_orig_mod" in name for name in saved["state_dict"])


class Fails(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 5:
            raise RuntimeError("on purpose")
        return super().training_step(batch, batch_idx)


@pytest.mark.long
def test_nothing_is_left_after_an_error(tmp_path: Path, accelerator: str) -> None:
    callback = CUDAGraphCallback(compile=True, harmless=["global_step"], warmup_steps=8)
    wrapper: Any = torch._TorchCompileInductorWrapper
    before = wrapper.__call__, vars(pl.LightningModule)["log"]
    with torch.compiler.set_stance("default", force_backend=BACKEND):
        run = fit(Fails, tmp_path, callback, accelerator=accelerator, raises=RuntimeError)
    assert "on purpose" in str(run.error)
    assert "training_step" not in vars(run.module)
    assert (wrapper.__call__, vars(pl.LightningModule)["log"]) == before


def test_a_private_name_that_is_gone(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch._dynamo.eval_frame, "OptimizeContext")
    with pytest.raises(CUDAGraphError, match="OptimizeContext` is gone"):
        fit(Net, tmp_path, CUDAGraphCallback(), accelerator=accelerator)


def test_compile_takes_a_bool() -> None:
    with pytest.raises(ConfigurationError, match="compile='reduce-overhead'"):
        CUDAGraphCallback(compile="reduce-overhead")  # type: ignore[arg-type]


# What Dynamo guards, and a replay does not ask: it is compared before each of them.


def _attribute(module: Any) -> None:
    module.scale = 0.5


def _global(module: Any) -> None:
    # Of the module that the code lies in: the tests for GPUs import it.
    sys.modules[Function.__module__].SCALE = 0.25  # type: ignore[attr-defined]


def _mode(module: Any) -> None:
    module.features[3].eval()


def _frozen(module: Any) -> None:
    module.features[0].requires_grad_(False)


CHANGES = [
    (_attribute, "`scale` of the `Function` changed from 1.0 to 0.5"),
    (_global, "`SCALE` of `tests.test_compiled` changed from 1.0 to 0.25"),
    (_mode, "features.3"),
    (_frozen, "requires_grad"),
]


class Changes(Callback):
    """Changes something that compiled code reads, in the middle of an epoch."""

    def __init__(self, changes: dict[int, Any]) -> None:
        self.changes = changes

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if (found := self.changes.get(trainer.global_step)) is not None:
            found[0](pl_module)


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        {6: CHANGES[0], 12: CHANGES[3]},
        {6: CHANGES[1], 12: CHANGES[2]},
    ],
    ids=["attribute, frozen", "global, mode"],
)
def test_what_compiled_code_reads(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch, changes: dict[int, Any]
) -> None:
    def run(name: str, callback: CUDAGraphCallback | None = None) -> Trace:
        monkeypatch.setattr(sys.modules[Function.__module__], "SCALE", 1.0)
        # Dynamo reads a number that has changed once from a tensor on the host. The emulator does not
        # know the host from the device.
        with torch._dynamo.config.patch(specialize_float=accelerator == "cpu"):
            return fit(
                Function,
                tmp_path / name,
                callback,
                accelerator=accelerator,
                callbacks=(Changes(changes),),
                train_loader=loader(ragged=False, batches=18),
                max_epochs=1,
                checkpoint_every=0,
            )

    plain, graph = run("plain"), run("graph", CUDAGraphCallback(timings=None, verify=None))
    assert_same(plain, graph)
    assert len(graph.counts.recaptures) == len(changes)
    for reason, (_, expected) in zip(graph.counts.recaptures, changes.values(), strict=True):
        assert expected in reason
    assert graph.counts.replayed == 18 - 3 * 3


# What compiled code does on the host, and a replay does not do.


class Draws(Function):
    def both(self, x: Tensor) -> Tensor:
        return super().both(x) * random.random()


class Counts(Function):
    def both(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().both(x)


class Reads(Function):
    def both(self, x: Tensor) -> Tensor:
        y = super().both(x)
        return y * 2 if bool(y.sum() > 0) else y


class LooksAtTheClock(Function):
    def both(self, x: Tensor) -> Tensor:
        return super().both(x) * (1.0 if time.monotonic() > 0 else 0.0)


REFUSED: dict[type[Net], str] = {
    Draws: r"draws from `random`",
    Counts: r"sets or changes `calls` of the `Counts`,.* found at .*test_compiled.py:\d+",
    Reads: r"a Python branch on a tensor\.\n  found at .*test_compiled.py:\d+",
    LooksAtTheClock: r"`time.monotonic\(\)`.*test_compiled.py:\d+",
}


@pytest.mark.spread(4, first=2)
@pytest.mark.parametrize("cls", REFUSED, ids=lambda cls: cls.__name__)
def test_what_compiled_code_does_on_the_host(tmp_path: Path, accelerator: str, cls: type[Net]) -> None:
    with pytest.raises(UnsupportedError, match=f"(?s){REFUSED[cls]}"):
        fit(cls, tmp_path, CUDAGraphCallback(timings=None), accelerator=accelerator)


class Large(Function):
    """What takes more memory as it is than compiled."""

    def both(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            raise torch.OutOfMemoryError("tried to allocate too much")
        return super().both(x)


@pytest.mark.long
def test_no_memory_to_look_at_its_python(tmp_path: Path, accelerator: str) -> None:
    plain = fit(Large, tmp_path / "plain", accelerator=accelerator)
    callback = CUDAGraphCallback(timings=None, on_unsupported="eager")
    eager = fit(Large, tmp_path / "eager", callback, accelerator=accelerator)
    assert_same(plain, eager)
    assert eager.counts.replayed == 0
    assert "without torch.compile, to audit its Python; that ran out of memory" in str(callback.summary)


class Moves(Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        pl_module.scale = 1.0 + trainer.global_step


@pytest.mark.long
def test_a_recompilation_is_named(tmp_path: Path, accelerator: str) -> None:
    """Another number in each step: Dynamo makes it a size of its own, or compiles until it gives up."""
    callback = CUDAGraphCallback(timings=None)
    expected = r"recompiled in the capture.*function name: 'both'.*scale"
    with (
        torch._dynamo.config.patch(specialize_float=True),
        pytest.raises(CaptureError, match=f"(?s){expected}"),
    ):
        fit(Function, tmp_path, callback, accelerator=accelerator, callbacks=(Moves(),))
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_a_compiled_optimizer_step_with_a_closure_is_refused(tmp_path: Path, accelerator: str) -> None:
    class StepCompiled(Quiet):
        def configure_optimizers(self) -> Any:
            found = super().configure_optimizers()
            found["optimizer"].step = torch.compile(found["optimizer"].step, backend=BACKEND)
            return found

    with pytest.raises(UnsupportedError, match="`step` of the `AdamW` is compiled"):
        fit(StepCompiled, tmp_path, CUDAGraphCallback(), accelerator=accelerator)


# Inductor's own graphs.


def _patches_given(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """With what Inductor is asked to compile; it then does nothing but run the ops."""
    import torch._inductor.compile_fx as module

    given: list[dict[str, Any]] = []

    def compile_fx(graph: Any, inputs: Any, config_patches: Any = None, **kwargs: Any) -> Any:
        given.append(dict(config_patches or {}))
        return graph.forward

    monkeypatch.setattr(module, "compile_fx", compile_fx)
    return given


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments",
    [{"mode": "reduce-overhead"}, {"mode": "max-autotune"}, {"options": {"triton.cudagraphs": True}}],
    ids=["mode", "tuned", "options"],
)
def test_graphs_of_inductors_own(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]
) -> None:
    class OwnGraphs(Net):
        def __init__(self) -> None:
            super().__init__()
            self.features: Any = torch.compile(self.features, **arguments)

    given = _patches_given(monkeypatch)
    plain = fit(OwnGraphs, tmp_path / "plain", accelerator=accelerator)
    assert given
    assert all(patches["triton.cudagraphs"] is True for patches in given)
    given.clear()
    callback = CUDAGraphCallback(timings=None)
    graph = fit(OwnGraphs, tmp_path / "graph", callback, accelerator=accelerator)
    assert given
    assert all(patches["triton.cudagraphs"] is False for patches in given)
    assert_same(plain, graph)
    assert graph.counts.replayed == 18
    assert "runs without the CUDA graphs of its own" in str(callback.summary)
    # Afterwards it is compiled as it was asked for.
    given.clear()
    graph.module.features(torch.randn(8, 12, device=graph.module.device))
    assert [patches["triton.cudagraphs"] for patches in given] == [True]


@pytest.mark.long
def test_graphs_that_are_there_already(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are let go, and in other threads graphs are made as ever."""
    given = _patches_given(monkeypatch)
    function = torch.compile(torch.sin, mode="reduce-overhead")
    told: list[str] = []

    class OwnGraphs(Net):
        def __init__(self) -> None:
            super().__init__()
            self.features: Any = torch.compile(self.features, mode="reduce-overhead")

        def on_train_start(self) -> None:
            self.features(torch.randn(8, 12, device=self.device))
            given.append({"compiled before": True})

        def on_train_end(self) -> None:
            thread = threading.Thread(target=lambda: told.append(str(function(torch.ones(1)).shape)))
            thread.start()
            thread.join()

    plain = fit(OwnGraphs, tmp_path / "plain", accelerator=accelerator)
    given.clear()
    graph = fit(OwnGraphs, tmp_path / "graph", CUDAGraphCallback(timings=None), accelerator=accelerator)
    assert_same(plain, graph)
    assert graph.counts.replayed == 18
    before = given.index({"compiled before": True})
    assert given[0]["triton.cudagraphs"] is True
    assert given[before + 1]["triton.cudagraphs"] is False
    assert given[-1]["triton.cudagraphs"] is True
    assert len(told) == 2


@pytest.mark.long
def test_kernels_that_the_emulator_cannot_see() -> None:
    fast = torch.compile(lambda x: x.sin() * 2)
    with (
        torch.no_grad(),
        GraphedStep(lambda x: fast(x), modules=nn.Linear(1, 1), backend="emulator") as step,
    ):
        for _ in range(3):
            step(torch.ones(4))
        with pytest.raises(CaptureError, match=r"(?s)Inductor has compiled for the CPU.*aot_eager"):
            step(torch.ones(4))


# A loop of one's own.


@pytest.mark.spread(2)
@pytest.mark.parametrize("whole", [False, True], ids=["part", "whole"])
def test_a_step_of_ones_own(accelerator: str, whole: bool) -> None:
    """Its model is compiled, or all that is differentiated, the loss included."""
    device = device_of(accelerator)

    def run(graphed: bool) -> tuple[list[Tensor], dict[str, Tensor], int]:
        torch.compiler.reset()
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.GELU(), nn.Linear(16, 2)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        called: Any = model if whole else torch.compile(model, backend=BACKEND)

        def loss_of(x: Tensor) -> Tensor:
            return called(x).square().mean()

        compiled_loss = torch.compile(loss_of, backend=BACKEND) if whole else loss_of

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = compiled_loss(x)
            loss.backward()
            optimizer.step()
            return loss

        batches = torch.randn(12, 8, 6, generator=torch.Generator().manual_seed(2)).to(device)
        if not graphed:
            losses = [step(batch).detach().clone() for batch in batches]
            return losses, model.state_dict(), 0
        with GraphedStep(step, modules=model, optimizers=optimizer) as graph:
            losses = [graph(batch).detach() for batch in batches]
        return losses, model.state_dict(), graph.summary.calls.replayed

    plain, graphed = run(False), run(True)
    assert all(map(torch.equal, plain[0], graphed[0]))
    assert all(map(torch.equal, plain[1].values(), graphed[1].values()))
    assert graphed[2] == 9


def _in_a_variable(optimizer: torch.optim.Optimizer) -> Any:
    return optimizer.step


def _compiled_beside(optimizer: torch.optim.Optimizer) -> Any:
    return torch.compile(optimizer.step, backend=BACKEND)


def _compiled_in_place(optimizer: Any) -> Any:
    optimizer.step = torch.compile(optimizer.step, backend=BACKEND)
    return lambda: optimizer.step()


STEPS = {
    _in_a_variable: "calls `SGD.step` as it was before",
    _compiled_beside: "calls `SGD.step` as it was before",
    _compiled_in_place: "`step` of the `SGD` is compiled with its learning rate",
}


@pytest.mark.long
@pytest.mark.parametrize("take", STEPS, ids=lambda take: take.__name__)
def test_steps_of_optimizers_that_bypass_ours(accelerator: str, take: Callable[[Any], Any]) -> None:
    model = nn.Linear(4, 2, device=device_of(accelerator))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step_optimizer = take(optimizer)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        step_optimizer()
        return loss

    def run() -> None:
        with GraphedStep(step, modules=model, optimizers=optimizer) as graph:
            for _ in range(4):
                graph(torch.ones(3, 4, device=device_of(accelerator)))

    with pytest.raises(UnsupportedError, match=f"(?s){STEPS[take]}"):
        run()


def test_a_step_that_nobody_closes_turns_no_later_one() -> None:
    class Owner:
        def note(self, text: str) -> None:
            notes.append(text)

    gc.collect()  # steps of earlier tests
    notes: list[str] = []
    owner = Owner()
    stack = without_its_graphs(owner.note)
    assert inductor._without_graphs._must_go_without()
    del owner
    assert not inductor._without_graphs._must_go_without()
    assert len(notes) == 1
    stack.close()


class _NotTraced:
    """Around a block that Dynamo cannot trace, so that it leaves the whole function alone."""

    def __enter__(self) -> None:
        self.frame: Any = sys._getframe(0)

    def __exit__(self, *error: object) -> None:
        self.frame = None


class LeftAlone(Net):
    """Its step is compiled by its user, as far as that goes."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        with _NotTraced():
            loss = nn.functional.cross_entropy(self(x), y)
        return loss.exp().sin()


@pytest.mark.long
@pytest.mark.parametrize("by_callback", [True, False])
def test_a_function_that_is_not_compiled_after_all(
    tmp_path: Path, accelerator: str, by_callback: bool
) -> None:
    """What it calls is compiled then, but for what watches the step."""

    def made() -> Any:
        module = LeftAlone()
        if not by_callback:
            module.training_step = torch.compile(module.training_step, backend=BACKEND)
        return module

    with torch.compiler.set_stance("default", force_backend=BACKEND):
        plain = train(make(LeftAlone), tmp_path / "plain", accelerator=accelerator)
        callback = CUDAGraphCallback(compile=by_callback)
        graph = train(make(made), tmp_path / "graph", callback, accelerator=accelerator)
    assert_same(plain, graph)
    assert graph.counts.replayed == 18, callback.summary
