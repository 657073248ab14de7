"""Batches of several signatures in training: each frequent one has a graph, the others stay eager.

`tests/gpu/test_signatures.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_cudagraph import CUDAGraphCallback, LayerTimings
from tests.harness import Net, Trace, assert_same, make, train

# A later signature: eager steps until it earns its graph, then watched ones.
TO_EARN, WATCHED = 8, 2
SIZE = "ignore:Trying to infer the `batch_size`"


class Reader(Net):
    """Reads sequences of any length, with dropout, batch norm and logged values."""

    def __init__(
        self, make_optimizer: Callable[[Any], torch.optim.Optimizer] | None = None, scale: float = 1.0
    ) -> None:
        super().__init__(make_optimizer)
        self.scale = scale
        self.table = nn.Embedding(16, 12)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.table(x).mean(1) * self.scale)  # type: ignore[no-any-return]


def sequences(lengths: Sequence[int], ragged: bool = False) -> Any:
    """Batches of these lengths, all different; with `ragged`, a smaller one at the end."""
    generator = torch.Generator().manual_seed(0)
    rows = [8] * len(lengths) + [3] * ragged
    of = [*lengths, *[lengths[0]] * ragged]
    batches = [
        (
            torch.randint(0, 16, (n, length), generator=generator),
            torch.randint(0, 4, (n,), generator=generator),
        )
        for n, length in zip(rows, of, strict=True)
    ]
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def both(
    tmp_path: Path,
    accelerator: str,
    lengths: Sequence[int],
    callback: CUDAGraphCallback | None = None,
    build: Callable[[], Any] = Reader,
    ragged: bool = False,
    **kwargs: Any,
) -> Trace:
    """Train without and with the callback; the runs must be equal. Returns the second."""
    kwargs = {
        "accelerator": accelerator,
        "max_epochs": 2,
        "val_loader": sequences([6, 6]),
        **kwargs,
    }
    runs = [
        train(make(build), tmp_path / name, ours, train_loader=sequences(lengths, ragged), **kwargs)
        for name, ours in (("plain", None), ("graph", callback or CUDAGraphCallback()))
    ]
    assert_same(*runs)
    counts = runs[1].counts
    batches = kwargs["max_epochs"] * (len(lengths) + ragged)
    assert counts.warmed_up + counts.replayed + counts.eager_steps == batches
    return runs[1]


@pytest.mark.long
@pytest.mark.parametrize("watched", [True, False], ids=["watched", "alone"])
def test_lengths_that_alternate(tmp_path: Path, accelerator: str, watched: bool) -> None:
    """All three have had their warm-up by the time that the first has a graph."""
    run = both(tmp_path, accelerator, [5, 9, 7] * 8, watched=watched)
    assert run.counts.captures == 3
    assert run.counts.eager == {}
    assert (run.counts.warmed_up, run.counts.replayed) == (9, 39)
    assert run.counts.recaptures == ()


@pytest.mark.spread(2, first=1)
@pytest.mark.parametrize("watched", [True, False], ids=["watched", "alone"])
def test_a_later_length_earns_its_graph(tmp_path: Path, accelerator: str, watched: bool) -> None:
    """And a rare one does not: a graph of its own would cost more than it saves."""
    lengths = [6] * 6 + [6, 11] * 14 + [3] * 3
    run = both(tmp_path, accelerator, lengths, watched=watched, max_epochs=1)
    assert run.counts.captures == 2
    assert run.counts.warmed_up == 3 + WATCHED
    assert sorted(run.counts.eager.values()) == [3, TO_EARN]
    assert all(reason.startswith("another batch signature: `batch[0]`") for reason in run.counts.eager)
    assert run.counts.replayed == len(lengths) - 3 - WATCHED - 3 - TO_EARN


@pytest.mark.long
@pytest.mark.filterwarnings(SIZE)
def test_the_ragged_batch_of_many_epochs(tmp_path: Path, accelerator: str) -> None:
    epochs = TO_EARN + WATCHED + 2
    run = both(tmp_path, accelerator, [6, 6, 6, 6], ragged=True, max_epochs=epochs)
    assert run.counts.captures == 2
    assert sum(run.counts.eager.values()) == TO_EARN
    assert run.counts.replayed == 5 * epochs - 3 - TO_EARN - WATCHED


@pytest.mark.long
def test_more_lengths_than_graphs(tmp_path: Path, accelerator: str) -> None:
    """Twelve that come equally often: four have graphs, and none takes another one's place."""
    lengths = [*range(3, 15)] * 14
    callback = CUDAGraphCallback(max_graphs=4)
    run = both(tmp_path, accelerator, lengths, callback, max_epochs=1, watched=False)
    assert (run.counts.captures, run.counts.evictions) == (4, 0)
    assert run.counts.replayed >= 3 * 4
    first = str(run.summary).splitlines()[0]
    assert "% of your steps ran eagerly: dimension 1 of `batch[0]` has 12 lengths;" in first
    assert "pad it to 5, 8, 11 or 14 (docs/recipes/buckets.md)" in first


