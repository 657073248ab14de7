"""The tests of `tests/test_host_checks.py`, on CUDA."""

from tests.test_host_checks import *  # noqa: F403
