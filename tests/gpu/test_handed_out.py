"""Numbers from the frameworks' own objects, on the GPU."""

from tests.test_handed_out import *  # noqa: F403
