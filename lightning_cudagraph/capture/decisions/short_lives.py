"""Short lives of graphs: so many in a row are not worth their captures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ShortLives:
    """The graphs in a row that served few replays.

    Attributes:
        limit: the number of them after which there are too many.
        few_replays: a graph with fewer replays than this had a short life.
    """

    limit: int
    few_replays: int = 32
    in_a_row: int = 0

    def ended(self, replays: int) -> None:
        """Note the end of a graph, or of several that end together, after their replays."""
        self.in_a_row = self.in_a_row + 1 if replays < self.few_replays else 0

    @property
    def are_too_many(self) -> bool:
        return self.in_a_row >= self.limit
