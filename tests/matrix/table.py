"""The table of `python -m tests.matrix`: places by moments, or effects, with the outcome of each."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor

import torch

from tests.matrix.cases import MODES, few, missing, whole
from tests.matrix.effects import EFFECTS
from tests.matrix.judge import EAGER, EQUAL, REFUSED, VAGUE, WRONG, Case, Verdict, judge
from tests.matrix.places import PLACES

_FROM_GOOD_TO_BAD = (EQUAL, EAGER, REFUSED, VAGUE, WRONG)


def _quietly() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_cudagraph"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _judged(cases: list[Case], accelerator: str, workers: int) -> Iterator[Verdict]:
    if workers == 1:
        yield from (judge(case, accelerator) for case in cases)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _quietly) as pool:
        # Neighbours share plain runs.
        yield from pool.map(judge, cases, [accelerator] * len(cases), chunksize=4)


def _chosen(arguments: argparse.Namespace) -> Iterable[Case]:
    if arguments.few:
        cases: Iterable[Case] = few()
    else:
        names = EFFECTS if arguments.effects else PLACES
        cases = (case for name in names for case in whole(name, tuple(arguments.mode)))
    for case in cases:
        verified = {"on": True, "off": False}.get(arguments.verify)
        if (
            not missing(case)
            and (arguments.place.lower() in case.name.lower())
            and (arguments.moment.lower() in (case.moment or case.where).lower())
            and (case.mode in arguments.mode)
            and (verified is None or verified == bool(case.setting.verify))
            and (not arguments.use or case.use == arguments.use)
        ):
            yield case


def _table(found: list[tuple[Case, Verdict]]) -> str:
    rows: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for case, verdict in found:
        column = f"{case.mode}: {case.moment or case.where}"
        rows[case.name][column].add(verdict.outcome)
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    width = max(map(len, rows), default=0)
    lines = [f"{number:>3}  {column}" for number, column in enumerate(columns, 1)]
    head = " ".join(f"{number:>7}" for number in range(1, len(columns) + 1))
    lines += ["", " " * width + " " + head]
    for name, row in rows.items():
        # The worst of those with verification and without.
        cells = (max(row[column], key=_FROM_GOOD_TO_BAD.index, default="") for column in columns)
        lines.append(f"{name:<{width}} " + " ".join(f"{cell:>7}" for cell in cells))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--place", default="", help="part of the names of places or effects")
    parser.add_argument("--moment", default="", help="part of the names of moments")
    parser.add_argument("--mode", nargs="*", default=list(MODES), choices=MODES)
    parser.add_argument("--use", default="", choices=("", "factor", "branch", "shape"))
    parser.add_argument("--verify", default="both", choices=("on", "off", "both"))
    parser.add_argument("--effects", action="store_true", help="effects instead of places")
    parser.add_argument("--few", action="store_true", help="those that every run of the tests has")
    parser.add_argument("--accelerator", default="cpu", choices=("cpu", "gpu"))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--details", action="store_true", help="of all, not only of those that fail")
    arguments = parser.parse_args()
    _quietly()
    cases = list(_chosen(arguments))
    found = []
    for case, verdict in zip(
        cases, _judged(cases, arguments.accelerator, arguments.workers), strict=True
    ):
        found.append((case, verdict))
        if arguments.details or not verdict.is_right:
            print(f"{case}\n    {verdict}", file=sys.stderr, flush=True)
    print(_table(found))
    print(", ".join(f"{count} {name}" for name, count in Counter(v.outcome for _, v in found).items()))
    return int(any(not verdict.is_right for _, verdict in found))
