"""Batches on their way to a GPU."""

from tests.test_transfer import *  # noqa: F403
