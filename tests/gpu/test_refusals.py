"""The refusals of `tests/test_refusals.py`, on CUDA."""

from tests.test_refusals import *  # noqa: F403
