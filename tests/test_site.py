"""The site of the documentation: each page has one place in it, and the API page has each exported name.

`.ci/run` builds it, with warnings as errors.
"""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

import lightning_cudagraph

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
SECTIONS = ["Start", "Recipes", "Reference", "How it works", "Benchmarks", "Developers"]


def _pages(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
        return
    for item in nav.values() if isinstance(nav, dict) else nav:
        yield from _pages(item)


def test_every_page_has_one_place() -> None:
    assert [name for section in CONFIG["nav"] for name in section] == SECTIONS
    pages = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    assert sorted(_pages(CONFIG["nav"])) == sorted(pages)


def test_the_api_page_has_every_exported_name() -> None:
    documented = re.findall(r"^::: lightning_cudagraph\.(\w+)$", (DOCS / "api.md").read_text(), re.M)
    imports = [node for node in ast.walk(ast.parse(_source())) if isinstance(node, ast.ImportFrom)]
    exported = [alias.name for node in imports for alias in node.names if alias.asname == alias.name]
    assert set(exported) <= set(vars(lightning_cudagraph))
    assert sorted(documented) == sorted(exported)


def _source() -> str:
    return Path(lightning_cudagraph.__file__).read_text()


def test_the_site_needs_no_other_host() -> None:
    """No fonts, scripts or counters of others, and no address that does not exist."""
    assert CONFIG["theme"]["font"] is False
    assert CONFIG["strict"] is True
    assert not CONFIG.keys() & {"repo_url", "site_url", "extra_css", "extra_javascript", "extra"}
    assert "://" not in (ROOT / "mkdocs.yml").read_text()


def test_links_to_files_outside_become_text() -> None:
    (hook,) = CONFIG["hooks"]
    on_page_markdown = runpy.run_path(str(ROOT / hook))["on_page_markdown"]

    def shown(address: str, markdown: str) -> str:
        page = SimpleNamespace(file=SimpleNamespace(src_uri=address))
        return on_page_markdown(markdown, page=page, config=None, files=None)

    assert shown("a.md", "[the house](../README.md#x), [b](b.md)") == "the house, [b](b.md)"
    assert (
        shown("recipes/a.md", "[the house](../../README.md), [b](../b.md)") == "the house, [b](../b.md)"
    )
