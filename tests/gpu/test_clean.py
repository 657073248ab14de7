"""Nothing is left replaced on CUDA either."""

from tests.test_clean import *  # noqa: F403
