"""Fits with callbacks, hooks, progress bars and metrics of others stay on the fast path, and are equal.

The surroundings are those that `benchmarks/surroundings.py` measures. `tests/gpu/test_surroundings.py`
collects these tests again, on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, RichProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress import tqdm_progress
from torch.utils.data import DataLoader

from benchmarks.surroundings import NOTHING, SURROUNDINGS, Mlp, batch
from lightning_cudagraph import CUDAGraphCallback
from lightning_cudagraph.trainer.logs import shown
from lightning_cudagraph.trainer.logs.logged_step import LoggedStep
from lightning_cudagraph.trainer.logs.shown import ShownValues
from tests.harness import differences
from tests.test_batch_hooks import Twice

BATCHES = 24
EPOCHS = 2
# What the modules and callbacks there keep.
KEPT = ("averages", "losses", "latest", "loss")


def _fit(trainer: Any, module: Any, train_loader: Any, val_loader: Any, **kwargs: Any) -> None:
    trainer.fit(module, train_loader, **kwargs)


def twice(
    tmp_path: Path,
    accelerator: str,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    bar: Callable[[], Callback] = TQDMProgressBar,
    **kwargs: Any,
) -> Twice:
    """The two runs of a surrounding."""
    around = SURROUNDINGS[name]
    torch.manual_seed(5)
    ready: Any = [batch() for _ in range(BATCHES)]
    makers = (*around.callbacks, *([bar] if around.default else []))
    return Twice(
        tmp_path,
        accelerator,
        monkeypatch,
        lambda: tuple(make() for make in makers),
        around.build,
        train_loader=DataLoader(ready, batch_size=None),
        fit=_fit,
        max_epochs=EPOCHS,
        log_every_n_steps=10,
        enable_checkpointing=True,
        enable_progress_bar=around.default,
        **kwargs,
    )


@pytest.mark.spread
@pytest.mark.parametrize("timed", [False, True], ids=["untimed", "timed"])
@pytest.mark.parametrize("name", SURROUNDINGS)
def test_a_surrounding(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch, name: str, timed: bool
) -> None:
    timings: dict[str, Any] = {} if timed else {"timings": None}
    runs = twice(tmp_path, accelerator, monkeypatch, name, ours=lambda: CUDAGraphCallback(**timings))
    steps = BATCHES * EPOCHS
    assert runs.traces[1].counts.replayed == steps - 3
    assert runs.quick > steps - 16  # without the first of each epoch, and those that are verified
    plain_owners, graph_owners = ([*c, m] for c, m in zip(runs.callbacks, runs.modules, strict=True))
    for plain, graph in zip(plain_owners, graph_owners, strict=True):
        kept = [{key: vars(owner).get(key) for key in KEPT} for owner in (plain, graph)]
        assert not differences(*kept)


class _Late:
    """An event of a device that is three drawn steps behind the host."""

    recorded = 0

    def record(self) -> None:
        _Late.recorded += 1
        self.due = _Late.recorded + 3

    def query(self) -> bool:
        return _Late.recorded >= self.due

    def synchronize(self) -> None:
        pass


def _record_draws(
    monkeypatch: pytest.MonkeyPatch, value: Callable[[dict[str, Any]], Any]
) -> list[list[Any]]:
    """A list for each run that follows, of a value of the items that its bar draws."""
    runs: list[list[Any]] = []
    begin = TQDMProgressBar.on_train_start

    def begins(bar: TQDMProgressBar, *args: Any) -> None:
        runs.append([])
        begin(bar, *args)

    def draw(bar: Any, items: dict[str, Any]) -> None:
        runs[-1].append(value(items))

    begins.__module__ = draw.__module__ = TQDMProgressBar.__module__
    monkeypatch.setattr(TQDMProgressBar, "on_train_start", begins)
    monkeypatch.setattr(tqdm_progress.Tqdm, "set_postfix", draw)
    return runs


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """The losses that each run has drawn."""
    return _record_draws(monkeypatch, lambda items: items["loss"])


@pytest.fixture
def shown_values(accelerator: str, monkeypatch: pytest.MonkeyPatch) -> list[ShownValues]:
    """The shown values of each run with the callback, late on the emulator too."""
    made: list[ShownValues] = []
    begin = ShownValues.__init__

    def begins(self: ShownValues) -> None:
        if accelerator == "gpu":
            begin(self)
        else:
            begin(self, lambda value: True, _Late)
        made.append(self)

    monkeypatch.setattr(shown.ShownValues, "__init__", begins)
    return made


def test_a_bar_shows_the_last_step_that_has_ended(
    tmp_path: Path,
    accelerator: str,
    monkeypatch: pytest.MonkeyPatch,
    drawn: list[list[float]],
    shown_values: list[ShownValues],
) -> None:
    twice(tmp_path, accelerator, monkeypatch, "the same, loss in the bar")
    plain, graph = drawn
    draws = (BATCHES + 1) * EPOCHS  # one at each step, and one at the end of each epoch
    assert len(plain) == len(graph) == draws
    for end in (BATCHES, draws - 1):
        assert graph[end] == plain[end]
    last = 0
    for index, loss in enumerate(graph):
        # Never one of before; of equal losses, any can be the one that is shown.
        later = [i for i in range(last, index + 1) if plain[i] == loss]
        assert later, (index, last, loss, plain)
        last = later[0]
    assert shown_values[0].waits == 0  # the values of the warm-up were read by Lightning
    if accelerator != "gpu":
        assert sum(one != other for one, other in zip(plain, graph, strict=True)) > draws / 2


class ShownAtTheEnd(Mlp):
    """Logs a value that a bar shows at the end of an epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("mean", loss, on_step=False, on_epoch=True, prog_bar=True)
        return loss


