"""Eager steps that are timed, and in which something happens that most steps do not have."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn

from lightning_cudagraph import (
    CUDAGraphCallback,
    LayerTimings,
    LayerTimingsMonitor,
)
from lightning_cudagraph.timing.events.marks import StepMarks
from lightning_cudagraph.timing.readings.spans import Reading
from lightning_cudagraph.timing.sinks.tensorboard.writer import TensorBoardWriter
from tests.harness import Net, assert_same, loader, make, train
from tests.test_clock import events, steps
from tests.test_layer_timings_monitor import run


@pytest.mark.spread
@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")  # there is nothing to validate on
@pytest.mark.parametrize("first", ["timings", "saves"])
@pytest.mark.parametrize("hook", ["on_before_optimizer_step", "on_train_batch_end"])
def test_a_checkpoint_in_the_middle_of_a_step(
    tmp_path: Path, accelerator: str, hook: str, first: str
) -> None:
    """Its step goes on being timed."""

    class Saves(Callback):
        pass

    def save(trainer: pl.Trainer, module: Any, *args: Any) -> None:
        trainer.save_checkpoint(tmp_path / "saved.ckpt")

    saves = Saves()
    setattr(saves, hook, save)
    both: list[Callback] = [LayerTimingsMonitor(), saves]
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator=accelerator,
        devices=1,
        callbacks=both if first == "timings" else both[::-1],
        logger=TensorBoardLogger(tmp_path),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        log_every_n_steps=1,
    )
    trainer.fit(make(Net), loader(ragged=False, batches=4))
    found = events(tmp_path)
    assert steps(found, "step_ms/total") == [0, 1, 2, 3]
    assert "~step_ms/optimizer" in found.Tags()["scalars"]


class _Lbfgs(Net):
    """Three forward passes in a step of the optimizer."""

    def __init__(self) -> None:
        super().__init__(lambda parameters: torch.optim.LBFGS(parameters, max_iter=3, max_eval=3))
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.trainer.global_step)
        return super().forward(x)


@pytest.mark.long
def test_a_closure_that_is_called_several_times(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings: list[Reading] = []
    add = TensorBoardWriter.add
    monkeypatch.setattr(
        TensorBoardWriter, "add", lambda self, one: (readings.append(one), add(self, one))
    )
    plain = train(make(_Lbfgs), tmp_path / "plain", accelerator=accelerator)
    timed = train(
        make(_Lbfgs), tmp_path / "timed", accelerator=accelerator, callbacks=(LayerTimingsMonitor(),)
    )
    assert_same(plain, timed)
    assert isinstance(timed.module, _Lbfgs)
    calls = timed.module.seen.count(2)
    assert calls > 1
    (reading,) = [one for one in readings if one.step == 2]
    spans = {span.tag: span.calls for span in reading.layout.spans}
    for tag in ("step_ms/forward", "layer_forward_ms/head", "layer_backward_ms/head"):
        assert len(spans[tag]) == calls


@pytest.mark.long
def test_steps_do_not_wait_for_the_collector(tmp_path: Path, accelerator: str) -> None:
    """The events of a step are gone when it has been read, also in a run without garbage collection."""
    alive: list[int] = []

    class Counts(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            alive.append(sum(type(thing) is StepMarks for thing in gc.get_objects()))

    gc.collect()
    gc.disable()
    try:
        run(tmp_path, accelerator, LayerTimingsMonitor(), Counts(), max_epochs=2)
    finally:
        gc.enable()
    assert len(alive) == 16
    assert max(alive) <= 4  # those under way, and on a GPU those that it has not come to


class _KeepsALoss(Net):
    """Goes back once more through the graph of a step, behind it."""

    kept: Any = None
    behind = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        self.kept = outputs["loss"]
        return outputs

    def backward(self, loss: Tensor) -> None:
        loss.backward(retain_graph=True)

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.autograd.set_multithreading_enabled(False):
            gradients = torch.autograd.grad(self.kept, [self.head.bias], retain_graph=False)
        self.behind += len(gradients)


def test_a_backward_pass_behind_the_step(tmp_path: Path, accelerator: str) -> None:
    plain = train(make(_KeepsALoss), tmp_path / "plain", accelerator=accelerator)
    timed = train(
        make(_KeepsALoss),
        tmp_path / "timed",
        accelerator=accelerator,
        callbacks=(LayerTimingsMonitor(),),
    )
    assert_same(plain, timed)
    assert isinstance(timed.module, _KeepsALoss)
    assert timed.module.behind == len(timed.steps)


class _StepsTwice(Net):
    def optimizer_step(self, *args: Any) -> None:
        *_, optimizer, closure = args
        optimizer.step(closure=closure)
        optimizer.step(closure=closure)


class _LooksAgain(Net):
    def optimizer_step(self, *args: Any) -> None:
        *_, optimizer, closure = args
        optimizer.step(closure=closure)
        closure()


class _GoesBackBehind(Callback):
    """Leaves gradients behind, which the next step drops."""

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *_: Any
    ) -> None:
        trainer.strategy.backward(pl_module(batch[0]).mean(), None)


@pytest.mark.long
@pytest.mark.parametrize(
    ("cls", "others"),
    [(_StepsTwice, ()), (_LooksAgain, ()), (Net, (_GoesBackBehind(),))],
    ids=["two steps", "closure", "callback"],
)
def test_passes_behind_the_step_of_the_optimizer(
    tmp_path: Path, accelerator: str, cls: Any, others: tuple[Callback, ...]
) -> None:
    """What the batch does when its step has come to its end is not timed."""
    timings = LayerTimingsMonitor()
    plain = train(make(cls), tmp_path / "plain", accelerator=accelerator, callbacks=others)
    timed = train(make(cls), tmp_path / "timed", accelerator=accelerator, callbacks=(*others, timings))
    assert_same(plain, timed)
    assert "optimizer" in timings.summary.times.parts
    assert "features.0" in timings.summary.times.forward


@dataclass
class _HalfSet:
    logits: Tensor
    hidden: Tensor = field(init=False)


@dataclass
class _Refuses:
    logits: Tensor
    attention: Tensor = field(init=False)


def _not_computed(packed: Any) -> Tensor:
    raise RuntimeError("pass `output_attentions=True`")


_Refuses.attention = property(_not_computed)  # type: ignore[assignment]


class _Lazy(UserDict[str, Any]):
    def __getitem__(self, key: str) -> Any:
        if key == "hidden":
            raise KeyError("was not computed")
        return super().__getitem__(key)


class _Once(UserDict[str, Any]):
    def __getitem__(self, key: str) -> Any:
        return self.data.pop(key)


def _holds_itself(logits: Tensor) -> list[Any]:
    found: list[Any] = [logits]
    found.append(found)
    return found


class _Packs(nn.Linear):
    pack: Any = None

    def forward(self, x: Tensor) -> Any:
        return self.pack(super().forward(x))


class _Unpacks(Net):
    """Has logits from its head in a container."""

    def __init__(self, pack: Callable[[Tensor], Any], logits: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.head = _Packs(24, 4)
        self.head.pack = pack
        self.logits = logits

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(super().forward(x))


@pytest.mark.spread
@pytest.mark.parametrize("graphed", [False, True])
@pytest.mark.parametrize(
    ("pack", "logits"),
    [
        (_HalfSet, lambda packed: packed.logits),
        (_Refuses, lambda packed: packed.logits),
        (_holds_itself, lambda packed: packed[0]),
        (lambda logits: _Lazy(logits=logits, hidden=None), lambda packed: packed["logits"]),
        (lambda logits: _Once(logits=logits), lambda packed: packed["logits"]),
    ],
    ids=["half set", "refuses", "holds itself", "lazy", "once"],
)
def test_outputs_of_layers_that_cannot_be_walked(
    tmp_path: Path, accelerator: str, pack: Any, logits: Any, graphed: bool
) -> None:
    callback = CUDAGraphCallback() if graphed else None
    plain = train(make(lambda: _Unpacks(pack, logits)), tmp_path / "plain", accelerator=accelerator)
    timed = train(
        make(lambda: _Unpacks(pack, logits)),
        tmp_path / "timed",
        callback,
        accelerator=accelerator,
        callbacks=() if graphed else (LayerTimingsMonitor(),),
    )
    assert_same(plain, timed)
    assert callback is None or timed.counts.replayed == 18


@pytest.mark.long
def test_layers_in_torchscript(tmp_path: Path, accelerator: str) -> None:
    """They take no hooks, which is said."""

    def scripted() -> Net:
        net = Net()
        net.head = torch.jit.script(nn.Sequential(nn.Linear(24, 4)))
        return net

    timings = LayerTimingsMonitor()
    with warnings.catch_warnings():
        # TorchScript is at its end: a `DeprecationWarning`, and from torch 2.15 on a `FutureWarning`.
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
        plain = train(make(scripted), tmp_path / "plain", accelerator=accelerator)
        timed = train(make(scripted), tmp_path / "timed", accelerator=accelerator, callbacks=(timings,))
    assert_same(plain, timed)
    assert "not timed: `head`, `head.0`: a ScriptModule takes no hooks" in str(timings.summary)


class _Replaces(Net):
    """Another layer is its head from the second epoch on, with the weights of the first one."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            head = nn.Linear(24, 4)
            head.weight, head.bias = self.head.weight, self.head.bias
            self.head = head


