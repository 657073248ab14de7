"""Evaluations on two GPUs: the same on NCCL."""

from tests.distributed.test_evaluated import *  # noqa: F403
