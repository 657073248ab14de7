"""Processes that Lightning starts from within Python, as in a notebook."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.distributed.launch import ROOT


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_spawn"])
def test_started_processes_train_as_without_the_callback(accelerator: str, strategy: str) -> None:
    command = [sys.executable, "-m", "tests.distributed.started", accelerator, strategy]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith(f"{strategy}: the same\n")
