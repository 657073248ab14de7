"""Every optimizer in every precision, on CUDA."""

from tests.test_family_resumed import *  # noqa: F403
