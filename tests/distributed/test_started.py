"""Processes that Lightning starts from within Python, as in a notebook."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.distributed.launch import ROOT


def test_started_processes_train_as_without_the_callback(accelerator: str) -> None:
    command = [sys.executable, "-m", "tests.distributed.started", accelerator, "ddp_fork", "ddp_spawn"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n")[-3:] == ["ddp_fork: the same", "ddp_spawn: the same", ""]