class _Removes(Net):
    """Has no dropout from the second epoch on."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            del self.features[3]


def _changed(
    cls: type[Net], folder: Path, accelerator: str, graphed: bool
) -> tuple[dict[str, int], str]:
    """A run the layers of which change in the middle: the last steps of their times; the report."""
    timings = LayerTimings(modules=["*"])
    graph, monitor = CUDAGraphCallback(timings=timings), LayerTimingsMonitor(timings)
    plain = train(
        make(cls), folder / "plain", accelerator=accelerator, logger=TensorBoardLogger(folder / "plain")
    )
    timed = train(
        make(cls),
        folder / "timed",
        graph if graphed else None,
        accelerator=accelerator,
        callbacks=() if graphed else (monitor,),
        logger=TensorBoardLogger(folder / "timed"),
    )
    assert_same(plain, timed)
    found = events(folder / "timed")
    prefix = "~layer_forward_ms/"
    tags = [tag for tag in found.Tags()["scalars"] if tag.startswith(prefix)]
    last = {tag.removeprefix(prefix): steps(found, tag.removeprefix("~"))[-1] for tag in tags}
    return last, str(graph.summary if graphed else monitor.summary)


@pytest.mark.long
@pytest.mark.parametrize("graphed", [False, True])
def test_a_layer_that_another_one_replaces(tmp_path: Path, accelerator: str, graphed: bool) -> None:
    """The times of its name go on."""
    last, report = _changed(_Replaces, tmp_path, accelerator, graphed)
    assert last["head"] == last["features.0"] >= 22
    assert "does not call it" not in report


@pytest.mark.spread(2)
@pytest.mark.parametrize("graphed", [False, True])
def test_a_layer_that_is_removed(tmp_path: Path, accelerator: str, graphed: bool) -> None:
    last, report = _changed(_Removes, tmp_path, accelerator, graphed)
    assert last["features.3"] < 8 < 22 <= last["features.2"]
    assert "not timed: `features.3`: the model has it no more; its times are those of before" in report
    assert "does not call it" not in report


class _Copies(Net):
    """Makes a copy of its layers in a step, and goes on using it."""

    teacher: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.teacher is None:
            self.__dict__["teacher"] = copy.deepcopy(self.features)
        with torch.no_grad():
            self.log("agreement", (self.teacher(batch[0]) * self.features(batch[0])).mean())
        return super().training_step(batch, batch_idx)


def test_a_copy_of_layers(tmp_path: Path, accelerator: str) -> None:
    """What it calls belongs to no layer, and it holds nothing of the step's marks."""
    timings = LayerTimingsMonitor(LayerTimings(modules=["features.*"]))
    plain = train(make(_Copies), tmp_path / "plain", accelerator=accelerator)
    timed = train(make(_Copies), tmp_path / "timed", accelerator=accelerator, callbacks=(timings,))
    assert_same(plain, timed)
    assert isinstance(timed.module, _Copies)
    for layer in timed.module.teacher:
        for hook in (*layer._forward_pre_hooks.values(), *layer._forward_hooks.values()):
            assert hook(layer, (), None) is None
    assert b"lightning_cudagraph" not in pickle.dumps(timed.module.teacher)


