"""Copies and pickles of the parts of a run, during it and after, work as without the callback.

`tests/gpu/test_copies.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

import copy
import io
import pickle
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_cudagraph import (
    CUDAGraphCallback,
    LayerTimings,
    LayerTimingsMonitor,
    RunSummary,
    StageSummary,
    StepTimes,
    Times,
    Verification,
)
from lightning_cudagraph.compat.method_patches import MethodPatch
from lightning_cudagraph.trainer.callbacks.runs import CapturedRuns
from lightning_cudagraph.trainer.config.padding import Padding
from tests.harness import Apart, Net, differences, loader
from tests.rows import Row, row

RAGGED = "another batch signature"


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader()

    def val_dataloader(self) -> Any:
        return loader(seed=1, batches=2)


def _with_data(trainer: pl.Trainer, module: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
    trainer.fit(module, datamodule=Data())


PARTS: dict[str, Callable[[pl.Trainer, pl.LightningModule], Any]] = {
    "module": lambda trainer, module: module,
    "head": lambda trainer, module: module.head,
    "state_dict": lambda trainer, module: module.state_dict(),
    "optimizer": lambda trainer, module: trainer.optimizers[0],
    "optimizer state": lambda trainer, module: trainer.optimizers[0].state_dict(),
    "optimizers": lambda trainer, module: trainer.optimizers,
    "scheduler": lambda trainer, module: trainer.lr_scheduler_configs[0].scheduler,
    "scheduler configs": lambda trainer, module: trainer.lr_scheduler_configs,
    "datamodule": lambda trainer, module: trainer.datamodule,
    "callbacks": lambda trainer, module: [
        c for c in trainer.callbacks if type(c).__module__.startswith("lightning.")
    ],
    "metrics": lambda trainer, module: dict(trainer.callback_metrics),
    "results": lambda trainer, module: trainer.fit_loop.epoch_loop._results,
    "progress": lambda trainer, module: trainer.fit_loop.epoch_loop.batch_progress,
    "optimizer progress": lambda trainer, module: (
        trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress
    ),
    "automatic_optimization": lambda trainer, module: trainer.fit_loop.epoch_loop.automatic_optimization,
    "epoch_loop": lambda trainer, module: trainer.fit_loop.epoch_loop,
    "fit_loop": lambda trainer, module: trainer.fit_loop,
    "strategy": lambda trainer, module: trainer.strategy,
    "lightning optimizers": lambda trainer, module: trainer.strategy._lightning_optimizers,
    "precision plugin": lambda trainer, module: trainer.precision_plugin,
    "gradients": lambda trainer, module: [p.grad for p in module.parameters()],
    "trainer": lambda trainer, module: trainer,
}


def _saved(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
    "torch.save": _saved,
}

# What must be in no copy: they belong to one run, on one device.
_FOREIGN = (torch.cuda.CUDAGraph, torch.cuda.Stream, torch.cuda.Event)
_LEAVES = (str, bytes, int, float, bool, type(None), type, types.ModuleType, torch.dtype, torch.device)


# Where the files of a run are, and when something happened.
_DIFFER = {
    "dirpath",
    "best_model_path",
    "_last_checkpoint_saved",
    "_last_time_checked",
    "_default_root_dir",
    "_root_dir",
    "_save_dir",
}
_OURS = (
    CapturedRuns,
    CUDAGraphCallback,
    LayerTimings,
    LayerTimingsMonitor,
    Padding,
    RunSummary,
    StageSummary,
    StepTimes,
    Times,
    Verification,
)


def _walk(value: Any, path: str, seen: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    """All objects in a copy, with their paths."""
    if isinstance(value, _LEAVES) or id(value) in seen:
        return
    seen[id(value)] = value
    yield path, value
    if isinstance(value, types.MethodType):
        yield from _walk(value.__self__, f"{path}.__self__", seen)
    elif isinstance(value, types.FunctionType):
        for index, cell in enumerate(value.__closure__ or ()):
            yield from _walk(cell.cell_contents, f"{path}.closure[{index}]", seen)
    elif isinstance(value, dict):
        for key, member in list(value.items()):
            yield from _walk(member, f"{path}[{key!r}]", seen)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for index, member in enumerate(list(value)):
            yield from _walk(member, f"{path}[{index}]", seen)
    if not isinstance(value, Tensor):
        for name, member in list(getattr(value, "__dict__", {}).items()):
            yield from _walk(member, f"{path}.{name}", seen)


def _is_foreign(found: Any) -> bool:
    """Graphs, streams, events, and whatever of this package is no plain data of the user's."""
    if isinstance(found, _FOREIGN):
        return True
    module = found.__module__ if isinstance(found, types.FunctionType) else type(found).__module__
    if str(module) == Apart.__module__:  # records of the harness
        return False
    return str(module).startswith("lightning_cudagraph.") and not isinstance(found, _OURS)


