"""Whole runs, as TensorBoard and other loggers show them."""

from tests.test_dashboard import *  # noqa: F403
