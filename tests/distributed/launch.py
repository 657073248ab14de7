"""Launches of processes that train together, with the outcome of each case.

A launch takes seconds, so one serves many cases: every process runs them in order, and writes the
outcome of each. A launch has a time limit: a hang is a failure. On a CPU the processes are forked from
servers that have imported everything; CUDA does not work in a fork.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.forks import ROOT, Forked

Process = Forked | subprocess.Popen[bytes]

# The limit of cases in which one process has something else to do than the others. All learn of it at
# once, and nobody waits for a time limit of torch's.
AT_ONCE_S = 30.0
# The time in which a process that hangs writes its stacks.
_STACKS_S = 2.0


@dataclass
class Ended:
    """The end of one process.

    Attributes:
        status: its exit status; negative for a signal, None if it had to be killed.
        said: its standard output and error.
        cases: the outcome of each case, ``"ok"`` or a traceback.
        ended_s: time of its end, by the monotonic clock; observed in the order of the ranks.
    """

    status: int | None
    said: str
    cases: dict[str, str]
    ended_s: float


def free_port() -> int:
    """A port without a listener.

    Not one that the system assigns: it assigns those to every connection made meanwhile.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def launch(
    folder: Path,
    cases: Sequence[str],
    accelerator: str,
    timeout_s: float,
    act: Callable[[Path, list[Process]], None] | None = None,
    size: int = 2,
    limit_s: float = 120.0,
    environment: Mapping[str, str] | None = None,
    to_its_end: bool = True,
) -> list[Ended]:
    """Run cases in the processes of one group.

    Args:
        folder: the folder of all files.
        cases: functions of `tests.distributed.cases` or of the modules beside it that `worker` knows.
        accelerator: ``"cpu"`` or ``"gpu"``.
        timeout_s: time after which they must have ended.
        act: called once they have begun, with the folder and the processes.
        size: number of processes.
        limit_s: time in one case after which a process writes its stack, and ends.
        environment: variables for all of them.
        to_its_end: let Python finalize all objects at the end of a forked process, which costs more than
            half a second. False if the end is not under test.
    """
    port = free_port()
    processes: list[Process] = []
    process: Process
    for rank in range(size):
        env = {
            **os.environ,
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
            **{"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(size)},
            # Without a store, NCCL's watchdog warns once a second, with its stack.
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            **(environment or {}),
        }
        arguments = [str(folder), accelerator, str(limit_s), *cases]
        file = folder / f"said{rank}.txt"
        if accelerator == "cpu":
            processes.append(Forked(rank, arguments, env, file, to_its_end))
            continue
        command = [sys.executable, "-m", "tests.distributed.worker", *arguments]
        with open(file, "wb") as said:
            process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=said, stderr=said)
        processes.append(process)
    if act is not None:
        act(folder, processes)
    started_s = time.monotonic()
    ended = []
    for rank, process in enumerate(processes):
        left_s = timeout_s - (time.monotonic() - started_s)
        status: int | None
        try:
            status = process.wait(timeout=max(left_s, 0.1))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGUSR1)  # writes its stacks
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_STACKS_S)
            process.send_signal(signal.SIGKILL)
            process.wait()
            status = None
        text = (folder / f"said{rank}.txt").read_text(errors="replace")
        found = folder / f"cases{rank}.json"
        done = json.loads(found.read_text()) if found.exists() else {}
        ended.append(Ended(status, text, done, time.monotonic()))
    return ended


def told(ended: list[Ended]) -> str:
    """The exit status and the output of each process."""
    return "\n\n".join(
        f"rank {rank} ended with {process.status}, and said: {process.said[-6000:]}"
        for rank, process in enumerate(ended)
    )


def failures(ended: list[Ended], cases: Sequence[str]) -> str:
    """The failed cases of all processes, in words; empty if none failed."""
    found = []
    for rank, process in enumerate(ended):
        bad = [case for case in cases if process.cases.get(case) != "ok"]
        found += [f"{case}, rank {rank}: {process.cases.get(case, 'did not end')}" for case in bad]
        if bad or process.status != 0:
            found.append(f"rank {rank} ended with {process.status}; it said: {process.said[-4000:]}")
    return "\n\n".join(found)


def assert_all_ok(ended: list[Ended], cases: Sequence[str]) -> None:
    """Fail unless every case passed in every process."""
    if found := failures(ended, cases):
        pytest.fail(found, pytrace=False)


def assert_cases_of(
    module: str, folder: Path, cases: Sequence[str], accelerator: str, timeout_s: float, **kwargs: Any
) -> None:
    """Launch cases of a module beside `cases.py`, and fail unless all pass; `kwargs` as for `launch`."""
    named = [f"{module}.{case}" for case in cases]
    assert_all_ok(launch(folder, named, accelerator, timeout_s, **kwargs), named)
