"""The wrapped functions of `tests/test_wrapped_functions.py` on CUDA."""

from tests.test_wrapped_functions import *  # noqa: F403
