"""The bad steps of `tests/test_bad_steps.py` on CUDA, and those that only CUDA can refuse."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_cudagraph import CaptureError, CUDAGraphCallback
from tests.harness import Net, assert_same, make, train
from tests.test_bad_steps import *  # noqa: F403


class Synchronizes(Net):
    """No op is dispatched: only CUDA notices, and breaks the capture off."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        torch.cuda.synchronize()
        return loss


class OlderThanTheStep(Net):
    """Copies a host tensor to the device that host code may change between steps."""

    def on_fit_start(self) -> None:
        self.scales = torch.ones(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        return loss * self.scales.to(self.device).mean()


class WritesToTheHost(Net):
    def on_fit_start(self) -> None:
        self.count = torch.zeros(())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count += 1
        return super().training_step(batch, batch_idx)["loss"]


class ToHost(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        loss.detach().cpu()
        return loss


class ReadsInAThread(Net):
    """Another thread, which works on the default stream, reads what the device takes long to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = ThreadPoolExecutor(1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        torch.cuda._sleep(50_000_000)  # cycles, some 25 ms
        loss = super().training_step(batch, batch_idx)["loss"]
        scale = self.pool.submit(lambda: 1 + loss.detach().item()).result()
        made = self.pool.submit(self.made_late, loss.detach()).result()
        return loss * scale + made

    def made_late(self, loss: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(50_000_000)
        return loss.square()


def test_what_another_thread_reads_and_makes_in_a_warm_up(tmp_path: Path, accelerator: str) -> None:
    kwargs: dict[str, Any] = {"accelerator": accelerator, "max_epochs": 1}
    plain = train(make(ReadsInAThread), tmp_path / "plain", **kwargs)
    callback = CUDAGraphCallback(on_unsupported="eager")
    eager = train(make(ReadsInAThread), tmp_path / "eager", callback, **kwargs)
    assert eager.counts.warmed_up == 3
    assert_same(plain, eager)


@pytest.mark.parametrize("cls", [Synchronizes, OlderThanTheStep, WritesToTheHost, ToHost])
def test_what_only_cuda_refuses(tmp_path: Path, accelerator: str, cls: type[Net]) -> None:
    with pytest.raises(CaptureError, match=r"test_bad_steps\.py:\d+"):
        train(make(cls), tmp_path / "raise", CUDAGraphCallback(), accelerator=accelerator)
    plain = train(make(cls), tmp_path / "plain", accelerator=accelerator)
    eager = train(
        make(cls),
        tmp_path / "eager",
        CUDAGraphCallback(on_unsupported="eager"),
        accelerator=accelerator,
    )
    assert_same(plain, eager)
    # The process has survived: random numbers, the allocator, and a capture that succeeds.
    torch.cuda.empty_cache()
    plain = train(make(Net), tmp_path / "a", accelerator=accelerator)
    graph = train(make(Net), tmp_path / "b", CUDAGraphCallback(), accelerator=accelerator)
    assert_same(plain, graph)
    assert graph.counts.captures == 1
