"""Two GPUs of which one has what the other has not: the same on NCCL."""

from tests.distributed.test_unequal import *  # noqa: F403
