"""Captured modules in eager steps, on CUDA."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.test_captured_modules import *  # noqa: F403
from tests.test_captured_modules import FULL, WARMUP, Dynamic, note, runs


class OnAStream(Dynamic):
    """Calls a module on a stream of its own."""

    def on_train_start(self) -> None:
        self.streams = [torch.cuda.Stream()]

    def logits(self, x: Tensor, batch_idx: int) -> Any:
        current, (stream,) = torch.cuda.current_stream(), self.streams
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            hidden = self.features(x)
        current.wait_stream(stream)
        return self.head(hidden)


def test_calls_on_another_stream_are_eager(tmp_path: Path) -> None:
    run = runs(tmp_path, OnAStream, ["features", "head"], "gpu", on_unsupported="eager")
    assert "0 replays" in note(run, "features")
    assert "on a stream of the user's" in note(run, "features")
    assert f"{FULL - WARMUP} replays" in note(run, "head")
