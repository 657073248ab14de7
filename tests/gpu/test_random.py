"""Random numbers on CUDA."""

from tests.test_random import *  # noqa: F403
