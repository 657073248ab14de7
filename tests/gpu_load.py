"""Load on a GPU by another process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Kernels of all sizes, one after the other, until it is told to end.
_LOAD = """
import select, sys, torch
torch.cuda.set_device(int(sys.argv[1]))
sizes = [64, 2048, 512, 4096, 128, 1024]
squares = [torch.randn(size, size, device="cuda") for size in sizes]
torch.cuda.synchronize()
print("ready", flush=True)
rounds = 0
while not select.select([sys.stdin], [], [], 0)[0]:
    for square in squares[: 1 + rounds % len(sizes)]:
        square.copy_((square @ square).tanh())
    torch.cuda.synchronize()
    rounds += 1
print(rounds, flush=True)
"""


@contextmanager
def gpu_under_load(index: int) -> Iterator[None]:
    """Let another process work on a GPU meanwhile."""
    command = [sys.executable, "-c", _LOAD, str(index)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield
            process.stdin.write("end\n")
            process.stdin.flush()
            assert int(process.stdout.readline()) > 10
        finally:
            process.stdin.close()
            process.kill()
