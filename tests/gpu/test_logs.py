"""Logged values on CUDA."""

from tests.test_logs import *  # noqa: F403
