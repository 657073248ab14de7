"""Scalers, optimizers, shapes, modes and wrong uses of `GraphedStep`, on CUDA."""

from tests.test_step_calls import *  # noqa: F403
