"""The tests of `tests/test_demos.py`, on CUDA."""

from tests.test_demos import *  # noqa: F403
