"""Mechanisms, each with what switches it off and a case that trains wrong without it.

A mechanism without a control here has no proof that a case needs it. To add one: say what is patched, by
its path and with what, and name the case.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from lightning_cudagraph.capture.audit.frozen import StepAudit
from lightning_cudagraph.capture.audit.mentions import MentionedNames
from tests.matrix.judge import Case
from tests.matrix.runs import UNCHECKED


@contextmanager
def _no_audit(*args: Any, **kwargs: Any) -> Iterator[StepAudit]:
    yield StepAudit(MentionedNames())


@dataclass(frozen=True)
class Control:
    """A mechanism, switched off.

    Attributes:
        patches: what stands in for what, by path.
        case: it is right with the mechanism, and wrong without.
    """

    patches: dict[str, Any]
    case: Case

    def switch_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for path, replacement in self.patches.items():
            monkeypatch.setattr(path, replacement)


_GUARDS = "lightning_cudagraph.capture.checks.guards.Guards.changed"
_NO_GUARDS: dict[str, Any] = {_GUARDS: lambda guards: None}

CONTROLS: dict[str, Control] = {
    "guards": Control(_NO_GUARDS, Case("attribute", "batch start of a callback")),
    "guards, of evaluation": Control(
        _NO_GUARDS, Case("attribute", "batch start of a callback", "evaluate")
    ),
    "guards, of a plain loop": Control(_NO_GUARDS, Case("attribute", "between two calls", "step")),
    "audit": Control(
        {"lightning_cudagraph.training.recording.frozen_python_audit": _no_audit},
        Case("counter: attribute", setting=UNCHECKED),
    ),
}
