"""The tests of evaluation graphs, on CUDA."""

from tests.test_evaluation import *  # noqa: F403
