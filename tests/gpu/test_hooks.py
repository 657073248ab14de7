"""Hooks inside the step, on CUDA."""

from tests.test_hooks import *  # noqa: F403
