"""Deferred calls of metrics that use tensors of others: the same on CUDA."""

from tests.test_deferred_metrics import *  # noqa: F403
