"""The tests of `tests/test_ppo.py`, on CUDA."""

from tests.test_ppo import *  # noqa: F403
