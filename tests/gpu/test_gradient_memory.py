"""The gradients of `tests/test_gradient_memory.py` on CUDA."""

from tests.test_gradient_memory import *  # noqa: F403
