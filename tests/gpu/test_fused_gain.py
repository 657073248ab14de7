"""Measured gain of a fused optimizer, on CUDA."""

from __future__ import annotations

import re

import pytest
import torch

from lightning_cudagraph.trainer.training.times.fused_gain import fused_notes
from tests.test_fused_gain import LONG, stepped


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW], ids=lambda make: make.__name__)
def test_the_gain_of_large_layers(make: type[torch.optim.Optimizer]) -> None:
    optimizer = stepped(make, "cuda", width=2048)
    before = [parameter.detach().clone() for parameter in optimizer.param_groups[0]["params"]]
    rng_state = torch.cuda.get_rng_state()
    (note,) = fused_notes(optimizer, LONG, 1.0)
    found = re.search(r"would step in (\S+) ms instead of (\S+) ms", note)
    assert found is not None
    assert 0 < float(found[1]) < float(found[2])
    after = optimizer.param_groups[0]["params"]
    assert all(map(torch.equal, before, after))
    assert torch.equal(rng_state, torch.cuda.get_rng_state())
    assert not optimizer.state


def test_without_a_fused_kernel() -> None:
    assert fused_notes(stepped(torch.optim.Adagrad, "cuda"), LONG, 0.001) == []
