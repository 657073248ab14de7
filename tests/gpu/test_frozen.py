"""Host code in the step, on CUDA."""

from tests.test_frozen import *  # noqa: F403
