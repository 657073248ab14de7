"""The tests of `tests/test_mended.py`, on CUDA."""

from tests.test_mended import *  # noqa: F403
