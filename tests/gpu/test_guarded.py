"""Runs that change what a step reads, on CUDA."""

from tests.test_guarded import *  # noqa: F403
