"""Checkpoints on CUDA."""

from tests.test_checkpoints import *  # noqa: F403
