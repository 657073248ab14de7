"""Fixtures of the tests that open TensorBoard in a browser, and are skipped without one.

With `SCREENSHOTS` set to a folder they leave pictures there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.tabs import NoBrowser, chromium, new_tab, picture


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A headless Chromium."""
    try:
        with chromium() as running:
            yield running
    except NoBrowser as reason:
        pytest.skip(str(reason))


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    """An empty tab."""
    opened = new_tab(browser)
    yield opened
    opened.close()


@pytest.fixture
def keep(tab: Any) -> Callable[[str], None]:
    """Take a picture of the tab, if pictures are wanted."""

    def take(name: str) -> None:
        if folder := os.environ.get("SCREENSHOTS"):
            picture(tab, Path(folder) / f"{name}.png")

    return take
