"""The equivalences of `tests/test_equivalence.py`, on CUDA."""

from tests.test_equivalence import *  # noqa: F403
