"""Verification on CUDA."""

from tests.test_walker import *  # noqa: F403
