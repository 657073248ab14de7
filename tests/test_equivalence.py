"""The run with the callback is the run without it, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_cudagraph import CUDAGraphCallback
from tests.harness import Net, assert_same, make, train


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("clip", [None, ("norm", 0.1), ("value", 0.01)])
def test_same_as_plain(tmp_path: Path, precision: str, clip: tuple[str, float] | None) -> None:
    kwargs = {"precision": precision}
    if clip is not None:
        kwargs |= {"gradient_clip_algorithm": clip[0], "gradient_clip_val": clip[1]}
    plain = train(make(Net), tmp_path / "plain", **kwargs)
    graph = train(make(Net), tmp_path / "graph", CUDAGraphCallback(), **kwargs)
    assert_same(plain, graph)
    assert graph.counts.warmed_up == 3
