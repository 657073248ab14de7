"""Changes, refusals and wrong uses of `GraphedStep`, on CUDA."""

from tests.test_step_changes import *  # noqa: F403
