"""The tests of `tests/test_rows_trainer.py`, on CUDA."""

from tests.test_rows_trainer import *  # noqa: F403
