"""Host code in the step, on CUDA."""

from tests.test_step_audit import *  # noqa: F403
