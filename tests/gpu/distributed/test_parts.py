"""Captured modules on two GPUs: the same on NCCL."""

from tests.distributed.test_parts import *  # noqa: F403
