"""The tests of `tests/test_doctor.py`, on CUDA."""

from tests.test_doctor import *  # noqa: F403

# The output in docs/doctor.md is that of a machine without a GPU.
del test_the_page  # type: ignore[name-defined] # noqa: F821
