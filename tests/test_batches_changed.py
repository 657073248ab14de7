"""Steps that change their batch, or keep it, and batches that change from step to step.

`tests/gpu/test_batches_changed.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_cudagraph import CUDAGraphCallback, UnsupportedError
from lightning_cudagraph.device.emulator.emulator_backend import EmulatorBackend
from tests.harness import Net, Trace, assert_same, differences, loader, make, train
from tests.loops import Loop, assert_equal_runs, device_of, run


class Bytes(Dataset[dict[str, Tensor]]):
    """Samples of integers, as images are."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randint(0, 9, (56, 12), generator=generator).to(torch.uint8)
        self.y = torch.randint(0, 4, (56,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


class PutsFloatsBack(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch["x"] = batch["x"].float()
        return super().training_step((batch["x"], batch["y"]), batch_idx)


class PutsFloatsIntoACopy(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch = dict(batch)
        batch["x"] = batch["x"].float()
        return super().training_step((batch["x"], batch["y"]), batch_idx)


def bytes_loader() -> DataLoader[Any]:
    return DataLoader(Bytes(), batch_size=8)


@pytest.mark.spread
@pytest.mark.parametrize("takes", [1, 2])
def test_an_item_of_the_batch_that_is_replaced(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch, takes: int
) -> None:
    """The second take was recorded on what the first one had put into the batch."""
    monkeypatch.setattr(EmulatorBackend, "graphs_per_step", takes)

    def trained(cls: type[Net], name: str, callback: CUDAGraphCallback | None) -> Trace:
        return train(
            make(cls), tmp_path / name, callback, accelerator=accelerator, train_loader=bytes_loader()
        )

    with pytest.raises(UnsupportedError, match=r"replaces `batch\['x'\]`") as caught:
        trained(PutsFloatsBack, "raise", CUDAGraphCallback())
    assert "`batch = copy.copy(batch)`" in str(caught.value)
    assert caught.value.location is not None
    assert caught.value.location.source == 'batch["x"] = batch["x"].float()'
    plain = trained(PutsFloatsBack, "plain", None)
    eager = trained(PutsFloatsBack, "eager", CUDAGraphCallback(on_unsupported="eager"))
    assert_same(plain, eager)
    assert any("The training step replaces `batch" in reason for reason in eager.counts.eager)
    copies = trained(PutsFloatsIntoACopy, "copies", CUDAGraphCallback())
    assert not differences(plain.final["weights"], copies.final["weights"])
    assert copies.counts.replayed > 10


class TakesOut(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        y = batch.pop("y")
        return super().training_step((batch["x"].float(), y), batch_idx)


class Deletes(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        y = batch["y"]
        del batch["y"]
        return super().training_step((batch["x"].float(), y), batch_idx)


class Adds(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch["more"] = [batch["x"].float(), batch["y"] + 1]
        return super().training_step((batch["x"].float(), batch["y"]), batch_idx)


class TakesOutByAName(Net):
    key = "y"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        labels = {"y": batch.pop(self.key)}
        return super().training_step((batch["x"].float(), labels["y"]), batch_idx)


@pytest.mark.spread
@pytest.mark.parametrize(
    ("cls", "what", "line"),
    [
        (TakesOut, "takes `batch['y']` out of its batch", 'y = batch.pop("y")'),
        (Deletes, "takes `batch['y']` out of its batch", 'del batch["y"]'),
        (
            Adds,
            "adds `batch['more'][0]`, `batch['more'][1]` to its batch",
            'batch["more"] = [batch["x"].float(), batch["y"] + 1]',
        ),
        (TakesOutByAName, "takes `batch['y']` out of its batch", None),
    ],
    ids=["pop", "del", "set", "by a name"],
)
def test_an_item_that_is_added_or_taken_out(
    tmp_path: Path, accelerator: str, cls: type[Net], what: str, line: str | None
) -> None:
    with pytest.raises(UnsupportedError) as caught:
        train(
            make(cls),
            tmp_path,
            CUDAGraphCallback(),
            accelerator=accelerator,
            train_loader=bytes_loader(),
        )
    (finding,) = caught.value.findings
    assert finding.what == f"The training step {what}."
    assert (finding.location and finding.location.source) == line
    assert not caught.value.search_ended_by


class WritesPastAutograd(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch[0].data.mul_(0.5)
        return super().training_step(batch, batch_idx)


class ValidatesPastAutograd(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        batch[0].data.mul_(0.5)
        super().validation_step(batch, batch_idx)


@pytest.mark.spread
@pytest.mark.parametrize("cls", [WritesPastAutograd, ValidatesPastAutograd])
def test_a_write_that_raises_no_version(tmp_path: Path, accelerator: str, cls: type[Net]) -> None:

    def trained(name: str, callback: CUDAGraphCallback | None) -> Trace:
        return train(
            make(cls),
            tmp_path / name,
            callback,
            accelerator=accelerator,
            val_loader=loader(seed=1, batches=6, ragged=False),
        )

    evaluation = cls is ValidatesPastAutograd
    with pytest.raises(UnsupportedError, match=r"writes into `batch\[0\]` in place"):
        trained("raise", CUDAGraphCallback(evaluation=evaluation))
    plain = trained("plain", None)
    eager = trained("eager", CUDAGraphCallback(evaluation=evaluation, on_unsupported="eager"))
    assert_same(plain, eager)


class WritesIntoItsArgument(Loop):
    def step(self, x: Tensor, y: Tensor) -> Tensor:
        x.data.mul_(0.5)
        return super().step(x, y)


def test_an_argument_that_is_written(accelerator: str) -> None:
    with pytest.raises(UnsupportedError, match=r"writes into `arguments\['x'\]` in place"):
        run(WritesIntoItsArgument(device_of(accelerator)), graphed=True)


class IsGivenWhatItWrites(Loop):
    def step(self, x: Tensor, y: Tensor, weight: Tensor) -> Any:
        return super().step(x, y), weight.norm()

    def call(self, step: Any, index: int, x: Tensor, y: Tensor) -> Any:
        return step(x, y, self.net.layers[0].weight.detach())


class IsGivenACopy(IsGivenWhatItWrites):
    def call(self, step: Any, index: int, x: Tensor, y: Tensor) -> Any:
        return step(x, y, self.net.layers[0].weight.detach().clone())


def test_an_argument_in_memory_that_the_step_writes(accelerator: str) -> None:
    with pytest.raises(UnsupportedError, match=r"memory of `arguments\['weight'\]` through"):
        run(IsGivenWhatItWrites(device_of(accelerator)), graphed=True)
    assert_equal_runs(lambda: IsGivenACopy(device_of(accelerator)), replays=9)


class OneTensorThenTwo(Loop):
    def step(self, x: Tensor, y: Tensor, again: Tensor) -> Tensor:
        return super().step(x - 2 * again, y)

    def call(self, step: Any, index: int, x: Tensor, y: Tensor) -> Any:
        return step(x, y, x if index < 7 else x * 0.5)


def test_one_tensor_at_two_places_and_then_two(accelerator: str) -> None:
    # Three calls of each kind of warm-up.
    assert_equal_runs(lambda: OneTensorThenTwo(device_of(accelerator)), replays=12 - 2 * 3)


class Signs(Dataset[dict[str, Any]]):
    """Batches whose zero has another sign from some batch on."""

    def __init__(self) -> None:
        self.batches = [(x, y) for x, y in loader(ragged=False, batches=14)]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> dict[str, Any]:
        x, y = self.batches[index]
        return {"x": x, "y": y, "zero": -0.0 if index >= 8 else 0.0}


class TakesTheSign(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch["x"] * math.copysign(1.0, batch["zero"])
        return super().training_step((x, batch["y"]), batch_idx)


# Lightning has no batch size for a number.
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size` from an ambiguous:UserWarning")
def test_the_sign_of_a_zero(tmp_path: Path, accelerator: str) -> None:
    runs = [
        train(
            make(TakesTheSign),
            tmp_path / str(index),
            callback,
            accelerator=accelerator,
            train_loader=DataLoader(Signs(), batch_size=None),
            max_epochs=2,
        )
        for index, callback in enumerate((None, CUDAGraphCallback()))
    ]
    assert_same(*runs)
    assert runs[1].counts.replayed >= 8
    assert any("expected 0.0, found -0.0" in reason for reason in runs[1].counts.eager)


class ScaledByTensor(Net):
    """A number that a hook attaches to a tensor of the batch."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        x.scale = 1.0 if self.current_epoch == 0 else 3.0
        return x, y

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return super().training_step((x * getattr(x, "scale", 0.5), y), batch_idx)


def test_a_number_on_a_tensor_of_the_batch(tmp_path: Path, accelerator: str) -> None:
    """The step read the default: the static input had no such attribute, nor had that of the check."""
    plain = train(make(ScaledByTensor), tmp_path / "plain", accelerator=accelerator)
    graphed = train(
        make(ScaledByTensor), tmp_path / "graph", CUDAGraphCallback(), accelerator=accelerator
    )
    assert_same(plain, graphed)
    assert graphed.counts.replayed
    assert any("`batch[0].scale` changed" in reason for reason in graphed.counts.eager)


class LearnsInTheTransfer(Net):
    """A hook that moves the batch through a layer with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Linear(12, 12)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.embedding(batch[0]), batch[1]


@pytest.mark.spread
@pytest.mark.parametrize("policy", ["raise", "eager"])
def test_a_batch_that_was_computed_with_a_gradient(
    tmp_path: Path, accelerator: str, policy: Any
) -> None:
    """The layer was trained in the warm-up alone."""
    plain = train(make(LearnsInTheTransfer), tmp_path / "plain", accelerator=accelerator)
    graphed = train(
        make(LearnsInTheTransfer),
        tmp_path / "graph",
        CUDAGraphCallback(on_unsupported=policy),
        accelerator=accelerator,
        raises=UnsupportedError if policy == "raise" else None,
    )
    if policy == "raise":
        assert "requires a gradient" in str(graphed.error)
        assert not graphed.steps
    else:
        assert_same(plain, graphed)
        assert not graphed.counts.replayed
