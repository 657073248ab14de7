"""The fast path through Lightning's loop, on CUDA."""

from tests.test_advance import *  # noqa: F403
