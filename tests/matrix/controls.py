"""Negative controls: each switches a mechanism off, with a case that then trains wrong.

Without a control, nothing proves that a case needs the mechanism. To add one, give the patches by path,
and name the case.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from lightning_cudagraph.checks.audit.calls.rules import HostRules
from lightning_cudagraph.checks.audit.step_audit import StepAudit
from tests.matrix.judge import Case
from tests.matrix.places import LOW, Place
from tests.matrix.runs import UNCHECKED


@contextmanager
def _no_audit(*args: Any, **kwargs: Any) -> Iterator[StepAudit]:
    yield StepAudit(nn.Module(), torch.device("cpu"), HostRules())


class _ReplacedFunction(Place):
    """A function that only code of its library names, which no guard compares."""

    def make(self) -> None:
        self.before = vars(statistics)["fsum"]

    def read(self) -> float:
        return statistics.fmean([LOW])

    def write(self, number: float) -> None:
        vars(statistics)["fsum"] = lambda values: number

    def close(self) -> None:
        vars(statistics)["fsum"] = self.before


@dataclass(frozen=True)
class Control:
    """A mechanism, switched off.

    Attributes:
        patches: the replacements, by path.
        case: a case that is right with the mechanism, and wrong without.
        needs_gpu: the case is wrong on a GPU only.
    """

    patches: dict[str, Any]
    case: Case
    needs_gpu: bool = False

    def switch_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for path, replacement in self.patches.items():
            monkeypatch.setattr(path, replacement)


_PACKAGE = "lightning_cudagraph"
_NO_GUARDS: dict[str, Any] = {f"{_PACKAGE}.checks.guards.guards.Guards.changed": lambda guards: None}
_NO_WALK: dict[str, Any] = {
    f"{_PACKAGE}.checks.walk.walker.Walk.quick_changes": lambda walk, everything: []
}
_NO_EFFECTS: dict[str, Any] = {
    f"{_PACKAGE}.checks.audit.effects.Effects.refused": lambda effects, captured: nullcontext()
}
_NEW = "batch start of a callback"


CONTROLS: dict[str, Control] = {
    "guards": Control(_NO_GUARDS, Case("attribute", "batch start of a callback")),
    "guards, of evaluation": Control(
        _NO_GUARDS, Case("attribute", "batch start of a callback", "evaluate")
    ),
    "guards, of a plain loop": Control(_NO_GUARDS, Case("attribute", "between two calls", "step")),
    "audit": Control(
        # What it would refuse is an effect of the captured step, too.
        {f"{_PACKAGE}.trainer.common.captured_run.step_audit": _no_audit, **_NO_EFFECTS},
        Case("counter: attribute", setting=UNCHECKED),
    ),
    "walk": Control(_NO_WALK, Case("deque", _NEW, setting=UNCHECKED)),
    "walk, of evaluation": Control(_NO_WALK, Case("deque", _NEW, "evaluate", UNCHECKED)),
    "walk, of a plain loop": Control(_NO_WALK, Case("deque", "between two calls", "step", UNCHECKED)),
    "checks of suspicions": Control(
        {f"{_PACKAGE}.checks.guards.suspicions.Suspicions.of": lambda suspicions, graph: ""},
        Case("getattr(self, f'w{i}')", _NEW, setting=UNCHECKED),
    ),
    "effects": Control(_NO_EFFECTS, Case("counter: ctypes", setting=UNCHECKED)),
    "checks after pauses": Control(
        {f"{_PACKAGE}.checks.verify.verifier.Verifier.pause": lambda verifier: None},
        Case("replaced function", "epoch start of the module", changes=1, make=_ReplacedFunction),
    ),
    "whole guards of tensors": Control(
        {f"{_PACKAGE}.tensors.layouts.Layouts.changed": lambda layouts, tensors: False},
        Case("strides of a buffer", _NEW, setting=UNCHECKED),
    ),
    "classes": Control(
        {
            f"{_PACKAGE}.checks.guards.classes.Classes.changed": lambda classes: False,
            f"{_PACKAGE}.checks.guards.classes.Classes.are_others": lambda classes: False,
        },
        Case("__class__ of a module assigned", _NEW, setting=UNCHECKED),
    ),
    # On a CPU, backward passes run in the calling thread anyway.
    "backward passes in one thread": Control(
        {
            f"{_PACKAGE}.device.cuda.cuda_backend.set_multithreading_enabled": lambda _: nullcontext(),
            **_NO_EFFECTS,
        },
        Case("file", setting=UNCHECKED, where="gradient hook"),
        needs_gpu=True,
    ),
}
