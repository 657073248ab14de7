"""The ends of runs on two GPUs: the same on NCCL."""

from tests.distributed.test_ends import *  # noqa: F403
