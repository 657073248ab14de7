"""Fork server: a process that has imported everything, from which one rank of each launch is forked.

Importing torch and Lightning takes many times longer than most cases. A forked process runs and ends as
a started one: it returns to the end of this module, and Python ends. If all went well and a launch does
not check the end, objects are left to the system: finalizing them copies their memory, which costs more
than many a case.

Not for GPUs: CUDA does not work in a fork.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

# A capture imports these, which would take each fork a third of a second.
import torch._dynamo.backends.common
import torch._dynamo.backends.debugging  # noqa: F401
from lightning_utilities.core.rank_zero import rank_zero_only

from tests.distributed import worker


def _tell(number: int) -> None:
    print(number, flush=True)


def _become(asked: Any) -> None:
    """Set what is fixed at the start of a process: its environment, its files, its rank."""
    os.environ.clear()
    os.environ.update(asked["environment"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    said = os.open(asked["said"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(nothing, 0)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.close(nothing)
    os.close(said)
    sys.argv = [worker.__file__, *asked["arguments"]]
    rank_zero_only.rank = int(os.environ["LOCAL_RANK"])  # which Lightning reads when it is imported


def _leave() -> None:
    """End as Python does, without finalizing objects."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main() -> int:
    """Fork a worker for each line that is read; write its process id, and later its exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for who has started this
    gc.freeze()  # a collection of garbage in a forked process would have it copied
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            asked = json.loads(line)
            _become(asked)
            folder, accelerator, limit_s, *names = sys.argv[1:]
            status = worker.main(Path(folder), accelerator, float(limit_s), names)
            if status == 0 and not asked["to_its_end"]:
                _leave()
            return status
        _tell(pid)
        _tell(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
