"""Functions of torch that user code has wrapped: the wrapper runs once, as without the callback."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_cudagraph import CUDAGraphCallback
from lightning_cudagraph.device.sentry import own_modes
from lightning_cudagraph.errors import CaptureError, UnsupportedError
from tests.harness import Apart, Net, assert_same, differences, make, train


def _wrap(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    monkeypatch.setattr(owner, name, wrap(getattr(owner, name)))


def _twice(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def twice(*args: Any, **kwargs: Any) -> Tensor:
        return function(*args, **kwargs) * 2

    return twice


def _fewer_arguments(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda logits, target: function(logits, target, label_smoothing=0.1)


_no_autocast: Any = torch.autocast("cpu", enabled=False)

WRAPPED: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "function": (F, "cross_entropy", _twice),
    "fewer arguments": (F, "cross_entropy", _fewer_arguments),
    "partial": (F, "cross_entropy", lambda function: functools.partial(function, label_smoothing=0.1)),
    "method": (Tensor, "__rsub__", _twice),
    "enable_grad": (F, "cross_entropy", lambda function: torch.enable_grad()(_twice(function))),
    "autocast": (F, "cross_entropy", lambda function: _no_autocast(_twice(function))),
    "disable": (F, "cross_entropy", lambda function: torch.compiler.disable(_twice(function))),
}


class UsesThem(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        return F.cross_entropy(logits, y) + 0.01 * (1.5 - logits).norm()


@pytest.mark.spread
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


CALLS = Apart()


def _counts(function: Any) -> Any:
    def counted(*args: Any, **kwargs: Any) -> Any:
        CALLS["n"] = CALLS.get("n", 0) + 1
        return function(*args, **kwargs)

    return counted


def _doubles_and_counts(descriptor: Any) -> Any:
    return property(_counts(_twice(descriptor.__get__)))


class WrapsInItsStep(Net):
    """`+` does not call `Tensor.add`, which it asks for."""

    wrapped: tuple[tuple[str, Callable[[Any], Any]], ...] = (
        ("relu", lambda function: _counts(_twice(function))),
        ("add", _counts),
        ("mT", _doubles_and_counts),
    )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        for name, wrap in self.wrapped:
            setattr(Tensor, name, wrap(getattr(Tensor, name)))
        try:
            used = logits.relu().sum() + (logits + 1).mT.sum()
        finally:
            for name, _ in self.wrapped:
                delattr(Tensor, name)
        return F.cross_entropy(logits, y) + 0.01 * used


@pytest.mark.parametrize("batches", [2, 8])  # refused by the capture after the warm-up
def test_a_wrapper_of_c_runs_once(tmp_path: Path, accelerator: str, batches: int) -> None:
    counts = []
    kwargs: dict[str, Any] = {"accelerator": accelerator, "limit_train_batches": batches}
    kwargs |= {"max_epochs": 1, "limit_val_batches": 0}
    for folder, callback in (("plain", None), ("graph", CUDAGraphCallback(on_unsupported="eager"))):
        CALLS.clear()
        run = train(make(WrapsInItsStep), tmp_path / folder, callback, **kwargs)
        counts.append((run.final["weights"], CALLS["n"]))
    assert not differences(*counts)


def test_without_the_functions_of_c(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_modes, "_torchs_own", lambda function: function)
    with pytest.raises(AssertionError):
        test_a_wrapper_of_c_runs_once(tmp_path, accelerator, 2)


class OneWrapperForTwo(WrapsInItsStep):
    def __init__(self) -> None:
        super().__init__()
        one = _twice(Tensor.relu)
        self.wrapped = (("relu", lambda _: one), ("relu_", lambda _: one))


def test_one_wrapper_under_two_names_is_refused(tmp_path: Path, accelerator: str) -> None:
    with pytest.raises(CaptureError, match="bound to 2 names"):
        train(make(OneWrapperForTwo), tmp_path, CUDAGraphCallback(), accelerator=accelerator)


class WrapsWhatIsLogged(Net):
    def on_train_start(self) -> None:
        Tensor.to = _counts(Tensor.to)  # type: ignore[method-assign]


def test_a_wrapper_between_steps_is_refused(tmp_path: Path, accelerator: str) -> None:
    try:
        with pytest.raises(UnsupportedError, match=r"`torch\.Tensor\.to` is bound to a `function`"):
            train(make(WrapsWhatIsLogged), tmp_path, CUDAGraphCallback(), accelerator=accelerator)
    finally:
        del Tensor.to
