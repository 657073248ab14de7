"""Fixtures of the tests that need a CUDA GPU, and are skipped without one."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")


@pytest.fixture
def accelerator() -> str:
    """Runs of the shared tests train on the GPU here."""
    return "gpu"
