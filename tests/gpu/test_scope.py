"""The optimizer behind the graph, on CUDA."""

from tests.test_scope import *  # noqa: F403
