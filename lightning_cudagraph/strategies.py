"""What becomes of a run with each of Lightning's strategies: one table, for messages and for readers.

A row says what is done, and why nothing is where that is so. A strategy that no row knows is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_cudagraph.errors import UnsupportedError

__all__ = ["STRATEGIES", "Row", "as_markdown", "refuse_strategy", "row_of"]

_DDP = 'Pass `strategy="ddp"`, if the model fits on one device.'


@dataclass(frozen=True)
class Row:
    """What becomes of runs with some strategies.

    Attributes:
        names: as `Trainer(strategy=...)` and `Fabric(strategy=...)` take them; others are made by hand.
        classes: the names of their classes, in either of them. A subclass belongs to the nearest one.
        captured: what is in the graph; empty if nothing is.
        reason: why nothing is.
        remedy: what to do about it.
        variant: which runs of these classes are meant, if not all; in words.
    """

    names: tuple[str, ...]
    classes: tuple[str, ...]
    captured: str = ""
    reason: str = ""
    remedy: str = _DDP
    variant: str = ""


STRATEGIES = (
    Row(
        ("single_device",),
        ("SingleDeviceStrategy",),
        captured="the whole step",
    ),
    Row(
        tuple(
            f"ddp{start}{unused}"
            for start in ("", "_spawn", "_fork", "_notebook")
            for unused in ("", "_find_unused_parameters_false")
        ),
        ("DDPStrategy",),
        captured="the whole step with its all-reduce, in all processes together, on one or several"
        " machines",
    ),
    Row(
        tuple(
            f"ddp{start}_find_unused_parameters_true" for start in ("", "_spawn", "_fork", "_notebook")
        ),
        ("DDPStrategy",),
        reason="it reads on the host, in every backward pass, which parameters took part",
        remedy='Pass `strategy="ddp"`, and let all parameters take part in every step; freeze others'
        " with `requires_grad_(False)`.",
        variant="find_unused_parameters=True",
    ),
    Row(
        (),
        ("ModelParallelStrategy",),
        captured="the whole step with its all-gathers and reduce-scatters, in all processes together,"
        " whatever `reshard_after_forward` is (by the callback; `GraphedStep` refuses sharded weights)",
        variant="fully_shard (FSDP2)",
    ),
    Row(
        (),
        ("ModelParallelStrategy",),
        reason="with tensor parallelism, parameters are `DTensor`s, whose ops decide in Python which"
        " collectives they need, and whose local parts replays are not yet compared in",
        variant="tensor parallel",
    ),
    Row(
        ("fsdp", "fsdp_cpu_offload"),
        ("FSDPStrategy",),
        reason="FSDP1 gathers weights into memory that it frees and resizes in every step, on streams of"
        " its own",
    ),
    Row(
        (
            "deepspeed",
            *(f"deepspeed_stage_{n}" for n in ("1", "1_offload", "2", "2_offload", "3", "3_offload")),
            "deepspeed_stage_3_offload_nvme",
        ),
        ("DeepSpeedStrategy",),
        reason="DeepSpeed's engine does backward pass and optimizer step itself, and decides in them on"
        " the host (overflows, partitions, offloading)",
    ),
    Row(
        ("xla", "xla_debug", "xla_fsdp", "single_xla", "single_tpu"),
        ("XLAStrategy", "XLAFSDPStrategy", "SingleDeviceXLAStrategy", "SingleTPUStrategy"),
        reason="XLA devices have no CUDA graphs",
        remedy="Train on CUDA GPUs.",
    ),
    Row(
        (),
        ("HPUParallelStrategy", "SingleHPUStrategy"),
        reason="HPU devices have no CUDA graphs",
        remedy="Train on CUDA GPUs.",
    ),
    Row(
        ("dp",),
        ("DataParallelStrategy",),
        reason="`DataParallel` copies the module to all devices in every step, and runs it there in"
        " threads",
    ),
)
_UNKNOWN = Row(
    (), (), reason="nothing is known of what it does in a step", remedy=f"{_DDP} Or train on one device."
)


def row_of(strategy: type | object, *, unused: bool = False, tensor_parallel: bool = False) -> Row:
    """The row of a strategy.

    Args:
        strategy: a strategy of Lightning's or Fabric's, or its class.
        unused: parameters without gradients are looked for in every step.
        tensor_parallel: more than one device has a part of the same weight.
    """
    kind = strategy if isinstance(strategy, type) else type(strategy)
    variants = {
        "find_unused_parameters=True": unused,
        "fully_shard (FSDP2)": not tensor_parallel,
        "tensor parallel": tensor_parallel,
    }
    for base in kind.__mro__:
        rows = [row for row in STRATEGIES if base.__name__ in row.classes]
        rows.sort(key=lambda row: not row.variant)
        for row in rows:
            if variants.get(row.variant, True):
                return row
    return _UNKNOWN


def refuse_strategy(strategy: Any) -> None:
    """Refuse a strategy under which nothing is captured.

    Args:
        strategy: of a trainer, or of Fabric.

    Raises:
        UnsupportedError: with the reason in its row.
    """
    arguments: dict[str, Any] = getattr(strategy, "_ddp_kwargs", {})
    row = row_of(
        strategy,
        unused=bool(arguments.get("find_unused_parameters")),
        tensor_parallel=_tensor_parallel_size(strategy) > 1,
    )
    if row.captured:
        return
    name = type(strategy).__qualname__
    argument = row.variant if "=" in row.variant else ""
    raise UnsupportedError(
        f"A step under `{name}{f'({argument})' if argument else ''}` is not captured: {row.reason}.",
        row.remedy,
    )


def _tensor_parallel_size(strategy: Any) -> int:
    mesh = getattr(strategy, "_device_mesh", None)
    names = getattr(mesh, "mesh_dim_names", None) or ()
    return int(mesh["tensor_parallel"].size()) if mesh and "tensor_parallel" in names else 1


def as_markdown() -> str:
    """The table, for readers."""
    lines = ["| `strategy=` | in the graph | why not |", "|---|---|---|"]
    for row in (*STRATEGIES, _UNKNOWN):
        names = ", ".join(
            f'`"{name}"`' for name in row.names if "_find_unused_parameters_false" not in name
        )
        made = ", ".join(f"`{name}`" for name in row.classes)
        what = names or made or "any other"
        variant = f", {row.variant}" if row.variant and "=" not in row.variant else ""
        lines.append(f"| {what}{variant} | {row.captured or 'nothing'} | {row.reason} |")
    return "\n".join(lines) + "\n"
