"""On CUDA."""

from tests.test_plain_replays import *  # noqa: F403
