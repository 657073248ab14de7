"""Every optimizer x precision x clipping x schedule comes out as `tests/family.json` says.

`tests/gpu/test_family.py` does the same on CUDA.
"""

from __future__ import annotations

import json

import pytest

from tests.family import (
    CELLS,
    FORMS,
    MARKS,
    PAGE,
    PAIRED_CELLS,
    PATH,
    outcomes,
    quiet,
    render,
    shown_table,
)


@pytest.mark.spread  # each form meets one cell of the square, and each cell several forms
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("part", range(9))
@pytest.mark.filterwarnings("ignore")  # of Lightning, about each of many small runs
def test_outcomes(accelerator: str, form: str, part: int) -> None:
    quiet()
    found = json.loads(PATH.read_text())[accelerator]
    stored = dict(zip(CELLS, found[form], strict=True))
    cells = (PAIRED_CELLS if accelerator == "cpu" else CELLS)[part::9]  # all take minutes
    assert outcomes(form, accelerator, cells) == "".join(stored[cell] for cell in cells)


def test_each_two_settings_meet_on_the_emulator() -> None:
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert len({(cell[one], cell[other]) for cell in PAIRED_CELLS}) == len(PAIRED_CELLS) == 9


def test_the_page_shows_what_was_run() -> None:
    stored = json.loads(PATH.read_text())
    assert set(stored["cpu"]) == set(FORMS)
    assert PAGE.read_text().count(MARKS[0]) == 1
    assert shown_table() == render(stored["gpu"])
