"""Odd timed steps on CUDA."""

from tests.test_odd_timed_steps import *  # noqa: F403
