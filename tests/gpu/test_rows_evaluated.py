"""The tests of `tests/test_rows_evaluated.py`, on CUDA."""

from tests.test_rows_evaluated import *  # noqa: F403
