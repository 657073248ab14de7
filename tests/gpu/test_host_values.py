"""Strings, numbers and paths in batches, on CUDA."""

from tests.test_host_values import *  # noqa: F403
