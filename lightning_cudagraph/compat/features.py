"""The features of this package that depend on private names of other packages."""

from __future__ import annotations

from dataclasses import dataclass

_OFF = 'pass `backend="off"`'


@dataclass(frozen=True)
class Feature:
    """A feature that needs private names.

    Attributes:
        without: what the user can do without it; for an optional feature, what is lost.
        is_optional: True if it is switched off when a name is missing, and the report says so; other
            features are refused.
    """

    what: str
    without: str
    is_optional: bool = False


CAPTURES = Feature("captured steps", _OFF)
LOOPS = Feature("captured steps in Lightning's loops", _OFF)
CAPTURED_MODULES = Feature('captured modules (`scope="modules"`)', "pass another `scope`")
FABRIC = Feature("captured steps in Fabric", _OFF)
FP16 = Feature("captured steps with a gradient scaler", f"{_OFF}, or train in bf16-mixed")
CAPTURABLE_ON_CPU = Feature("capturable optimizers on the CPU emulator", _OFF)
REPLICAS = Feature("captured steps with `DistributedDataParallel`", _OFF)
SHARDS = Feature("captures of sharded weights", _OFF)
COLLECTIVES = Feature("captured steps of several processes", _OFF)
CUDA = Feature("captures on CUDA", _OFF)
SEGMENTS = Feature(
    "detecting expandable segments of the allocator, which NCCL must not register",
    f"set NCCL_GRAPH_REGISTER=0 before the process group is made, or {_OFF}",
)
METRICS = Feature(
    "metrics of torchmetrics in a captured step", f"{_OFF}, or call them in `on_train_batch_end`"
)
TIMES = Feature("the times of layers", "leave out `timings=`")

FAST_PATH = Feature(
    "the fast path from one replay to the next",
    "Lightning's own loop runs there, which takes the host some 0.3 ms more a step",
    is_optional=True,
)
COUNTED_CLASSES = Feature(
    "counting classes without asking the device",
    "metrics that count classes are called after replays",
    True,
)
HELD_GRADIENTS = Feature(
    "finding external references to gradients", "gradients are copied out after every replay", True
)
