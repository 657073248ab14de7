"""Strategies that split weights between GPUs: the same on NCCL, and FSDP1."""

from tests.distributed.test_sharded import *  # noqa: F403
