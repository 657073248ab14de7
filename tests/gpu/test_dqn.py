"""The tests of `tests/test_dqn.py`, on CUDA."""

from tests.test_dqn import *  # noqa: F403
