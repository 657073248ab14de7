"""State outside of modules, on CUDA."""

from tests.test_outside import *  # noqa: F403
