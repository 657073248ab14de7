"""Times of eager runs on CUDA."""

from tests.test_layer_timings_monitor import *  # noqa: F403
