"""Every optimizer in every precision, on CUDA."""

from tests.test_family import *  # noqa: F403
