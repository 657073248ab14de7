"""The comparison as a figure: for each model the step times of all peers, and the limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from benchmarks.peers import PEERS, REPLAYS
from benchmarks.rows import Row, Table

__all__ = ["draw"]

_COLUMNS = 3
_OURS, _OTHERS = "#c44e52", "#8c96a3"


def draw(table: Table, path: Path) -> None:
    """Draw all rows into a file.

    Args:
        table: the comparison.
        path: a PNG, an SVG or a PDF file.
    """
    rows = [row for row in table.rows if any(cell.step_us for cell in row.cells.values())]
    lines = max(1, -(-len(rows) // _COLUMNS))
    figure = Figure(figsize=(5.2 * _COLUMNS, 2.9 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, row in zip(figure.subplots(lines, _COLUMNS, squeeze=False).flat, rows, strict=False):
        _panel(axes, row)
    for axes in figure.axes[len(rows) :]:
        axes.set_visible(False)
    environment = table.environment
    figure.suptitle(f"µs per training step: {environment['device']}, torch {environment['torch']}")
    figure.savefig(path, dpi=110)


def _panel(axes: Any, row: Row) -> None:
    names = [peer.name for peer in PEERS if row.measured(peer.name) and peer.name != REPLAYS]
    for place, name in enumerate(names):
        cell = row.cells[name]
        low_us, high_us = cell.spread_us
        colour = _OURS if name.startswith("callback") else _OTHERS
        axes.barh(place, cell.median_us, color=colour, height=0.7)
        axes.hlines(place, low_us, high_us, color="black", linewidth=1.2)
        axes.text(high_us, place, f" {cell.median_us:.0f}", va="center", fontsize=7)
    if (replays := row.measured(REPLAYS)) is not None:
        axes.axvline(replays.median_us, color="black", linewidth=0.9, linestyle="--")
    if row.limits is not None:
        axes.axvline(row.limits.chain_us, color="black", linewidth=0.9, linestyle=":")
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.invert_yaxis()
    shortest_us = min(cell.median_us for name in names if (cell := row.measured(name)))
    if row.limits is not None:
        shortest_us = min(shortest_us, row.limits.chain_us)
    axes.set_xscale("log")
    axes.set_xlim(left=shortest_us / 2)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.15)
    axes.set_title(row.model, fontsize=9)
    axes.tick_params(axis="x", labelsize=7)
    axes.set_xlabel("-- replays of a one-stream graph alone    : longest dependent chain", fontsize=6)