def _foreign(value: Any) -> list[str]:
    return [path for path, found in _walk(value, "", {}) if _is_foreign(found)]


def _contents(value: Any) -> dict[str, Any]:
    """The tensors and plain values in a copy, by path, without the trainer that parts refer to."""
    if isinstance(value, pl.Trainer):
        value = [value.fit_loop.state_dict(), dict(value.callback_metrics), value.strategy]
    seen: dict[int, Any] = {}
    for _, held in _walk(value, "", {}):
        if isinstance(held, pl.Trainer):
            seen[id(held)] = held
    found: dict[str, Any] = {}
    for path, held in _walk(value, "", seen):
        if isinstance(held, Tensor):
            found[path] = held.detach().clone()
            continue
        members = dict(getattr(held, "__dict__", {}))
        if isinstance(held, dict):
            members |= {repr(key): member for key, member in held.items()}
        found |= {
            f"{path}.{name}": member
            for name, member in members.items()
            if isinstance(member, (int, float, str)) and name not in _DIFFER
        }
    return found


class _Copies(Callback):
    """Copies everything in every way at some moments, and notes what came of it."""

    def __init__(self, parts: list[str]) -> None:
        self.parts = parts
        self.outcomes: dict[tuple[str, str, str], Any] = {}
        self.foreign: list[Any] = []
        self.reasons: dict[tuple[str, str, str], str] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def look(self, moment: str, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        for part in self.parts:
            for way, made in WAYS.items():
                thing = PARTS[part](trainer, module)
                key = (moment, part, way)
                try:
                    copied = made(thing)
                except Exception as error:
                    self.outcomes[key] = type(error).__name__
                    self.reasons[key] = str(error)
                    continue
                self.outcomes[key] = _contents(copied)
                self.foreign += [(*key, path) for path in _foreign(copied)]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step in (2, 7, 8, 13):  # in warm-up, after replays, a ragged one, after more
            self.look(f"step {trainer.global_step}", trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.look(f"end of epoch {trainer.current_epoch}", trainer, pl_module)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.look(f"validation {trainer.global_step}", trainer, pl_module)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.look("fit end", trainer, pl_module)


def _copying(
    tmp_path: Path,
    accelerator: str,
    parts: list[str],
    build: Callable[[], Any] = Net,
    kind: type[_Copies] = _Copies,
    **kwargs: Any,
) -> tuple[Row, _Copies, _Copies]:
    copies: list[_Copies] = []

    def setting(folder: Path) -> dict[str, Any]:
        copies.append(kind(parts))
        return {"callbacks": (copies[-1],)}

    done = row(
        tmp_path,
        accelerator,
        build,
        setting,
        max_epochs=2,
        fit=_with_data,
        checkpoint_every=0,
        **kwargs,
    )
    return done, copies[0], copies[1]


_SOME = [*PARTS][::8]


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(_SOME, id="some"),
        pytest.param([part for part in PARTS if part not in _SOME], id="more", marks=pytest.mark.long),
    ],
)
def test_parts_of_a_run(tmp_path: Path, accelerator: str, parts: list[str]) -> None:
    done, plain, graph = _copying(tmp_path, accelerator, parts)
    assert done.graph.counts.replayed == 11
    _assert_same_copies(plain, graph)


def _assert_same_copies(plain: _Copies, graph: _Copies) -> None:
    assert plain.outcomes.keys() == graph.outcomes.keys()
    assert not all(isinstance(outcome, str) for outcome in plain.outcomes.values())
    for key, expected in plain.outcomes.items():
        found = graph.outcomes[key]
        if isinstance(expected, str):
            continue  # nobody can copy this without the callback either
        assert not isinstance(found, str), (key, found, graph.reasons[key])
        assert not differences(expected, {name: found.get(name, "missing") for name in expected}), key
    assert not graph.foreign


