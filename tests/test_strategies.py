"""The table of strategies: every one of Lightning's has a row, and messages and readers get the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.fabric.strategies as of_fabric
import lightning.pytorch.strategies as of_trainer
import pytest
from lightning.fabric.strategies import STRATEGY_REGISTRY

from lightning_cudagraph.errors import UnsupportedError
from lightning_cudagraph.trainer.config.strategies import (
    STRATEGIES,
    UNKNOWN,
    Row,
    refuse_strategy,
    row_of,
)

PAGE = Path(__file__).parents[1] / "docs" / "strategies.md"
REGISTRIES: list[Any] = [STRATEGY_REGISTRY, of_trainer.StrategyRegistry]
# Their base classes, of which nothing is known.
BASES = ("Strategy", "ParallelStrategy")


def _names() -> dict[int, list[str]]:
    """For each row, the names by which `Trainer(strategy=...)` and `Fabric(strategy=...)` make one."""
    found: dict[int, list[str]] = {}
    for registry in REGISTRIES:
        for name in registry.available_strategies():
            made = registry[name]
            names = found.setdefault(id(row_of(made["strategy"])), [])
            if name not in names:
                names.append(name)
    return found


def test_every_registered_name_has_a_row() -> None:
    assert _names().keys() <= {id(row) for row in STRATEGIES}


def test_every_class_has_a_row() -> None:
    for package in (of_trainer, of_fabric):
        for name in dir(package):
            cls = getattr(package, name)
            if isinstance(cls, type) and name.endswith("Strategy") and name not in BASES:
                assert name in row_of(cls).classes, name


@pytest.mark.parametrize("row", STRATEGIES, ids=lambda row: f"{row.classes[0]} {row.variant}".strip())
def test_a_row_says_what_is_captured_or_why_nothing_is(row: Row) -> None:
    assert bool(row.captured) is not bool(row.reason)
    assert row.classes


def test_a_subclass_has_the_row_of_its_nearest_ancestor() -> None:
    class Mine(of_trainer.DDPStrategy):
        pass

    class Stranger(of_trainer.Strategy):
        pass

    assert row_of(Mine).captured
    assert not row_of(of_trainer.SingleDeviceXLAStrategy).captured  # whose base is captured
    assert "effects in a step are unknown" in row_of(Stranger).reason


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (of_trainer.FSDPStrategy(), "`FSDPStrategy` is not captured: FSDP1"),
        (of_fabric.FSDPStrategy(), "`FSDPStrategy` is not captured: FSDP1"),
        (of_fabric.DataParallelStrategy(), "copies the module to all devices"),
        (object.__new__(of_trainer.DeepSpeedStrategy), "DeepSpeed's engine"),
        (object.__new__(of_trainer.XLAStrategy), "XLA devices have no CUDA graphs"),
        (object(), "`object` is not captured: its effects in a step are unknown"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__module__,
)
def test_refusals_say_what_the_table_says(strategy: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=f"(?s){message}"):
        refuse_strategy(strategy)


@pytest.mark.parametrize(
    "strategy",
    [
        *(of_trainer.DDPStrategy(), of_fabric.DDPStrategy(), of_trainer.SingleDeviceStrategy("cpu")),
        of_trainer.ModelParallelStrategy(),
        of_fabric.ModelParallelStrategy(lambda module, mesh: module),
    ],
    ids=lambda value: f"{type(value).__module__}.{type(value).__name__}",
)
def test_the_captured_ones_are_not_refused(strategy: Any) -> None:
    refuse_strategy(strategy)


def test_the_page_is_the_table() -> None:
    lines = ["| `strategy=` | in the graph | why not |", "|---|---|---|"]
    names = _names()
    for row in (*STRATEGIES, UNKNOWN):
        registered = [name for name in names.get(id(row), []) if not name.endswith("parameters_false")]
        called = ", ".join([f'`"{name}"`' for name in registered] or [f"`{n}`" for n in row.classes])
        variant = f", {row.variant}" if row.variant and "=" not in row.variant else ""
        lines.append(
            f"| {called or 'any other'}{variant} | {row.captured or 'nothing'} | {row.reason} |"
        )
    expected = "\n".join(lines) + "\n"
    assert expected in PAGE.read_text(), f"{PAGE} should be:\n\n{expected}"
