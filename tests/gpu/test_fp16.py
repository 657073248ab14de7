"""fp16 on CUDA."""

from tests.test_fp16 import *  # noqa: F403
