"""Steps of the optimizer over several batches, on CUDA."""

from tests.test_whole_steps import *  # noqa: F403
