"""Planted faults on CUDA."""

from tests.test_planted_faults import *  # noqa: F403
