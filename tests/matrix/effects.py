"""Effects of a step on Python objects: counters in all places, and others, one small class each.

A new one is a subclass of `Effect` with a name. Replayed, refused or eager, the effect must be that of
the run without graphs: neither lost nor doubled.
"""

from __future__ import annotations

import csv
import io
import itertools
import logging
import queue
import random
import sqlite3
import tempfile
import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torchmetrics import MeanMetric

from tests.matrix.places import PLACES, Place


class Effect:
    """A side effect of a step.

    Attributes:
        packages: packages that must be installed.
        needs_trainer: it needs a trainer, so plain loops do not have it.
        needs_datamodule: it needs batches of a datamodule.
        callbacks: callbacks for the trainer.
        waits: it begins when a moment writes the first number.
    """

    packages: ClassVar[tuple[str, ...]] = ()
    needs_trainer: ClassVar[bool] = False
    needs_datamodule: ClassVar[bool] = False
    waits: ClassVar[bool] = False

    def __init_subclass__(cls, name: str = "") -> None:
        if name:
            assert name not in EFFECTS, name
            EFFECTS[name] = cls

    def __init__(self, net: Any) -> None:
        self.net = net
        self.callbacks: list[Callback] = []
        self.make()

    def make(self) -> None:
        """Make the objects that it works on."""

    def start(self) -> None:
        """Make the objects that need a trainer or an optimizer."""

    def act(self, x: Tensor) -> None:
        """Have the effect, in a step on `x`."""
        raise NotImplementedError

    def write(self, number: float) -> None:
        """Begin: under a name that no code mentions, so that no guard takes it for read."""
        setattr(self.net, "".join(("is_", "on_now")), True)

    @property
    def has_begun(self) -> bool:
        return not self.waits or getattr(self.net, "".join(("is_", "on_now")), False)

    def seen(self) -> Any:
        """The result at the end of the run."""
        raise NotImplementedError

    def close(self) -> None:
        """Undo everything that outlives the run."""


EFFECTS: dict[str, type[Effect]] = {}


class _CountsIn(Effect):
    """A counter in one of the places."""

    kind: ClassVar[type[Place]]

    def make(self) -> None:
        self.place = self.kind(self.net)
        self.callbacks = self.place.callbacks

    def start(self) -> None:
        self.place.start()

    def act(self, x: Tensor) -> None:
        self.place.write(self.place.read() + 1)

    def seen(self) -> float:
        return self.place.read()

    def close(self) -> None:
        self.place.close()


for _name, _kind in PLACES.items():
    if _kind.counts:
        EFFECTS[f"counter: {_name}"] = type(
            "CountsIn" + _kind.__name__,
            (_CountsIn,),
            {
                "kind": _kind,
                "packages": _kind.packages,
                "needs_trainer": _kind.needs_trainer,
                "needs_datamodule": _kind.needs_datamodule,
            },
        )


class _Appends(Effect):
    """Appends to a list in one of the places."""

    def members(self) -> list[Any]:
        raise NotImplementedError

    def act(self, x: Tensor) -> None:
        self.members().append(len(self.members()))

    def seen(self) -> list[Any]:
        return list(self.members())


class Appends(_Appends, name="append to a list"):
    def make(self) -> None:
        self.made: list[Any] = []

    def members(self) -> list[Any]:
        return self.made


class AppendsToAnOptimizer(_Appends, name="append to a list of the optimizer"):
    def optimizer(self) -> Any:
        trainer = getattr(self.net, "_trainer", None)
        return self.net.optimizer if trainer is None else trainer.optimizers[0]

    def start(self) -> None:
        self.optimizer().seen = []

    def members(self) -> list[Any]:
        return self.optimizer().seen


class AppendsToAMetric(_Appends, name="append to a list of a metric"):
    def make(self) -> None:
        self.metric: Any = MeanMetric()
        self.metric.seen = []

    def members(self) -> list[Any]:
        return self.metric.seen


class _Keeper(Callback):
    """A callback that keeps a list."""

    def __init__(self) -> None:
        self.seen: list[Any] = []


class AppendsToACallback(_Appends, name="append to a list of a callback"):
    needs_trainer = True

    def make(self) -> None:
        self.callbacks = [_Keeper()]

    def members(self) -> list[Any]:
        return next(c for c in self.net.trainer.callbacks if isinstance(c, _Keeper)).seen


class _AppendsBehindTheTrainer(_Appends):
    needs_trainer = True

    def owner(self) -> Any:
        raise NotImplementedError

    def start(self) -> None:
        self.owner().seen = []

    def members(self) -> list[Any]:
        return self.owner().seen


