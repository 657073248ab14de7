"""The same on CUDA."""

from tests.test_marks import *  # noqa: F403
