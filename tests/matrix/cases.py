"""Selection of cases: a few in every run of the tests, or the whole matrix."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from tests.matrix.effects import EFFECTS
from tests.matrix.judge import Case
from tests.matrix.moments import Mode, moments_of
from tests.matrix.places import PLACES, SELDOM
from tests.matrix.runs import CHECKED, DEFAULT, UNCHECKED, Use

MODES: tuple[Mode, ...] = ("train", "evaluate", "step")
_USES: tuple[Use, ...] = ("factor", "factor", "branch", "shape")


def missing(case: Case) -> str:
    """A package that a case needs and that is not installed."""
    return next((name for name in case.kind.packages if importlib.util.find_spec(name) is None), "")


def _has(name: str, mode: Mode) -> bool:
    kind = PLACES.get(name) or EFFECTS[name]
    return mode != "step" or not kind.needs_trainer


def _turns(names: list[str], mode: Mode, changes: int) -> Iterator[Case]:
    """One case for each place, cycling through moments, uses and verification."""
    moments = moments_of(mode)
    for index, name in enumerate(names):
        yield Case(
            name,
            moments[index % len(moments)],
            mode,
            (CHECKED, UNCHECKED)[index % 2],
            _USES[index % len(_USES)],
            changes=changes,
        )


def few() -> list[Case]:
    """Each place at one moment, each moment with at least three places, and some effects."""
    names = [name for name in PLACES if name not in SELDOM]
    cases = list(_turns(names, "train", changes=1))
    for mode in ("evaluate", "step"):
        there = [name for name in names if _has(name, mode)]
        cases += _turns(there[3 :: len(there) // 4], mode, changes=1)
    # Counters in a few places, and others: all at their defaults, or with nothing verified.
    counters = [name for name in EFFECTS if name.removeprefix("counter: ") in names][5::20]
    others = [name for name in EFFECTS if not name.startswith("counter: ")][::4]
    cases += [Case(name, setting=DEFAULT) for name in counters]
    cases += [Case(name, setting=UNCHECKED) for name in others]
    cases += [
        Case(f"counter: {name}", setting=UNCHECKED)
        for name in ("sqlite3", "key of the optimizer's state")
    ]
    cases.append(Case("counter: attribute of the optimizer", mode="step"))
    cases.append(Case("put into a queue that a thread empties", setting=DEFAULT))
    cases += [late(name, "train") for name in ("file", "sqlite3", "random.Random", "generator")]
    cases += [late("buffer of a module in a list", mode) for mode in MODES]
    return cases


def places(name: str, modes: tuple[Mode, ...] = MODES) -> Iterator[Case]:
    """All cases of a place."""
    for mode in modes:
        if not _has(name, mode):
            continue
        for index, moment in enumerate(moments_of(mode)):
            yield Case(name, moment, mode, CHECKED, _USES[index % len(_USES)])
            yield Case(name, moment, mode, UNCHECKED, "factor")


def late(name: str, mode: Mode) -> Case:
    """An effect that begins after the capture."""
    moment = "between two calls" if mode == "step" else "batch start of a callback"
    return Case(name, moment, mode, UNCHECKED, changes=1)


def effects(name: str, modes: tuple[Mode, ...] = MODES) -> Iterator[Case]:
    """All cases of an effect."""
    for mode in modes:
        if not _has(name, mode):
            continue
        yield Case(name, "", mode, DEFAULT)
        yield Case(name, "", mode, UNCHECKED)
        yield late(name, mode)
        if mode != "evaluate":
            yield Case(name, "", mode, UNCHECKED, where="gradient hook")
            yield Case(name, "", mode, DEFAULT, where="pre-hook of the optimizer")


def whole(name: str, modes: tuple[Mode, ...] = MODES) -> Iterator[Case]:
    """All cases of a place or an effect."""
    return places(name, modes) if name in PLACES else effects(name, modes)
