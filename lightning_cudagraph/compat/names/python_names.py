"""Names of CPython with an underscore, present in all versions that this package runs on."""

from __future__ import annotations

from lightning_cudagraph.compat.features import CAPTURES
from lightning_cudagraph.compat.probes import PrivateName

PYTHON = (
    PrivateName("sys._getframe", (CAPTURES,), lambda f: f(0).f_code.co_name),
    PrivateName("logging.Logger._log", (CAPTURES,)),
    PrivateName("copy._deepcopy_dispatch"),  # without it, the doctor's copies share functions
    # Documented, for named tuples.
    PrivateName("platform.uname_result._fields", (CAPTURES,)),
)
