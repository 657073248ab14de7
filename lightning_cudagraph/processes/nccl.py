"""A check of NCCL's buffer registration, which is unsafe in captures with expandable segments."""

from __future__ import annotations

import os

import torch

from lightning_cudagraph.compat.features import SEGMENTS
from lightning_cudagraph.compat.tables import require
from lightning_cudagraph.errors import ConfigurationError

_GRAPH_REGISTER = "NCCL_GRAPH_REGISTER"


def check_nccl(device: torch.device) -> None:
    """Refuse captures of NCCL's collectives with expandable segments and registered buffers.

    A registered buffer that spans segments can be read at unmapped addresses (NVIDIA/Megatron-LM and
    pytorch/torchtitan#3306 on captures with expandable segments).
    """
    if device.type != "cuda" or os.environ.get(_GRAPH_REGISTER) == "0":
        return
    require(SEGMENTS)
    if not torch.cuda.memory._snapshot()["allocator_settings"].get("expandable_segments", False):
        return
    found = os.environ.get(_GRAPH_REGISTER, "not set")
    raise ConfigurationError(
        f"The allocator has expandable segments, and {_GRAPH_REGISTER} is {found}: NCCL would register"
        " the buffers of a captured step, and could then read where nothing is. It reads the variable"
        f" when the process group is made: set {_GRAPH_REGISTER}=0 before that. Or leave"
        " `expandable_segments:True` out of PYTORCH_CUDA_ALLOC_CONF."
        ' `backend="off"` goes on without a graph.'
    )
