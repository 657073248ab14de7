"""One process of a launch: runs cases, and writes the outcome of each.

A warning is a failure, as in all tests, but not an error in the middle of a step: in one process alone,
that would leave the others waiting for it. A case that hangs writes its stack.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import sys
import threading
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import (
    cases,
    evaluation_cases,
    hook_cases,
    model_cases,
    module_cases,
    overlap_cases,
    sharded_cases,
    sharded_step_cases,
    step_cases,
    stream_cases,
    time_cases,
    unequal_cases,
)

# As in pyproject.toml; and one run is not told about logging that the other is told about.
_IGNORED = (
    r".*treespec, LeafSpec",
    r".*does not have many workers",
    r".*GPU available but not used",
    r"The number of training batches .* is smaller than the logging interval",
    r"Checkpoint directory .* exists and is not empty",
    r"It is recommended to use `self.log",
    # Without the callback, Lightning wraps the module on a stream of its own.
    r"The AccumulateGrad node's stream does not match",
    r".*has Tensor Cores",
    # Of a group that was made without a device, by Lightning's own barriers.
    r"barrier\(\): using the device under current context",
    # The first thing that autograd's thread does is a product of matrices.
    r".*no current CUDA context",
)
# Begin with their name.
_OF_OTHER_NAMES = (
    evaluation_cases,
    hook_cases,
    module_cases,
    overlap_cases,
    sharded_cases,
    sharded_step_cases,
    step_cases,
    stream_cases,
    unequal_cases,
)
_ROOT = str(Path(__file__).parents[2])
_LOOK_EVERY_S = 0.05
# What is noted once a process has been started, and how long it waits for the others.
_BEGUN = "begun"
_BEGUN_S = 120.0
# How long a process may go on with a case that has failed in another one.
_FAILED_ELSEWHERE_S = 25.0


class _Results:
    """The outcomes of the cases in each process, as files that all of them read.

    Args:
        folder: of the files.
        rank: of this process.
        size: number of processes.
    """

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self._folder = folder
        self._rank = rank
        self._size = size
        self._mine: dict[str, str] = {}

    def note(self, case: str, result: str) -> None:
        self._mine[case] = result
        path = self._folder / f"cases{self._rank}.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps(self._mine))
        part.replace(path)  # whole, or not at all

    def of_others(self, case: str) -> list[str | None]:
        """The outcomes of a case in the other processes, as far as known."""
        found: list[str | None] = []
        for rank in range(self._size):
            path = self._folder / f"cases{rank}.json"
            if rank != self._rank:
                found.append(json.loads(path.read_text()).get(case) if path.exists() else None)
        return found

    def wait_for_others(self, case: str) -> None:
        """Wait until all processes have written the outcome of a case."""
        while None in self.of_others(case):
            threading.Event().wait(_LOOK_EVERY_S)

    def has_failed_elsewhere(self, case: str) -> bool:
        return any(found is not None and found != "ok" for found in self.of_others(case))


def _watch(results: _Results, case: str, ended: threading.Event) -> None:
    """In a thread: end the wait for a process in which the case has failed."""
    while not ended.wait(_LOOK_EVERY_S):
        # `launch` asks a process that hangs for its stacks. Lightning restores the handlers of Python at
        # the end of a run, and this is none of those: it works without the interpreter.
        faulthandler.register(signal.SIGUSR1)
        if results.has_failed_elsewhere(case):
            break
    if not ended.wait(_FAILED_ELSEWHERE_S):
        print(f"{case} has failed in another process, and goes on here:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback()
        os._exit(3)


def _run(case: str, here: cases.Here) -> str:
    """The outcome of a case: ``"ok"``, or the exception or warning."""
    warned: list[str] = []

    def note(message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
        if any(re.match(ignored, str(message), re.IGNORECASE) for ignored in _IGNORED):
            return
        if issubclass(category, DeprecationWarning) and not filename.startswith(_ROOT):
            return  # between other packages
        warned.append(f"{filename}:{lineno}: {category.__name__}: {message}")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        try:
            known = vars(cases) | cases.OVER_SOCKETS | vars(time_cases) | model_cases.CASES
            for module in _OF_OTHER_NAMES:
                room = module.__name__.rpartition(".")[2]
                known |= {f"{room}.{name}": value for name, value in vars(module).items()}
            known[case](here)
        except (Exception, pytest.fail.Exception):
            return traceback.format_exc() + "".join(f"\nwarned: {text}" for text in warned)
    return "\n".join(f"warned: {text}" for text in warned) or "ok"


def main(folder: Path, accelerator: str, limit_s: float, names: list[str]) -> int:
    """Run the cases; returns the exit status."""
    torch.set_num_threads(1)
    # A shell that starts something in the background lets it ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    results = _Results(folder, rank, size)
    # How long it takes to start them is no time of the first case.
    faulthandler.dump_traceback_later(_BEGUN_S, exit=True)
    results.note(_BEGUN, "ok")
    results.wait_for_others(_BEGUN)
    faulthandler.cancel_dump_traceback_later()
    for name in names:
        place = folder / name
        place.mkdir(exist_ok=True)
        ended = threading.Event()
        watch = threading.Thread(target=_watch, args=(results, name, ended), daemon=True)
        watch.start()
        faulthandler.dump_traceback_later(limit_s, exit=True)
        try:
            result = _run(name, cases.Here(place, rank, accelerator, size))
        finally:
            ended.set()
            faulthandler.register(signal.SIGUSR1)
        results.note(name, result)
        if result == "ok":
            results.wait_for_others(name)  # the next one begins with all processes in the same place.
        faulthandler.cancel_dump_traceback_later()
        watch.join()
        if result != "ok" or results.has_failed_elsewhere(name):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4:]))
