"""Fixtures that the tests on the emulator and those on CUDA share."""

from __future__ import annotations

import pytest
import torch

# Tiny tensors gain nothing from threads, and several processes on few cores lose a lot by them.
torch.set_num_threads(1)


@pytest.fixture
def accelerator() -> str:
    """Where runs train; `tests/gpu` overrides it."""
    return "cpu"
