"""Paths of steps that branch on `batch_idx`, on CUDA."""

from tests.test_paths import *  # noqa: F403
