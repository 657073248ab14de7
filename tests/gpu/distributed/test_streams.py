"""The number of streams on two GPUs: the same on NCCL."""

from tests.distributed.test_streams import *  # noqa: F403
