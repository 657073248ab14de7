"""Layer times by events in the graph."""

from tests.test_timings import *  # noqa: F403
