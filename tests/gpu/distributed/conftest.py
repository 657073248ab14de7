"""Everything in this folder needs two CUDA GPUs, and skips itself where there are fewer."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _needs_two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA GPUs")
