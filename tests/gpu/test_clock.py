"""The clock of a fit on CUDA."""

from tests.test_clock import *  # noqa: F403
