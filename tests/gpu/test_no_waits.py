"""Between two replays the host waits for nothing but the end of an earlier one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader, TensorDataset

from lightning_cudagraph import CUDAGraphCallback
from tests.harness import Net, loader, make, train
from tests.test_fp16 import states_possible

_FIRST, _LAST, _STEPS = 14, 46, 50


class _Quiet(Net):
    """Shows nothing in a progress bar: Lightning reads such a value in every step, shown or not."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        super().log(*args, **{**kwargs, "prog_bar": False})


class _Watch(pl.Callback):
    """Has torch raise where it waits for the device, and counts who asks it to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waits: list[str] = []
        self.seen: list[str] | None = None
        for owner in (torch.cuda, torch.cuda.Stream):
            monkeypatch.setattr(owner, "synchronize", self._counted(owner.synchronize))

    def _counted(self, synchronize: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.waits.append(synchronize.__qualname__)
            return synchronize(*args, **kwargs)

        return counted

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == _FIRST:
            self.waits.clear()
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == _LAST:
            torch.cuda.set_sync_debug_mode("default")
            self.seen = list(self.waits)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("averages", [False, True])
@pytest.mark.parametrize("logs", [False, True])
def test_the_device_is_not_waited_for(
    tmp_path: Path, logs: bool, averages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    n = 8 * (_STEPS + 2)
    data = TensorDataset(
        torch.randn(n, 12, generator=generator), torch.randint(4, (n,), generator=generator)
    )
    watch, callback = _Watch(monkeypatch), CUDAGraphCallback()
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=1,
        max_steps=_STEPS,
        logger=TensorBoardLogger(tmp_path) if logs else False,
        log_every_n_steps=10**6,  # to write a value that was logged is to wait for it
        callbacks=[callback, watch, *([EMAWeightAveraging(decay=0.9)] if averages else [])],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    try:
        trainer.fit(make(_Quiet), DataLoader(data, batch_size=8, pin_memory=True), DataLoader(data))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert watch.seen == []
    assert callback.summary.fit.replayed == _STEPS - 3
    assert "slowest layers" in str(callback.summary)


class _Busy(_Quiet):
    """A step in which the device works for longer than the host."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        square = torch.ones(4096, 4096, device=self.device)
        for _ in range(40):
            square = square @ square / 4096
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("hook", [False, True])
def test_the_host_does_not_wait_to_count_steps_in_fp16(
    tmp_path: Path, hook: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It launches the next replay before it knows if this one was skipped; not if user code may ask."""
    numbers = states_possible(monkeypatch)
    callback = CUDAGraphCallback(timings=None)
    train(
        make(lambda: _Busy(lambda p: torch.optim.AdamW(p, lr=1e-3))),
        tmp_path,
        callback,
        accelerator="gpu",
        precision="16-mixed",
        max_epochs=1,
        train_loader=loader(ragged=False, batches=_STEPS),
        callbacks=(_User(),) if hook else (),
        checkpoint_every=0,
        log_every_n_steps=10**6,
        watched=False,
    )
    assert callback.summary.fit.replayed > _STEPS - 10  # warm-up is longer if the first steps overflow
    assert (numbers.count(2) > _STEPS / 3) is not hook


class _User(pl.Callback):
    def on_train_batch_end(self, *args: Any) -> None:
        pass
