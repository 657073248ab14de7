"""The comparison with peers, on CUDA."""

from tests.test_peers import *  # noqa: F403
