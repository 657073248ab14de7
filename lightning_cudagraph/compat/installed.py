"""Checks of the installed packages: presence and versions at import, and a torch without CUDA."""

from __future__ import annotations

import os
import re
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

# The folder of this package, ending in a separator.
PACKAGE_DIR = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

_OLDEST = {"torch": (2, 10), "lightning": (2, 6)}
# In which the driver lists GPUs.
_GPUS = Path("/proc/driver/nvidia/gpus")


def check_installed() -> None:
    """Refuse versions that are too old, before an import inside another package fails."""
    if find_spec("lightning") is None:
        raise ImportError(
            "`lightning_cudagraph` needs the package `lightning` (2.6 or newer). `pip install"
            " lightning`, and import `Trainer` with `from lightning.pytorch import Trainer`.",
            name="lightning",
        )
    for package, oldest in _OLDEST.items():
        found = _version_of(package)
        if minor_of(found) < oldest:
            wanted = ".".join(map(str, oldest))
            raise ImportError(
                f"`lightning_cudagraph` needs {package} {wanted} or newer, and {found} is installed."
                f" Install it with `pip install '{package}>={wanted}'`.",
                name=package,
            )


def gpu_without_cuda(built_for: str | None, hip: str | None) -> str:
    """One line if there is an NVIDIA GPU that this build of torch cannot use; otherwise empty."""
    if built_for is not None or hip is not None or not (_GPUS.is_dir() and any(_GPUS.iterdir())):
        return ""
    return (
        f"this machine has an NVIDIA GPU, and torch {_version_of('torch')} was built without CUDA:"
        " training runs on the CPU. Install a build for CUDA (https://pytorch.org/get-started)"
    )


def minor_of(version: str) -> tuple[int, ...]:
    """Major and minor version, without what may follow them (`2.7dev`)."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def _version_of(package: str) -> str:
    if package == "torch":  # has its build in the version, and may be installed without metadata
        return str(import_module("torch").__version__)
    return version(package)
