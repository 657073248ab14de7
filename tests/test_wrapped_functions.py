"""Functions of torch that user code has wrapped: the wrapper runs once, as without the callback."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from lightning_cudagraph import CUDAGraphCallback
from lightning_cudagraph.device.sentry import own_modes
from tests.harness import Net, assert_same, make, train


def _wrap(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    monkeypatch.setattr(owner, name, wrap(getattr(owner, name)))


def _twice(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def twice(*args: Any, **kwargs: Any) -> Tensor:
        return function(*args, **kwargs) * 2

    return twice


def _fewer_arguments(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda logits, target: function(logits, target, label_smoothing=0.1)


WRAPPED: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "function": (F, "cross_entropy", _twice),
    "fewer arguments": (F, "cross_entropy", _fewer_arguments),
    "partial": (F, "cross_entropy", lambda function: functools.partial(function, label_smoothing=0.1)),
    "method": (Tensor, "norm", _twice),
}


class UsesThem(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        return F.cross_entropy(logits, y) + 0.01 * logits.norm()


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("batches", [2, 8])  # in warm-up alone, and in replays
def test_a_wrapper_runs_once(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch, name: str, batches: int
) -> None:
    _wrap(monkeypatch, *WRAPPED[name])
    kwargs: dict[str, Any] = {
        "accelerator": accelerator,
        "limit_train_batches": batches,
        "max_epochs": 1,
    }
    plain = train(make(UsesThem), tmp_path / "plain", val_loader=None, **kwargs)
    graph = train(make(UsesThem), tmp_path / "graph", CUDAGraphCallback(), val_loader=None, **kwargs)
    assert_same(plain, graph)


def test_control(tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the search for torch's own function, the wrapper runs twice."""
    monkeypatch.setattr(own_modes, "_torchs_own", lambda function: function)
    with pytest.raises(AssertionError):
        test_a_wrapper_runs_once(tmp_path, accelerator, monkeypatch, "function", 2)
