"""The tests of `tests/test_strides.py`, on CUDA."""

from tests.test_strides import *  # noqa: F403
