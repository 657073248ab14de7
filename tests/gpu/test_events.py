"""Timers and registries, by CUDA events."""

from tests.test_events import *  # noqa: F403
