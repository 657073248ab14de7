"""Text tables with columns aligned by display width: some characters take two places, some none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from unicodedata import combining, east_asian_width

__all__ = ["places", "shortened", "table"]


def places(text: str) -> int:
    """The display width of a text."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)


def _padded(text: str, width: int, to_the_right: bool = False) -> str:
    """A text padded with blanks to `width` places."""
    blanks = " " * (width - places(text))
    return blanks + text if to_the_right else text + blanks


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
    texts = [[_cell(cell) for cell in row] for row in rows]
    widths = [max(map(places, column)) for column in zip(*texts, strict=True)]
    return [
        "  ".join(
            _padded(cell, width, to_the_right=index not in left)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in texts
    ]


def _cell(value: str | float | None) -> str:
    if isinstance(value, str):
        return value
    return "-" if value is None else f"{value:.3f}"
