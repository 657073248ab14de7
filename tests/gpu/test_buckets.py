"""Padding to buckets on CUDA."""

import torch
from torch.utils.data import DataLoader

from lightning_cudagraph import Buckets
from tests.test_buckets import *  # noqa: F403
from tests.test_buckets import VALUES, stacked


def test_what_is_pinned_stays_pinned() -> None:
    """So that it is copied to the device while the host goes on."""
    buckets = Buckets([8], {0: 0})
    assert buckets.pad([torch.ones(2, 3).pin_memory()])[0].is_pinned()
    assert not buckets.pad([torch.ones(2, 3)])[0].is_pinned()


def test_workers_pad_where_the_parent_has_used_cuda() -> None:
    torch.zeros(1, device="cuda")
    collate = Buckets([8], VALUES, length_key="length").collate(stacked)
    loader = DataLoader([[1, 2, 3]] * 4, collate_fn=collate, num_workers=1, pin_memory=True)
    for batch in loader:
        assert batch["tokens"].shape == (1, 8)
        assert batch["tokens"].is_pinned()
