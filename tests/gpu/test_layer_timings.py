"""Times of eager runs on CUDA."""

from tests.test_layer_timings import *  # noqa: F403
