"""User hooks around steps on the fast path see and change what they see and change without it.

`tests/gpu/test_batch_hooks.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, TQDMProgressBar
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torch.utils.data import DataLoader

from lightning_cudagraph import CUDAGraphCallback
from lightning_cudagraph.checks.walk.versions import Versions
from lightning_cudagraph.trainer.training.hooks.hook_arguments import ignores
from lightning_cudagraph.trainer.training.steps import TrainingSteps
from tests.harness import Net, Trace, assert_same, differences, loader, make, train

BATCHES = 14
# In this batch of the first epoch, and later ones if so said, a hook changes something.
AT = 9


class Scaled(Net):
    """A step that reads a Python number."""

    factor = 1.0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.spare = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = super().training_step(batch, batch_idx)
        found["loss"] = found["loss"] * self.factor
        return found


class Twice:
    """A plain run and one with the callback, which are the same.

    Attributes:
        quick: the number of replays on the fast path.
        traces: the two runs.
    """

    def __init__(
        self,
        tmp_path: Path,
        accelerator: str,
        monkeypatch: pytest.MonkeyPatch,
        callbacks: Callable[[], tuple[Callback, ...]] = tuple,
        build: type[pl.LightningModule] = Scaled,
        ours: Callable[[], CUDAGraphCallback] = lambda: CUDAGraphCallback(timings=None),
        **kwargs: Any,
    ) -> None:
        self.quick = 0
        replay = TrainingSteps.replay

        def counted(*args: Any) -> Any:
            outputs = replay(*args)
            self.quick += outputs is not None
            return outputs

        monkeypatch.setattr(TrainingSteps, "replay", counted)
        self.callbacks = [callbacks(), callbacks()]
        self.traces: list[Trace] = [
            train(
                make(build),
                tmp_path / str(index),
                callback,
                accelerator=accelerator,
                callbacks=self.callbacks[index],
                **{
                    "train_loader": loader(ragged=False, batches=BATCHES),
                    "watched": False,
                    "max_epochs": 3,
                    "checkpoint_every": 0,
                    "enable_checkpointing": False,
                    **kwargs,
                },
            )
            for index, callback in enumerate((None, ours()))
        ]
        assert_same(*self.traces)
        self.modules: list[Any] = [trace.module for trace in self.traces]
        assert not differences(*(module.state_dict() for module in self.modules))


def _seen(trainer: Any, module: Any, *args: Any) -> Any:
    """All that a hook can look at. Its arguments are kept as they are, to be compared at the end."""
    return (
        module._current_fx_name,
        args,
        copy.deepcopy(trainer.fit_loop.state_dict()),
        trainer.global_step,
        dict(trainer.callback_metrics),
        dict(trainer.logged_metrics),
        trainer._results.batch_size,
        [float(group["lr"]) for group in trainer.optimizers[0].param_groups],
        [None if p.grad is None else p.grad.clone() for p in module.parameters()],
        [p.detach().clone() for p in module.parameters()],
        torch.get_rng_state(),
    )


class Sees(Callback):
    """Looks, logs and draws in the hooks around a step."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def note(self, name: str, trainer: Any, module: Any, *args: Any) -> None:
        self.seen.append((name, _seen(trainer, module, *args)))
        torch.rand(3)
        module.log(f"callback/{name}", float(len(self.seen)), on_step=True, on_epoch=True)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.note("start", trainer, pl_module, batch, batch_idx)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.note("end", trainer, pl_module, outputs, batch, batch_idx)


class SeesTheRest(Sees):
    """Looks in the middle of the step too."""

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.note("zero_grad", trainer, pl_module)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self.note("backward", trainer, pl_module, loss)


class Book(Sees):
    """A record of inputs. Guards do not look into it, or each entry would be a change to verify."""

    __module__ = "lightning_cudagraph.tests"


