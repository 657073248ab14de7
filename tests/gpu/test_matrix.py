"""The matrix of places and moments, on CUDA."""

from tests.test_matrix import *  # noqa: F403
