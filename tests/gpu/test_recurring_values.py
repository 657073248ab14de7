"""Steps that branch on attributes with values that recur, on CUDA."""

from tests.test_recurring_values import *  # noqa: F403
