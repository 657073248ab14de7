"""Private names of torchmetrics."""

from __future__ import annotations

from lightning_cudagraph.compat.features import COUNTED_CLASSES, METRICS
from lightning_cudagraph.compat.probes import PrivateName, accepts, members, named

_METRIC = "torchmetrics.Metric"
_COLLECTION = "torchmetrics.MetricCollection"

TORCHMETRICS = (
    members(
        _METRIC, "_defaults _reductions _forward_cache _computed _update_count _update_called", METRICS
    ),
    members(
        _COLLECTION, "_groups _modules _groups_checked _enable_compute_groups _state_is_copy", METRICS
    ),
    *named(_COLLECTION, "_set_name", METRICS, probe=accepts("self", "name")),
    *named(_COLLECTION, "_compute_and_reduce", METRICS),
    *named(_COLLECTION, "_compute_groups_create_state_ref", METRICS, probe=accepts("self", "copy")),
    PrivateName(
        "torchmetrics.utilities.data._bincount", (COUNTED_CLASSES,), accepts("x", minlength=None)
    ),
)
