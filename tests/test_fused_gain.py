"""The report's note on what a fused optimizer would save: conditions. On CUDA: tests/gpu."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_cudagraph.trainer.training.times import fused_gain
from lightning_cudagraph.trainer.training.times.fused_gain import fused_notes

LONG, SHORT = 10_000, 100


def stepped(make: Any, device: str = "cpu", width: int = 8) -> torch.optim.Optimizer:
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(6))).to(device)
    optimizer: torch.optim.Optimizer = make(net.parameters())
    net(torch.randn(4, width, device=device)).sum().backward()
    return optimizer


FORMS = {
    "fused already": lambda p: torch.optim.AdamW(p, fused=True),
    "no fused form": lambda p: torch.optim.RMSprop(p),
    "differentiable": lambda p: torch.optim.AdamW(p, differentiable=True),
}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Measurements that were made, each of 3 ms or, fused, 1 ms; parameters count as on a GPU."""
    forms: list[dict[str, Any]] = []

    def step_ms(optimizer: Any, groups: Any, form: dict[str, Any]) -> float:
        forms.append(form)
        return 1.0 if form.get("fused") else 3.0

    monkeypatch.setattr(fused_gain, "_step_ms", step_ms)
    monkeypatch.setattr(fused_gain, "_is_plain", lambda parameter: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 10**9))
    return forms


def test_the_gain(measured: list[dict[str, Any]]) -> None:
    (note,) = fused_notes(stepped(torch.optim.AdamW), LONG, 10.0)
    assert "`AdamW(..., fused=True)` would step in 1.000 ms instead of 3.000 ms, 20% of a step" in note
    assert measured == [{}, {"fused": True, "foreach": None, "capturable": True}]


@pytest.mark.parametrize("form", FORMS)
def test_nothing_to_gain(form: str, measured: list[dict[str, Any]]) -> None:
    assert fused_notes(stepped(FORMS[form]), LONG, 10.0) == []
    assert measured == []


def test_not_measured(measured: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = stepped(torch.optim.AdamW)
    assert fused_notes(optimizer, SHORT, 10.0) == []
    assert fused_notes(optimizer, LONG, None) == []
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 10**9))
        assert fused_notes(optimizer, LONG, 10.0) == []
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    assert fused_notes(optimizer, LONG, 10.0) == []
    handle.remove()
    assert measured == []
    assert fused_notes(optimizer, LONG, 1000.0) == []  # too little


def test_on_a_cpu() -> None:
    assert fused_notes(stepped(torch.optim.AdamW), LONG, 10.0) == []
