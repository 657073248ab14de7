"""User hooks around steps on the fast path, on CUDA."""

from tests.test_batch_hooks import *  # noqa: F403
