"""What ops are said to read and write, compared with what their CUDA kernels do."""

from tests.test_accesses import *  # noqa: F403
