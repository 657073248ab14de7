"""Running sums of logged values in the graph, equal to Lightning's on the host.

For each logged name, Lightning keeps a value and a number of samples, and rebinds both in every step,
with several small ops. Here they are static tensors that the captured step writes, and Lightning's
objects hold them as long as replays follow one another. If an eager step or the end of an epoch has
rebound them, the new values are copied back before the next replay. If a replay must not count,
Lightning's objects get copies before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_cudagraph.compat.names.lightning_names import (
    _get_default_dtype,
    _ResultCollection,
    _ResultMetric,
)


def converted(value: Tensor) -> Tensor:
    """The value in the dtype that Lightning reduces it in (`_ResultMetric.update`)."""
    return value if value.dtype in (torch.float32, torch.float64) else value.to(_get_default_dtype())


@dataclass
class LoggedValue:
    """A value that a step logs, with its key in Lightning's results and its weight in a mean."""

    key: str
    value: Tensor
    batch_size: Any


@dataclass(eq=False)
class Slot:
    """The static tensors of one logged name.

    Attributes:
        value: the running sum, minimum or maximum; None if only the last value counts.
        count: the number of samples, for means.
    """

    metric: _ResultMetric
    value: Tensor | None
    count: Tensor | None

    def __post_init__(self) -> None:
        self._state: dict[str, Any] = vars(self.metric)

    def is_held(self) -> bool:
        """True if Lightning's object holds these tensors."""
        if self.value is None:
            return True
        state = self._state  # faster than attributes of the metric
        return state["value"] is self.value and (
            self.count is None or state["cumulated_batch_size"] is self.count
        )

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Pairs of these tensors and those of Lightning's object."""
        state = self._state
        pairs = [] if self.value is None else [(self.value, state["value"])]
        return pairs if self.count is None else [*pairs, (self.count, state["cumulated_batch_size"])]

    def hold(self) -> None:
        """Bind these tensors to Lightning's object."""
        if self.value is not None:
            self.metric.value = self.value
        if self.count is not None:
            self.metric.cumulated_batch_size = self.count

    def let_go(self) -> None:
        """Bind copies to Lightning's object, if it holds these tensors."""
        if self.value is not None and self.metric.value is self.value:
            self.metric.value = self.value.clone()
        if self.count is not None and self.metric.cumulated_batch_size is self.count:
            self.metric.cumulated_batch_size = self.count.clone()

    def updated(self, value: Tensor, replays: int) -> None:
        """Apply the effects of one call of `_ResultMetric.update` for each replay, but for the sums."""
        state, meta = self._state, self.metric.meta
        state["_update_count"] += replays
        state["_computed"] = None
        state["has_reset"] = False
        if meta.on_step:
            state["_forward_cache"] = value
            if self.value is None:
                state["value"] = value


class RunningSums:
    """The static tensors of all logged names of a run, shared by all graphs and in no graph's memory."""

    def __init__(self) -> None:
        self._slots: dict[str, Slot] = {}

    def make_room(self, results: _ResultCollection) -> None:
        """Make tensors for new names. Not to be called in a capture."""
        for key, metric in results.items():
            if metric.is_tensor and (key not in self._slots or self._slots[key].metric is not metric):
                self._slots[key] = _new_slot(metric)

    def usable(self, logged: Iterable[LoggedValue]) -> dict[str, Slot]:
        """The slots of the values that a graph can add up exactly as Lightning would."""
        several: set[str] = set()
        found: dict[str, Slot] = {}
        for each in logged:
            slot = self._slots.get(each.key)
            if each.key in found:
                several.add(each.key)
            elif slot is not None and _can_add(slot, each):
                found[each.key] = slot
        return {key: slot for key, slot in found.items() if key not in several}

    def let_go(self) -> None:
        """Bind copies to Lightning's objects."""
        for slot in self._slots.values():
            slot.let_go()