class _CopiesInSteps(_Copies):
    """The same in hooks inside of steps: of warm-up, timed and not, of a replay, and of a ragged one."""

    def look_inside(self, hook: str, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.global_step in (0, 2, 4, 7):
            self.look(f"{hook} of step {trainer.global_step}", trainer, module)

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.look_inside("on_before_zero_grad", trainer, pl_module)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self.look_inside("on_before_backward", trainer, pl_module)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.look_inside("on_after_backward", trainer, pl_module)


class _Reads(Net):
    """No graph is made of its steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        assert result["loss"].item() == result["loss"].item()
        return result


@pytest.mark.long
@pytest.mark.parametrize("build", [Net, _Reads])
@pytest.mark.parametrize("part", ["module", "strategy", "results", "fit_loop", "callbacks", "trainer"])
def test_parts_of_a_run_inside_of_steps(
    tmp_path: Path, accelerator: str, part: str, build: type[Net]
) -> None:
    done, plain, graph = _copying(
        tmp_path,
        accelerator,
        [part],
        build,
        kind=_CopiesInSteps,
        watched=False,
        ours=lambda: CUDAGraphCallback(on_unsupported="eager"),
    )
    assert done.graph.counts.replayed == (11 if build is Net else 0)
    _assert_same_copies(plain, graph)


@pytest.mark.long
def test_something_foreign_would_be_found(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The walk means something: what stands in for a method would be seen in a copy, or prevent it."""
    monkeypatch.delattr(MethodPatch, "__reduce_ex__")
    _, _, graph = _copying(tmp_path, accelerator, ["strategy"])
    assert graph.foreign or any(isinstance(outcome, str) for outcome in graph.outcomes.values())


@pytest.mark.long
def test_a_callback_in_use(tmp_path: Path, accelerator: str) -> None:
    """A copy of it makes a run of its own; the original goes on."""
    made: list[CUDAGraphCallback] = []

    class CopiesOurs(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            ours = [c for c in trainer.callbacks if isinstance(c, CUDAGraphCallback)]
            if trainer.global_step == 7:
                made.extend(way(callback) for callback in ours for way in WAYS.values())

    done = row(tmp_path, accelerator, callbacks=(CopiesOurs(),))
    assert len(made) == 3
    for index, callback in enumerate(made):
        assert not _foreign(callback)
        again = row(tmp_path / str(index), accelerator, ours=lambda: callback)  # noqa: B023
        assert not differences(done.graph.final, again.graph.final)
        assert again.graph.counts.replayed == 18


class _TrainsACopy(Callback):
    """Copies the module in the middle of training, and trains the copy by hand from then on."""

    def __init__(self) -> None:
        self.module: Any = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == 7:
            self.module = copy.deepcopy(pl_module)
            self.gradients = [parameter.grad for parameter in self.module.parameters()]
            self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.05)
        elif trainer.global_step > 7:
            x, y = (member.to(pl_module.device) for member in next(iter(loader(seed=5))))
            self.module.features.eval()
            nn.functional.cross_entropy(self.module(x), y).backward()
            self.optimizer.step()


def test_a_copy_that_is_trained_on_its_own(tmp_path: Path, accelerator: str) -> None:
    copies: list[_TrainsACopy] = []

    def setting(folder: Path) -> dict[str, Any]:
        copies.append(_TrainsACopy())
        return {"callbacks": (copies[-1],)}

    done = row(tmp_path, accelerator, Net, setting)
    assert done.graph.counts.replayed == 18
    plain, graph = copies
    assert not differences(plain.module.state_dict(), graph.module.state_dict())
    assert not differences(plain.gradients, graph.gradients)
    # Its memory is its own: the copy is not what has been trained by the graph.
    pointers = {p.data_ptr() for p in done.graph.module.parameters()}  # type: ignore[union-attr]
    assert not pointers & {p.data_ptr() for p in graph.module.parameters()}
    assert differences(graph.module.state_dict(), done.graph.final["weights"])


@pytest.mark.long
def test_after_the_run(tmp_path: Path, accelerator: str) -> None:
    done = row(tmp_path, accelerator)
    for trace in (done.plain, done.graph):
        assert trace.module is not None
    for name, way in WAYS.items():
        modules = [way(trace.module) for trace in (done.plain, done.graph)]
        assert not differences(modules[0].state_dict(), modules[1].state_dict()), name
        assert not _foreign(modules[1])
    # A copy of a trained module starts a run of its own.
    again = row(tmp_path / "again", accelerator, lambda: copy.deepcopy(done.graph.module))  # type: ignore[arg-type]
    assert again.graph.counts.replayed == 18
