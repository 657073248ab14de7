"""Processes that train together, and what became of each.

A launch takes seconds, so that one serves many cases: every process runs them in order, and writes for
each what it came to. A launch has a time limit: a hang is a failure. On a CPU the processes are forked
from some that have imported everything; CUDA does not go on in a fork.
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

import pytest

from tests.distributed.forks import ROOT, Forked

Process = Forked | subprocess.Popen[bytes]

# The limit of cases in which one process has something else to do than the others. All learn of it at
# once, and nobody waits for a time limit of torch's.
AT_ONCE_S = 30.0


@dataclass
class Ended:
    """How one process ended.

    Attributes:
        status: its exit status; negative for a signal, None if it had to be killed.
        said: what it wrote to its output and its errors.
        cases: what came of each case, ``"ok"`` or a traceback.
        ended_s: when, by the monotonic clock; seen in the order of the ranks.
    """

    status: int | None
    said: str
    cases: dict[str, str]
    ended_s: float


def free_port() -> int:
    """A port that nobody listens on.

    Not one that the system would give: those are given to every connection that is made meanwhile.
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
    """Run cases in processes of one group.

    Args:
        folder: where everything is written.
        cases: functions of `tests.distributed.cases` or of the modules beside it that `worker` knows.
        accelerator: ``"cpu"`` or ``"gpu"``.
        timeout_s: when they must have ended.
        act: called once they have begun, with the folder and the processes.
        size: how many processes.
        limit_s: when a process that is still in the same case writes where it is, and ends.
        environment: variables for all of them.
        to_its_end: let Python take all objects apart at the end of a forked process. False where the end
            is not what is tested: that costs more than half a second of each.
    """
    port = free_port()
    processes: list[Process] = []
    for rank in range(size):
        env = {
            **os.environ,
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
            **{"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(size)},
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
            process.send_signal(signal.SIGKILL)
            process.wait()
            status = None
        told = (folder / f"said{rank}.txt").read_text(errors="replace")
        found = folder / f"cases{rank}.json"
        done = json.loads(found.read_text()) if found.exists() else {}
        ended.append(Ended(status, told, done, time.monotonic()))
    return ended


def failures(ended: list[Ended], cases: Sequence[str]) -> str:
    """What did not come out well: every case, in every process; or nothing."""
    found = []
    for rank, process in enumerate(ended):
        bad = [case for case in cases if process.cases.get(case) != "ok"]
        found += [f"{case}, rank {rank}: {process.cases.get(case, 'did not end')}" for case in bad]
        if bad or process.status != 0:
            found.append(f"rank {rank} ended with {process.status}; it said: {process.said[-4000:]}")
    return "\n\n".join(found)


def assert_all_ok(ended: list[Ended], cases: Sequence[str]) -> None:
    """Fail unless every case came out well in every process."""
    if found := failures(ended, cases):
        pytest.fail(found, pytrace=False)
