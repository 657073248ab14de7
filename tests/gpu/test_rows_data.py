"""The tests of `tests/test_rows_data.py`, on CUDA."""

from tests.test_rows_data import *  # noqa: F403
