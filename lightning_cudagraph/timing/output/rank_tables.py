"""Text about the times of all processes: a table, and sentences about the slowest process."""

from __future__ import annotations

from lightning_cudagraph.timing.output.tables import timed_steps
from lightning_cudagraph.timing.output.texts import table
from lightning_cudagraph.timing.readings.rank_times import MEASURED_PARTS, RankRow, RankTable

_MOST_ROWS = 32
_FASTEST_SHOWN = 4
# A process counts as the slowest if it is behind the fastest by this share of a step.
_BEHIND = 0.02
_WHERE = {
    "forward": "in its forward pass",
    "backward": "in its backward pass",
    "host": "in hooks in the middle of its steps",
    "optimizer": "after its backward pass",
    "gap": "between its steps, where the device waits for the host (batches, hooks, loggers)",
    "copy": "in the copy of its batches",
}


def ranks_text(ranks: RankTable) -> str:
    """A table with a row for each process, sorted by its own work, the slowest first."""
    rows = sorted(ranks.rows, key=lambda row: -row.p50_ms("work"))
    shown = rows
    if len(rows) > _MOST_ROWS:
        shown = rows[: _MOST_ROWS - _FASTEST_SHOWN] + rows[-_FASTEST_SHOWN:]
    columns = [part for part in MEASURED_PARTS if any(part in row.parts for row in rows)]
    hosts = ["host"] if len({row.host for row in rows}) > 1 else []
    lines: list[list[str | float]] = [
        ["", *[""] * len(hosts), "work", "", "", "wait", "step", *[""] * len(columns)],
        ["rank", *hosts, "p50 ms", "p95 ms", "mean ms", "p50 ms", "p50 ms", *columns],
    ]
    for row in shown:
        work = row.parts["work"]
        medians_ms = [row.p50_ms(part) for part in ("wait", "step", *columns)]
        host = [row.host] if hosts else []
        lines.append([str(row.rank), *host, work.p50_ms, work.p95_ms, work.mean_ms, *medians_ms])
    text = table(lines, left=(1,) if hosts else ())
    if len(shown) < len(rows):
        text.insert(2 + _MOST_ROWS - _FASTEST_SHOWN, f"... and {len(rows) - len(shown)} more")
    first, last = rows[0].first_step, max(row.last_step for row in rows)
    return "\n".join(
        [
            f"{len(rows)} processes, {timed_steps(rows[0].n_steps)}, {first} to {last}",
            *ranks_lines(ranks),
            "",
            *text,
            "Work: the time that a step would take without the other processes. Wait: the part of a",
            "step in which a process only waits for others, in collectives or before it launches the",
            "step. The process with the most work waits least.",
        ]
    )


def ranks_lines(table: RankTable) -> list[str]:
    """Sentences that name the process that the others wait for, and the part in which it loses time."""
    slowest, fastest = table.slowest, table.fastest
    work_ms, step_ms = slowest.p50_ms("work"), table.median_ms("step")
    waits_ms = sorted(row.p50_ms("wait") for row in table.rows)
    if work_ms - fastest.p50_ms("work") < _BEHIND * step_ms:
        text = (
            f"all {len(table.rows)} are as fast: {fastest.p50_ms('work'):.3f} to {work_ms:.3f} ms of"
            f" their own in a step of {step_ms:.3f} ms, and {waits_ms[0]:.3f} to {waits_ms[-1]:.3f} ms"
            " of waiting for one another"
        )
        return [text]
    on_host = f" ({slowest.host})" if len({row.host for row in table.rows}) > 1 else ""
    text = (
        f"rank {slowest.rank}{on_host} is slowest: {work_ms:.3f} ms of its own in a"
        f" step of {step_ms:.3f} ms, {_others(table, 'work')}"
    )
    if slowest.p50_ms("wait") <= waits_ms[0]:
        text += f"; it waits least for others, {waits_ms[0]:.3f} ms, {_others(table, 'wait')}"
    return [text, *_where(table, slowest)]


def _others(table: RankTable, part: str) -> str:
    """The median rank, or the other one of two, for comparison with the slowest."""
    if len(table.rows) == 2:
        return f"rank {table.fastest.rank} {table.fastest.p50_ms(part):.3f} ms"
    return f"median rank {table.median_ms(part):.3f} ms"


def _where(table: RankTable, slowest: RankRow) -> list[str]:
    """The part of a step in which the slowest loses most of its time, if there is one such part."""
    fastest = table.fastest
    behind_ms = slowest.p50_ms("work") - fastest.p50_ms("work")
    part = max(_WHERE, key=lambda part: slowest.p50_ms(part) - fastest.p50_ms(part))
    lost_ms = slowest.p50_ms(part) - fastest.p50_ms(part)
    if lost_ms < behind_ms / 2:
        return []
    times = f"{slowest.p50_ms(part):.3f} ms, rank {fastest.rank} {fastest.p50_ms(part):.3f} ms"
    return [f"most of the difference is {_WHERE[part]}: {times}"]