def test_the_least_recently_used_is_released(tmp_path: Path, accelerator: str) -> None:
    """Lengths that grow in the course of training."""
    lengths = [length for length in (4, 5, 6, 7) for _ in range(14)]
    callback = CUDAGraphCallback(max_graphs=2)
    run = both(tmp_path, accelerator, lengths, callback, max_epochs=1)
    assert (run.counts.captures, run.counts.evictions) == (4, 2)
    assert sum(run.counts.eager.values()) == 3 * TO_EARN
    assert "released for others 2 time(s)" in str(run.summary)


@pytest.mark.long
@pytest.mark.filterwarnings(SIZE)
def test_a_released_graph_adds_to_gradients_of_another(tmp_path: Path, accelerator: str) -> None:
    """Those stay where the other graph writes them: on a GPU, a graph's own move out of its pool."""
    lengths = [4, 5] * 24 + [4, 6] * 24
    callback = CUDAGraphCallback(max_graphs=2, verify=None)
    run = both(tmp_path, accelerator, lengths, callback, max_epochs=1, accumulate_grad_batches=2)
    assert (run.counts.captures, run.counts.evictions) == (3, 1)
    assert run.counts.replayed > 60


@pytest.mark.long
def test_graphs_that_serve_few_replays_are_exchanged_no_more(
    tmp_path: Path, accelerator: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four in a row with fewer than 32 replays end it: a capture costs more than it saves."""
    lengths = [length for length in range(3, 12) for _ in range(14)]
    callback = CUDAGraphCallback(max_graphs=1)
    run = both(tmp_path, accelerator, lengths, callback, max_epochs=1, watched=False)
    assert (run.counts.captures, run.counts.evictions) == (5, 4)
    assert run.counts.eager_steps == 4 * TO_EARN + 4 * 14


@pytest.mark.long
@pytest.mark.parametrize("window", [2, 3])
@pytest.mark.parametrize("watched", [True, False], ids=["watched", "alone"])
def test_windows_of_mixed_lengths(tmp_path: Path, accelerator: str, window: int, watched: bool) -> None:
    """Micro-batches of one window differ in length, so that one graph adds to another's gradients."""
    lengths = ([5, 9, 9, 5, 5] * 6)[:29]
    run = both(
        tmp_path,
        accelerator,
        lengths,
        watched=watched,
        ragged=True,
        accumulate_grad_batches=window,
        gradient_clip_val=0.1,
    )
    assert run.counts.captures >= 2 * window
    assert run.counts.replayed >= 25
    assert run.counts.recaptures == ()


class Wide(Reader):
    """Long sequences use parameters that short ones leave alone."""

    def __init__(self) -> None:
        super().__init__(lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.3))
        self.long = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.table(x).mean(1)
        hidden = self.long(hidden) if x.shape[1] > 6 else hidden
        return self.head(self.features(hidden))


@pytest.mark.long
@pytest.mark.parametrize("window", [1, 2])
def test_parameters_that_only_some_lengths_use(tmp_path: Path, accelerator: str, window: int) -> None:
    """An optimizer skips a parameter without a gradient, and no zeros may take its place."""
    lengths = ([5, 9, 9, 5, 5, 5] * 6)[:35]
    run = both(tmp_path, accelerator, lengths, build=Wide, max_epochs=3, accumulate_grad_batches=window)
    assert run.counts.captures >= 2
    assert run.counts.replayed >= 20
    assert run.counts.recaptures == ()


