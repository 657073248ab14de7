"""The tests of `tests/test_attention.py`, on CUDA."""

from tests.test_attention import *  # noqa: F403
from tests.test_attention import torchs_own

__all__ = ["torchs_own"]
