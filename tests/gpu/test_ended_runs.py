"""A run that is ended on CUDA has its report too."""

from tests.test_ended_runs import *  # noqa: F403
