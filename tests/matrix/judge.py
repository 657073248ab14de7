"""Outcome of a case: equal to the run without graphs, refused, eager, wrong, or a vague refusal."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lightning_cudagraph import CUDAGraphError
from tests.harness import differences
from tests.matrix.effects import EFFECTS, Effect
from tests.matrix.moments import MOMENTS, Mode, Never
from tests.matrix.places import PLACES, Place
from tests.matrix.runs import CHECKED, Record, Setting, Use, Where, run

EQUAL, REFUSED, EAGER, WRONG, VAGUE = "equal", "refused", "eager", "WRONG", "VAGUE"


@dataclass(frozen=True)
class Case:
    """One case of the matrix.

    Attributes:
        name: of the place, or of the effect.
        moment: of the change of the place, or of the beginning of a late effect; none for others.
        mode: the kind of step that is graphed.
        setting: the settings of its graphs.
        use: the way in which the place's number enters the loss.
        where: the position of the effect in the step.
        changes: number of changes of the place.
        make: makes a place that is in no list.
    """

    name: str
    moment: str = ""
    mode: Mode = "train"
    setting: Setting = CHECKED
    use: Use = "factor"
    where: Where = "forward"
    changes: int = 2
    make: Callable[[Any], Place] | None = None

    @property
    def kind(self) -> type[Place] | type[Effect]:
        if self.name in PLACES:
            return PLACES[self.name]
        kind = EFFECTS[self.name]
        return type(f"Late{kind.__name__}", (kind,), {"waits": True}) if self.moment else kind

    def __str__(self) -> str:
        parts = [self.name, self.moment or self.where]
        parts += [] if self.mode == "train" else [self.mode]
        parts += [] if self.use == "factor" else [self.use]
        parts += [str(self.setting)] if str(self.setting) else []
        return " - ".join(parts)

    def run(self, setting: Setting | None, accelerator: str, name: str = "") -> Record:
        """Run it, or the same with another place."""
        make = PLACES[name] if name else self.make or self.kind
        moment = MOMENTS[self.moment] if self.moment else Never
        return run(
            make,
            self.mode,
            setting,
            accelerator,
            moment=moment,
            use=self.use,
            where=self.where,
            changes=self.changes,
        )


@dataclass(frozen=True)
class Verdict:
    """The outcome of a case.

    Attributes:
        outcome: one of the five.
        detail: the difference, the error, or the report.
    """

    outcome: str
    detail: str = ""

    @property
    def is_right(self) -> bool:
        return self.outcome in (EQUAL, REFUSED, EAGER)

    def __str__(self) -> str:
        return f"{self.outcome}: {self.detail}"


_plain: dict[Any, Record] = {}


def _plain_run(case: Case, accelerator: str, *, own: bool) -> Record:
    """The run without graphs to compare with.

    A place that returns what was written to it trains as an attribute does: all such places share one
    run. Other places have their own.
    """
    if own:
        return case.run(None, accelerator)
    is_place = case.name not in EFFECTS
    name = "" if is_place else case.name
    key = (name, case.moment, case.mode, case.use, case.where, case.changes, accelerator)
    if key not in _plain:
        _plain[key] = case.run(None, accelerator, "attribute" if is_place else "")
    return _plain[key]


def _differences(case: Case, record: Record, accelerator: str) -> list[str]:
    shared = differences(_plain_run(case, accelerator, own=False).left, record.left)
    if not shared or case.name in EFFECTS:
        return shared
    return differences(_plain_run(case, accelerator, own=True).left, record.left)


_NAME = re.compile(r"`[^`]+`")
_LINE = re.compile(r"tests/matrix/\w+\.py:\d+")


def message_of(error: CUDAGraphError) -> str:
    return str(error)


def _lacks(error: CUDAGraphError | None, recaptures: list[str]) -> str:
    """The part that is missing in a refusal, or in a reason for a re-capture; or nothing."""
    message = "" if error is None else message_of(error)
    if message and not _NAME.search(message):
        return f"the refusal does not name what was found: {message}"
    if message and not _LINE.search(message):
        return f"the refusal does not name file and line: {message}"
    nameless = [why for why in recaptures if not _NAME.search(why)]
    return f"captured anew without saying what changed: {nameless[0]}" if nameless else ""


def judge(case: Case, accelerator: str = "cpu") -> Verdict:
    """Run a case; where it is refused, once more with ``on_unsupported="eager"``."""
    try:
        record = case.run(case.setting, accelerator)
        if (error := record.error) is not None:
            record = case.run(replace(case.setting, eager=True), accelerator)
    except Exception as raised:  # of no kind that this package raises on purpose
        return Verdict(WRONG, f"raised {raised!r}\n{''.join(traceback.format_tb(raised.__traceback__))}")
    if record.error is not None:
        return Verdict(WRONG, f"refused also where it should be eager: {record.error}")
    if found := _differences(case, record, accelerator):
        after = "" if error is None else f"; after the refusal: {error}"
        return Verdict(WRONG, f"{len(found)} differences, the first: {found[:3]}{after}")
    if lacks := _lacks(error, record.recaptures):
        return Verdict(VAGUE, lacks)
    if error is not None:
        return Verdict(REFUSED, str(error))
    return Verdict(EQUAL if record.replayed else EAGER, record.report)
