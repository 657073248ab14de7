"""TensorBoard on a folder, a headless browser, and navigation in its tabs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

__all__ = [
    "NoBrowser",
    "chromium",
    "new_tab",
    "picture",
    "show_filtered",
    "show_time_series",
    "tensorboard_on",
]

# Without the last ones, a browser in a closed network goes on asking for its maker's hosts.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
# Whatever is waited for must have come by then.
LIMIT_MS = 20_000
# So many looks at a tab, one after another, that show the same, are taken for its last state.
_LOOKS = 10


class NoBrowser(Exception):
    """There is no browser here; the message says what to install."""


@contextmanager
def chromium() -> Iterator[Any]:
    """A Chromium: that of the system, or that installed by playwright.

    Raises:
        NoBrowser: if there is neither.
    """
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise NoBrowser('needs playwright: `pip install -e ".[browser]"`') from error
    with sync_playwright() as driver:
        path = shutil.which("chromium") or shutil.which("google-chrome")
        if path is None and not Path(driver.chromium.executable_path).exists():
            raise NoBrowser(
                "needs Chromium: Debian's package `chromium`, or `playwright install chromium`"
            )
        browser = driver.chromium.launch(executable_path=path, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def tensorboard_on(logdir: Path) -> Iterator[str]:
    """Start TensorBoard on a folder, at a free port; gives its address."""
    command = [sys.executable, "-m", "tensorboard.main", "--port", "0", "--logdir", str(logdir)]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            yield _address(server)
        finally:
            server.terminate()


def _address(server: subprocess.Popen[str]) -> str:
    assert server.stderr is not None
    said = []
    for line in server.stderr:
        said.append(line)
        if (found := re.search(r"TensorBoard \S+ at (http://\S+)", line)) is not None:
            return found[1]
    raise RuntimeError(f"TensorBoard did not start:\n{''.join(said)}")


def new_tab(browser: Any, width: int = 1400, height: int = 900) -> Any:
    """An empty tab."""
    tab = browser.new_page(viewport={"width": width, "height": height})
    tab.set_default_timeout(LIMIT_MS)
    return tab


def show_time_series(tab: Any, address: str, pattern: str) -> None:
    """Show the tab Time Series with the cards that match a pattern."""
    tab.goto(f"{address}#timeseries")
    tab.get_by_text("Enable step selection and data table").click()  # off
    tab.get_by_role("button", name="Settings").click()  # folded away
    tags = tab.get_by_role("combobox", name="Filter tags")
    tags.fill(pattern)
    tags.press("Escape")  # the list of suggestions
    tab.locator("metrics-filtered-view line-chart canvas").first.wait_for()
    tab.wait_for_load_state("networkidle")


def show_filtered(tab: Any, address: str, plugin: str, pattern: str, texts: Sequence[str]) -> None:
    """Show another tab with everything that matches a pattern; wait until `texts` are visible."""
    # A path of its own: the part behind # alone would not load it anew.
    tab.goto(f"{address}?{plugin}#{plugin}&tagFilter={quote(pattern)}")
    for text in texts:
        tab.get_by_text(text, exact=True).first.wait_for()
    tab.wait_for_load_state("networkidle")


def picture(tab: Any, path: Path) -> None:
    """Save a picture of the tab once it no longer changes: charts appear one by one."""
    last, same = b"", 0
    while same < _LOOKS:
        now = tab.screenshot()
        last, same = now, same + 1 if now == last else 0
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(last)
