"""The comparison as tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from benchmarks.goals import RATIOS, goal_of
from benchmarks.peers import DATA_FLOW, EAGER, PEERS
from benchmarks.rows import Cell, Row, Table

__all__ = ["markdown"]

# In the callback's report.
_SAID_OF_STREAMS = "captured on "


def markdown(table: Table) -> str:
    """The whole comparison."""
    said = ", ".join(f"{key} {value}" for key, value in table.environment.items())
    said += f"; medians of {table.rounds} blocks of {table.steps} steps, all of a row in turn in one"
    said += " process; quarter points in brackets."
    peers = [peer.name for peer in PEERS if any(peer.name in row.cells for row in table.rows)]
    parts = [
        said,
        _lines(
            "### µs per step",
            ["model", *peers],
            (_times(row, peers) for row in table.rows),
        ),
        _lines(
            "### Against one another, and the goals",
            ["model", "ratio, round by round", "median", "goal", ""],
            (line for row in table.rows for line in _ratios(row, table.on_gpu)),
        ),
        _lines(
            "### Limits of one step on one stream, µs",
            ["model", "kernels", "sum of their times", "longest dependent chain", "sum ÷ chain"],
            map(_limits, table.rows),
        ),
        _lines(
            "### Weights after the run, against eager Lightning's",
            ["model", "bit for bit the same", "not the same (largest difference)"],
            map(_equality, table.rows),
        ),
        _lines(
            "### Graphs",
            ["model", "peer", "s until the first block", "MiB of graphs"],
            (line for row in table.rows for line in _costs(row)),
        ),
        _streams(table),
        "\n".join(["### Models", "", *(f"- {row.model}: {row.description}" for row in table.rows)]),
        _failures(table),
    ]
    return "\n\n".join(part for part in parts if part)


def _lines(title: str, heads: Sequence[str], rows: Iterable[list[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in rows]
    if not lines:
        return ""
    head = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([title, "", *head, *lines])


def _times(row: Row, peers: list[str]) -> list[str]:
    return [row.model, *(_time(row.cells.get(peer)) for peer in peers)]


def _time(cell: Cell | None) -> str:
    if cell is None:
        return ""
    if cell.failure is not None:
        return "-" if cell.unavailable else "failed"
    low_us, high_us = cell.spread_us
    return f"{cell.median_us:.0f} ({low_us:.0f} to {high_us:.0f})"


def _ratios(row: Row, on_gpu: bool) -> Iterator[list[str]]:
    for ratio in RATIOS:
        upper, lower = row.measured(ratio.upper), row.measured(ratio.lower)
        if upper is None or lower is None:
            continue
        value, low, high = upper.ratio_to(lower)
        goal = None if not on_gpu else goal_of(ratio, row.model, lower.median_us)
        bound = "" if goal is None else f"{'≥' if ratio.large else '≤'} {goal:.2f}"
        met = "" if goal is None else ("met" if ratio.is_met(value, goal) else "**missed**")
        yield [row.model, ratio.name, f"{value:.3f} ({low:.3f} to {high:.3f})", bound, met]


def _limits(row: Row) -> list[str]:
    limits = row.limits
    if limits is None:
        return [row.model, "-", "-", "-", "-"]
    return [
        row.model,
        str(limits.n_kernels),
        f"{limits.kernels_us:.0f}",
        f"{limits.chain_us:.0f}",
        f"{limits.kernels_us / limits.chain_us:.2f}",
    ]


def _equality(row: Row) -> list[str]:
    compared = {name: cell for name, cell in row.cells.items() if cell.equal is not None}
    same = [name for name, cell in compared.items() if cell.equal]
    others = [
        f"{name} ({cell.furthest:.1e}){' **but must be**' if cell.must_be_equal else ''}"
        for name, cell in compared.items()
        if not cell.equal
    ]
    if row.measured(EAGER) is None:
        return [row.model, "not compared", ""]
    if row.eager_again:
        same.append(f"none must: {EAGER} itself, trained again, comes to others ({row.eager_again:.1e})")
    return [row.model, "; ".join(same), "; ".join(others)]


def _costs(row: Row) -> Iterator[list[str]]:
    for name, cell in row.cells.items():
        if cell.step_us:
            taken = "" if cell.memory_bytes is None else f"{cell.memory_bytes / 2**20:.1f}"
            yield [row.model, name, f"{cell.begin_s:.1f}", taken]


def _streams(table: Table) -> str:
    """The lines of the reports on the choice of streams."""
    lines = [
        f"- {row.model}: {line.split(maxsplit=1)[1]}"
        for row in table.rows
        if (cell := row.measured(DATA_FLOW)) is not None and cell.report is not None
        for line in cell.report.splitlines()
        if _SAID_OF_STREAMS in line
    ]
    return "\n".join(["### Streams", "", *lines]) if lines else ""


def _failures(table: Table) -> str:
    lines = [f"- {row.model}: failed: {row.failure}" for row in table.rows if row.failure]
    for row in table.rows:
        for name, cell in row.cells.items():
            if cell.failure is not None:
                what = "not compared" if cell.unavailable else "failed"
                lines.append(f"- {row.model}, {name}: {what}: {cell.failure}")
        if row.limits_failure is not None:
            lines.append(f"- {row.model}, limits: failed: {row.limits_failure}")
    return "\n".join(["### What has no figures", "", *lines]) if lines else ""
