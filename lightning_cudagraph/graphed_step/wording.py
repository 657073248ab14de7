"""Translation of messages from the callback's terms to those of `GraphedStep`."""

from __future__ import annotations

from lightning_cudagraph.checks.audit.calls_without_tensors import MODULES_ALONE
from lightning_cudagraph.device.cuda.capture_errors import NO_TIMINGS_OR_USE
from lightning_cudagraph.errors import FORWARD_BACKWARD, OR_FORWARD_BACKWARD, Wording

_BEFORE, _AFTER = "before you call the step", "after the call of the step"
_OPTIMIZER_OUTSIDE = "call the optimizer after the step, outside of it"

WORDING = Wording(
    steps="The loop",
    signature="signature of arguments",
    signatures="signatures of arguments",
    words={
        "in a hook that runs on the host at every step, such as `on_train_batch_start`": _BEFORE,
        "in `on_train_batch_end`, which runs on the host after every step": _AFTER,
        "in `on_after_batch_transfer`, which runs between two steps": _BEFORE,
        ", such as `batch_idx`: in a capture": ": in a capture",
        "in `on_train_batch_start` or `on_train_batch_end`": "before or after the call of the step",
        "in `on_train_batch_start`": _BEFORE,
        "in `on_train_batch_end`": _AFTER,
        FORWARD_BACKWARD: _OPTIMIZER_OUTSIDE,
        OR_FORWARD_BACKWARD: _OPTIMIZER_OUTSIDE,
        NO_TIMINGS_OR_USE: "Use",
        # The batch of a call is its arguments, by name.
        "`batch[": "`arguments[",
        MODULES_ALONE: "",
        "CUDAGraphCallback(": "GraphedStep(",
        "the training step": "the step",
        "To train on without a graph": "To go on without a graph",
    },
)
