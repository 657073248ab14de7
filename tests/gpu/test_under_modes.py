"""What torch computes in another way under the modes of a capture, on CUDA."""

from tests.test_under_modes import *  # noqa: F403
