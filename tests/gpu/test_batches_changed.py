"""Steps that change their batch, on a GPU."""

from tests.test_batches_changed import *  # noqa: F403
