"""Collections of garbage in the middle of a step, on CUDA."""

from tests.test_garbage import *  # noqa: F403
