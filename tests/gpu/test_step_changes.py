"""Changes and refusals of `GraphedStep`, on CUDA."""

from tests.test_step_changes import *  # noqa: F403
