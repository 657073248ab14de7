"""Guards on CUDA."""

from tests.test_guards import *  # noqa: F403
