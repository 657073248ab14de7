"""Recurrent nets in cuDNN, whose dropout draws from a state of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from lightning_cudagraph import CUDAGraphCallback
from lightning_cudagraph.capture import writes
from lightning_cudagraph.errors import VerificationError
from tests.harness import Net, make, train


class Recurrent(Net):
    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.LSTM(12, 12, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        hidden, _ = self.memory(x[:, None, :])
        return super().forward(hidden[:, 0])


def test_checks_go_back_to_the_state_of_dropout(tmp_path: Path, accelerator: str) -> None:
    callback = CUDAGraphCallback(verify_replays=5)
    trace = train(make(Recurrent), tmp_path, callback, accelerator=accelerator)
    assert trace.counts.replayed == 18
    assert "6 replay(s) verified" in (callback.report or "")


def test_without_it_they_differ(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writes, "_DROPOUT_STATE", ("", ""))
    with pytest.raises(VerificationError):
        train(make(Recurrent), tmp_path, CUDAGraphCallback(), accelerator=accelerator)
