"""Steps that draw on the host, and hand what they draw to the device, on CUDA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_cudagraph import CaptureError, CUDAGraphCallback, VerificationError
from lightning_cudagraph.device.host_work import HostInput
from lightning_cudagraph.device.sentry.host_ops import HostOps
from tests.harness import Net, assert_same, differences, make, train
from tests.test_host_draws import *  # noqa: F403
from tests.test_host_draws import BATCHES, GAN, Noisy, both, images, pytestmark  # noqa: F401


def _frozen(self: HostOps, *args: Any) -> None:
    """Repeat nothing before a launch."""


def test_a_frozen_draw_is_noticed(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostOps, "_repeat", _frozen)
    with pytest.raises(VerificationError):
        train(make(Noisy), tmp_path, CUDAGraphCallback(), accelerator=accelerator)


def test_without_checks_the_numbers_would_be_others(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kwargs: dict[str, Any] = {"accelerator": accelerator, "limit_val_batches": 0}
    plain = train(make(GAN), tmp_path / "plain", train_loader=images(), **kwargs)
    callback = CUDAGraphCallback(verify=None)
    right = train(make(GAN), tmp_path / "right", callback, train_loader=images(), **kwargs)
    assert_same(plain, right)
    monkeypatch.setattr(HostOps, "_repeat", _frozen)
    callback = CUDAGraphCallback(verify=None)
    wrong = train(make(GAN), tmp_path / "wrong", callback, train_loader=images(), **kwargs)
    assert wrong.counts.replayed == right.counts.replayed > 0
    assert differences(plain.final, wrong.final)


def test_launches_that_are_queued_find_their_own_numbers() -> None:
    device = torch.device("cuda")
    static, found = HostInput(device, 1 << 10), []
    torch.cuda._sleep(200_000_000)  # the device is behind: all copies are queued
    for index in range(64):
        with static.filled(1 << 10) as source:
            source.fill_(index)
        found.append(static.memory.clone())
    assert [int(each.float().mean()) for each in found] == [*range(64)]


class Forks(Net):
    """Sets the generator in the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        with torch.random.fork_rng(devices=[]):
            noise = torch.rand(12)
        return super().training_step((x + noise.to(x), y), batch_idx)


def test_a_generator_that_is_set_inside(tmp_path: Path, accelerator: str) -> None:
    with pytest.raises(CaptureError, match="also sets their generator"):
        train(make(Forks), tmp_path, CUDAGraphCallback(), accelerator=accelerator)


class Reads(Noisy):
    """A read on the device beside draws that a graph can hold: the draws are no finding."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = super().training_step(batch, batch_idx)
        found["value"] = found["loss"].item()
        return found


def test_the_other_findings_are_alone(tmp_path: Path, accelerator: str) -> None:
    with pytest.raises(CaptureError) as caught:
        train(make(Reads), tmp_path, CUDAGraphCallback(), accelerator=accelerator)
    assert [".item()" in each.what for each in caught.value.findings] == [True]


class Sampled(Metric):
    """Keeps a sample of what it is given, drawn on the host."""

    kept: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("kept", [], dist_reduce_fx="cat")

    def update(self, values: Tensor) -> None:
        self.kept.append(values[torch.randperm(len(values))[:2].to(values.device)])

    def compute(self) -> Tensor:
        return torch.cat(self.kept).mean()


class Last(Noisy):
    """A metric that the host updates after the replay draws last in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.sampled = Sampled()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = super().training_step(batch, batch_idx)
        self.sampled.update(found["logits"][:, 0])
        return found

    def on_train_epoch_end(self) -> None:
        self.log("sampled", self.sampled.compute())
        self.sampled.reset()


class First(Last):
    """It draws before the step does."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.sampled.update(batch[0][:, 0])
        return Noisy.training_step(self, batch, batch_idx)


def test_metrics_that_draw_behind_the_step(tmp_path: Path, accelerator: str) -> None:
    assert both(tmp_path, accelerator, Last).counts.replayed >= 8
    with pytest.raises(CaptureError, match="a draw of random numbers by the metric `sampled`"):
        train(make(First), tmp_path / "first", CUDAGraphCallback(), accelerator=accelerator)


def test_mixed_precision(tmp_path: Path, accelerator: str) -> None:
    assert both(tmp_path, accelerator, Noisy, precision="16-mixed").counts.replayed >= 8
    kwargs: dict[str, Any] = {"train_loader": images(), "limit_val_batches": 0}
    run = both(tmp_path / "gan", accelerator, GAN, precision="bf16-mixed", **kwargs)
    assert run.counts.replayed == 3 * BATCHES - 3
