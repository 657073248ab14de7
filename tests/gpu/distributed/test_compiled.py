"""Two GPUs train with a compiled step as they do without the callback."""

from tests.distributed.test_compiled import *  # noqa: F403
