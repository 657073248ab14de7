"""Several machines: the same on NCCL, where each agent sees one of the GPUs."""

from tests.distributed.test_hosts import *  # noqa: F403
