"""Numbers from the frameworks' own objects, on the GPU."""

from tests.test_framework_reads import *  # noqa: F403
