"""Steps of optimizers by themselves, on CUDA."""

from tests.test_optimizer_runs import *  # noqa: F403
