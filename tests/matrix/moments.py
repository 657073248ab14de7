"""Moments at which user code changes what a step reads: one small class each.

A new one is a subclass of `Moment` with a name. It adds user code to a run that calls `turn`, which
writes a new number if one is due. Only the chosen moment adds user code to a run.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import Dataset, Sampler, default_collate

from tests.matrix.places import HIGH, LOW, Place

Mode = Literal["train", "evaluate", "step"]
EPOCH = 6  # batches in each of three
_DUE = ((8, HIGH), (14, LOW))  # the second one after a re-capture
DUE_BY_EPOCH = ((EPOCH, HIGH), (2 * EPOCH, LOW))
O = torch.optim  # noqa: E741


class Moment:
    """A moment between two steps, or in one, in which user code changes a place.

    Attributes:
        modes: the kinds of runs that have it.
        due: the first step of each new number.
        module_hooks: hooks of the module, by name.
        place: the place to change; set by the run.
        now: number of finished steps; set by the run.
    """

    modes: ClassVar[tuple[Mode, ...]] = ("train", "evaluate")
    due: ClassVar[tuple[tuple[int, float], ...]] = _DUE

    def __init_subclass__(cls, name: str = "") -> None:
        if name:
            assert name not in MOMENTS, name
            MOMENTS[name] = cls

    place: Place
    now: Callable[[], int]

    def __init__(self, mode: Mode, folder: Path, changes: int) -> None:
        self.mode, self.folder = mode, folder
        self.left = list(self.due[:changes])
        self.module_hooks: dict[str, Any] = {}
        self.make()

    def make(self) -> None:
        """Make the objects that the run needs."""

    def next_number(self) -> float | None:
        """The number that is due now, once."""
        if self.left and self.now() >= self.left[0][0]:
            return self.left.pop(0)[1]
        return None

    def is_over(self) -> bool:
        """True if all numbers have been written."""
        return not self.left

    def turn(self) -> None:
        """Write the number that is due, if one is."""
        if (number := self.next_number()) is not None:
            self.place.write(number)

    def hook(self) -> Callable[..., None]:
        """A hook of a module or a callback that only calls `turn`."""

        def takes_its_turn(*args: Any, **kwargs: Any) -> None:
            self.turn()

        return takes_its_turn

    # What it adds to a run.

    def callbacks(self) -> list[Callback]:
        return []

    def dataset(self, data: Any) -> Any:
        return data

    def loader(self, data: Any) -> dict[str, Any]:
        """Arguments of the `DataLoader`."""
        return {}

    def trainer(self) -> dict[str, Any]:
        """Arguments of the `Trainer`."""
        return {}

    def scheduler(self, optimizer: O.Optimizer) -> Any:
        return None

    def watch(self, net: Any, optimizer: O.Optimizer) -> None:
        """Register hooks, when both are there."""

    def between(self) -> None:
        """Run between two calls of a step in a plain loop."""

    def close(self) -> None:
        """Stop everything that it has started."""


MOMENTS: dict[str, type[Moment]] = {}


class Never(Moment):
    """No change; for runs in which only the step itself writes."""

    modes = ("train", "evaluate", "step")
    due = ()


class BetweenCalls(Moment, name="between two calls"):
    modes = ("step",)

    def between(self) -> None:
        self.turn()


class EpochStart(Moment, name="epoch start of the module"):
    due = DUE_BY_EPOCH

    def make(self) -> None:
        stage = "train" if self.mode == "train" else "validation"
        self.module_hooks[f"on_{stage}_epoch_start"] = self.hook()


class _Calls(Callback):
    """A callback with one hook."""

    def __init__(self, name: str, hook: Any) -> None:
        setattr(self, name, hook)


class BatchStart(Moment, name="batch start of a callback"):
    def callbacks(self) -> list[Callback]:
        stage = "train" if self.mode == "train" else "validation"
        return [_Calls(f"on_{stage}_batch_start", self.hook())]


class BatchEnd(Moment, name="batch end of the module"):
    def make(self) -> None:
        stage = "train" if self.mode == "train" else "validation"
        self.module_hooks[f"on_{stage}_batch_end"] = self.hook()


class Transfer(Moment, name="batch transfer of the module"):
    def make(self) -> None:
        def on_before_batch_transfer(net: Any, batch: Any, dataloader_idx: int) -> Any:
            self.turn()
            return batch

        self.module_hooks["on_before_batch_transfer"] = on_before_batch_transfer


class _Items(Dataset[Any]):
    def __init__(self, data: Any, turn: Callable[[], None]) -> None:
        self.data, self.turn = data, turn

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        self.turn()
        return self.data[index]


class GetItem(Moment, name="__getitem__ of the dataset"):
    def dataset(self, data: Any) -> Any:
        return _Items(data, self.turn)


class Collate(Moment, name="collate"):
    def loader(self, data: Any) -> dict[str, Any]:
        def collate(samples: list[Any]) -> Any:
            self.turn()
            return default_collate(samples)

        return {"collate_fn": collate}


class _InOrder(Sampler[int]):
    def __init__(self, length: int, turn: Callable[[], None]) -> None:
        self.length, self.turn = length, turn

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        for index in range(self.length):
            self.turn()
            yield index


class Samples(Moment, name="sampler"):
    def loader(self, data: Any) -> dict[str, Any]:
        return {"sampler": _InOrder(len(data), self.turn)}


class LambdaOfLR(Moment, name="function of a LambdaLR"):
    modes = ("train", "step")

    def scheduler(self, optimizer: O.Optimizer) -> Any:
        def factor(step: int) -> float:
            self.turn()
            return 1.0

        return O.lr_scheduler.LambdaLR(optimizer, factor)


class _Schedule(O.lr_scheduler.StepLR):
    def __init__(self, optimizer: O.Optimizer, turn: Callable[[], None]) -> None:
        self.turn = turn
        super().__init__(optimizer, step_size=100)

    def step(self, *args: Any, **kwargs: Any) -> None:
        self.turn()
        super().step(*args, **kwargs)


class SchedulerStep(Moment, name="step of a scheduler"):
    modes = ("train", "step")

    def scheduler(self, optimizer: O.Optimizer) -> Any:
        return _Schedule(optimizer, self.turn)


class OptimizerStep(Moment, name="optimizer_step of the module"):
    modes = ("train",)

    def make(self) -> None:
        def optimizer_step(
            net: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
        ) -> None:
            self.turn()
            optimizer.step(closure=optimizer_closure)

        self.module_hooks["optimizer_step"] = optimizer_step


class _InTheStep(Moment):
    """Code in the step that writes in one step only: other code between two steps arms it.

    It does nothing in the warm-up, which is watched.
    """

    modes = ("train", "step")

    def make(self) -> None:
        self.armed: float | None = None

    def arm(self, *args: Any, **kwargs: Any) -> None:
        if (number := self.next_number()) is not None:
            self.armed = number

    def callbacks(self) -> list[Callback]:
        return [_Calls("on_train_batch_start", self.arm)]

    def between(self) -> None:
        self.arm()

    def is_over(self) -> bool:
        return super().is_over() and self.armed is None

    def fire(self) -> None:
        if self.armed is not None:
            self.place.write(self.armed)
            self.armed = None


class PreHook(_InTheStep, name="pre-hook of the optimizer's step"):
    def watch(self, net: Any, optimizer: O.Optimizer) -> None:
        optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: self.fire())


class PostHook(_InTheStep, name="post-hook of the optimizer's step"):
    def watch(self, net: Any, optimizer: O.Optimizer) -> None:
        optimizer.register_step_post_hook(lambda optimizer, args, kwargs: self.fire())


class GradientHook(_InTheStep, name="hook of a gradient"):
    def watch(self, net: Any, optimizer: O.Optimizer) -> None:
        net.body[0].weight.register_hook(lambda gradient: self.fire())


class AccumulatedHook(_InTheStep, name="hook of an accumulated gradient"):
    def watch(self, net: Any, optimizer: O.Optimizer) -> None:
        net.body[0].weight.register_post_accumulate_grad_hook(lambda parameter: self.fire())


class ForwardHook(_InTheStep, name="forward hook of a layer"):
    def watch(self, net: Any, optimizer: O.Optimizer) -> None:
        net.body[2].register_forward_hook(lambda layer, args, output: self.fire())


class AfterBackward(_InTheStep, name="on_after_backward of the module"):
    modes = ("train",)

    def make(self) -> None:
        super().make()
        self.module_hooks["on_after_backward"] = lambda net: self.fire()


class BeforeOptimizerStep(_InTheStep, name="on_before_optimizer_step of a callback"):
    modes = ("train",)

    def callbacks(self) -> list[Callback]:
        fires = _Calls("on_before_optimizer_step", lambda *args: self.fire())
        return [*super().callbacks(), fires]


class _Logs(CSVLogger):
    def __init__(self, folder: Any, turn: Callable[[], None]) -> None:
        super().__init__(folder)
        self.turn = turn

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        self.turn()
        super().log_metrics(*args, **kwargs)


class LogMetrics(Moment, name="log_metrics of a logger"):
    def trainer(self) -> dict[str, Any]:
        return {"logger": _Logs(self.folder, self.turn)}


class OtherThread(Moment, name="another thread"):
    """A thread that writes while the loop waits for the next batch."""

    modes = ("train", "evaluate", "step")

    def make(self) -> None:
        self.asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def work(self) -> None:
        while self.asked.get():
            error = None
            try:
                self.turn()
            except BaseException as raised:
                error = raised
            self.done.put(error)

    def ask(self) -> None:
        self.asked.put(True)
        if (error := self.done.get()) is not None:
            raise error

    def dataset(self, data: Any) -> Any:
        return _Items(data, self.ask)

    def between(self) -> None:
        self.ask()

    def close(self) -> None:
        self.asked.put(False)
        self.thread.join()


class ValidationStep(Moment, name="validation_step"):
    modes = ("train",)

    def make(self) -> None:
        def validation_step(net: Any, batch: Any, batch_idx: int) -> None:
            self.turn()

        self.module_hooks["validation_step"] = validation_step

    def trainer(self) -> dict[str, Any]:
        return {"val_check_interval": 2, "limit_val_batches": 1}


class SavesCheckpoint(Moment, name="on_save_checkpoint of a callback"):
    modes = ("train",)

    def callbacks(self) -> list[Callback]:
        saver = ModelCheckpoint(self.folder / "checkpoints", every_n_train_steps=4)
        return [_Calls("on_save_checkpoint", self.hook()), saver]

    def trainer(self) -> dict[str, Any]:
        return {"enable_checkpointing": True}


class Finalizer(Moment, name="finalizer of an object"):
    """The finalizer of an object that the dataset drops."""

    def dataset(self, data: Any) -> Any:
        return _Items(data, self.drop)

    def drop(self) -> None:
        _Finalized(self.turn)


class _Finalized:
    def __init__(self, turn: Callable[[], None]) -> None:
        self.turn = turn

    def __del__(self) -> None:
        self.turn()


def moments_of(mode: Mode) -> list[str]:
    return [name for name, moment in MOMENTS.items() if mode in moment.modes]
