"""Step times of the callback and of its peers, over models from launch-bound to compute-bound.

    python -m benchmarks

Each row is a process of its own, in which all peers (`benchmarks/peers.py`) train one model
(`benchmarks/models.py`) in turn, block by block, so that drift of the machine cancels
(`benchmarks/fits.py`). Prints tables in Markdown, and on request writes JSON and a figure. The exit
status is 1 if a peer failed, or ended with wrong weights.

Without a GPU, `--tiny` checks that all that can run on a CPU runs: the figures mean nothing there.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from benchmarks.fits import Blocks, environment
from benchmarks.models import WORKLOADS, Workload
from benchmarks.peers import PEERS
from benchmarks.picture import draw
from benchmarks.rows import Row, Table, measure_row
from benchmarks.tables import markdown

__all__ = ["main"]

# Compilation, warm-up, capture on several numbers of streams, verified replays, and rare work early in a
# process: with timings, two critics took 735 us a step after 40 steps, 294 after 100 (H200).
_WARM_STEPS = 100
_LEAD_STEPS = 5


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    models, peers = [each.name for each in WORKLOADS], [each.name for each in PEERS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=models, default=models, metavar="MODEL")
    parser.add_argument("--peers", nargs="+", choices=peers, default=peers, metavar="PEER")
    parser.add_argument("--steps", type=int, default=25, help="steps of a block")
    parser.add_argument("--rounds", type=int, default=7, help="blocks of each fit")
    parser.add_argument("--no-limits", action="store_true", help="leave out the limits of a step")
    parser.add_argument("--tiny", action="store_true", help="tiny models, all in this process")
    parser.add_argument("--list", action="store_true", help="only list models and peers")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    parser.add_argument("--figure", type=Path, help="draw a figure into this file")
    parser.add_argument("--read", type=Path, nargs="+", help="measure nothing: read what --json wrote")
    return parser.parse_args(given)


def _row_here(workload: Workload, args: argparse.Namespace) -> Row:
    """Measure a row in this process."""
    if not workload.is_here:
        return Row(workload.name, workload.description, failure=f"it needs {workload.needs}")
    blocks = Blocks(_WARM_STEPS, _LEAD_STEPS, args.steps, args.rounds)
    peers = [peer for peer in PEERS if peer.name in args.peers]
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return measure_row(workload, peers, blocks, args.tiny, not args.no_limits)


def _table_there(workload: Workload, args: argparse.Namespace) -> Table:
    """Measure a row in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.json"
        command = [sys.executable, "-m", "benchmarks", "--models", workload.name, "--peers", *args.peers]
        command += ["--steps", str(args.steps), "--rounds", str(args.rounds), "--json", str(path)]
        command += ["--no-limits"] * args.no_limits
        # The tables are printed from all rows together.
        ended = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        if path.exists():
            return Table.read(path)
    row = Row(workload.name, workload.description, failure=f"its process ended with {ended.returncode}")
    return Table({}, args.steps, args.rounds, rows=[row])


def _measured(args: argparse.Namespace) -> Table:
    chosen = [workload for workload in WORKLOADS if workload.name in args.models]
    if args.tiny or len(chosen) == 1:
        rows = [_row_here(workload, args) for workload in chosen]
        return Table(environment(), args.steps, args.rounds, rows=rows)
    table = Table({}, args.steps, args.rounds)
    for workload in chosen:
        started_s = time.perf_counter()
        part = _table_there(workload, args)
        table.environment = part.environment or table.environment
        table.rows += part.rows
        said = f"{workload.name}: {time.perf_counter() - started_s:.0f} s"
        print(said, file=sys.stderr, flush=True)
        if args.json:
            table.write(args.json)  # what is there, if a later row takes too long
    return table


def _read(paths: Sequence[Path]) -> Table:
    """Tables of several runs as one."""
    first, *others = [Table.read(path) for path in paths]
    conditions = (first.environment, first.steps, first.rounds)
    for other in others:
        if (other.environment, other.steps, other.rounds) != conditions:
            raise SystemExit(f"Not measured alike: {paths[0]} and the others of {len(paths)} files")
        first.rows += other.rows
    return first


def main(given: Sequence[str] | None = None) -> int:
    """Measure, and print the tables."""
    args = _arguments(given)
    if args.list:
        print("\n".join(f"{each.name}: {each.description}" for each in WORKLOADS))
        print("\n".join(["", *(each.name for each in PEERS)]))
        return 0
    table = _read(args.read) if args.read else _measured(args)
    text = markdown(table)
    print(text)
    if args.json:
        table.write(args.json)
    if args.markdown:
        args.markdown.write_text(text + "\n")
    if args.figure:
        draw(table, args.figure)
    wrong = any(cell.is_wrong for row in table.rows for cell in row.cells.values())
    return int(wrong or any(row.failure is not None for row in table.rows))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
