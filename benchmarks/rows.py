"""One row of the comparison: a model trained by all peers in turn, with times and weights of each."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.fits import ON_GPU, BlockedBatches, Blocks, Times, fits_in_turn, pinned
from benchmarks.limits import Limits, measure_limits
from benchmarks.models import Workload
from benchmarks.peers import EAGER, Outcome, Peer

__all__ = ["Cell", "Row", "Table", "measure_row"]

_LONGEST_REASON = 160
# Of a traceback, from its end.
_FRAMES = -12


@dataclass
class Cell(Times):
    """The result of one peer with one model.

    Attributes:
        failure: the reason why it has no times, or None.
        unavailable: it cannot run on this machine.
        equal: its final weights are those of eager Lightning, bit for bit; None if not compared.
        furthest: the largest difference of a weight.
        must_be_equal: the weights must be equal, if eager Lightning reproduces its own.
        report: of the callback.
        memory_bytes: device memory that the callback's graphs took.
    """

    failure: str | None = None
    unavailable: bool = False
    equal: bool | None = None
    furthest: float | None = None
    must_be_equal: bool = False
    report: str | None = None
    memory_bytes: int | None = None

    @property
    def is_wrong(self) -> bool:
        """True if it failed although it can run here, or has other weights although it must not."""
        failed = self.failure is not None and not self.unavailable
        return failed or (self.must_be_equal and self.equal is False)


@dataclass
class Row:
    """The results of one model.

    Attributes:
        model: its name.
        description: its size, in words.
        cells: by the names of the peers.
        limits: lower bounds of the step time; None if unknown.
        limits_failure: the reason why they are unknown.
        took_s: duration of all fits in seconds.
        failure: the reason why the row has no results, or None.
        eager_again: the largest difference between the weights of two fits of eager Lightning; None if
            not measured, because all peers that must have its weights do.
    """

    model: str
    description: str
    cells: dict[str, Cell] = field(default_factory=dict)
    limits: Limits | None = None
    limits_failure: str | None = None
    took_s: float = float("nan")
    failure: str | None = None
    eager_again: float | None = None

    def measured(self, peer: str) -> Cell | None:
        """The cell of a peer, if it has times."""
        cell = self.cells.get(peer)
        return cell if cell is not None and cell.step_us else None


@dataclass
class Table:
    """All rows, with the conditions of the measurement.

    Attributes:
        environment: device and versions.
        steps: of a block.
        rounds: blocks of a fit.
        on_gpu: False on a CPU, where no goal applies.
        rows: one for each model.
    """

    environment: dict[str, Any]
    steps: int
    rounds: int
    on_gpu: bool = ON_GPU
    rows: list[Row] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Write everything into a file."""
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, path: Path) -> Table:
        """Read what `write` has written."""
        fields = json.loads(path.read_text())
        fields["rows"] = [_row(each) for each in fields["rows"]]
        return cls(**fields)


def _row(fields: dict[str, Any]) -> Row:
    cells = {name: Cell(**cell) for name, cell in fields["cells"].items()}
    limits = None if fields["limits"] is None else Limits(**fields["limits"])
    return Row(**(fields | {"cells": cells, "limits": limits}))


def _reason(error: BaseException) -> str:
    """An error as one line of a table."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = (f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__).replace("|", "/")
    return said if len(said) <= _LONGEST_REASON else said[: _LONGEST_REASON - 1] + "…"


def measure_row(
    workload: Workload, peers: Sequence[Peer], blocks: Blocks, tiny: bool, with_limits: bool = True
) -> Row:
    """Train one model by all peers in turn. A failure of one does not affect the others.

    Args:
        workload: the model.
        peers: the peers.
        blocks: the division of the steps into blocks.
        tiny: the model in its tiny size.
        with_limits: also measure the limits, on a GPU.
    """
    started_s = time.perf_counter()
    row = Row(workload.name, workload.description)
    weights = _Weights()
    outcomes: dict[str, Outcome] = {}

    def fit_of(peer: Peer) -> Callable[[BlockedBatches], None]:
        def fit(batches: BlockedBatches) -> None:
            outcome = peer.fit(workload, tiny, batches)
            weights.compare(row.cells[peer.name], peer, outcome.weights)
            outcome.weights = {}
            outcomes[peer.name] = outcome

        return fit

    fits = {}
    in_main_thread = None
    for peer in peers:
        row.cells[peer.name] = cell = Cell(must_be_equal=peer.same_numbers)
        if peer.needs_gpu and not ON_GPU:
            cell.failure, cell.unavailable = "needs a GPU", True
            continue
        fits[peer.name] = fit_of(peer)
        if peer.in_main_thread:
            in_main_thread = peer.name
        if peer.needs is not None:
            import_module(peer.needs)
    with contextlib.redirect_stdout(io.StringIO()):  # samples, progress
        measured = fits_in_turn(fits, lambda: pinned(workload.batch(tiny)), blocks, in_main_thread)
    for name, each in measured.items():
        cell = row.cells[name]
        if each.failure is not None:
            cell.failure = _reason(each.failure)
            traceback.print_exception(each.failure, limit=_FRAMES)
            continue
        cell.step_us, cell.begin_s = each.step_us, each.begin_s
        cell.report, cell.memory_bytes = outcomes[name].report, outcomes[name].memory_bytes
    again = [peer for peer in peers if peer.name == EAGER and weights.are_known]
    if again and any(cell.must_be_equal and cell.equal is False for cell in row.cells.values()):
        control = Cell()

        def eager_again(batches: BlockedBatches) -> None:
            weights.compare(control, None, again[0].fit(workload, tiny, batches).weights)

        with contextlib.redirect_stdout(io.StringIO()):
            fits_in_turn({EAGER: eager_again}, lambda: pinned(workload.batch(tiny)), blocks, None)
        row.eager_again = control.furthest
        if control.equal is False:
            for cell in row.cells.values():
                cell.must_be_equal = False
    gc.collect()
    if ON_GPU and with_limits:
        try:
            row.limits = measure_limits(workload, tiny)
        except Exception as error:  # the step times stand without it
            row.limits_failure = _reason(error)
            traceback.print_exception(error, limit=_FRAMES)
    row.took_s = time.perf_counter() - started_s
    return row


class _Weights:
    """The final weights of eager Lightning, with which the others are compared."""

    def __init__(self) -> None:
        self._eager: dict[str, Tensor] | None = None

    @property
    def are_known(self) -> bool:
        return self._eager is not None

    def compare(self, cell: Cell, peer: Peer | None, weights: dict[str, Tensor]) -> None:
        """Note how far a fit's weights are from these; the first fit of eager Lightning sets them."""
        if peer is not None and peer.name == EAGER:
            self._eager = weights
        elif self._eager is not None and weights:
            pairs = [(tensor, weights[name]) for name, tensor in self._eager.items()]
            cell.equal = all(torch.equal(eager, its) for eager, its in pairs)
            cell.furthest = max(_distance(eager, its) for eager, its in pairs)


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0
