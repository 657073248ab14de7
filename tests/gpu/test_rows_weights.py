"""The tests of `tests/test_rows_weights.py`, on CUDA."""

from tests.test_rows_weights import *  # noqa: F403
