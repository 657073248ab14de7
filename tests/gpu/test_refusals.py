"""The refusals of `tests/test_refusals.py`, on CUDA, and the one that Lightning forestalls on a CPU."""

from pathlib import Path

import pytest

from lightning_cudagraph import CUDAGraphCallback, UnsupportedError
from tests.harness import Net, make, train
from tests.test_refusals import *  # noqa: F403


def test_fp16_is_refused(tmp_path: Path, accelerator: str) -> None:
    with pytest.raises(UnsupportedError, match="16-mixed"):
        train(make(Net), tmp_path, CUDAGraphCallback(), precision="16-mixed", accelerator=accelerator)