class Seeing(Scaled):
    """A module that looks in its own hooks."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.book = Book()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.book.note("module start", self.trainer, self, batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.book.note("module end", self.trainer, self, outputs, batch, batch_idx)


class SeeingTransfers(Seeing):
    """One that takes part in the transfer of batches."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.book.seen.append(("before transfer", self._current_fx_name, batch, dataloader_idx))
        return [batch[0] * 2, batch[1]]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.book.seen.append(("after transfer", self._current_fx_name, batch, dataloader_idx))
        return [batch[0] + 1, batch[1]]


SEEING: dict[str, tuple[type[Scaled], tuple[type[Sees], ...]]] = {
    "a callback": (Scaled, (Sees,)),
    "two callbacks": (Scaled, (Sees, Sees)),
    "the module": (Seeing, ()),
    "both": (Seeing, (Sees,)),
    "transfers": (SeeingTransfers, ()),
    "in the middle": (Seeing, (SeesTheRest, Sees)),
}
LONG_SEEING = {"two callbacks", "the module"}  # parts of "both" and of "in the middle"


class Empty(Callback):
    def on_train_batch_start(self, *args: Any) -> None: ...

    def on_train_batch_end(self, *args: Any) -> None: ...


def test_the_name_of_a_hook_is_not_taken_for_a_change(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []
    is_same = Versions.is_same

    def counted(self: Versions, index: int) -> bool:
        holder = self.dicts[index]
        compared.append("_current_fx_name" in holder and "_modules" in holder)
        return is_same(self, index)

    monkeypatch.setattr(Versions, "is_same", counted)
    batches = loader(ragged=False, batches=80)
    runs = Twice(
        *(tmp_path, accelerator, monkeypatch, lambda: (Empty(),)),
        max_epochs=1,
        train_loader=batches,
    )
    assert runs.quick > 60
    assert sum(compared) < runs.quick  # at the capture, and where Lightning's own loop runs


@pytest.mark.spread
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize(
    "which", [pytest.param(which, marks=[pytest.mark.long] * (which in LONG_SEEING)) for which in SEEING]
)
def test_what_hooks_see(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch, which: str, window: int
) -> None:
    build, kinds = SEEING[which]
    runs = Twice(
        tmp_path,
        accelerator,
        monkeypatch,
        lambda: tuple(kind() for kind in kinds),
        build,
        accumulate_grad_batches=window,
    )
    assert runs.quick > 15
    books = [
        [getattr(m, "book", Sees()), *cs] for m, cs in zip(runs.modules, runs.callbacks, strict=True)
    ]
    for plain, graph in zip(*books, strict=True):
        assert len(plain.seen) == len(graph.seen)
        assert not differences(plain.seen, graph.seen)
    assert sum(len(book.seen) for book in books[0]) >= BATCHES * 3


class Data(pl.LightningDataModule):
    """A data module that takes part in the transfer of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(ragged=False, batches=BATCHES)

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(seed=1, batches=2)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.seen.append(batch)
        return [batch[0] * 2, batch[1]]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.seen.append(batch)
        return batch


@pytest.mark.long
def test_a_data_module(tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data: list[Data] = []

    def fit(trainer: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        data.append(Data())
        trainer.fit(module, datamodule=data[-1], weights_only=False)

    runs = Twice(tmp_path, accelerator, monkeypatch, lambda: (Sees(),), fit=fit)
    assert runs.quick > 15
    assert len(data[0].seen) > 2 * BATCHES * 3
    assert not differences(data[0].seen, data[1].seen)
    assert not differences(*(callbacks[0].seen for callbacks in runs.callbacks))


class Acts(Callback):
    """Does something in a hook.

    Args:
        when: the hook, "start" or "end".
        act: what it does, given the trainer, the module, the batch and a list of things to compare.
        each: in this batch and all later ones.
    """

    def __init__(self, when: str, act: Callable[..., Any], each: bool) -> None:
        self.when = when
        self.act = act
        self.each = each
        self.seen: list[Any] = []

    def do(self, when: str, trainer: Any, module: Any, batch: Any) -> None:
        batches = trainer.current_epoch * BATCHES + trainer.fit_loop.epoch_loop.batch_idx
        if when == self.when and (batches == AT or (self.each and batches > AT)):
            self.act(trainer, module, batch, self.seen)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.do("start", trainer, pl_module, batch)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.do("end", trainer, pl_module, batch)


def _buffer(trainer: Any, module: Any, batch: Any, seen: Any) -> None:
    module.features[1].running_mean.mul_(0.5)


def _weights(trainer: Any, module: Any, batch: Any, seen: Any) -> None:
    with torch.no_grad():
        module.head.weight.mul_(0.9)


def _number(trainer: Any, module: Any, batch: Any, seen: Any) -> None:
    module.factor = module.factor * 0.5


def _frozen(trainer: Any, module: Any, batch: Any, seen: Any) -> None:
    module.head.requires_grad_(False)


def _module(trainer: Any, module: Any, batch: Any, seen: Any) -> None:
    module.features[2] = nn.Tanh()


def _evaluated(trainer: Any, module: Any, batch: Any, seen: Any) -> None:
    module.features[3].eval()


def _rate(trainer: Any, module: Any, batch: Any, seen: Any) -> None:
    trainer.lr_scheduler_configs.clear()
    trainer.optimizers[0].param_groups[0]["lr"] = 3e-3


def _decay(trainer: Any, module: Any, batch: Any, seen: Any) -> None:
    trainer.optimizers[0].param_groups[0]["weight_decay"] = 0.3


def _draws(trainer: Any, module: Any, batch: Any, seen: Any) -> None:
    seen.append((torch.rand(2), torch.rand(2, device=module.device)))


def _batch(trainer: Any, module: Any, batch: Any, seen: Any) -> None:
    batch[0].mul_(0.5)


def _kept_batch(trainer: Any, module: Any, batch: Any, seen: Any) -> None:
    seen.append(batch)


def _kept_gradients(trainer: Any, module: Any, batch: Any, seen: Any) -> None:
    seen.append([parameter.grad for parameter in module.parameters()])


def _kept_metrics(trainer: Any, module: Any, batch: Any, seen: Any) -> None:
    seen.append(trainer.callback_metrics)


def _stop(trainer: Any, module: Any, batch: Any, seen: Any) -> None:
    trainer.should_stop = True


def _fails(trainer: Any, module: Any, batch: Any, seen: Any) -> None:
    raise ZeroDivisionError("in a hook")


def _window(trainer: Any, module: Any, batch: Any, seen: Any) -> None:
    trainer.accumulate_grad_batches = 2


def _end_hook(trainer: Any, module: Any, batch: Any, seen: Any) -> None:
    module.on_train_batch_end = lambda outputs, batch, batch_idx: seen.append(
        (outputs, batch, batch_idx)
    )


def _same_size(trainer: Any, module: Any, batch: Any, seen: Any) -> None:
    """Put a hook into the attributes of the module in exchange for another name."""
    if "spare" in vars(module):
        del module.spare
        _end_hook(trainer, module, batch, seen)


def _start_hook(trainer: Any, module: Any, batch: Any, seen: Any) -> None:
    module.on_train_batch_start = lambda batch, batch_idx: seen.append((batch, batch_idx))


def _skips(trainer: Any, module: Any, batch: Any, seen: Any) -> None:
    module.on_train_batch_start = lambda batch, batch_idx: -1


def _zero_hook(trainer: Any, module: Any, batch: Any, seen: Any) -> None:
    module.on_before_zero_grad = lambda optimizer: seen.append(trainer.global_step)


def _transfer_hook(trainer: Any, module: Any, batch: Any, seen: Any) -> None:
    module.on_after_batch_transfer = lambda batch, dataloader_idx: [batch[0] * 2, batch[1]]


def _before_transfer_hook(trainer: Any, module: Any, batch: Any, seen: Any) -> None:
    module.on_before_batch_transfer = lambda batch, dataloader_idx: [batch[0] * 2, batch[1]]


def _step_hook(trainer: Any, module: Any, batch: Any, seen: Any) -> None:
    plain = module.optimizer_step

    def optimizer_step(*args: Any) -> None:
        seen.append(args[:2])
        plain(*args)

    module.optimizer_step = optimizer_step


def _callback(trainer: Any, module: Any, batch: Any, seen: Any) -> None:
    if len(seen) < 3:
        trainer.callbacks.append(added := Sees())
        seen.append(added.seen)


def _other_callbacks(trainer: Any, module: Any, batch: Any, seen: Any) -> None:
    added = Sees()
    trainer.callbacks = [*trainer.callbacks, added]
    seen.append(added.seen)


def _logs(trainer: Any, module: Any, batch: Any, seen: Any) -> None:
    module.log("hook", float(len(seen)), on_step=True, on_epoch=True)
    module.log("hook_only", module.head.weight.detach().mean(), on_step=True, on_epoch=False)
    seen.append(dict(trainer.callback_metrics))


def _profiler(trainer: Any, module: Any, batch: Any, seen: Any) -> None:
    trainer.profiler = SimpleProfiler()


def _epochs(trainer: Any, module: Any, batch: Any, seen: Any) -> None:
    trainer.fit_loop.epoch_loop.max_steps = 20


def _validates(trainer: Any, module: Any, batch: Any, seen: Any) -> None:
    trainer.val_check_batch = 4


CHANGES: dict[str, Callable[..., None]] = {
    name.removeprefix("_"): function
    for name, function in list(globals().items())
    if name.startswith("_") and getattr(function, "__module__", "") == __name__ and name != "_seen"
}
# These have to invalidate the graph.
CAPTURED_AGAIN = {"number", "frozen", "module", "evaluated", "decay"}
# Variants of others, or what other files test in these hooks (`test_odd_code`, `test_plain_replays`,
# `test_rows_trainer`).
LONG_CHANGES = {
    *("frozen", "module", "evaluated", "decay"),
    *("kept_metrics", "same_size", "start_hook", "skips"),
    *("callback", "other_callbacks", "stop", "fails", "validates"),
}


@pytest.mark.spread(2)
@pytest.mark.parametrize("each", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("when", ["start", "end"])
@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[pytest.mark.long] * (what in LONG_CHANGES)) for what in CHANGES]
)
def test_what_hooks_change(
    tmp_path: Path,
    accelerator: str,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    when: str,
    each: bool,
) -> None:
    runs = Twice(
        tmp_path,
        accelerator,
        monkeypatch,
        lambda: (Acts(when, CHANGES[what], each), TQDMProgressBar(), LearningRateMonitor("step")),
        raises=ZeroDivisionError if what == "fails" else None,
        enable_progress_bar=True,
        max_epochs=2,
    )
    plain, graph = (callbacks[0] for callbacks in runs.callbacks)
    assert not differences(plain.seen, graph.seen)
    assert runs.quick > 0
    if what in CAPTURED_AGAIN:
        assert runs.traces[1].counts.recaptures


class Skips(Scaled):
    """Ends every epoch in the middle."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        self.log("batch", float(batch_idx), on_step=True, on_epoch=True)
        return -1 if batch_idx == AT + 1 - self.current_epoch else None


@pytest.mark.spread(2)
@pytest.mark.parametrize("watched", [False, True])
def test_a_hook_ends_the_epoch(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch, watched: bool
) -> None:
    runs = Twice(tmp_path, accelerator, monkeypatch, build=Skips, watched=watched)
    assert runs.quick > 15
    assert runs.traces[0].final["global_step"] == 3 * AT


class Keeping(Scaled):
    """A module that keeps what its hook after a step gets, as records of a run do."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.record: Any = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.record.append(outputs["loss"])


class KeepsLatest(Keeping):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.record = outputs["loss"]


class KeepsOutputs(Keeping):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.record = outputs


class KeepsBatch(Keeping):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.record = tuple(batch)


class KeepsNumbers(Keeping):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.record.append(float(outputs["loss"]))


class KeepsInTable(Keeping):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.record = {"loss": [], "by": {}, "last": deque(maxlen=3), "count": 0}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.record["loss"].append([float(outputs["loss"])])
        self.record["by"][self.global_step] = outputs["loss"]
        self.record["last"].append(batch[0])
        self.record["count"] += 1


class KeepsForTheNext(Keeping):
    """The step reads what the hook has kept."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.record = torch.zeros(())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = super().training_step(batch, batch_idx)
        self.log("before", self.record)
        found["loss"] = found["loss"] + 0.1 * self.record
        return found

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.record = outputs["loss"].detach()


class KeepsItself(KeepsForTheNext):
    """The step reads and sets it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = super().training_step(batch, batch_idx)
        self.record = found["loss"].detach()
        return found

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 4 == 3:
            self.record = torch.zeros_like(self.record)


KEEPING = {kind.__name__: kind for kind in (Keeping, *Keeping.__subclasses__(), KeepsItself)}


@pytest.mark.spread
@pytest.mark.parametrize("which", KEEPING)
def test_what_hooks_keep(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    runs = Twice(tmp_path, accelerator, monkeypatch, build=KEEPING[which])
    assert runs.quick > 2 * BATCHES  # a few replays are verified, and no more than that
    assert not runs.traces[1].counts.recaptures
    assert not differences(*(module.record for module in runs.modules))


class FindsByChance(Scaled):
    """A step that reads a record which its code does not name."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.record: list[float] = [1.0]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = super().training_step(batch, batch_idx)
        (numbers,) = (value for name, value in vars(self).items() if name.startswith("rec"))
        found["loss"] = found["loss"] * numbers[-1]
        return found

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 8 == 7:
            self.record.append(self.record[-1] * 0.5)


@pytest.mark.long
def test_a_record_that_the_step_finds_by_chance_stays_under_checks(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Twice(tmp_path, accelerator, monkeypatch, build=FindsByChance)
    assert runs.traces[1].counts.recaptures


class Reads(Callback):
    """Reads the outputs in a way that its own code does not show."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append(locals()["args"][2:])


class Averages(Scaled):
    """An average of weights, without a gradient."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.averages = [p.detach().clone() for p in self.parameters()]

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        averages = [average.to(self.device) for average in self.averages]
        torch._foreach_lerp_(averages, [*self.parameters()], 0.1)
        self.averages = averages


@pytest.mark.long
def test_an_average_and_one_that_reads(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Twice(tmp_path, accelerator, monkeypatch, lambda: (Reads(),), Averages)
    assert runs.quick > 15
    assert len(runs.callbacks[0][0].seen) == BATCHES * 3
    assert not differences(*(callbacks[0].seen for callbacks in runs.callbacks))
    assert not differences(*(module.averages for module in runs.modules))


class Arguments:
    """Hooks that read their first argument, and hooks that do not."""

    def ignored(self, given: Any, other: Any) -> Any:
        return other

    def ignored_together(self, *args: Any) -> None:
        pass

    @torch.no_grad()
    def ignored_without_gradient(self, given: Any) -> None:
        pass

    @rank_zero_only
    def ignored_elsewhere(self, given: Any) -> None:
        pass

    def read(self, given: Any) -> Any:
        return given

    def read_together(self, *args: Any) -> Any:
        return args

    def read_inside(self, given: Any) -> Any:
        return lambda: given

    def read_in_comprehension(self, given: Any) -> Any:
        return [given for _ in range(2)]

    def read_by_name(self, given: Any) -> Any:
        return locals()

    @torch.no_grad()
    def read_without_gradient(self, given: Any) -> Any:
        return [other := given, other]

    def read_after_the_other(self, given: Any, other: Any = None) -> Any:
        return (other, given)


@pytest.mark.parametrize("name", [name for name in vars(Arguments) if not name.startswith("__")])
def test_who_ignores_an_argument(name: str) -> None:
    assert ignores(getattr(Arguments(), name), 0) is name.startswith("ignored")


def test_who_may_ignore_an_argument_is_taken_to_read_it() -> None:
    assert not ignores(print, 0)
    assert not ignores(lambda: None, 0)  # the call fails
    assert ignores(lambda given: None, 0)
