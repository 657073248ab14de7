"""Workers forked from a process that has imported everything (`fork_server.py`).

Each rank has a server of its own, because the order of Python's sets is drawn when a process starts: it
must not be the same in all ranks.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, cast

ROOT = Path(__file__).parents[2]


class _Server:
    """A fork server: forks one process after the other, and reports the id and exit status of each."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.distributed.fork_server"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        # Without a buffer, in which `select` would not see a number.
        self._process = subprocess.Popen(
            command, bufsize=0, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe
        )
        atexit.register(self._process.communicate)  # which closes its input, and waits

    def ask(self, **asked: object) -> None:
        """Request a fork."""
        cast(IO[bytes], self._process.stdin).write(json.dumps(asked).encode() + b"\n")

    def told(self, timeout: float | None) -> int:
        """The next number that it writes."""
        output = cast(IO[bytes], self._process.stdout)
        if timeout is not None and not select.select([output], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self._process.args, timeout)
        line = output.readline()
        assert line, "the process from which others are forked has ended"
        return int(line)


_servers: dict[int, _Server] = {}


class Forked:
    """A worker, with the methods of `subprocess.Popen` that a launch needs.

    Args:
        rank: of the server that forks it. The worker before it must have ended.
        arguments: of `tests.distributed.worker`.
        environment: its variables.
        said: the file for its output and its errors.
        to_its_end: let Python finalize all objects at its end.
    """

    def __init__(
        self,
        rank: int,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        said: Path,
        to_its_end: bool,
    ) -> None:
        if rank not in _servers:
            _servers[rank] = _Server()
        self._server = _servers[rank]
        self._server.ask(
            arguments=arguments, environment=environment, said=str(said), to_its_end=to_its_end
        )
        self._pid: int | None = None
        self._status: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, negative for a signal."""
        if self._pid is None:
            self._pid = self._server.told(timeout)
        if self._status is None:
            self._status = self._server.told(timeout)
        return self._status

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless the worker has ended."""
        if self._pid is None:
            self._pid = self._server.told(None)
        if self._status is None:
            os.kill(self._pid, sig)
