"""The host's time between replays, by part, on CUDA."""

from tests.test_host_times import *  # noqa: F403
