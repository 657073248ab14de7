"""The fast path through Lightning's loop between replays does what the loop does.

`tests/gpu/test_advance.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call

from lightning_cudagraph import CUDAGraphCallback
from lightning_cudagraph.compat import lightning_source
from lightning_cudagraph.compat.features import FAST_PATH
from lightning_cudagraph.compat.tables import notes
from lightning_cudagraph.trainer.training.fast_path import FastPath
from tests import harness
from tests.harness import Net, differences, loader, make


class Run:
    """A run, and how many batches took the fast path."""

    def __init__(
        self,
        tmp_path: Path,
        accelerator: str,
        monkeypatch: pytest.MonkeyPatch,
        graph: bool,
        others: tuple[Callback, ...] = (),
        build: type[Net] = Net,
        **kwargs: Any,
    ) -> None:
        self.quick = 0
        quickly = FastPath._advance

        def counted(self_: FastPath, fetcher: Any) -> None:
            self.quick += 1
            quickly(self_, fetcher)

        self.saver = ModelCheckpoint(tmp_path / "ckpt", every_n_train_steps=5, save_top_k=-1)
        self.module = make(build)
        with monkeypatch.context() as patch:
            patch.setattr(FastPath, "_advance", counted)
            trainer = pl.Trainer(
                accelerator=accelerator,
                devices=1,
                max_epochs=3,
                logger=CSVLogger(tmp_path),
                log_every_n_steps=1,
                callbacks=[*others, self.saver, *([CUDAGraphCallback()] if graph else [])],
                enable_progress_bar=any(isinstance(one, TQDMProgressBar) for one in others),
                enable_model_summary=False,
                **kwargs,
            )
            pl.seed_everything(7, verbose=False)
            trainer.fit(self.module, loader(), loader(seed=1, batches=2))
        self.loops = trainer.fit_loop.state_dict()
        self.csv = next(tmp_path.rglob("metrics.csv")).read_text()
        self.checkpoints = {
            path.name: torch.load(path, weights_only=False, map_location="cpu")
            for path in sorted((tmp_path / "ckpt").glob("*.ckpt"))
        }
        for checkpoint in self.checkpoints.values():
            del checkpoint["callbacks"]  # names folders
        assert self.module._current_fx_name is None


def assert_same(plain: Run, graph: Run) -> None:
    for name in ("loops", "checkpoints"):
        assert not differences(getattr(plain, name), getattr(graph, name)), name
    assert not differences(plain.module.state_dict(), graph.module.state_dict())
    assert plain.csv == graph.csv


class Watches(Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        pass


OTHERS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "nothing": ((), {}),
    "a hook": ((Watches,), {}),
    "lightning's callbacks": ((LearningRateMonitor, TQDMProgressBar), {}),
    "accumulation and validation": ((), {"accumulate_grad_batches": 3, "val_check_interval": 4}),
    "limits": ((), {"limit_train_batches": 6, "max_steps": 17}),
}


@pytest.mark.spread(2)
@pytest.mark.parametrize("case", OTHERS)
def test_the_same_as_the_long_way(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    callbacks, kwargs = OTHERS[case]
    runs = [
        Run(
            tmp_path / str(graph),
            accelerator,
            monkeypatch,
            graph,
            tuple(make() for make in callbacks),
            **kwargs,
        )
        for graph in (False, True)
    ]
    assert_same(*runs)
    assert runs[0].quick == 0
    assert runs[1].quick >= 5


class Steps(Net):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)


@pytest.mark.spread(2)
@pytest.mark.parametrize("reason", ["an override", "a profiler", "another lightning"])
def test_the_long_way(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    if reason == "another lightning":
        monkeypatch.setattr(lightning_source, "_KNOWN", frozenset())
    kwargs: dict[str, Any] = {
        "build": Steps if reason == "an override" else Net,
    }
    runs = [
        Run(
            tmp_path / str(graph),
            accelerator,
            monkeypatch,
            graph,
            **kwargs,
            profiler=SimpleProfiler(tmp_path) if reason == "a profiler" else None,
        )
        for graph in (False, True)
    ]
    assert_same(*runs)
    assert runs[1].quick == 0


def test_lightning_is_the_one_that_was_read() -> None:
    """If not: compare what stands in for its functions with them, and add the digest of their source."""
    assert lightning_source.digest() in lightning_source._KNOWN


def _other_words(advance: str) -> str:
    return (
        advance.replace("data_fetcher: _DataFetcher) -> None:", "data_fetcher):  # a comment")
        .replace('"""Runs', '"""Does')
        .replace("batch_output: _BATCH_OUTPUTS_TYPE =", "batch_output: object =")
        .replace("trainer = self.trainer", "trainer = (self\n            .trainer)")
    )


def _another_string(advance: str) -> str:
    return advance.replace("run_training_batch", "run_another_batch")


@pytest.mark.parametrize(("change", "does_same"), [(_other_words, True), (_another_string, False)])
def test_another_source(monkeypatch: pytest.MonkeyPatch, change: Any, does_same: bool) -> None:
    """Comments, docstrings, annotations and line breaks may change: what the code does may not."""
    read, advance = inspect.getsource, _TrainingEpochLoop.advance
    assert change(read(advance)) != read(advance)
    monkeypatch.setattr(inspect, "getsource", lambda f: change(read(f)) if f is advance else read(f))
    monkeypatch.setattr(lightning_source, "_syntax", lightning_source._syntax.__wrapped__)
    assert lightning_source.is_known() is does_same
    assert (notes(FAST_PATH) == []) is does_same


def test_a_release_without_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(function: Any) -> str:
        raise OSError("could not get source code")

    monkeypatch.setattr(inspect, "getsource", gone)
    monkeypatch.setattr(lightning_source, "_syntax", lightning_source._syntax.__wrapped__)
    assert not lightning_source.is_known()


def _calls_another_hook(own: Any) -> Any:
    def advance(self: Any, data_fetcher: Any) -> None:
        own(self, data_fetcher)
        call._call_callback_hooks(self.trainer, "on_train_batch_end")

    return advance


def _counts_otherwise(own: Any) -> Any:
    def advance(self: Any, data_fetcher: Any) -> None:
        own(self, data_fetcher)
        self._batches_that_stepped += 1

    return advance


def _asks_for_more(own: Any) -> Any:
    def advance(self: Any, data_fetcher: Any) -> None:
        if not self.trainer.skips_batches:
            own(self, data_fetcher)

    return advance


def _has_a_new_condition(own: Any) -> Any:
    def advance(self: Any, data_fetcher: Any) -> None:
        if self.restarting and self.trainer.skips_batches:
            return
        own(self, data_fetcher)

    return advance


@pytest.mark.parametrize(
    "change", [_calls_another_hook, _counts_otherwise, _asks_for_more, _has_a_new_condition]
)
def test_a_release_that_does_something_else(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    monkeypatch.setattr(_TrainingEpochLoop, "advance", change(_TrainingEpochLoop.advance))
    assert not lightning_source.is_known()
    (note,) = notes(FAST_PATH)
    assert note.startswith("off: the fast path from one replay to the next, because `lightning.pytorch")
    assert note.endswith("which takes the host some 0.3 ms more a step")


def _unwatched(build: Any, path: Path, callback: Any, accelerator: str, **kwargs: Any) -> Any:
    return harness.train(
        make(build),
        path,
        callback,
        accelerator=accelerator,
        watched=False,
        checkpoint_every=0,
        **kwargs,
    )


class Wraps(Callback):
    """Puts a function in the place of a hook, with the name of the hook's module on it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        hook = getattr(pl_module, self.name)

        @functools.wraps(hook)
        def counted(*args: Any) -> Any:
            self.calls += 1
            found = hook(*args)
            return [torch.sin(found[0]), found[1]] if self.name == "on_after_batch_transfer" else found

        setattr(pl_module, self.name, counted)


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    "name", ["on_train_batch_start", "on_train_batch_end", "on_after_batch_transfer"]
)
def test_a_wrapped_hook(tmp_path: Path, accelerator: str, name: str) -> None:
    hooks = [Wraps(name), Wraps(name)]
    plain, graph = (
        _unwatched(Net, tmp_path / str(i), callback, accelerator, callbacks=(hook,))
        for i, (hook, callback) in enumerate(zip(hooks, (None, CUDAGraphCallback()), strict=True))
    )
    harness.assert_same(plain, graph)
    assert hooks[0].calls == hooks[1].calls > 0
    assert graph.counts.replayed > 10


