"""Every optimizer x precision x clipping x schedule comes out as `tests/family.json` says.

`tests/gpu/test_family.py` does the same on CUDA.
"""

from __future__ import annotations

import json

import pytest

from tests.family import FORMS, MARKS, PAGE, PATH, outcomes, quiet, render, shown_table


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.filterwarnings("ignore")  # of Lightning, about each of many small runs
def test_outcomes(accelerator: str, form: str) -> None:
    quiet()
    expected = json.loads(PATH.read_text())[accelerator][form]
    assert outcomes(form, accelerator) == expected


def test_the_page_shows_what_was_run() -> None:
    stored = json.loads(PATH.read_text())
    assert set(stored["cpu"]) == set(FORMS)
    assert PAGE.read_text().count(MARKS[0]) == 1
    assert shown_table() == render(stored["gpu"])