class AppendsToTheDataset(_AppendsBehindTheTrainer, name="append to a list of the dataset"):
    def owner(self) -> Any:
        return self.net.trainer.train_dataloader.dataset


class AppendsToTheDataModule(_AppendsBehindTheTrainer, name="append to a list of the datamodule"):
    needs_datamodule = True

    def owner(self) -> Any:
        return self.net.trainer.datamodule


class AppendsToTheSampler(_AppendsBehindTheTrainer, name="append to a list of the sampler"):
    def owner(self) -> Any:
        return self.net.trainer.train_dataloader.sampler


class AppendsToTheStrategy(_AppendsBehindTheTrainer, name="append to a list of the strategy"):
    def owner(self) -> Any:
        return self.net.trainer.strategy


class AppendsToTheLogger(_AppendsBehindTheTrainer, name="append to a list of the logger"):
    def owner(self) -> Any:
        return self.net.trainer.logger


class Deque(Effect, name="deque with a bound"):
    def make(self) -> None:
        self.last: deque[int] = deque([0], maxlen=4)

    def act(self, x: Tensor) -> None:
        self.last.append(self.last[-1] + 1)

    def seen(self) -> list[int]:
        return list(self.last)


class Puts(Effect, name="put into a queue"):
    def make(self) -> None:
        self.waiting: queue.Queue[str] = queue.Queue()

    def act(self, x: Tensor) -> None:
        self.waiting.put("step")

    def seen(self) -> int:
        return self.waiting.qsize()


class PutsSimply(Puts, name="put into a SimpleQueue"):
    def make(self) -> None:
        self.waiting = queue.SimpleQueue()  # type: ignore[assignment]


class PutsForAThread(Puts, name="put into a queue that a thread empties"):
    """A thread that waits for the queue must still be woken behind a capture that was given up."""

    def make(self) -> None:
        super().make()
        self.taken: list[str] = []
        self.thread = threading.Thread(target=_take, args=(self.waiting, self.taken))
        self.thread.start()

    def seen(self) -> int:
        self.waiting.put("end")
        self.thread.join(20)
        return len(self.taken)

    def close(self) -> None:
        self.seen()
        assert not self.thread.is_alive()


def _take(waiting: queue.Queue[str], taken: list[str]) -> None:
    while (item := waiting.get()) != "end":
        taken.append(item)


class Updates(Effect, name="Counter.update"):
    def make(self) -> None:
        self.counter: Counter[str] = Counter()

    def act(self, x: Tensor) -> None:
        self.counter.update(["step"])

    def seen(self) -> dict[str, int]:
        return dict(self.counter)


class WritesRows(Effect, name="csv writer"):
    def make(self) -> None:
        self.text = io.StringIO()
        self.writer = csv.writer(self.text)

    def act(self, x: Tensor) -> None:
        self.writer.writerow(["step", 1])

    def seen(self) -> str:
        return self.text.getvalue()


class WritesText(Effect, name="io.StringIO"):
    def make(self) -> None:
        self.text = io.StringIO()

    def act(self, x: Tensor) -> None:
        self.text.write("step\n")

    def seen(self) -> str:
        return self.text.getvalue()


class ReadsText(Effect, name="io.StringIO.readline"):
    def make(self) -> None:
        self.text = io.StringIO("line\n" * 200)

    def act(self, x: Tensor) -> None:
        self.text.readline()

    def seen(self) -> int:
        return self.text.tell()


class WritesThroughAMethod(WritesText, name="bound method of a StringIO"):
    def make(self) -> None:
        super().make()
        self.put = self.text.write

    def act(self, x: Tensor) -> None:
        self.put("step\n")


