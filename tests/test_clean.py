"""Nothing of Lightning, torch or the module is left replaced, however a fit ends."""

from __future__ import annotations

import gc
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_cudagraph import CaptureError, CUDAGraphCallback
from tests.harness import Net, loader, make

_PREFIXES = ("torch", "lightning", "torchmetrics", "tensorboard")
_CODE = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    type,
    property,
    staticmethod,
    classmethod,
)
# Written by torch and Lightning themselves while they work.
THEIR_OWN = {
    ("torch.optim.lr_scheduler", "_warn_get_lr_called_within_step"),
    ("lightning.pytorch.trainer.connectors.logger_connector.result", "warning_cache"),
}


def _is_code(value: Any) -> bool:
    return isinstance(value, _CODE)


def code_of_libraries() -> dict[tuple[str, str], int]:
    """Every function and class that the libraries' modules and classes hold, by name, as identity."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated names warn when they are looked at
        return _code_of_libraries()


def _code_of_libraries() -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for module_name, module in list(sys.modules.items()):
        if module is None or module_name.split(".")[0] not in _PREFIXES:
            continue
        for name, value in list(vars(module).items()):
            if not _is_code(value):
                continue
            found[module_name, name] = id(value)
            if isinstance(value, type) and value.__module__ == module_name:
                for member, held in list(vars(value).items()):
                    if _is_code(held):
                        found[module_name, f"{name}.{member}"] = id(held)
    return found


def attributes(*objects: Any) -> list[dict[str, Any]]:
    """What is in the instances themselves, callables by identity and hooks by number."""
    return [
        {
            name: (id(value) if _is_code(value) else None) if not name.endswith("_hooks") else len(value)
            for name, value in vars(thing).items()
        }
        for thing in objects
    ]


class ItemInStep(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        output["loss"].item()
        return output


class FailsLate(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step == 10:
            raise ValueError("late")


class FailsInCapture(Net):
    late = False

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 3:
            self.late = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.late:
            raise ValueError("in the capture")
        return super().training_step(batch, batch_idx)


class FailsInWarmup(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 1:
            raise ValueError("in warm-up")
        return super().training_step(batch, batch_idx)


class Interrupts(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step == 9:
            raise KeyboardInterrupt


ENDINGS: dict[str, tuple[type[Net], type[BaseException] | None]] = {
    "success": (Net, None),
    "refused": (ItemInStep, CaptureError),
    "after replays": (FailsLate, ValueError),
    "in the capture": (FailsInCapture, ValueError),
    "in warm-up": (FailsInWarmup, ValueError),
    "Ctrl-C": (Interrupts, SystemExit),
}


class _Seen(Callback):
    """Looks at the objects that are patched just before they are."""

    def __init__(self) -> None:
        self.before: list[dict[str, Any]] = []

    def look(self, trainer: Any, module: Any) -> list[dict[str, Any]]:
        optimizer = trainer.optimizers[0]
        return attributes(
            trainer,
            trainer.strategy,
            trainer.fit_loop,
            trainer.fit_loop.epoch_loop,
            trainer.fit_loop.epoch_loop.automatic_optimization,
            trainer._logger_connector,
            *module.modules(),
            optimizer,
            *optimizer.param_groups and [types.SimpleNamespace(**optimizer.param_groups[0])],
        )

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.before = self.look(trainer, pl_module)
        file_writer = trainer.logger.experiment.file_writer
        self.records = file_writer.event_writer._async_writer._writer


KWARGS: dict[str, Any] = {
    "devices": 1,
    "max_epochs": 2,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "log_every_n_steps": 1,
}
_WARM: set[str] = set()


@pytest.fixture
def everything_imported(tmp_path: Path, accelerator: str) -> None:
    """Two fits before the first test, which import what is imported late and fill every cache."""
    for folder in () if accelerator in _WARM else ("a", "b"):
        logger = TensorBoardLogger(tmp_path / folder)
        warm = pl.Trainer(
            callbacks=[CUDAGraphCallback()], logger=logger, accelerator=accelerator, **KWARGS
        )
        warm.fit(make(Net), loader(), loader(batches=1))
    _WARM.add(accelerator)


@pytest.mark.spread
@pytest.mark.usefixtures("everything_imported")
@pytest.mark.parametrize("ending", ENDINGS)
def test_nothing_is_left(tmp_path: Path, accelerator: str, ending: str) -> None:
    cls, error = ENDINGS[ending]
    module = make(cls)
    before = code_of_libraries()

    seen = _Seen()
    callback = CUDAGraphCallback()
    logger = TensorBoardLogger(tmp_path / "c")
    trainer = pl.Trainer(callbacks=[callback, seen], logger=logger, accelerator=accelerator, **KWARGS)
    if error is None:
        trainer.fit(module, loader(), loader(batches=1))
    else:
        with pytest.raises(error):
            trainer.fit(module, loader(), loader(batches=1))

    after = code_of_libraries()
    changed = {name for name, identity in before.items() if after.get(name) != identity} - THEIR_OWN
    assert not changed
    for was, now in zip(seen.before, seen.look(trainer, module), strict=True):
        for name, held in was.items():
            if held is not None:
                assert now.get(name) == held, name
        new = {name for name, held in now.items() if held is not None and name not in was}
        assert not new
    assert "optimizer_step" not in vars(trainer.strategy)
    assert not trainer.optimizers[0].param_groups[0]["capturable"]
    assert isinstance(trainer.optimizers[0].param_groups[0]["lr"], float)
    assert "write" not in vars(seen.records)
    assert callback._runs.training is None
    assert torch.overrides._get_current_function_mode() is None
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert gc.isenabled()
