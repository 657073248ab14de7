"""Captured modules on two GPUs: the same on NCCL."""

from tests.distributed.test_captured_modules import *  # noqa: F403
