"""One training run, recorded as a `Trace` of everything that must not depend on the callback.

`train` runs a `Trainer` and returns a `Trace`; `assert_same` compares two of them bit for bit. The
same functions serve the tests on the emulator and, under `tests/gpu`, those on CUDA.
"""

from __future__ import annotations

import contextlib
import copy
import csv
import functools
from collections import UserDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, is_dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, TensorDataset

from lightning_cudagraph import (
    CUDAGraphCallback,
    LayerTimingsMonitor,
)

BATCH_SIZE = 8
FULL_BATCHES = 7


def fused_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)


class Apart(dict[Any, Any]):
    """Counts of a test, made in methods that a step calls. Guards and audit do not look into it."""

    __module__ = "lightning_cudagraph.tests"


class Net(pl.LightningModule):
    """A model with what a graph easily loses: dropout, batch norm, in-place ops, logs, a schedule."""

    def __init__(
        self,
        make_optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
        make_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    ) -> None:
        super().__init__()
        self.make_optimizer = make_optimizer or fused_adamw
        self.make_scheduler = make_scheduler or cosine
        self.features = nn.Sequential(
            nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(inplace=True), nn.Dropout(0.3)
        )
        self.head = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("peak", logits.detach().max(), on_step=True, on_epoch=True, reduce_fx="max")
        self.log_dict({"step_only": loss * 2}, on_epoch=False)
        return {"loss": loss, "logits": logits.detach()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        scheduler = self.make_scheduler(optimizer)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def loader(ragged: bool = True, seed: int = 0, batches: int = FULL_BATCHES) -> DataLoader[Any]:
    """Distinct batches; with `ragged`, the last one is smaller."""
    generator = torch.Generator().manual_seed(seed)
    n = BATCH_SIZE * batches + (3 if ragged else 0)
    data = TensorDataset(
        torch.randn(n, 12, generator=generator), torch.randint(0, 4, (n,), generator=generator)
    )
    return DataLoader(data, batch_size=BATCH_SIZE)


@dataclass
class Trace:
    """The record of a run. Tensors of steps are kept as hooks got them, not copied."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    hooks: list[tuple[Any, ...]] = field(default_factory=list)
    final: dict[str, Any] = field(default_factory=dict)
    checkpoints: dict[str, Any] = field(default_factory=dict)
    csv: str = ""
    folder: Path = Path()
    callback: CUDAGraphCallback | None = None
    trainer: pl.Trainer | None = None
    module: pl.LightningModule | None = None
    error: BaseException | None = None

    @property
    def counts(self) -> Any:
        """The callback's counts of the training steps."""
        assert self.callback is not None
        return self.callback.summary.fit

    @property
    def summary(self) -> Any:
        """The callback's summary of the run."""
        assert self.callback is not None
        return self.callback.summary

    def portable(self, tree: Any) -> Any:
        """A tree of saved values, with a common name for the run's own folder."""
        if isinstance(tree, dict):
            return {self.portable(key): self.portable(value) for key, value in tree.items()}
        if isinstance(tree, (str, Path)):
            return str(tree).replace(str(self.folder), "<folder>")
        return tree


# The hooks of callbacks that Lightning calls on the host: all but those between the start of the forward
# pass and the end of the optimizer's step.
HOST_HOOKS = sorted(
    {name for name in vars(Callback) if name.startswith("on_")}
    - {"on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"}
    | {"setup", "teardown"}
)


def _as_it_was(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return repr(value) if isinstance(value, BaseException) else value


def _copied(tree: Any) -> Any:
    """A deep copy of the state saved after each step, ten times as fast as `copy.deepcopy`."""
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map(_copied, tree))
    if type(tree) in _CONSTANTS:
        return tree
    return tree.detach().clone() if isinstance(tree, Tensor) else copy.deepcopy(tree)


_CONSTANTS = (bool, float, int, str, type(None))


class _Watcher(Callback):
    """Records every hook call with its arguments, and the state after each step."""

    def __init__(self, trace: Trace) -> None:
        self.apart = Apart(trace=trace)  # which no walk enters: it grows with every step

    @property
    def trace(self) -> Trace:
        return self.apart["trace"]

    def note(self, name: str, trainer: pl.Trainer, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        given: Any = (args, kwargs)
        if name in ("on_save_checkpoint", "on_load_checkpoint"):
            given = sorted(args[0])  # the contents are compared as files
        given = tree_map(_as_it_was, given)
        self.trace.hooks.append((name, given, trainer.global_step, trainer.current_epoch))
        if name == "on_train_batch_end":
            self.note_step(trainer, pl_module, *args, **kwargs)
        if name == "on_train_end":
            self.note_end(trainer, pl_module)

    def note_step(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        optimizer = trainer.optimizers[0]
        self.trace.steps.append(
            {
                "outputs": outputs,
                "batch": batch,
                "callback_metrics": dict(trainer.callback_metrics),
                "logged_metrics": dict(trainer.logged_metrics),
                "progress_bar_metrics": dict(trainer.progress_bar_metrics),
                "lr": [float(group["lr"]) for group in optimizer.param_groups],
                "gradients": [
                    None if p.grad is None else p.grad.clone() for p in pl_module.parameters()
                ],
                "loops": _copied(trainer.fit_loop.state_dict()),
                "callbacks": self.states(trainer),
            }
        )

    def note_end(self, trainer: Any, pl_module: Any) -> None:
        device = pl_module.device
        self.trace.final = copy.deepcopy(
            {
                "weights": pl_module.state_dict(),
                "optimizer": trainer.optimizers[0].state_dict(),
                "other_optimizers": [each.state_dict() for each in trainer.optimizers[1:]],
                "schedulers": [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs],
                "rng_cpu": torch.get_rng_state(),
                "rng_device": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
                "loops": trainer.fit_loop.state_dict(),
                "global_step": trainer.global_step,
                "callback_metrics": dict(trainer.callback_metrics),
                "logged_metrics": dict(trainer.logged_metrics),
                "progress_bar_metrics": dict(trainer.progress_bar_metrics),
                "should_stop": trainer.should_stop,
                "callbacks": self.states(trainer),
            }
        )

    def states(self, trainer: Any) -> dict[str, Any]:
        """The state dicts of the other callbacks, if they have any."""
        return {
            callback.state_key: _copied(self.trace.portable(state))
            for callback in trainer.callbacks
            if not isinstance(callback, (CUDAGraphCallback, LayerTimingsMonitor, _Watcher))
            and (state := callback.state_dict())
        }


def _noting(name: str) -> Callable[..., None]:
    @functools.wraps(getattr(Callback, name))
    def hook(self: _Watcher, *args: Any, **kwargs: Any) -> None:
        self.note(name, *args, **kwargs)

    # Lightning's own code between two steps is known by its module; this is not.
    hook.__module__ = __name__
    return hook


for _name in HOST_HOOKS:
    setattr(_Watcher, _name, _noting(_name))


class _EndWatcher(Callback):
    """Records the final state, and runs no code between two steps."""

    def __init__(self, trace: Trace) -> None:
        self.on_train_end = _Watcher(trace).note_end  # type: ignore[method-assign]


def train(
    module: pl.LightningModule,
    tmp_path: Path,
    callback: CUDAGraphCallback | None = None,
    *,
    accelerator: str = "cpu",
    train_loader: Any = None,
    val_loader: Any = None,
    seed: int = 7,
    callbacks: tuple[Callback, ...] = (),
    ckpt_path: str | None = None,
    checkpoint_every: int = 4,
    position: int = 0,
    watched: bool = True,
    raises: type[BaseException] | None = None,
    fit: Callable[..., None] = pl.Trainer.fit,
    **trainer_kwargs: Any,
) -> Trace:
    """Run a fit and record it.

    Args:
        module: the module; made by the caller after seeding.
        tmp_path: the folder of logs and checkpoints.
        callback: the callback under test, or None for a run without it.
        accelerator: ``"cpu"`` or ``"gpu"``.
        train_loader: the training batches; by default seven full ones and a ragged one.
        val_loader: the validation batches.
        seed: of all generators, set just before the fit.
        callbacks: other callbacks.
        ckpt_path: checkpoint to resume from.
        checkpoint_every: steps between checkpoints; 0 for none but those of `callbacks`.
        position: index of `callback` among the callbacks; from the end if negative.
        watched: record all hooks, and every step. If False, only the final state is recorded, and no
            user code runs between two steps, unless the module or `callbacks` have some.
        raises: the exception that must end the run; it is recorded.
        fit: called instead of `Trainer.fit`, with the same arguments.
        trainer_kwargs: for the `Trainer`.
    """
    trace = Trace(callback=callback, module=module, folder=tmp_path)
    kwargs: dict[str, Any] = {
        "max_epochs": 3,
        "accelerator": accelerator,
        "devices": 1,
        "logger": CSVLogger(tmp_path, flush_logs_every_n_steps=1),
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": tmp_path,
        **trainer_kwargs,
    }
    saver = ModelCheckpoint(
        tmp_path / "ckpt", every_n_train_steps=checkpoint_every, save_top_k=-1, save_last="link"
    )
    watcher = _Watcher(trace) if watched else _EndWatcher(trace)
    others: list[Callback] = [watcher, *([saver] if checkpoint_every else []), *callbacks]
    if callback is not None:
        others.insert(position if position >= 0 else len(others) + 1 + position, callback)
    trainer = pl.Trainer(callbacks=others, **kwargs)
    trace.trainer = trainer
    pl.seed_everything(seed, verbose=False)
    with contextlib.nullcontext() if raises is None else pytest.raises(raises) as caught:
        fit(
            trainer,
            module,
            loader() if train_loader is None else train_loader,
            loader(seed=1, batches=2) if val_loader is None else val_loader,
            ckpt_path=ckpt_path,
            weights_only=False,
        )
    trace.error = None if caught is None else caught.value
    for path in sorted(tmp_path.rglob("*.ckpt")):
        saved = torch.load(path, weights_only=False, map_location="cpu")
        saved["callbacks"] = trace.portable(saved.get("callbacks", {}))
        trace.checkpoints[str(path.relative_to(tmp_path)).removeprefix("ckpt/")] = saved
    for path in sorted(tmp_path.rglob("metrics.csv")):
        trace.csv += path.read_text()
    return trace


def differences(one: Any, other: Any) -> list[str]:
    """Paths of the leaves that differ in any bit, or are missing on one side."""
    return [_written(path) for path in _differing(one, other, ())]


# The keys from the root; the way there is a pair of the way to what holds it, and the last key.
_Way = tuple[Any, ...]


def _written(way: _Way) -> str:
    keys = []
    while way:
        way, key = way
        keys.append(f"[{key!r}]")
    return "".join(reversed(keys))


def _differing(one: Any, other: Any, way: _Way) -> Iterator[_Way]:
    # By hand, because pytrees write the path of every leaf, which takes longer than many a run.
    if isinstance(one, _MAPPINGS) and isinstance(other, _MAPPINGS):
        for key, value in one.items():
            if key in other:
                yield from _differing(value, other[key], (way, key))
        for key in one.keys() ^ other.keys():
            yield (way, key), "is in one of them"
        if [key for key in one if key in other] != [key for key in other if key in one]:
            yield way, "in another order"  # which is that of checkpoints
    elif isinstance(one, _SEQUENCES) and isinstance(other, _SEQUENCES):
        for index, (left, right) in enumerate(zip(one, other, strict=False)):
            yield from _differing(left, right, (way, index))
        if len(one) != len(other):
            yield way, f"{len(one)} and {len(other)} members"
    elif is_dataclass(one) and not isinstance(one, type) and type(one) is type(other):
        yield from _differing(vars(one), vars(other), way)
    elif not _is_same(one, other):
        yield way


_SEQUENCES = (list, tuple, deque)
_MAPPINGS = (dict, UserDict)  # the latter are batches of Hugging Face's collators


def _is_same(one: Any, other: Any) -> bool:
    # Of what is split between processes, each compares its own part.
    one, other = getattr(one, "_local_tensor", one), getattr(other, "_local_tensor", other)
    if not isinstance(one, Tensor):
        return bool(one == other or (one != one and other != other))
    if not isinstance(other, Tensor) or one.dtype != other.dtype or one.device != other.device:
        return False
    # A NaN equals nothing, but the same bits are the same.
    return torch.equal(one, other) or torch.equal(one.nan_to_num(1234.5), other.nan_to_num(1234.5))


def assert_same(one: Trace, other: Trace, ignore: Sequence[str] = ()) -> None:
    """Fail unless two runs are equal, bit for bit.

    Args:
        one: a run.
        other: the other.
        ignore: globs of names of logged values and other leaves that differ from run to run, such as
            times. Both runs must have them.
    """
    for name in ("hooks", "steps", "final", "checkpoints"):
        found = [
            path
            for path in differences(getattr(one, name), getattr(other, name))
            if not any(fnmatch(path, f"*{pattern}*") for pattern in ignore)
        ]
        assert not found, f"{name} differ at {len(found)} places, the first: {found[:8]}"
    assert (one.error is None) == (other.error is None)
    assert repr(one.error) == repr(other.error)
    assert _without(one.csv, ignore) == _without(other.csv, ignore)
    writes = one.trainer is not None and any(isinstance(x, CSVLogger) for x in one.trainer.loggers)
    logs = writes and any(step["logged_metrics"] for step in one.steps)
    assert one.csv or one.error is not None or not logs


def _without(text: str, ignore: Sequence[str]) -> object:
    """Logged values without those that match a glob."""
    if not ignore:
        return text
    return [
        {
            name: (value != "" if any(fnmatch(name, f"*{g}*") for g in ignore) else value)
            for name, value in row.items()
        }
        for row in csv.DictReader(text.splitlines())
    ]


def make(build: Callable[[], pl.LightningModule], seed: int = 3) -> pl.LightningModule:
    """A module with weights that depend on the seed alone."""
    pl.seed_everything(seed, verbose=False)
    return build()
