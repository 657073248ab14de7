"""Fixtures that the tests on the emulator and those on CUDA share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from lightning_cudagraph.capture import stream_choice

# Tiny tensors gain nothing from threads, and several processes on few cores lose a lot by them.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--streams 4`: all captures of the tests are on four streams, where these do not say."""
    parser.addoption("--streams", default=str(stream_choice.DEFAULT_STREAMS))


def pytest_configure(config: pytest.Config) -> None:
    streams = config.getoption("--streams")
    stream_choice.DEFAULT_STREAMS = streams if streams == "auto" else int(streams)


@pytest.fixture
def hypothesis_leaves_no_clock() -> Iterator[None]:
    """Hypothesis reads a clock in each collection of garbage, for ever; no captured step may."""
    before = list(gc.callbacks)
    yield
    gc.callbacks[:] = before


@pytest.fixture
def accelerator() -> str:
    """Where runs train; `tests/gpu` overrides it."""
    return "cpu"
