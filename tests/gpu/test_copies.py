"""The tests of `tests/test_copies.py`, on CUDA."""

from tests.test_copies import *  # noqa: F403
