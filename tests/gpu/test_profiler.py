"""The profiler of all graphs, on CUDA."""

from tests.test_profiler import *  # noqa: F403
