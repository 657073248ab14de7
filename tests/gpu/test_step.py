"""`GraphedStep` in plain loops, on CUDA."""

from tests.test_step import *  # noqa: F403
