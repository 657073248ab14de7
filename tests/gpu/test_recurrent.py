"""Recurrent nets in cuDNN, whose dropout draws from a state of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from lightning_cudagraph import CUDAGraphCallback
from lightning_cudagraph.tensors import writes
from tests.harness import Net, Trace, assert_same, differences, make, train


class Recurrent(Net):
    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.LSTM(12, 12, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        hidden, _ = self.memory(x[:, None, :])
        return super().forward(hidden[:, 0])


def _both(tmp_path: Path, accelerator: str, **arguments: Any) -> tuple[Trace, Trace]:
    plain = train(make(Recurrent), tmp_path / "plain", accelerator=accelerator)
    callback = CUDAGraphCallback(**arguments)
    graph = train(make(Recurrent), tmp_path / "graph", callback, accelerator=accelerator)
    assert graph.counts.replayed == 18
    return plain, graph


def test_checks_go_back_to_the_state_of_dropout(tmp_path: Path, accelerator: str) -> None:
    assert_same(*_both(tmp_path, accelerator))


def test_otherwise_they_would_move_it_on(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for op in ("aten::_cudnn_rnn", "aten::_cudnn_rnn_backward"):
        monkeypatch.delitem(writes.UNDECLARED_WRITES, op)
    # On one stream: the trials of more would move it on as well, which a check then finds.
    plain, graph = _both(tmp_path, accelerator, streams=1)
    assert differences(plain.steps, graph.steps)
