"""Accumulation on CUDA."""

from tests.test_accumulation import *  # noqa: F403
