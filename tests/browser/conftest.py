"""What opens TensorBoard in a browser. Tests in this folder skip themselves where there is none.

They need `pip install -e ".[browser]"` and a Chromium, be it one of the system (Debian's package
`chromium`) or the one that `playwright install chromium` brings. With `SCREENSHOTS` set to a folder they
leave pictures there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

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
LIMIT_MS = 20_000


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A Chromium without a window."""
    playwright = pytest.importorskip("playwright.sync_api", reason='needs `pip install -e ".[browser]"`')
    with playwright.sync_playwright() as driver:
        path = shutil.which("chromium") or shutil.which("google-chrome")
        if path is None and not Path(driver.chromium.executable_path).exists():
            pytest.skip("needs Chromium: Debian's package `chromium`, or `playwright install chromium`")
        chromium = driver.chromium.launch(executable_path=path, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A tab, in which everything that is waited for must come."""
    tab = browser.new_page(viewport={"width": 1400, "height": 900})
    tab.set_default_timeout(LIMIT_MS)
    yield tab
    tab.close()


@pytest.fixture
def picture(page: Any) -> Callable[[str], None]:
    """Take a picture of the tab, if pictures are wanted."""

    def take(name: str) -> None:
        if folder := os.environ.get("SCREENSHOTS"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            page.screenshot(path=Path(folder) / f"{name}.png")

    return take


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[[Path], str]]:
    """Start TensorBoard on a folder, on a free port; returns its address."""
    servers: list[subprocess.Popen[str]] = []

    def start(logdir: Path) -> str:
        command = [sys.executable, "-m", "tensorboard.main", "--port", "0", "--logdir", str(logdir)]
        server = subprocess.Popen(
            [*command, "--load_fast", "false", "--samples_per_plugin", "images=100"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        servers.append(server)
        assert server.stderr is not None
        said = []
        for line in server.stderr:
            said.append(line)
            if (found := re.search(r"TensorBoard \S+ at (http://\S+)", line)) is not None:
                return found[1]
        raise RuntimeError(f"TensorBoard did not start:\n{''.join(said)}")

    yield start
    for server in servers:
        server.terminate()
        server.communicate()
