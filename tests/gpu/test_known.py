"""The tests of `tests/test_known.py`, on CUDA."""

from tests.test_known import *  # noqa: F403
