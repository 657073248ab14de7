"""Manual optimization with `GraphedStep`, on CUDA."""

from tests.test_manual import *  # noqa: F403
