"""Steps that no graph can hold: the error names the line, and nothing is lost or left behind."""

from __future__ import annotations

import random
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_cudagraph import CaptureError, CUDAGraphCallback, UnsupportedError
from tests.harness import Net, assert_same, make, train


class Item(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        output["seen"] = output["loss"].detach().item()  # BAD
        return output


class Branch(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        if loss > 1e9:  # BAD
            loss = loss * 0
        return loss


class Mask(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        losses = nn.functional.cross_entropy(self(x), y, reduction="none")
        return losses[losses > 0].mean()  # BAD


class BatchIdx(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        return loss * (1 + batch_idx)  # BAD


class GlobalStep(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        return loss * (1.0 + self.global_step)  # BAD


class Clock(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        started_s = time.perf_counter()  # BAD
        loss = super().training_step(batch, batch_idx)["loss"]
        return loss * (1 if started_s else 0)


class AsksForAFile(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        return loss * (2 if Path("slow").exists() else 1)  # BAD


class AsksTheNetwork(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        name = socket.gethostname()  # BAD
        return super().training_step(batch, batch_idx)["loss"] * len(name)


class Attribute(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.calls = getattr(self, "calls", 0) + 1
        return output["loss"]


class GrowingList(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.seen.append(output["loss"].detach())
        return output["loss"]


class Rebound(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean_loss", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        self.mean_loss = 0.9 * self.mean_loss + 0.1 * loss.detach()
        return loss


class PythonRandom(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"] * (1 + random.random())


class NumpyRandom(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"] * (1 + float(np.random.rand()))


class PythonNumberLogged(Net):
    batches = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batches += 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("batches", float(self.batches))  # BAD
        return super().training_step(batch, batch_idx)["loss"]


class _ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        assert float(gradient.sum()) < 1e9  # BAD
        return gradient


class BackwardItem(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return _ReadsInBackward.apply(super().training_step(batch, batch_idx)["loss"])


BAD: dict[type[Net], str] = {
    Item: "`.item()`",
    Branch: "Python branch",
    Mask: "boolean mask",
    BatchIdx: "`batch_idx`",
    GlobalStep: "`self.global_step`",
    Clock: "`time.perf_counter()`",
    AsksForAFile: "`os.stat`",
    AsksTheNetwork: "`socket.gethostname`",
    Attribute: "`calls` of the `Attribute`",
    GrowingList: "`seen` of the `GrowingList`",
    Rebound: "`mean_loss` of the `Rebound`",
    PythonRandom: "`random`",
    NumpyRandom: "`numpy.random`",
    PythonNumberLogged: "Python number given to `self.log('batches', ...)` in `training_step`",
    BackwardItem: "`.item()`",
}


def _line_of(cls: type) -> int | None:
    lines = Path(__file__).read_text().splitlines()
    where = next(i for i, line in enumerate(lines) if line.startswith(f"class {cls.__name__}("))
    for number in range(where, len(lines)):
        if number > where and lines[number].startswith(("class ", "BAD")):
            return None
        if lines[number].endswith("# BAD"):
            return number + 1
    return None


@pytest.mark.parametrize("cls", BAD, ids=lambda cls: cls.__name__)
def test_raises_with_the_users_line(tmp_path: Path, accelerator: str, cls: type[Net]) -> None:
    module = make(cls)
    with pytest.raises(CaptureError, match=re.escape(BAD[cls])) as caught:
        train(module, tmp_path, CUDAGraphCallback(), accelerator=accelerator)
    text = str(caught.value)
    line = _line_of(_ReadsInBackward if cls is BackwardItem else cls)
    if line is not None:
        assert f"{__file__}:{line} " in text
    assert 'on_unsupported="eager"' in text
    assert text.count("A CUDA graph cannot hold") <= 1


@pytest.mark.spread(2)
@pytest.mark.parametrize("cls", BAD, ids=lambda cls: cls.__name__)
def test_goes_on_eagerly_with_the_same_numbers(tmp_path: Path, accelerator: str, cls: type[Net]) -> None:
    callback = CUDAGraphCallback(on_unsupported="eager")
    plain_module, module = make(cls), None
    plain = train(plain_module, tmp_path / "plain", accelerator=accelerator)
    module = make(cls)
    graph = train(module, tmp_path / "graph", callback, accelerator=accelerator)
    assert_same(plain, graph)
    assert graph.counts.captures == 0
    assert graph.counts.replayed == 0
    assert len(graph.counts.eager) == 1
    assert getattr(plain_module, "calls", 0) == getattr(module, "calls", 0)
    assert len(getattr(plain_module, "seen", [])) == len(getattr(module, "seen", []))


class ReturnsNone(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_returning_none(tmp_path: Path, accelerator: str) -> None:
    with pytest.raises(UnsupportedError, match=r"`ReturnsNone.training_step` returned None"):
        train(make(ReturnsNone), tmp_path / "raise", CUDAGraphCallback(), accelerator=accelerator)
    plain = train(make(ReturnsNone), tmp_path / "plain", accelerator=accelerator)
    eager = CUDAGraphCallback(on_unsupported="eager")
    graph = train(make(ReturnsNone), tmp_path / "graph", eager, accelerator=accelerator)
    assert_same(plain, graph)


def test_an_error_of_the_users_own_in_the_capture(tmp_path: Path, accelerator: str) -> None:
    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)["loss"]
            if self.fails:
                raise ValueError("the fourth step fails")
            return loss

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.fails = batch_idx == 3

    with pytest.raises(ValueError, match="the fourth step fails"):
        train(make(Fails), tmp_path / "graph", CUDAGraphCallback(), accelerator=accelerator)
    # The process is as good as new: random numbers, memory, another capture.
    plain = train(make(Net), tmp_path / "a", accelerator=accelerator)
    again = train(make(Net), tmp_path / "b", CUDAGraphCallback(), accelerator=accelerator)
    assert_same(plain, again)


@pytest.mark.parametrize("hook", ["on_after_backward", "on_before_optimizer_step"])
def test_item_in_a_hook(tmp_path: Path, accelerator: str, hook: str) -> None:
    def item(self: Net, *args: Any) -> None:
        float(self.head.weight.grad.abs().max())

    cls: Callable[[], Any] = type("Hook", (Net,), {hook: item})
    with pytest.raises(CaptureError, match=r"float\(self.head.weight.grad.abs\(\).max\(\)\)"):
        train(make(cls), tmp_path, CUDAGraphCallback(scope="step"), accelerator=accelerator)
