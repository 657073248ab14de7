"""The same on CUDA, with NCCL."""

from tests.test_collective_marks import *  # noqa: F403
