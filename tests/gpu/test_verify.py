"""Verification on CUDA."""

from tests.test_verify import *  # noqa: F403