@pytest.mark.parametrize("build", [Mlp, ShownAtTheEnd])
@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_a_bar_without_values_takes_none_out_of_the_graph(
    tmp_path: Path,
    accelerator: str,
    monkeypatch: pytest.MonkeyPatch,
    bar: Callable[[], Callback],
    build: type[Mlp],
) -> None:
    handed: list[int] = []
    hand_over = LoggedStep.hand_over

    def counted(logged: LoggedStep, *args: Any, **kwargs: Any) -> Any:
        handed.append(1)
        return hand_over(logged, *args, **kwargs)

    monkeypatch.setattr(LoggedStep, "hand_over", counted)
    around = SURROUNDINGS["default Trainer: bar, checkpoints"]
    monkeypatch.setitem(SURROUNDINGS, NOTHING, replace(around, build=build))
    runs = twice(tmp_path, accelerator, monkeypatch, NOTHING, bar)
    assert runs.quick > BATCHES
    # Loggers are due every ten steps; others are the first of an epoch, and those that are verified.
    assert len(handed) < BATCHES


class ShownLater(Callback):
    """Logs a value for the bar from the middle of the first epoch on."""

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step > BATCHES // 2:
            pl_module.log("later", float(trainer.global_step), prog_bar=True)


def test_a_value_that_a_hook_begins_to_log_is_drawn(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = _record_draws(monkeypatch, lambda items: items.get("later"))
    around = SURROUNDINGS["default Trainer: bar, checkpoints"]
    monkeypatch.setitem(SURROUNDINGS, NOTHING, replace(around, callbacks=(ShownLater,)))
    runs = twice(tmp_path, accelerator, monkeypatch, NOTHING)
    assert runs.quick > BATCHES
    plain, graph = drawn
    assert [value is None for value in plain] == [value is None for value in graph]
    values = [value for value in graph if value is not None]
    assert len(values) > BATCHES
    # On a GPU, those of a drawn step that has ended.
    assert values == sorted(values)
    assert all(now in plain[: index + 1] for index, now in enumerate(graph))
    assert (graph[BATCHES], graph[-1]) == (plain[BATCHES], plain[-1])


class Bar(TQDMProgressBar):
    """A bar whose own code reads the values."""

    def get_metrics(self, *args: Any) -> Any:
        return super().get_metrics(*args)


@pytest.mark.spread
@pytest.mark.parametrize("bar", [Bar, RichProgressBar])
def test_other_code_reads_the_last_step(
    tmp_path: Path,
    accelerator: str,
    monkeypatch: pytest.MonkeyPatch,
    drawn: list[list[float]],
    shown_values: list[ShownValues],
    bar: type[Callback],
) -> None:
    seen: list[list[float]] = []

    class Reads(pl.Callback):
        def on_train_start(self, *args: Any) -> None:
            seen.append([])

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            seen[-1].append(trainer.progress_bar_metrics["loss"])

    monkeypatch.setitem(
        SURROUNDINGS,
        NOTHING,
        type(SURROUNDINGS[NOTHING])(
            SURROUNDINGS["the same, loss in the bar"].build, callbacks=(Reads,), default=True
        ),
    )
    runs = twice(tmp_path, accelerator, monkeypatch, NOTHING, bar)
    assert runs.quick > BATCHES
    assert seen[0] == seen[1]
    if bar is Bar:
        assert drawn[0] == drawn[1]
        assert shown_values[0].waits == 0
    told = str(runs.traces[1].callback and str(runs.traces[1].callback.summary))
    note = "reads logged values in every step, and waits for the device"
    assert (note in told) is (bar is Bar)


def test_more_copies_than_there_is_room_for() -> None:
    class Never(_Late):
        def query(self) -> bool:
            return False

    values = ShownValues(lambda value: True, Never)
    found = [values.read({"loss": torch.tensor(float(step))})["loss"] for step in range(40)]
    assert found == [0.0] * 40
    assert values.read({"other": torch.tensor(7)}) == {"other": 7}
    assert values.waits == 2
    assert values.read({"loss": torch.tensor(50.0)})["loss"] > 0  # waited for meanwhile
