"""The newest versions that the whole test suite has run on, and the note about newer ones."""

from __future__ import annotations

import platform
from collections.abc import Mapping

import torch

from lightning_cudagraph.compat.installed import minor_of

# The newest of each in the table of docs/versions.md (written by `python -m tests.versions`).
NEWEST: Mapping[str, str] = {"torch": "2.15.0", "lightning": "2.6.6", "Python": "3.13"}


def newer_than_tested() -> str:
    """One line that names the packages newer than any version tested; empty if there are none.

    Only major and minor version are compared: probes of private names see changes of a patch release.
    """
    import lightning

    here = {
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "Python": platform.python_version(),
    }
    newer = [
        f"{name} {here[name]} is newer than {NEWEST[name]}"
        for name in here
        if minor_of(here[name]) > minor_of(NEWEST[name])
    ]
    if not newer:
        return ""
    return (
        f"{' and '.join(newer)}, the newest that this package was tested on; all private names that it"
        " needs are as they were"
    )
