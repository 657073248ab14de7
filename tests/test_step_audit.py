"""Host code in a captured step that would be frozen or lost: named with its line, or guarded."""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
import re
import sys
import time
import warnings
from argparse import Namespace
from collections import Counter, OrderedDict, UserDict, deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial, wraps
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_cudagraph import (
    CaptureError,
    ConfigurationError,
    CUDAGraphCallback,
    UnsupportedError,
)
from lightning_cudagraph.capture.decisions.short_lives import ShortLives
from lightning_cudagraph.checks.audit.calls.rules import HostRules
from lightning_cudagraph.checks.audit.effects import Effects
from lightning_cudagraph.checks.audit.step_audit import StepAudit
from lightning_cudagraph.checks.walk.scope import Root, Scope
from lightning_cudagraph.checks.walk.walker import Walk
from tests.harness import Net, assert_same, differences, make, train

log = logging.getLogger(__name__)


class Scaled(Net):
    """The loss is multiplied with a number that `scale` finds on the host."""

    def scale(self) -> float:
        return 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"] * (1 + 0.01 * self.scale())


class Meter:
    def __init__(self) -> None:
        self.count = 0
        self.history: list[int] = []

    def update(self) -> int:
        self.count += 1  # BAD Counts
        return self.count


class Slotted:
    __slots__ = ("count", "unset")

    def __init__(self) -> None:
        self.count = 0


@dataclass
class Node:
    value: int = 0
    inner: dict[str, Any] = field(default_factory=dict)


