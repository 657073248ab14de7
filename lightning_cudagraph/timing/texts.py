"""Names and columns of plain text, by the places that they take: some characters take two, some none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from unicodedata import combining, east_asian_width

__all__ = ["aligned", "padded", "places", "shortened"]


def places(text: str) -> int:
    """How many places a text takes in a line."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)


def padded(text: str, width: int, to_the_right: bool = False) -> str:
    """A text with blanks, so that it takes `width` places; behind it, or before it."""
    blanks = " " * (width - places(text))
    return blanks + text if to_the_right else text + blanks


def shortened(name: str, width: int) -> str:
    """A name in at most `width` places; what is too much is left out in the middle."""
    if places(name) <= width:
        return name
    if width <= 3:
        return "..."[:width]
    tail = (width - 3 + 1) // 2
    end = _first(reversed(name), tail)[::-1]
    while end and combining(end[0]):  # an accent whose letter is left out
        end = end[1:]
    return f"{_first(name, width - 3 - tail)}...{end}"


def _first(characters: Iterable[str], width: int) -> str:
    """The first of some characters, in at most `width` places."""
    found = ""
    for character in characters:
        if places(found + character) > width:
            break
        found += character
    return found


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """Rows with columns of one width.

    Args:
        rows: texts, as many in each row.
        left: the columns whose texts begin at one place; those of others end at one.
    """
    widths = [max(map(places, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            padded(cell, width, to_the_right=index not in left)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
