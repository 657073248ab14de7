"""The tests of `tests/test_rows_profilers.py`, on CUDA."""

from tests.test_rows_profilers import *  # noqa: F403
