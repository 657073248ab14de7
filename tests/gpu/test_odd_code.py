"""Plausible code on CUDA."""

from tests.test_odd_code import *  # noqa: F403
