"""What TensorBoard and other loggers are given."""

from tests.test_dashboard import *  # noqa: F403
