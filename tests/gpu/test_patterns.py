"""Dynamic patterns, on CUDA."""

from tests.test_patterns import *  # noqa: F403
