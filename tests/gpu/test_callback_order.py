"""The order of callbacks, on CUDA."""

from tests.test_callback_order import *  # noqa: F403