class Appears(Net):
    """Gets a hook in the middle of an epoch, from the code of its dataloader."""

    def setup(self, stage: str) -> None:
        self.seen: list[Any] = []


class Adds:
    """A dataloader that sets a hook."""

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        for i in range(12):
            if i == 9:
                self.module.on_train_batch_start = lambda batch, index: self.module.seen.append(batch)
            yield torch.randn(8, 12, generator=generator), torch.randint(0, 4, (8,), generator=generator)

    module: Any


class Tells(Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.train_dataloader.module = pl_module


def test_a_hook_from_a_dataloader(tmp_path: Path, accelerator: str) -> None:
    plain, graph = (
        _unwatched(
            Appears,
            tmp_path / str(i),
            callback,
            accelerator,
            train_loader=Adds(),
            callbacks=(Tells(),),
            max_epochs=1,
        )
        for i, callback in enumerate((None, CUDAGraphCallback()))
    )
    harness.assert_same(plain, graph)
    assert not differences(plain.module.seen, graph.module.seen)
    assert len(plain.module.seen) > 1
    assert graph.counts.replayed > 5


class Has(Callback):
    """A callback that is given hooks."""

    def __init__(self) -> None:
        self.left = 0


class Module(Net):
    pass


class Data(pl.LightningDataModule):
    """Twelve batches; `at_ninth` is called where the loader makes the ninth."""

    def __init__(self, at_ninth: Any) -> None:
        super().__init__()
        self.batches = _Loader(at_ninth)

    def train_dataloader(self) -> Any:
        return self.batches

    def val_dataloader(self) -> Any:
        return loader(seed=1, batches=2)


class _Loader(Adds):
    def __init__(self, at_ninth: Any) -> None:
        self.at_ninth = at_ninth

    def __iter__(self) -> Any:
        for i, batch in enumerate(loader(ragged=False, batches=12)):
            if i == 8:
                self.at_ninth()
                self.at_ninth = lambda: None
            yield batch


class AtNinth(Callback):
    def __init__(self, call: Any) -> None:
        self.call = call

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 8 and trainer.current_epoch == 0:
            self.call()


def _replace(patch: pytest.MonkeyPatch, module: Net, has: Has, where: Any, name: str) -> None:
    """Replace a method or hook by a function that also changes a weight."""
    was = getattr(Has if where in ("instance", "another class") else where, name)

    def function(*args: Any, **kwargs: Any) -> Any:
        module.head.weight.data.mul_(0.97)
        return was(*args, **kwargs)

    if where == "instance":  # which has as many attributes afterwards
        del has.left
        setattr(has, name, functools.partial(function, has))
    elif where == "another class":
        has.__class__ = type("Other", (Has,), {name: function})  # type: ignore[assignment]
    else:
        patch.setattr(where, name, function)


_OF_BATCHES = ("on_train_batch_start", "on_train_batch_end")
_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_INSIDE = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
_OF_STRATEGY = ("optimizer_step", "batch_to_device", "on_train_batch_start")
REPLACED = [
    *((Has, name) for name in (*_INSIDE, *_OF_BATCHES)),
    *(("another class", name) for name in (*_INSIDE, *_OF_BATCHES)),
    *(("instance", name) for name in _OF_BATCHES),
    *((Module, name) for name in (*_TRANSFERS, *_OF_BATCHES)),
    *((Data, name) for name in _TRANSFERS),
    *((Strategy, name) for name in _OF_STRATEGY),
    (LightningOptimizer, "step"),
]


def _fit_with(data: Data, trainer: Any, module: Any, *loaders: Any, **kwargs: Any) -> None:
    trainer.fit(module, datamodule=data, **kwargs)


def _replaced_in_mid_epoch(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, moment: str
) -> None:
    runs = []
    for callback in (None, CUDAGraphCallback()):
        module, has = make(Module), Has()
        with monkeypatch.context() as patch:
            replace = functools.partial(_replace, patch, module, has, where, name)
            data = Data(replace if moment == "loader" else lambda: None)
            run = harness.train(
                module,
                tmp_path / str(len(runs)),
                callback,
                accelerator=accelerator,
                callbacks=(has, *([AtNinth(replace)] if moment == "hook" else [])),
                fit=functools.partial(_fit_with, data),
                watched=False,
                checkpoint_every=0,
                max_epochs=2,
                enable_checkpointing=False,
            )
        runs.append(run)
    harness.assert_same(*runs)
    assert runs[1].counts.replayed > 8


@pytest.mark.spread(3)
@pytest.mark.filterwarnings("ignore:You have overridden:UserWarning")
@pytest.mark.parametrize(
    ("where", "name", "moment"),
    [
        (Has, "on_before_backward", "hook"),
        ("another class", "on_after_backward", "loader"),
        ("instance", "on_train_batch_end", "loader"),
        (Module, "on_train_batch_end", "loader"),
        (Module, "on_after_batch_transfer", "hook"),
        (Data, "on_before_batch_transfer", "hook"),
        (Data, "on_after_batch_transfer", "loader"),
        (Strategy, "optimizer_step", "loader"),
        (Strategy, "batch_to_device", "hook"),
        (Strategy, "on_train_batch_start", "hook"),
        (LightningOptimizer, "step", "loader"),
    ],
)
def test_replaced_in_mid_epoch(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, moment: str
) -> None:
    _replaced_in_mid_epoch(tmp_path, accelerator, monkeypatch, where, name, moment)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:You have overridden:UserWarning")
@pytest.mark.parametrize("moment", ["hook", "loader"])
@pytest.mark.parametrize(("where", "name"), REPLACED)
def test_all_that_are_replaced_in_mid_epoch(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, moment: str
) -> None:
    _replaced_in_mid_epoch(tmp_path, accelerator, monkeypatch, where, name, moment)


class Unvalidated(Net):
    """Without a `validation_step`, until a hook sets one in mid-epoch."""

    validation_step: Any = pl.LightningModule.validation_step


class SetsAValidationStep(Callback):
    def __init__(self) -> None:
        self.validated: list[int] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (trainer.current_epoch, batch_idx) == (1, 2):
            pl_module.validation_step = lambda batch, batch_idx: self.validated.append(
                trainer.global_step
            )


@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader` but have no")
def test_a_validation_step_that_a_hook_sets(tmp_path: Path, accelerator: str) -> None:
    found = []
    for name, ours in (("plain", None), ("graph", CUDAGraphCallback())):
        sets = SetsAValidationStep()
        harness.train(
            make(Unvalidated),
            tmp_path / name,
            ours,
            accelerator=accelerator,
            callbacks=(sets,),
            val_loader=loader(seed=1, batches=1),
            val_check_interval=2,
            max_epochs=3,
            num_sanity_val_steps=0,
            checkpoint_every=0,
            watched=False,
            train_loader=loader(ragged=False, batches=12),
        )
        found.append(sets.validated)
    plain, graph = found
    assert plain == graph
    assert plain[0] == 16  # in the middle of the second epoch
