"""The tests of `tests/test_rows_watching.py`, on CUDA."""

from tests.test_rows_watching import *  # noqa: F403