class _PartlyCompiled(Net):
    """Layers called by code that torch.compile compiles; which graphs it makes is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled_ops: list[int] = []
        self.fast = torch.compile(self.both, backend=self.compiles)

    def compiles(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.compiled_ops.append(len(graph.graph.nodes))
        return graph.forward

    def both(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.fast(x) if self.training else self.both(x)


# Inductor's own imports, in torch 2.11.
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.parametrize("n", [1, 2])
def test_layers_in_compiled_code(tmp_path: Path, accelerator: str, n: int) -> None:
    """What is compiled is what it would be without timings, and is not compiled for each step."""

    def fit(name: str, *callbacks: Callback) -> Any:
        torch.compiler.reset()
        return train(
            make(_PartlyCompiled),
            tmp_path / name,
            accelerator=accelerator,
            callbacks=callbacks,
            train_loader=loader(ragged=False),
        )

    timings = LayerTimingsMonitor(LayerTimings(every_n_steps=n))
    plain, timed = fit("plain"), fit("timed", timings)
    assert_same(plain, timed)
    (ops,) = plain.module.compiled_ops
    # With hooks on the layers, and without.
    assert set(timed.module.compiled_ops) == {ops}
    assert "`head`: the step does not call it, or past its hooks only (`.forward()`, compiled code)" in (
        str(timings.summary)
    )


class _Pickles(Net):
    """Pickles itself in each step."""

    loaded: Any = None

    def on_before_zero_grad(self, optimizer: Any) -> None:
        found = io.BytesIO()
        torch.save(self.features, found)
        found.seek(0)
        self.__dict__["loaded"] = torch.load(found, weights_only=False)


@pytest.mark.spread(2)
@pytest.mark.parametrize("graphed", [False, True])
def test_a_pickle_in_the_middle_of_a_step(tmp_path: Path, accelerator: str, graphed: bool) -> None:
    """Also in the warm-up steps of a run with graphs, the last of which is timed."""
    timings = LayerTimings(modules=["features.*"])
    callback = CUDAGraphCallback(timings=timings, harmless=["loaded"]) if graphed else None
    others = () if graphed else (LayerTimingsMonitor(timings),)
    plain = train(make(_Pickles), tmp_path / "plain", accelerator=accelerator)
    timed = train(
        make(_Pickles), tmp_path / "timed", callback=callback, accelerator=accelerator, callbacks=others
    )
    assert_same(plain, timed)
    assert isinstance(timed.module, _Pickles)
    loaded = timed.module.loaded
    assert loaded(torch.zeros(2, 12, device=next(loaded.parameters()).device)).shape[0] == 2
