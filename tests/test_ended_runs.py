"""A run that an exception or Ctrl-C ends has its report, printed and in TensorBoard."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_cudagraph import (
    CaptureError,
    CUDAGraphCallback,
    LayerTimings,
    LayerTimingsMonitor,
)
from lightning_cudagraph.timing.events.clock import FitClock
from tests.harness import Net, loader, make
from tests.test_clean import ENDINGS
from tests.test_timings import events


def trainer_of(tmp_path: Path, accelerator: str, *callbacks: Callback, **kwargs: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator=accelerator,
        devices=1,
        max_epochs=2,
        callbacks=[*callbacks],
        logger=TensorBoardLogger(tmp_path, name="", version=""),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        **kwargs,
    )


def loaders() -> tuple[Any, Any]:
    return loader(), loader(batches=1)


@pytest.fixture
def printed(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The reports that were printed."""
    caplog.set_level(logging.INFO)
    return lambda: [
        message.lstrip("\n")
        for message in caplog.messages
        if " replayed (" in message or "the times of an eager run" in message
    ]


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_end_has_a_report(
    tmp_path: Path, accelerator: str, ending: str, printed: Callable[[], list[str]]
) -> None:
    cls, error = ENDINGS[ending]
    callback = CUDAGraphCallback()
    trainer = trainer_of(tmp_path, accelerator, callback)
    if error is None:
        trainer.fit(make(cls), *loaders())
    else:
        with pytest.raises(error):
            trainer.fit(make(cls), *loaders())
    assert printed() == [str(callback.summary)]
    first, second, *_ = str(callback.summary).splitlines()
    counts = callback.summary.fit
    n_steps = counts.warmed_up + counts.replayed + sum(counts.eager.values())
    assert f": {counts.replayed} of {n_steps} steps replayed (" in first
    raised = "KeyboardInterrupt" if error is SystemExit else error and error.__name__
    behind = f"  ended     by {raised} after step {trainer.global_step};"
    assert second.startswith(behind) is (error is not None)
    text = events(tmp_path).Tensors("~cudagraph/report/text_summary")[-1].tensor_proto.string_val[0]
    assert str(callback.summary) in text.decode()
    if ending in ("after replays", "Ctrl-C"):
        assert counts.replayed >= 5
        assert "slowest layers of " in str(callback.summary)
        assert "ms replayed" in str(callback.summary)


@pytest.mark.spread
@pytest.mark.parametrize("fails", [True, False])
def test_nothing_is_kept_of_a_run_that_is_over(tmp_path: Path, accelerator: str, fails: bool) -> None:
    """Its streams and its memory are for the next one."""

    def run() -> list[weakref.ref[Any]]:
        now = ValueError("now")  # with it its traceback lives as long as the class

        class Fails(Net):
            def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
                if fails and self.global_step == 6:
                    raise now

        module = make(Fails)
        with pytest.raises(ValueError, match="now") if fails else nullcontext():
            trainer_of(tmp_path, accelerator, CUDAGraphCallback()).fit(module, *loaders())
        return [weakref.ref(Fails), weakref.ref(module)]

    run()  # what is cached for one run alone would be let go by the next
    references = run()
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_nothing_waits_for_a_device_that_may_hang(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def waits(self: FitClock) -> None:
        raise AssertionError("waited for the device")

    monkeypatch.setattr(FitClock, "finish", waits)
    callback = CUDAGraphCallback(timings=LayerTimings(every_n_steps=2))
    with pytest.raises(ValueError, match="late"):
        trainer_of(tmp_path, accelerator, callback).fit(
            make(ENDINGS["after replays"][0]), loader(), loader(batches=1)
        )
    assert "ValueError" in str(callback.summary).splitlines()[1]


def test_with_accumulation_the_batch_is_named(tmp_path: Path, accelerator: str) -> None:
    callback = CUDAGraphCallback()
    trainer = trainer_of(tmp_path, accelerator, callback, accumulate_grad_batches=2)
    with pytest.raises(ValueError, match="in warm-up"):
        trainer.fit(make(ENDINGS["in warm-up"][0]), *loaders())
    assert "by ValueError after step 1 (batch 2);" in str(callback.summary).splitlines()[1]


def test_an_eager_run_that_is_timed(
    tmp_path: Path, accelerator: str, printed: Callable[[], list[str]]
) -> None:
    timings = LayerTimingsMonitor()
    with pytest.raises(SystemExit):
        trainer_of(tmp_path, accelerator, timings).fit(
            make(ENDINGS["Ctrl-C"][0]), loader(), loader(batches=1)
        )
    report = str(timings.summary)
    assert printed() == [report]
    assert timings.summary.ended == "KeyboardInterrupt after step 9"
    first, second, *_ = report.splitlines()
    assert first == "lightning_cudagraph: the times of an eager run"
    assert second.startswith("  ended     by KeyboardInterrupt after step 9;")
    assert "slowest layers of " in report


class FailsAtItsEnd(Callback):
    def __init__(self, hook: str) -> None:
        setattr(self, hook, self._fail)

    def _fail(self, *args: Any) -> None:
        raise ValueError("at its end")


@pytest.mark.spread
@pytest.mark.parametrize("hook", ["on_train_end", "on_fit_end"])
@pytest.mark.parametrize("ours_first", [True, False])
def test_an_error_in_the_last_hooks(
    tmp_path: Path, accelerator: str, hook: str, ours_first: bool, printed: Callable[[], list[str]]
) -> None:
    """The report is printed once, whether ours had its turn before that or not."""
    callback, fails = CUDAGraphCallback(), FailsAtItsEnd(hook)
    callbacks = (callback, fails) if ours_first else (fails, callback)
    with pytest.raises(ValueError, match="at its end"):
        trainer_of(tmp_path, accelerator, *callbacks).fit(make(Net), *loaders())
    assert printed() == [str(callback.summary)]
    assert ("ended     by ValueError" in str(callback.summary)) is (
        hook == "on_train_end" and not ours_first
    )


@pytest.mark.parametrize("raised", [ValueError("now"), KeyboardInterrupt()])
def test_an_evaluation(
    tmp_path: Path, accelerator: str, raised: BaseException, printed: Callable[[], list[str]]
) -> None:
    class Fails(Net):
        def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 6:
                raise raised

    callback = CUDAGraphCallback(evaluation=True)
    with pytest.raises(SystemExit if isinstance(raised, KeyboardInterrupt) else ValueError):
        trainer_of(tmp_path, accelerator, callback).validate(make(Fails), loader(), verbose=False)
    assert printed() == [str(callback.summary)]
    first, second, *_ = str(callback.summary).splitlines()
    assert ": 4 of 7 batches replayed (57.1%); " in first
    assert second.startswith(f"  ended     by {type(raised).__name__};")


def test_a_refused_run_has_one_report(
    tmp_path: Path, accelerator: str, printed: Callable[[], list[str]]
) -> None:
    """Also where the first capture is refused: what became of the steps until then."""
    callback = CUDAGraphCallback()
    with pytest.raises(CaptureError):
        trainer_of(tmp_path, accelerator, callback).fit(
            make(ENDINGS["refused"][0]), loader(), loader(batches=1)
        )
    (report,) = printed()
    assert ": 0 of 3 steps replayed (0.0%); " in report
