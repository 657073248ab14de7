"""The gradients of `tests/test_lost_gradients.py` on CUDA."""

from tests.test_lost_gradients import *  # noqa: F403
