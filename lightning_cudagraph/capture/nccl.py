"""What NCCL must be told before its collectives are captured, and whether it was."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from lightning_cudagraph.compat.features import SEGMENTS
from lightning_cudagraph.compat.tables import require
from lightning_cudagraph.errors import ConfigurationError

__all__ = ["check_nccl", "settle_nccl"]

_GRAPH_REGISTER = "NCCL_GRAPH_REGISTER"
_EXPANDABLE = "expandable_segments"


def settle_nccl() -> str:
    """Set what NCCL needs for captures, if it needs anything, before it is first asked.

    Returns:
        What was set, in words.
    """
    asked = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if f"{_EXPANDABLE}:True" not in asked or _GRAPH_REGISTER in os.environ:
        return ""
    if dist.is_available() and dist.is_initialized():
        return ""  # too late
    # Registered, a buffer that spans segments can be read where nothing is (NVIDIA/Megatron-LM and
    # pytorch/torchtitan#3306 on captures with this allocator).
    os.environ[_GRAPH_REGISTER] = "0"
    return f"{_GRAPH_REGISTER}=0 is set, because the allocator has expandable segments"


def check_nccl(device: torch.device) -> None:
    """Refuse captures of NCCL's collectives that would read where nothing is.

    Raises:
        ConfigurationError: if NCCL registers the buffers of captures, and the allocator moves them.
    """
    if device.type != "cuda" or os.environ.get(_GRAPH_REGISTER) == "0":
        return
    require(SEGMENTS)
    if not torch.cuda.memory._snapshot()["allocator_settings"].get(_EXPANDABLE, False):
        return
    found = os.environ.get(_GRAPH_REGISTER, "not set")
    raise ConfigurationError(
        f"The allocator has expandable segments, and {_GRAPH_REGISTER} is {found}: NCCL would register"
        " the buffers of a captured step, and could then read where nothing is. It reads the variable"
        f" when the process group is made; set {_GRAPH_REGISTER}=0 before that, or make the"
        " `CUDAGraphCallback` or the `GraphedStep` before that, which sets it. Or leave"
        " `expandable_segments:True` out of PYTORCH_CUDA_ALLOC_CONF."
        ' `backend="off"` goes on without a graph.'
    )
