"""Metrics on CUDA."""

from tests.test_metrics import *  # noqa: F403