class Counts(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()

    def scale(self) -> float:
        return self.meter.update()


class CountsInSlots(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.slots = Slotted()

    def scale(self) -> float:
        self.slots.count += 1  # BAD CountsInSlots
        return self.slots.count


class Nested(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.tree = {"a": [Node(inner={"list": ([1], 2)})]}

    def scale(self) -> float:
        members = self.tree["a"][0].inner["list"][0]
        members.append(1)  # BAD Nested
        return len(members)


class DataclassField(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.nodes = [Node()]

    def scale(self) -> float:
        self.nodes[0].value += 1  # BAD DataclassField
        return self.nodes[0].value


class Rotates(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.ring = deque([1, 2, 3])

    def scale(self) -> float:
        self.ring.rotate(1)  # BAD Rotates
        return self.ring[0]


class Reorders(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.order = OrderedDict.fromkeys([1, 2, 3])

    def scale(self) -> float:
        self.order.move_to_end(next(iter(self.order)))  # BAD Reorders
        return next(iter(self.order))


class CountsKeys(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.keys: Counter[str] = Counter()

    def scale(self) -> float:
        self.keys["x"] += 1  # BAD CountsKeys
        return self.keys["x"]


class OwnGenerator(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(0)

    def scale(self) -> float:
        return float(self.rng.random())  # BAD OwnGenerator


class OldGenerator(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.RandomState(0)

    def scale(self) -> float:
        return float(self.rng.rand())  # BAD OldGenerator


class OwnRandom(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.dice = random.Random(0)

    def scale(self) -> float:
        return self.dice.randint(1, 6)  # BAD OwnRandom


class GlobalRandom(Scaled):
    def scale(self) -> float:
        return random.uniform(0, 1)  # BAD GlobalRandom


class GlobalNumpy(Scaled):
    def scale(self) -> float:
        return float(np.random.normal())  # BAD GlobalNumpy


class CountsUp(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.ids = itertools.count()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "ids": None}

    def scale(self) -> float:
        return next(self.ids)  # BAD CountsUp


def _numbers() -> Iterator[int]:
    yield from range(10_000)


class DrawsFromAGenerator(Scaled):
    def on_fit_start(self) -> None:
        self.box = {"numbers": [_numbers()]}

    def scale(self) -> float:
        for number in self.box["numbers"][0]:  # BAD DrawsFromAGenerator
            return number
        return 0.0


class SecondLoader(Scaled):
    def on_fit_start(self) -> None:
        self.other: Any = iter(DataLoader(range(1000), batch_size=None))  # type: ignore[arg-type]

    def scale(self) -> float:
        return next(self.other)  # BAD SecondLoader


METER = Meter()
TOTAL = 0


class GlobalObject(Scaled):
    def on_fit_start(self) -> None:
        METER.count = 0

    def scale(self) -> float:
        METER.count += 1  # BAD GlobalObject
        return METER.count


class GlobalNumber(Scaled):
    def on_fit_start(self) -> None:
        globals()["TOTAL"] = 0

    def scale(self) -> float:
        global TOTAL
        TOTAL += 1  # BAD GlobalNumber
        return TOTAL


class OfTheClass(Scaled):
    calls = 0

    def on_fit_start(self) -> None:
        OfTheClass.calls = 0

    def scale(self) -> float:
        type(self).calls += 1  # BAD OfTheClass
        return self.calls


class DefaultArgument(Scaled):
    def on_fit_start(self) -> None:
        self.scale.__func__.__defaults__[0].clear()  # type: ignore[attr-defined]

    def scale(self, seen: list[int] = []) -> float:  # noqa: B006
        seen.append(1)  # BAD DefaultArgument
        return len(seen)


def _closures() -> tuple[type[Net], type[Net]]:
    number, members = 0, deque([0])

    class Nonlocal(Scaled):
        def on_fit_start(self) -> None:
            nonlocal number
            number = 0

        def scale(self) -> float:
            nonlocal number
            number += 1  # BAD Nonlocal
            return number

    class InClosure(Scaled):
        def on_fit_start(self) -> None:
            members[0] = 0

        def scale(self) -> float:
            members.append(members.pop() + 1)  # BAD InClosure
            return members[0]

    return Nonlocal, InClosure


Nonlocal, InClosure = _closures()


class OfTheTrainer(Scaled):
    def on_fit_start(self) -> None:
        self.trainer.steps_seen = 0

    def scale(self) -> float:
        self.trainer.steps_seen += 1  # BAD OfTheTrainer
        return self.trainer.steps_seen


class SetsByName(Scaled):
    def on_fit_start(self) -> None:
        self.counter = 0

    def scale(self) -> float:
        setattr(self, "counter", self.counter + 1)  # noqa: B010  # BAD SetsByName
        return self.counter


class HooksAParameter(Scaled):
    def scale(self) -> float:
        self.head.weight.register_hook(torch.sin)  # BAD HooksAParameter
        return 1.0


STATE: dict[type[Net], str] = {
    HooksAParameter: "weight._backward_hooks",
    Counts: "meter.count",
    CountsInSlots: "slots.count",
    Nested: "tree['a'][0].inner['list'][0]",
    DataclassField: "nodes[0].value",
    Rotates: "ring",
    Reorders: "order",
    CountsKeys: "keys",
    OwnGenerator: "rng",
    OldGenerator: "rng",
    OwnRandom: "dice",
    GlobalRandom: "random",
    GlobalNumpy: "numpy.random",
    CountsUp: "ids",
    DrawsFromAGenerator: "box['numbers'][0]",
    SecondLoader: "next(DataLoader)",
    GlobalObject: "METER.count",
    GlobalNumber: "TOTAL",
    OfTheClass: "calls",
    DefaultArgument: "scale",
    Nonlocal: "number",
    InClosure: "members",
    SetsByName: "counter",
    OfTheTrainer: "steps_seen",
}


class GlobalStep(Scaled):
    def scale(self) -> float:
        return float(self.global_step)  # BAD GlobalStep


class TrainersStep(Scaled):
    def scale(self) -> float:
        return float(self.trainer.global_step)  # BAD TrainersStep


class BatchIndex(Scaled):
    def scale(self) -> float:
        return self.trainer.fit_loop.epoch_loop.batch_idx  # BAD BatchIndex


class TotalBatchIndex(Scaled):
    def scale(self) -> float:
        return self.trainer.fit_loop.epoch_loop.total_batch_idx  # BAD TotalBatchIndex


class LastLr(Scaled):
    def scale(self) -> float:
        return self.lr_schedulers().get_last_lr()[0]  # BAD LastLr


class Metrics(Scaled):
    def scale(self) -> float:
        return len(self.trainer.callback_metrics)  # BAD Metrics


class Logged(Scaled):
    def scale(self) -> float:
        return len(self.trainer.logged_metrics)  # BAD Logged


class OnTheBar(Scaled):
    def scale(self) -> float:
        return len(self.trainer.progress_bar_metrics)  # BAD OnTheBar


class LastBatch(Scaled):
    def scale(self) -> float:
        return float(self.trainer.is_last_batch)  # BAD LastBatch


class Clock(Scaled):
    def scale(self) -> float:
        return 0.0 * time.time()  # BAD Clock


class ReadsAFile(Scaled):
    def scale(self) -> float:
        return len(Path(__file__).read_text()) * 0.0  # BAD ReadsAFile


READS: dict[type[Net], str] = {
    GlobalStep: "global_step",
    TrainersStep: "global_step",
    BatchIndex: "fit_loop.epoch_loop.batch_idx",
    TotalBatchIndex: "fit_loop.epoch_loop.total_batch_idx",
    LastLr: "LRScheduler.get_last_lr",
    Metrics: "callback_metrics",
    Logged: "logged_metrics",
    OnTheBar: "progress_bar_metrics",
    LastBatch: "is_last_batch",
    Clock: "time.time()",
    ReadsAFile: "file.read",
}


# Where a remedy is for one kind of read; and no other is offered.
_BUFFER = "hand the result to the step in a registered buffer"
SAID: dict[type[Net], str] = {
    GlobalStep: _BUFFER,
    TrainersStep: _BUFFER,
    BatchIndex: "Ask the `batch_idx` that the step is given",
    LastBatch: "Ask `batch_idx + 1 == self.trainer.num_training_batches` instead",
}


class Prints(Scaled):
    def scale(self) -> float:
        print("a step")  # BAD Prints
        return 1.0


class PrintsInAHook(Scaled):
    def on_after_backward(self) -> None:
        print("a step")  # BAD PrintsInAHook


class PrintsItself(Scaled):
    def scale(self) -> float:
        self.print("a step")  # BAD PrintsItself
        return 1.0


class WritesToStdout(Scaled):
    def scale(self) -> float:
        sys.stdout.write("a step\n")  # BAD WritesToStdout
        return 1.0


class WritesToAFile(Scaled):
    def on_fit_start(self) -> None:
        self.file = open(Path(self.trainer.default_root_dir) / "steps.txt", "a")  # noqa: SIM115

    def scale(self) -> float:
        json.dump([1], self.file)  # BAD WritesToAFile
        return 1.0


class Opens(Scaled):
    def scale(self) -> float:
        with open(os.devnull, "a") as file:  # BAD Opens
            return file.fileno() * 0.0


class Logs(Scaled):
    def scale(self) -> float:
        log.warning("a step")  # BAD Logs
        return 1.0


class Warns(Scaled):
    def scale(self) -> float:
        warnings.warn("a step", UserWarning, stacklevel=1)  # BAD Warns
        return 1.0


class LogsMetrics(Scaled):
    def scale(self) -> float:
        self.logger.log_metrics({"x": 1.0}, 1)  # BAD LogsMetrics
        return 1.0


class WritesARecord(Scaled):
    def scale(self) -> float:
        self.logger.experiment.log_metrics({"x": 1.0}, 1)  # BAD WritesARecord
        return 1.0


class AddsAScalar(Scaled):
    def scale(self) -> float:
        self.trainer.loggers[1].experiment.add_scalar("x", 1.0, 1)  # BAD AddsAScalar
        return 1.0


EFFECTS: dict[type[Net], str] = {
    Prints: "print",
    PrintsInAHook: "print",
    PrintsItself: "self.print",
    WritesToStdout: "sys.stdout.write",
    WritesToAFile: "file.write",
    Opens: "open",
    Logs: "logging",
    Warns: "warnings.warn",
    LogsMetrics: "CSVLogger.log_metrics",
    WritesARecord: "ExperimentWriter.log_metrics",
    AddsAScalar: "SummaryWriter.add_scalar",
}

REFUSED = {**STATE, **READS, **EFFECTS}


def _line(cls: type) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(n for n, line in enumerate(lines, 1) if line.endswith(f"# BAD {cls.__name__}"))


@contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a step")
        yield


def _make(cls: type[Net]) -> Net:
    # Variables of closures are found by functions that collections of garbage look at; those of the time
    # of the import are frozen (`conftest.py`).
    of_now = {each.__name__: each for each in _closures()}
    return make(of_now.get(cls.__name__, cls))  # type: ignore[return-value]


def _train(module: Net, path: Path, callback: CUDAGraphCallback | None, **kwargs: Any) -> Any:
    if isinstance(module, AddsAScalar):
        from lightning.pytorch.loggers import CSVLogger

        kwargs["logger"] = [CSVLogger(path), TensorBoardLogger(path)]
    path.mkdir(exist_ok=True)
    try:
        with _quietly():
            return train(module, path, callback, default_root_dir=path, **kwargs)
    finally:
        if isinstance(module, WritesToAFile):
            module.file.close()


# The other half of the classes is refused in the two tests that follow.
@pytest.mark.spread(2, first=1)
@pytest.mark.parametrize("cls", REFUSED, ids=lambda cls: cls.__name__)
def test_refused_with_the_line(tmp_path: Path, accelerator: str, cls: type[Net]) -> None:
    callback = CUDAGraphCallback(scope="step")
    with pytest.raises(CaptureError, match=re.escape(REFUSED[cls])) as caught:
        _train(_make(cls), tmp_path, callback, accelerator=accelerator)
    assert f"at {__file__}:{_line(cls)} " in str(caught.value)
    assert cls is not ReadsAFile or len(caught.value.findings) == 1  # not its `open` too
    assert SAID.get(cls, "") in caught.value.remedy
    assert (f'harmless=["{REFUSED[cls]}"' in caught.value.remedy) == (cls not in SAID)


@pytest.mark.spread(4)
@pytest.mark.parametrize("cls", REFUSED, ids=lambda cls: cls.__name__)
def test_the_same_eagerly(
    tmp_path: Path, accelerator: str, cls: type[Net], capsys: pytest.CaptureFixture[str]
) -> None:
    kwargs: dict[str, Any] = {"accelerator": accelerator, "max_epochs": 1}
    plain = _train(_make(cls), tmp_path / "plain", None, **kwargs)
    printed = capsys.readouterr().out.count("a step")
    callback = CUDAGraphCallback(on_unsupported="eager", scope="step")
    eager = _train(_make(cls), tmp_path / "eager", callback, **kwargs)
    assert_same(plain, eager)
    assert eager.counts.captures == 0
    assert capsys.readouterr().out.count("a step") == printed
    assert (tmp_path / "eager/steps.txt").exists() == (cls is WritesToAFile)
    if cls is WritesToAFile:
        both = [(tmp_path / name / "steps.txt").read_text() for name in ("plain", "eager")]
        assert both[0] == both[1]


@pytest.mark.spread(4, first=2)
@pytest.mark.parametrize("cls", REFUSED, ids=lambda cls: cls.__name__)
def test_allowed_if_harmless(tmp_path: Path, accelerator: str, cls: type[Net]) -> None:
    callback = CUDAGraphCallback(scope="step", verify=None, harmless=[REFUSED[cls]])
    allowed = _train(_make(cls), tmp_path, callback, accelerator=accelerator, max_epochs=1)
    assert allowed.counts.captures >= 1
    assert allowed.counts.replayed >= 4


@pytest.mark.long
@pytest.mark.usefixtures("only_numbers_are_checked")
@pytest.mark.parametrize("cls", [Counts, Rotates, OwnGenerator, GlobalNumber])
def test_without_the_audit_it_would_train_wrong(
    tmp_path: Path, accelerator: str, cls: type[Net], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def no_audit(*args: Any) -> Iterator[StepAudit]:
        yield StepAudit(nn.Module(), torch.device("cpu"), HostRules())

    plain = train(make(cls), tmp_path / "plain", accelerator=accelerator)
    monkeypatch.setattr("lightning_cudagraph.trainer.common.captured_run.step_audit", no_audit)
    monkeypatch.setattr(Effects, "refused", lambda *args: nullcontext())
    callback = CUDAGraphCallback(verify=None)
    graph = train(make(cls), tmp_path / "graph", callback, accelerator=accelerator)
    assert graph.counts.replayed > 10
    assert differences(plain.final["weights"], graph.final["weights"])


class PerEpoch(Scaled):
    def scale(self) -> float:
        return self.current_epoch


class TrainersEpoch(Scaled):
    def scale(self) -> float:
        return 0.5 if self.trainer.current_epoch == 1 else 2.0


@pytest.mark.long
@pytest.mark.parametrize("cls", [PerEpoch, TrainersEpoch])
def test_a_graph_for_each_epoch(tmp_path: Path, accelerator: str, cls: type[Net]) -> None:
    plain = train(make(cls), tmp_path / "plain", accelerator=accelerator)
    graph = train(make(cls), tmp_path / "graph", CUDAGraphCallback(), accelerator=accelerator)
    assert_same(plain, graph)
    assert graph.counts.captures == 3
    assert graph.counts.replayed == 12
    assert graph.counts.recaptures == (
        "`current_epoch` changed from 0 to 1",
        "`current_epoch` changed from 1 to 2",
    )


@pytest.mark.long
def test_captures_that_serve_are_never_too_many(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kwargs: dict[str, Any] = {"accelerator": accelerator, "max_epochs": 10}
    callback = CUDAGraphCallback(verify=None)
    short = train(make(PerEpoch), tmp_path / "short", callback, **kwargs)
    assert short.counts.captures == 8
    assert any("8 captures in a row that served fewer than 32 replays" in r for r in short.counts.eager)
    fewer = partial(ShortLives, few_replays=4)
    monkeypatch.setattr("lightning_cudagraph.capture.decisions.invalidation.ShortLives", fewer)
    served = train(make(PerEpoch), tmp_path / "served", callback, **kwargs)
    assert served.counts.captures == 10


def _mock(function: Any) -> Any:
    return MagicMock(side_effect=function)


class _Calls:
    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def _wrapped(function: Any) -> Any:
    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


class Replaces(Net):
    """A method of the module is replaced when training starts."""

    def __init__(self, name: str, by: Any) -> None:
        super().__init__()
        self.name, self.by = name, by

    def on_train_start(self) -> None:
        self.__dict__[self.name] = self.by(getattr(self, self.name))


@pytest.mark.spread
@pytest.mark.parametrize("name", ["training_step", "forward", "log", "on_after_backward"])
def test_mocks_in_the_place_of_methods(tmp_path: Path, accelerator: str, name: str) -> None:
    def build() -> Net:
        return Replaces(name, _mock)

    with pytest.raises(CaptureError, match=r"calls a `MagicMock` object|of the `MagicMock`"):
        train(make(build), tmp_path / "raise", CUDAGraphCallback(scope="step"), accelerator=accelerator)


class MocksChild(Net):
    def on_train_start(self) -> None:
        self.head.forward = _mock(self.head.forward)


class MocksStrategy(Net):
    def on_train_start(self) -> None:
        strategy: Any = self.trainer.strategy
        strategy.backward = _mock(strategy.backward)


@pytest.mark.parametrize("cls", [MocksChild, MocksStrategy])
def test_mocks_that_framework_code_calls(tmp_path: Path, accelerator: str, cls: type[Net]) -> None:
    with pytest.raises(CaptureError, match="calls a `MagicMock` object"):
        train(make(cls), tmp_path, CUDAGraphCallback(), accelerator=accelerator)


@pytest.mark.spread(2)
@pytest.mark.parametrize("by", [_wrapped, partial, _Calls])
@pytest.mark.parametrize("name", ["training_step", "forward", "log", "on_after_backward"])
def test_callables_in_the_place_of_methods(tmp_path: Path, accelerator: str, name: str, by: Any) -> None:
    def build() -> Net:
        return Replaces(name, by)

    plain = train(make(build), tmp_path / "plain", accelerator=accelerator)
    graph = train(make(build), tmp_path / "graph", CUDAGraphCallback(), accelerator=accelerator)
    assert_same(plain, graph)
    assert graph.counts.captures == 1


class ReplacesStep(Net):
    def __init__(self, by: Any) -> None:
        super().__init__()
        self.by = by

    def on_train_start(self) -> None:
        (optimizer,) = self.trainer.optimizers
        step = optimizer.step

        def then_halves(*args: Any, **kwargs: Any) -> Any:
            loss = step(*args, **kwargs)
            with torch.no_grad():
                self.head.bias.mul_(0.5)
            return loss

        optimizer.step = self.by(then_halves)


@pytest.mark.spread(2)
@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step")
@pytest.mark.parametrize("by", [_wrapped, partial, _Calls])
def test_callables_in_the_place_of_an_optimizers_step(tmp_path: Path, accelerator: str, by: Any) -> None:
    def build() -> Net:
        return ReplacesStep(by)

    plain = train(make(build), tmp_path / "plain", accelerator=accelerator)
    graph = train(make(build), tmp_path / "graph", CUDAGraphCallback(), accelerator=accelerator)
    assert_same(plain, graph)
    assert graph.counts.replayed > 10


class ReplacesZeroGrad(Net):
    def __init__(self, by: Any) -> None:
        super().__init__()
        self.by = by

    def on_train_start(self) -> None:
        (optimizer,) = self.trainer.optimizers
        optimizer.zero_grad = self.by(optimizer.zero_grad)


@pytest.mark.spread
@pytest.mark.parametrize("by", [_mock, partial, _Calls, _wrapped])
def test_a_zero_grad_in_the_place_of_torchs(tmp_path: Path, accelerator: str, by: Any) -> None:
    with pytest.raises(UnsupportedError, match="AdamW` has a `zero_grad` of its own"):
        train(make(lambda: ReplacesZeroGrad(by)), tmp_path, CUDAGraphCallback(), accelerator=accelerator)


@lru_cache
def _cached(number: int) -> float:
    return 1.0 + number


class Trap:
    """Everything about it is dangerous to touch."""

    __slots__ = ("armed",)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"touched {name}")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        raise RuntimeError("measured")


class Odd:
    """Without traps for attributes; comparing it, or reading its property, fails."""

    def __init__(self) -> None:
        self.name = "odd"
        self.nan = float("nan")

    @property
    def broken(self) -> int:
        raise RuntimeError("read")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    def __iter__(self) -> Any:
        raise RuntimeError("iterated")

    def __bool__(self) -> bool:
        raise RuntimeError("tested")

    __hash__ = object.__hash__


@dataclass(frozen=True)
class Config:
    alpha: float = 0.5
    sizes: tuple[int, ...] = (1, 2)
    inner: Node = field(default_factory=Node)


CONFIG = Config()
TRAP = Trap()


class Ordinary(Scaled):
    """What modules usually do on the host, and what a graph does not mind."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.config = Config()
        self.trap, self.odd = Trap(), Odd()
        self.options = {"a": [1, 2], "b": UserDict(x=1), "c": Namespace(y=2)}
        self.itself = [self.options]
        self.itself.append(self.itself)  # type: ignore[arg-type]
        self.layers = [self.head]
        self.hooked = 0
        self.head.register_forward_hook(lambda module, args, output: output * 1.0)
        self.rng = np.random.default_rng(0)
        self.ids = iter([1, 2, 3])
        self.shape: Any = None
        self.cache: dict[Any, Tensor] = {}

    @property
    def factor(self) -> float:
        return self.config.alpha

    def scale(self) -> float:
        made_inside = Meter()
        members: list[int] = []

        def count() -> None:
            members.append(made_inside.update())

        count()
        count()
        log.debug("nobody hears it")
        self.shape = self.head.weight.shape
        self.ready = True
        if "x" not in self.cache:
            self.cache["x"] = torch.ones(2, device=self.device)
        names = ",".join(sorted(name for name, _ in self.named_parameters()))
        assert next(self.parameters()).requires_grad
        assert isinstance(self.trap, Trap)
        assert TRAP is not None
        inner = CONFIG.inner.value + self.options["b"]["x"] + self.options["c"].y
        return self.factor * _cached(3) + len(members) + inner + 0.0 * len(names)


def test_ordinary_modules_are_not_refused(tmp_path: Path, accelerator: str) -> None:
    plain = train(make(Ordinary), tmp_path / "plain", accelerator=accelerator, checkpoint_every=1000)
    module = make(Ordinary)
    graph = train(
        module, tmp_path / "graph", CUDAGraphCallback(), accelerator=accelerator, checkpoint_every=1000
    )
    assert_same(plain, graph)
    assert graph.counts.captures == 1
    assert list(module.ids) == [1, 2, 3]  # type: ignore[call-overload]


class Settings:
    scale = 1.0


SETTINGS = Settings()
SLOTS = Slotted()


class ChangesAt(Scaled):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.change(5.0 if self.global_step >= 13 else 1.0)

    def change(self, to: float) -> None:
        raise AssertionError("overridden")


class ConfigOfAModule(ChangesAt):
    def __init__(self) -> None:
        super().__init__()
        self.config = Node()

    def change(self, to: float) -> None:
        self.config.value = to  # type: ignore[assignment]

    def scale(self) -> float:
        return self.config.value


class GlobalSettings(ChangesAt):
    def change(self, to: float) -> None:
        SETTINGS.scale = to

    def scale(self) -> float:
        return SETTINGS.scale


class ClassAsNamespace(ChangesAt):
    def change(self, to: float) -> None:
        Settings.scale = to

    def scale(self) -> float:
        return Settings.scale


class OwnClassAttribute(ChangesAt):
    factor = 1.0

    def change(self, to: float) -> None:
        OwnClassAttribute.factor = to

    def scale(self) -> float:
        return self.factor


class SlotOfAGlobal(ChangesAt):
    def change(self, to: float) -> None:
        SLOTS.count = to  # type: ignore[assignment]

    def scale(self) -> float:
        return SLOTS.count


class NestedOptions(ChangesAt):
    def __init__(self) -> None:
        super().__init__()
        self.options = {"loss": {"scale": [1.0]}}

    def change(self, to: float) -> None:
        self.options["loss"]["scale"][0] = to

    def scale(self) -> float:
        return self.options["loss"]["scale"][0]


GUARDED: dict[type[Net], str] = {
    ConfigOfAModule: "`config.value` of the `ConfigOfAModule` changed from 1.0 to 5.0",
    GlobalSettings: "`SETTINGS.scale` of `tests.test_step_audit` changed from 1.0 to 5.0",
    ClassAsNamespace: "`scale` of the class `Settings` changed from 1.0 to 5.0",
    OwnClassAttribute: "`factor` of the class `OwnClassAttribute` changed from 1.0 to 5.0",
    SlotOfAGlobal: "`SLOTS.count` of `tests.test_step_audit` changed from 1.0 to 5.0",
    NestedOptions: "`options['loss']['scale'][0]` of the `NestedOptions` changed from 1.0 to 5.0",
}


@pytest.mark.spread(2)
@pytest.mark.parametrize("cls", GUARDED, ids=lambda cls: cls.__name__)
def test_guarded(tmp_path: Path, accelerator: str, cls: type[Net]) -> None:
    plain = train(make(cls), tmp_path / "plain", accelerator=accelerator)
    graph = train(make(cls), tmp_path / "graph", CUDAGraphCallback(), accelerator=accelerator)
    assert_same(plain, graph)
    assert graph.counts.recaptures == (GUARDED[cls],)


@pytest.mark.parametrize("harmless", ["print", 3, [1], None])
def test_names_that_are_none(harmless: Any) -> None:
    with pytest.raises(ConfigurationError, match="expected a list of names"):
        CUDAGraphCallback(harmless=harmless)


def test_a_walk_has_an_end() -> None:
    deep: list[Any] = []
    wide = [[i] for i in range(20_000)]
    for _ in range(1000):
        deep = [deep]
    held = [deep, wide, TRAP, Odd()]
    state = Walk([Root(held, "it", "the test")], Scope(in_capture=True))
    assert state.changes() == []
    wide.append([1])
    assert [change.name for change in state.changes()] == ["it[1]"]
    state.put_back()
    assert len(wide) == 20_000
    state.release()


def test_iterators_are_given_back() -> None:
    numbers = itertools.count(5)
    meter = Meter()
    meter.history = numbers  # type: ignore[assignment]
    state = Walk([Root(meter, "meter", "the test")], Scope(in_capture=True))
    with pytest.raises(CaptureError, match=r"`meter.history` of the test"):
        next(meter.history)  # type: ignore[call-overload]
    state.put_back()
    state.release()
    assert meter.history is numbers
    assert next(numbers) == 5


def test_tuples_of_iterators_are_given_back() -> None:
    pair = (itertools.cycle("ab"), ("other", iter(deque([1]))))
    meter = Meter()
    meter.history = pair  # type: ignore[assignment]
    state = Walk([Root(meter, "meter", "the test")], Scope(in_capture=True))
    for taken, named in ((meter.history[0], "[0]"), (meter.history[1][1], "[1][1]")):  # type: ignore[index]
        with pytest.raises(CaptureError, match=re.escape(f"`meter.history{named}` of the test")):
            next(taken)
    state.put_back()
    state.release()
    assert meter.history is pair
    assert (next(pair[0]), next(pair[1][1])) == ("a", 1)  # type: ignore[call-overload]


@pytest.mark.spread
@pytest.mark.parametrize(
    ("owner", "name"),
    [(Precision, "backward"), (Tensor, "backward"), (Net.__base__, "log")],
)
def test_mocks_on_classes(
    owner: Any, name: str, tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(owner, name)

    class Passes(MagicMock):
        """Bound to the object, as a function is, and counts."""

        def __get__(self, held: Any, kind: Any = None) -> Any:
            return self if held is None else partial(self, held)

    mock = Passes(side_effect=original)
    monkeypatch.setattr(owner, name, mock)
    with pytest.raises(UnsupportedError, match=r"calls a `Passes` object of `unittest\.mock`"):
        train(make(Net), tmp_path / "raise", CUDAGraphCallback(), accelerator=accelerator)
    mock.reset_mock()
    callback = CUDAGraphCallback(on_unsupported="eager")
    train(make(Net), tmp_path / "eager", callback, accelerator=accelerator)
    eager_calls = mock.call_count
    mock.reset_mock()
    train(make(Net), tmp_path / "plain", accelerator=accelerator)
    assert eager_calls == mock.call_count


class _Swallows(Net):
    """Catches whatever is raised, and goes on with another number."""

    def read(self, loss: Tensor) -> float:
        return loss.item()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        try:
            scale = self.read(loss)
        except Exception:
            scale = 2.0
        return loss * scale


class _SwallowsAList(_Swallows):
    def read(self, loss: Tensor) -> float:
        return float(loss.tolist())


class _SwallowsAMask(_Swallows):
    def read(self, loss: Tensor) -> Any:
        bias = self.head.bias.detach()
        return bias[bias > 0].sum()


class _SwallowsAClock(_Swallows):
    def read(self, loss: Tensor) -> float:
        return 1.0 + 0 * time.time()


class _SwallowsTheIndex(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        try:
            return loss * (batch_idx + 1)
        except Exception:
            return loss


class _RaisesAnother(_Swallows):
    def read(self, loss: Tensor) -> float:
        try:
            return loss.item()
        except Exception:
            raise ValueError("no number") from None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        return loss * self.read(loss)


@pytest.mark.spread
@pytest.mark.parametrize(
    ("module", "words"),
    [
        (_Swallows, "`.item()`"),
        (_SwallowsAList, "`.tolist()`"),
        (_SwallowsAMask, "boolean mask"),
        (_SwallowsAClock, "`time.time()`"),
        (_SwallowsTheIndex, "`batch_idx`"),
        (_RaisesAnother, "`.item()`"),
    ],
)
def test_a_refusal_stands_though_the_step_catches_it(
    module: Any, words: str, tmp_path: Path, accelerator: str
) -> None:
    with pytest.raises(CaptureError, match=re.escape(words)):
        train(make(module), tmp_path, CUDAGraphCallback(), accelerator=accelerator)
    plain = train(make(module), tmp_path / "plain", accelerator=accelerator)
    callback = CUDAGraphCallback(on_unsupported="eager")
    eager = train(make(module), tmp_path / "eager", callback, accelerator=accelerator)
    assert_same(plain, eager)
    assert eager.counts.replayed == 0
