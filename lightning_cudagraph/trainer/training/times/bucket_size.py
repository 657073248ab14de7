"""A note on the size of DDP's buckets, where steps wait for all-reduces."""

from __future__ import annotations

from lightning.pytorch.strategies import DDPStrategy, Strategy

from lightning_cudagraph.timing.readings.spans import EXPOSED_TAG
from lightning_cudagraph.timing.readings.windows import WindowSummary

# A smaller share of the step is not worth another size.
_MIN_SHARE = 0.05


def bucket_notes(strategy: Strategy, graph: WindowSummary) -> list[str]:
    """Return a note for the report if steps wait for all-reduces of buckets of DDP's default size.

    That size is for eager steps, where the host launches each all-reduce. In a graph it launches
    none, and the first of many small ones begins earlier.
    """
    exposed = graph.get(EXPOSED_TAG)
    if exposed is None or exposed.share < _MIN_SHARE or not isinstance(strategy, DDPStrategy):
        return []
    if "bucket_cap_mb" in strategy._ddp_kwargs:
        return []
    note = (
        f"{exposed.share:.0%} of a step is the wait for all-reduces; smaller buckets begin earlier:"
        " `DDPStrategy(bucket_cap_mb=5, gradient_as_bucket_view=True)` (docs/several_gpus.md)"
    )
    return [note]
