"""Text tables with columns aligned by display width: some characters take two places, some none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from unicodedata import combining, east_asian_width


def places(text: str) -> int:
    """The display width of a text."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)


def shortened(name: str, width: int) -> str:
    """A name in at most `width` places; a longer one loses its middle."""
    if places(name) <= width:
        return name
    if width <= 3:
        return "..."[:width]
    tail = (width - 3 + 1) // 2
    end = _first(reversed(name), tail)[::-1]
    while end and combining(end[0]):  # an accent without its letter
        end = end[1:]
    return f"{_first(name, width - 3 - tail)}...{end}"


def _first(characters: Iterable[str], width: int) -> str:
    """The first characters that fit into `width` places."""
    found = ""
    for character in characters:
        if places(found + character) > width:
            break
        found += character
    return found


def table(rows: Sequence[Sequence[str | float | None]], left: Sequence[int]) -> list[str]:
    """Lines of a table with aligned columns, those with the numbers `left` to the left.

    A cell is a text, milliseconds, or None if it was not timed.
    """
    columns = [[_cell(cell) for cell in column] for column in zip(*rows, strict=True)]
    for index, column in enumerate(columns):
        width = max(map(places, column))
        blanks = [" " * (width - places(cell)) for cell in column]
        sides = (column, blanks) if index in left else (blanks, column)
        columns[index] = list(map("".join, zip(*sides, strict=True)))
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]


def _cell(value: str | float | None) -> str:
    if isinstance(value, str):
        return value
    return "-" if value is None else f"{value:.3f}"
