"""The sizes of a run's batches, and the remedy where they have too many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from lightning_cudagraph.errors import AS_NUMBER
from lightning_cudagraph.tensors.batch_signature import Signature
from lightning_cudagraph.tensors.buckets import best_lengths
from lightning_cudagraph.tensors.host_values import HostReads

# Different sizes of one dimension that are counted.
MAX_COUNTED = 1024
# The most lengths to pad to that a remedy names: more save little padding, and each costs a capture.
_NAMED_LENGTHS = 8


class Sizes:
    """The number of batches with each size of each dimension, and with each host value that counts."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int | None], Counter[Any]] = {}

    def add(self, signature: Signature, batches: int) -> None:
        for place, size in signature.sizes().items():
            counter = self._counts.setdefault(place, Counter())
            if size in counter or len(counter) < MAX_COUNTED:
                counter[size] += batches

    def remedy(
        self, others: Mapping[Signature, int], max_graphs: int, reads: HostReads | None = None
    ) -> str:
        """The part of batches that varies most, and what to do about it; empty if none does.

        Args:
            others: numbers of batches that are not counted here, by signature.
            max_graphs: the most signatures with graphs.
            reads: the reads of host values in batches, with their lines.
        """
        every = Sizes()
        every._counts = {place: counter.copy() for place, counter in self._counts.items()}
        for signature, batches in others.items():
            every.add(signature, batches)
        varied = {place: counter for place, counter in every._counts.items() if len(counter) > 1}
        if not varied:
            return ""
        (path, dimension), found = max(varied.items(), key=lambda item: len(item[1]))
        number = len(found)
        least = "more than " if number >= MAX_COUNTED else ""
        if dimension is None:
            where = "" if reads is None else reads.described(path)
            kind = f" ({AS_NUMBER})" if any(value[0] is float for value in found) else ""
            return f"`{path}`{where} has {least}{number} values; pass it as a tensor{kind}"
        # Fewer lengths than graphs can be too many too, if they come seldom or something else varies.
        most = min(max_graphs if number > max_graphs else number // 2, _NAMED_LENGTHS)
        *chosen, longest = best_lengths(found, most)
        lengths = f"{', '.join(map(str, chosen))} or {longest}" if chosen else str(longest)
        return (
            f"dimension {dimension} of `{path}` has {least}{number} lengths; pad it to {lengths}"
            " (docs/recipes/buckets.md)"
        )
