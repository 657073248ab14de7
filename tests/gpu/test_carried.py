"""The tests of `tests/test_carried.py`, on CUDA."""

from tests.test_carried import *  # noqa: F403
