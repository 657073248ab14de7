"""The backend for a device."""

from __future__ import annotations

from typing import Literal

import torch

from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.device.cuda.cuda_backend import CudaBackend
from lightning_cudagraph.device.emulator.emulator_backend import EmulatorBackend
from lightning_cudagraph.errors import UnsupportedError, wrong_argument

BackendName = Literal["auto", "cuda", "emulator", "off"]
# The devices of the backends that the user can name.
_DEVICES = {"cuda": "cuda", "emulator": "cpu"}


def backend_for(device: torch.device, name: str = "auto", owner: str = "GraphedStep") -> Backend:
    """Return the backend for a device, if it is the one that the argument `backend` of `owner` names."""
    if _DEVICES.get(name, device.type) != device.type:
        expected = f'one for {device}, where the step runs, such as "auto"'
        raise wrong_argument(owner, "backend", name, expected)
    if device.type == "cuda":
        return CudaBackend(device)
    if device.type == "cpu":
        return EmulatorBackend()
    raise UnsupportedError(f"The step runs on {device}, which has no CUDA graphs.", "Use a CUDA GPU.")
