"""Compiled steps of optimizers on CUDA, with kernels of Inductor's: one for many parameters."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch._inductor.utils import fresh_cache

from lightning_cudagraph import CUDAGraphCallback
from tests.harness import assert_same
from tests.test_compiled_optimizers import *  # noqa: F403
from tests.test_compiled_optimizers import FIT, How, Loop, assert_replayed, beside, fp16, in_place


@pytest.fixture
def _by_inductor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two compilations of one step find the same choice of kernels in files of their own."""
    monkeypatch.setattr(sys.modules[Loop.__module__], "BACKEND", "inductor")
    with fresh_cache():
        yield


@pytest.mark.usefixtures("_by_inductor")
@pytest.mark.parametrize("how", [in_place, beside], ids=lambda how: how.__name__)
@pytest.mark.parametrize("form", ["Adam", "AdamW-single", "AdamW-fused"])
def test_kernels_of_inductors(form: str, how: How) -> None:
    assert_replayed("gpu", FIT[form], how)


@pytest.mark.usefixtures("_by_inductor")
@pytest.mark.parametrize("form", ["SGD-momentum", "RMSprop"])
def test_kernels_that_read_the_learning_rate(form: str) -> None:
    assert_replayed("gpu", FIT[form], in_place)


@pytest.mark.usefixtures("_by_inductor")
def test_kernels_and_a_gradient_scaler(tmp_path: Path) -> None:
    plain = fp16(tmp_path / "plain", "gpu", None, FIT["AdamW-foreach"])
    graph = fp16(tmp_path / "graph", "gpu", CUDAGraphCallback(), FIT["AdamW-foreach"])
    assert_same(plain, graph)
    assert graph.counts.replayed == 18
