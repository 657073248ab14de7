"""The tests of `tests/test_averages.py`, on CUDA."""

from tests.test_averages import *  # noqa: F403
