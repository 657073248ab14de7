"""Plausible code on CUDA."""

from tests.test_scope import *  # noqa: F403
