"""The table of Lightning's strategies: the captured part of a step under each, or the reason for none.

A strategy without a row is refused. `docs/strategies.md` is generated from the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_cudagraph.errors import UnsupportedError

_DDP = 'Pass `strategy="ddp"`, if the model fits on one device.'


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        classes: class names in Lightning or Fabric; a subclass has the row of its nearest ancestor.
        captured: the captured part of a step; empty if the strategy is refused.
        variant: the configurations of these classes that the row is for, in words; empty for all.
    """

    classes: tuple[str, ...]
    captured: str = ""
    reason: str = ""
    remedy: str = _DDP
    variant: str = ""


STRATEGIES = (
    Row(("SingleDeviceStrategy",), captured="the whole step"),
    Row(
        ("DDPStrategy",),
        captured="the whole step with its all-reduce, in all processes together, on one or several"
        " machines",
    ),
    Row(
        ("ModelParallelStrategy",),
        captured="the whole step with its all-gathers and reduce-scatters, in all processes together,"
        " whatever `reshard_after_forward` is",
        variant="fully_shard (FSDP2)",
    ),
    Row(
        ("ModelParallelStrategy",),
        reason="with tensor parallelism, parameters are `DTensor`s: their ops choose collectives in"
        " Python, and verification does not compare their local parts yet",
        variant="tensor parallel",
    ),
    Row(
        ("FSDPStrategy",),
        reason="FSDP1 gathers weights into memory that it frees and resizes in every step, on streams of"
        " its own",
    ),
    Row(
        ("DeepSpeedStrategy",),
        reason="DeepSpeed's engine does backward pass and optimizer step itself, and decides in them on"
        " the host (overflows, partitions, offloading)",
    ),
    Row(
        ("XLAStrategy", "XLAFSDPStrategy", "SingleDeviceXLAStrategy", "SingleTPUStrategy"),
        reason="XLA devices have no CUDA graphs",
        remedy="Train on CUDA GPUs.",
    ),
    Row(
        ("HPUParallelStrategy", "SingleHPUStrategy"),
        reason="HPU devices have no CUDA graphs",
        remedy="Train on CUDA GPUs.",
    ),
    Row(
        ("DataParallelStrategy",),
        reason="`DataParallel` copies the module to all devices in every step, and runs it there in"
        " threads",
    ),
)
UNKNOWN = Row((), reason="its effects in a step are unknown", remedy=f"{_DDP} Or train on one device.")


def row_of(strategy: type | object, *, tensor_parallel: bool = False) -> Row:
    """Return the row of a strategy.

    Args:
        tensor_parallel: True if weights are split over devices.
    """
    kind = strategy if isinstance(strategy, type) else type(strategy)
    variants = {
        "fully_shard (FSDP2)": not tensor_parallel,
        "tensor parallel": tensor_parallel,
    }
    for base in kind.__mro__:
        rows = [row for row in STRATEGIES if base.__name__ in row.classes]
        rows.sort(key=lambda row: not row.variant)
        for row in rows:
            if variants.get(row.variant, True):
                return row
    return UNKNOWN


def refuse_strategy(strategy: Any) -> None:
    """Raise `UnsupportedError` for a strategy without captures, with the reason of its row."""
    row = row_of(strategy, tensor_parallel=_tensor_parallel_size(strategy) > 1)
    if row.captured:
        return
    name = type(strategy).__qualname__
    raise UnsupportedError(f"A step under `{name}` is not captured: {row.reason}.", row.remedy)


def supported_base(strategy: type) -> type | None:
    """The class of `lightning.pytorch` with a row and captures that a strategy is or inherits from."""
    names = {name for row in STRATEGIES if row.captured for name in row.classes}
    return next(
        (
            base
            for base in strategy.__mro__
            if base.__name__ in names and base.__module__.startswith("lightning.pytorch.")
        ),
        None,
    )


def _tensor_parallel_size(strategy: Any) -> int:
    mesh = getattr(strategy, "_device_mesh", None)
    names = getattr(mesh, "mesh_dim_names", None) or ()
    # Not of a part of the mesh, which is made by ops that no graph can hold.
    return int(mesh.size(names.index("tensor_parallel"))) if mesh and "tensor_parallel" in names else 1
