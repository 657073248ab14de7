"""What a run shows of its times at the end."""

from tests.test_views import *  # noqa: F403
