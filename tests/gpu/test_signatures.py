"""Batches of several signatures on CUDA."""

from tests.test_signatures import *  # noqa: F403
