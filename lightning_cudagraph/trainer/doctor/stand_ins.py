"""Stand-ins for what writes in a fit: the step sees the user's loggers and checkpoints, and none writes.

A logger of files is a copy that writes into a temporary folder. What others do is not known: they may
talk to a network. They keep their class, by name and for `isinstance`, and copies of their attributes;
their methods that write records do nothing, and neither does their experiment.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy, deepcopy
from tempfile import mkdtemp
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_cudagraph.checks.audit.calls.known_calls import RECORDING
from lightning_cudagraph.trainer.config.support import callbacks_of
from lightning_cudagraph.trainer.logs.silent import silent, silent_method

_WRITING = (*RECORDING, "push", "flush", "set_", "close", "finish")
_TO_FILES = (TensorBoardLogger, CSVLogger)
# That of a logger, once something was logged.
_EXPERIMENT = "_experiment"


def use_stand_ins(trainer: pl.Trainer, folder: str) -> list[str]:
    """Let a trainer write into a temporary folder only; return what is not called in the fit."""
    loggers, folder = trainer.loggers, mkdtemp(dir=folder)
    trainer.loggers = [_logger(each, folder) for each in loggers]
    trainer.callbacks = [_callback(each, folder) for each in callbacks_of(trainer)]  # type: ignore[attr-defined]
    return list(dict.fromkeys(_words(loggers)))


def _words(loggers: Iterable[Logger]) -> Iterable[str]:
    for logger in loggers:
        if not (type(logger) is DummyLogger or _writes_files(logger)):
            name = type(logger).__qualname__
            yield f"a stand-in with the attributes of the `{name}` takes its place, and writes nothing"


def _writes_files(logger: Logger) -> bool:
    return type(logger) in _TO_FILES and "://" not in str(logger.save_dir)


def _logger(logger: Logger, folder: str) -> Logger:
    if type(logger) is DummyLogger:
        return DummyLogger()
    memo: dict[int, Any] = {}
    attributes = {
        name: None if name == _EXPERIMENT else _copied(value, memo)
        for name, value in vars(logger).items()
    }
    kind = type(logger)
    if _writes_files(logger):
        root = logger.save_dir
        attributes = {name: folder if value == root else value for name, value in attributes.items()}
    else:
        kind = _silenced(kind)
    made = object.__new__(kind)
    vars(made).update(attributes)
    return made


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """A copy, or the value itself: a lock, a connection and many others have no copy."""
    try:
        return deepcopy(value, memo)
    except Exception:  # of classes of the user
        return value


def _silenced(kind: type[Logger]) -> type[Logger]:
    """A class of this name, the methods of which write nothing."""
    experiment = silent(f"{kind.__qualname__}.experiment")
    methods = {
        name: silent_method(name)
        for name in dir(kind)
        if callable(getattr(kind, name, None))
        and (hasattr(Logger, name) or name.startswith(_WRITING))
        and not name.startswith("_")
    }
    own = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(
        kind.__name__, (kind,), {**methods, **own, "experiment": property(lambda self: experiment)}
    )


def _callback(callback: Callback, folder: str) -> Callback:
    """A copy of a `ModelCheckpoint` that saves nothing; others are returned."""
    if not isinstance(callback, ModelCheckpoint):
        return callback
    made = copy(callback)
    made.dirpath = folder
    made.save_top_k, made.save_last = 0, None
    made.save_on_exception = False
    return made
