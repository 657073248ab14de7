"""Fits with callbacks, hooks, progress bars and metrics of others, on CUDA."""

from tests.test_surroundings import *  # noqa: F403
