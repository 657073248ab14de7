"""Metrics in the graph, on CUDA."""

from tests.test_metrics_in_graph import *  # noqa: F403
