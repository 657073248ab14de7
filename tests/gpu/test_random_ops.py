"""Random ops on several streams of a GPU."""

from tests.test_random_ops import *  # noqa: F403
