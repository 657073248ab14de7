"""The tests of `tests/test_rows_callbacks.py`, on CUDA."""

from tests.test_rows_callbacks import *  # noqa: F403
