"""Steps whose code has no file, on CUDA."""

from tests.test_typed_in import *  # noqa: F403
