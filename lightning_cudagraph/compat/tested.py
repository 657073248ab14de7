"""The versions that the whole test suite has been run on, and what is said on newer ones."""

from __future__ import annotations

import platform
from collections.abc import Mapping

import torch

__all__ = ["NEWEST", "newer_than_tested"]

# The newest of each in the table of docs/versions.md, which `python -m tests.versions` writes.
NEWEST: Mapping[str, str] = {"torch": "2.13.0", "lightning": "2.6.6", "Python": "3.11"}


def newer_than_tested(newest: Mapping[str, str] = NEWEST) -> str:
    """One line on what is newer than all that was tested; empty if nothing is.

    Of a version, the first two numbers count: probes of private names see what a patch release changes.
    """
    import lightning

    here = {
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "Python": platform.python_version(),
    }
    newer = [
        f"{name} {here[name]} is newer than {newest[name]}"
        for name in here
        if _minor(here[name]) > _minor(newest[name])
    ]
    if not newer:
        return ""
    return (
        f"{' and '.join(newer)}, the newest that this package was tested on; all private names that it"
        " needs are as they were"
    )


def _minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
