"""The tests of several streams, on CUDA."""

from tests.test_streams import *  # noqa: F403
