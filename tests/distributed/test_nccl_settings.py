"""What is set for NCCL when a callback is made: only what it needs, and nothing that is set already."""

from __future__ import annotations

import os

import pytest

from lightning_cudagraph import CUDAGraphCallback

REGISTER = "NCCL_GRAPH_REGISTER"


@pytest.mark.parametrize(
    ("variables", "backend", "found"),
    [
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "auto", "0"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}, "auto", "0"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "off", None),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", REGISTER: "1"}, "auto", "1"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, "auto", None),
        ({}, "auto", None),
    ],
)
def test_buffers_are_not_registered_where_they_move(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], backend: str, found: str | None
) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", REGISTER):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    CUDAGraphCallback(backend=backend)  # type: ignore[arg-type]
    assert os.environ.get(REGISTER) == found
