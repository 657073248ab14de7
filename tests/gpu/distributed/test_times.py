"""The times of two GPUs: the same on NCCL."""

from tests.distributed.test_times import *  # noqa: F403