class WritesAFile(Effect, name="file"):
    def make(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.file = (Path(self.folder.name) / "steps").open("w")

    def act(self, x: Tensor) -> None:
        self.file.write("step\n")

    def seen(self) -> str:
        self.file.flush()
        return Path(self.file.name).read_text()

    def close(self) -> None:
        self.file.close()
        self.folder.cleanup()


class Inserts(Effect, name="sqlite3"):
    def make(self) -> None:
        self.base = sqlite3.connect(":memory:")
        self.base.execute("create table steps (number integer)")

    def act(self, x: Tensor) -> None:
        self.base.execute("insert into steps values (1)")

    def seen(self) -> int:
        return self.base.execute("select count(*) from steps").fetchone()[0]

    def close(self) -> None:
        self.base.close()


class _Handler(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1


class Logs(Effect, name="handler of a logger"):
    def make(self) -> None:
        self.handler = _Handler()
        self.logger = logging.getLogger("tests.matrix.effects")
        self.logger.propagate = False
        self.logger.addHandler(self.handler)

    def act(self, x: Tensor) -> None:
        self.logger.warning("step")

    def seen(self) -> int:
        return self.handler.count

    def close(self) -> None:
        self.logger.removeHandler(self.handler)
        self.logger.propagate = True


class LogsMetrics(Effect, name="log_metrics of the logger"):
    needs_trainer = True

    def act(self, x: Tensor) -> None:
        self.net.trainer.logger.log_metrics({"step_seen": 1.0}, 1)

    def seen(self) -> None:
        """The rows are compared as the run's logs."""


class CountsUp(Effect, name="itertools.count"):
    def make(self) -> None:
        self.numbers = itertools.count()

    def act(self, x: Tensor) -> None:
        next(self.numbers)

    def seen(self) -> int:
        return next(self.numbers)


class Iterates(CountsUp, name="iterator of a list"):
    def make(self) -> None:
        self.numbers = iter(list(range(100)))  # type: ignore[assignment]


def _generated() -> Iterator[int]:
    yield from range(100)


class Generates(CountsUp, name="generator"):
    def make(self) -> None:
        self.numbers = _generated()  # type: ignore[assignment]


class InATuple(CountsUp, name="iterator in a tuple"):
    def make(self) -> None:
        self.pair = (itertools.count(), "other")

    def act(self, x: Tensor) -> None:
        next(self.pair[0])

    def seen(self) -> int:
        return next(self.pair[0])


class Cycles(InATuple, name="cycle in a tuple"):
    def make(self) -> None:
        numbers = itertools.cycle(range(7))
        next(itertools.islice(numbers, 7, None))  # from now on, its parts stay the same objects
        self.pair = (numbers, "other")  # type: ignore[assignment]


class Scans(InATuple, name="iterator of a deque in a tuple"):
    def make(self) -> None:
        self.pair = (iter(deque(range(100))), "other")  # type: ignore[assignment]


class CountsByMethod(CountsUp, name="bound method of an iterator"):
    def make(self) -> None:
        super().make()
        self.count = self.numbers.__next__

    def act(self, x: Tensor) -> None:
        self.count()


class Draws(Effect, name="random.Random"):
    def make(self) -> None:
        self.random = random.Random(0)

    def act(self, x: Tensor) -> None:
        self.random.random()

    def seen(self) -> float:
        return self.random.random()


class DrawsNumPy(Draws, name="NumPy generator"):
    def make(self) -> None:
        self.random = np.random.default_rng(0)  # type: ignore[assignment]


class DrawsTorch(Effect, name="torch.Generator of the host"):
    def make(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def act(self, x: Tensor) -> None:
        torch.randperm(3, generator=self.generator)

    def seen(self) -> Tensor:
        return self.generator.get_state()


class Refers(Effect, name="WeakSet"):
    def make(self) -> None:
        self.kept: list[Any] = []
        self.known: weakref.WeakSet[Any] = weakref.WeakSet()

    def act(self, x: Tensor) -> None:
        thing = type("Thing", (), {})()
        _THINGS.append(thing)
        self.known.add(thing)

    def seen(self) -> int:
        return len(self.known)

    def close(self) -> None:
        _THINGS.clear()


_THINGS: list[Any] = []


class Instances(Effect, name="instances, counted by their class"):
    def make(self) -> None:
        def __init__(instance: Any) -> None:
            type(instance).made += 1

        self.kind: Any = type("Instance", (), {"made": 0, "__init__": __init__})

    def act(self, x: Tensor) -> None:
        self.kind()

    def seen(self) -> int:
        return self.kind.made


class InAPartial(Effect, name="list in a partial"):
    def make(self) -> None:
        self.append = partial(list.append, [])

    def act(self, x: Tensor) -> None:
        self.append(1)

    def seen(self) -> list[int]:
        return list(self.append.args[0])


class HiddenBuffer(Effect, name="buffer of a module in a list"):
    def make(self) -> None:
        self.hidden = [nn.Module()]
        self.hidden[0].register_buffer("total", torch.zeros(4))

    def start(self) -> None:
        self.hidden[0].to(self.net.body[0].weight.device)

    def act(self, x: Tensor) -> None:
        self.hidden[0].total.add_(x.detach().sum(0))  # type: ignore[operator,union-attr]

    def seen(self) -> Any:
        return self.hidden[0].total


class HiddenMemory(HiddenBuffer, name="rebound memory of a module in a list"):
    def act(self, x: Tensor) -> None:
        self.hidden[0].total = self.hidden[0].total * 0.5 + x.detach().sum(0)  # type: ignore[operator]


class KeptTensors(Effect, name="tensors in a list"):
    def make(self) -> None:
        self.kept: list[Tensor] = []

    def act(self, x: Tensor) -> None:
        self.kept.append(x.detach().mean())

    def seen(self) -> list[Tensor]:
        return self.kept
