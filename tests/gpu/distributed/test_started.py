"""Processes that Lightning starts from within Python: the same on GPUs."""

from tests.distributed.test_started import *  # noqa: F403
