"""Selection of the tests of the default run: all but the long ones.

A test is long if it has the mark `long`, or the mark `spread` without being one of the representative
cases. `--long` selects all; so does the name of a test (`file.py::test`). `tests/gpu` always runs whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

GPU = Path(__file__).parent / "gpu"
# The default run takes every sixteenth of the representatives: it shall end in minutes on two cores.
# All of them run with `--long`, and on a GPU.
_EVERY = 16


def lacks_gpu(config: pytest.Config, folder: Path) -> bool:
    """True if a folder needs a GPU, there is none, and it was not named."""
    if folder != GPU or torch.cuda.is_available():
        return False
    named = (Path(argument.partition("::")[0]).absolute() for argument in config.args)
    return not any(path == GPU or GPU in path.parents for path in named)


def takes_all(config: pytest.Config) -> bool:
    """True if this run includes the long tests."""
    return config.getoption("--long") or any("::" in argument for argument in config.args)


def long_ones(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The tests that the default run leaves out."""
    spread: dict[object, list[pytest.Item]] = {}
    found = []
    for item in items:
        if GPU in item.path.parents:
            continue
        if item.get_closest_marker("long"):
            found.append(item)
        elif item.get_closest_marker("spread"):
            spread.setdefault((item.parent, getattr(item, "originalname", item.name)), []).append(item)
    for cases in spread.values():
        mark = cases[0].get_closest_marker("spread")
        assert mark is not None
        kept = _kept(_indices(cases), *mark.args, **mark.kwargs)
        found += [item for index, item in enumerate(cases) if index not in kept]
    return found


def _indices(cases: Sequence[pytest.Item]) -> list[dict[str, int]]:
    """The values of the parameters of each case, numbered as they first appear."""
    seen: dict[str, dict[int, int]] = {}
    return [
        {
            name: seen.setdefault(name, {}).setdefault(id(value), len(seen[name]))
            for name, value in case.callspec.params.items()  # type: ignore[attr-defined]
        }
        for case in cases
    ]


def _kept(cases: Sequence[Mapping[str, int]], every: int = 1, first: int = 0) -> list[int]:
    return representatives(cases, every, first)[::_EVERY]


def representatives(cases: Sequence[Mapping[str, int]], every: int = 1, first: int = 0) -> list[int]:
    """Representative cases of a product of parameters: a diagonal, on which each value appears.

    Args:
        cases: the index of the value of each parameter, for each case.
        every: take every n-th case of the diagonal.
        first: the index of the first one.

    Returns:
        The positions of the cases in the order of `cases`.
    """
    # Parameters that are given together, as in `parametrize(("a", "b"), ...)`, are one.
    columns = {tuple(case[name] for case in cases) for name in cases[0]}
    longest, *others = sorted(columns, key=lambda column: (-max(column), column))
    sizes = [max(column) + 1 for column in others]
    diagonal = []
    for position, index in enumerate(longest):
        # Shifted from one round to the next, lest two parameters always go together.
        rounds = index // sizes[0] if sizes else 0
        wanted = [(index + k * rounds) % size for k, size in enumerate(sizes)]
        if wanted == [column[position] for column in others]:
            diagonal.append(position)
    diagonal.sort(key=lambda position: longest[position])
    return diagonal[first::every]
