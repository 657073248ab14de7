"""Two GPUs train as they do without the callback, and decide together: the same on NCCL."""

from tests.distributed.test_together import *  # noqa: F403