def _new_slot(metric: _ResultMetric) -> Slot:
    if not metric.meta.on_epoch:
        return Slot(metric, None, None)
    # A clone each: two names may share one tensor now.
    value = metric.value.detach().clone()
    count = metric.cumulated_batch_size.clone() if metric.meta.is_mean_reduction else None
    return Slot(metric, value, count)


def _can_add(slot: Slot, logged: LoggedValue) -> bool:
    meta = slot.metric.meta
    if meta.sync.should:
        return False
    if slot.value is None:
        return True
    default = slot.metric._defaults["value"]
    assert isinstance(default, Tensor)
    if slot.value.dtype != torch.promote_types(default.dtype, logged.value.dtype):
        return False
    if slot.value.device != logged.value.device:
        return False
    if meta.is_mean_reduction:
        return type(logged.batch_size) is int
    # Python's `max` and `min` would read the values on the host.
    return meta.is_sum_reduction or meta.reduce_fx in (torch.max, torch.min)


@dataclass
class SumsOfStep:
    """The running sums of the graphs of one kind of step.

    Attributes:
        batch_size: the size that Lightning extracts from the batch, if the step needs it.
        entered: Lightning's own `log` has run once for each name since the capture.
        live: the next or last replay counts, that is, Lightning's objects hold the static tensors.
        in_parts: the step has graph breaks, at which hooks may read what it has logged.
    """

    slots: dict[str, Slot] = field(default_factory=dict)
    batch_size: int | None = None
    entered: bool = False
    live: bool = False
    in_parts: bool = False

    def adopt(self, results: _ResultCollection, counts: bool) -> None:
        """Copy the values of Lightning's objects into the static tensors, before a replay.

        Args:
            counts: in this step Lightning would add to the current values, and not reset them.
        """
        self.live = (
            counts
            and self.entered
            and (self.batch_size is None or results.batch_size in (None, self.batch_size))
            and self._hold(results)
        )
        if not self.live:
            for slot in self.slots.values():
                slot.let_go()

    def _hold(self, results: _ResultCollection) -> bool:
        stale: list[Slot] = []
        for key, slot in self.slots.items():
            if results.get(key) is not slot.metric:
                return False
            if not slot.is_held():
                stale.append(slot)
        pairs = [pair for slot in stale for pair in slot.pairs()]
        for ours, theirs in pairs:
            # Only if the copy loses no precision.
            if torch.promote_types(theirs.dtype, ours.dtype) != ours.dtype:
                return False
            if theirs.device != ours.device:
                return False
        if pairs:
            with torch.no_grad():
                torch._foreach_copy_([ours for ours, _ in pairs], [theirs for _, theirs in pairs])
            for slot in stale:
                slot.hold()
        return True


@dataclass
class _Means:
    totals: list[Tensor] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)


def add(logged: Iterable[LoggedValue], slots: dict[str, Slot]) -> None:
    """Add logged values to the slots, in the order of Lightning's ops; the host adds the others."""
    means: dict[Any, _Means] = {}
    sums: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    with torch.no_grad():
        for each in logged:
            slot = slots.get(each.key)
            if slot is None or slot.value is None:
                continue
            dtypes = (slot.value.dtype, each.value.dtype)
            if slot.count is not None:
                group = means.setdefault(dtypes, _Means())
                group.totals.append(slot.value)
                group.counts.append(slot.count)
                group.values.append(each.value)
                group.sizes.append(each.batch_size)
            elif slot.metric.meta.is_sum_reduction:
                totals, values = sums.setdefault(dtypes, ([], []))
                totals.append(slot.value)
                values.append(each.value)
            else:
                extreme = slot.metric.meta.reduce_fx
                extreme(slot.value, each.value.to(slot.value.dtype), out=slot.value)
        for group in means.values():
            products = torch._foreach_mul(group.values, group.sizes)
            torch._foreach_add_(group.totals, products)
            torch._foreach_add_(group.counts, group.sizes)
        for totals, values in sums.values():
            torch._foreach_add_(totals, values)