@pytest.mark.long
@pytest.mark.parametrize("form", ["bf16-mixed", "sgd", "eager-optimizer"])
def test_forms(tmp_path: Path, accelerator: str, form: str) -> None:
    makers: dict[str, Any] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "eager-optimizer": lambda p: torch.optim.Adagrad(p, lr=0.1),
    }
    callback = CUDAGraphCallback(scope="forward_backward" if form == "eager-optimizer" else "auto")
    run = both(
        tmp_path,
        accelerator,
        [5, 9, 7] * 8,
        callback,
        build=lambda: Reader(makers.get(form)),
        precision=form if form == "bf16-mixed" else "32-true",
    )
    assert run.counts.captures == 3
    assert run.counts.replayed == 39


@pytest.mark.long
@pytest.mark.parametrize("every", [1, 4])
def test_times_are_of_one_signature(tmp_path: Path, accelerator: str, every: int) -> None:
    callback = CUDAGraphCallback(timings=LayerTimings(every_n_steps=every))
    run = both(tmp_path, accelerator, [5, 9] * 16, callback)
    assert run.counts.captures == 2
    assert "times are of batches" in str(run.summary)


class Changes(Reader):
    """A Python number of the model changes between epochs."""

    def on_train_epoch_start(self) -> None:
        self.scale = 1.0 + self.current_epoch


@pytest.mark.long
def test_a_changed_number_invalidates_all(tmp_path: Path, accelerator: str) -> None:
    run = both(tmp_path, accelerator, [5, 9, 7] * 6, build=Changes)
    assert run.counts.captures == 6
    assert len(run.counts.recaptures) == 1
    assert "`scale`" in run.counts.recaptures[0]


class Quiet(Reader):
    """Long sequences read a number on the host, which no graph can hold."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * y.detach().sum().item() if x.shape[1] > 8 else y


@pytest.mark.long
def test_a_later_length_that_cannot_be_captured(tmp_path: Path, accelerator: str) -> None:
    """It stays eager, with the reason; the first one goes on with its graph."""
    lengths = [5] * 6 + [5, 9] * 16
    run = both(tmp_path, accelerator, lengths, build=Quiet, max_epochs=1)
    assert run.counts.captures == 1
    assert run.counts.recaptures == ()
    assert run.counts.replayed == 6 + 16 - 3
    assert any("item" in reason for reason in run.counts.eager)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.filterwarnings("ignore:You.re resuming from a checkpoint that ended before")
def test_resume(tmp_path: Path, accelerator: str) -> None:
    """A checkpoint in the middle, taken by a run with graphs, is continued with and without."""
    lengths = [5, 9, 7] * 6
    runs: dict[str, Trace] = {}
    for name, ours in (("plain", None), ("graph", CUDAGraphCallback())):
        first = train(
            make(Reader),
            tmp_path / name / "first",
            ours,
            accelerator=accelerator,
            train_loader=sequences(lengths),
            val_loader=sequences([6, 6]),
            max_epochs=2,
        )
        runs[name] = train(
            make(Reader),
            tmp_path / name / "second",
            None if ours is None else CUDAGraphCallback(),
            accelerator=accelerator,
            train_loader=sequences(lengths),
            val_loader=sequences([6, 6]),
            max_epochs=4,
            ckpt_path=str(first.folder / "ckpt" / next(iter(sorted(first.checkpoints)))),
        )
    assert_same(runs["plain"], runs["graph"], ignore=["best_model_path"])
    assert runs["graph"].counts.captures == 3


@pytest.mark.long
def test_one_graph(tmp_path: Path, accelerator: str) -> None:
    """With `max_graphs=1`, other lengths that come between its batches do not take its place."""
    callback = CUDAGraphCallback(max_graphs=1)
    run = both(tmp_path, accelerator, [5, 5, 5, 9] * 10, callback)
    assert (run.counts.captures, run.counts.evictions) == (1, 0)
    assert run.counts.replayed == 60 - 3
