"""Several machines: ranks that are not local ranks, and processes without memory in common."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lightning_cudagraph.processes.shared_page import machine
from tests.distributed.launch import ROOT, free_port

TIMEOUT_S = 240.0


def _status(process: subprocess.Popen[bytes], deadline_s: float) -> int | None:
    try:
        return process.wait(timeout=max(deadline_s - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # with which it ends its processes
        process.wait()
        return None


def torchrun(
    folder: Path, command: list[str], local_size: int, agents: int = 1, gpus: bool = False
) -> list[str]:
    """Run a command by one agent or several of `torchrun`; returns what each agent has said.

    Args:
        folder: where what they say goes.
        command: a script or `-m` and a module, and arguments.
        local_size: how many processes each agent starts.
        agents: how many there are; each is a machine of its own to its processes.
        gpus: let each agent see GPUs of its own.
    """
    port = free_port()
    started = []
    for node in range(agents):
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
        if gpus:
            first = node * local_size
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(first, first + local_size)))
        agent = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(agents)),
            *("--node-rank", str(node), "--nproc-per-node", str(local_size)),
            *("--master-addr", "127.0.0.1", "--master-port", str(port)),
        ]
        with open(folder / f"agent{node}.txt", "wb") as said:
            started.append(
                subprocess.Popen([*agent, *command], cwd=ROOT, env=env, stdout=said, stderr=said)
            )
    deadline_s = time.monotonic() + TIMEOUT_S
    statuses = [_status(process, deadline_s) for process in started]
    said = [(folder / f"agent{node}.txt").read_text(errors="replace") for node in range(agents)]
    assert statuses == [0] * agents, "\n".join(text[-3000:] for text in said)
    return said


@pytest.mark.long
@pytest.mark.parametrize("local_size", [1, 2])
def test_two_machines_train_as_without_the_callback(
    tmp_path: Path, accelerator: str, local_size: int
) -> None:
    if accelerator == "gpu" and torch.cuda.device_count() < 2 * local_size:
        pytest.skip(f"needs {2 * local_size} CUDA GPUs")
    command = ["-m", "tests.distributed.hosts", str(tmp_path), accelerator]
    torchrun(tmp_path, command, local_size, agents=2, gpus=accelerator == "gpu")
    for rank in range(2 * local_size):
        assert json.loads((tmp_path / f"rank{rank}.json").read_text()) == "ok"


@pytest.mark.long  # they share a page in test_together.py
def test_processes_of_one_machine_have_one_name_for_it() -> None:
    code = "from lightning_cudagraph.processes.shared_page import machine; print(machine())"
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    assert said.stdout.decode().strip() == machine()


@pytest.mark.long
def test_an_example_with_torchrun(tmp_path: Path, accelerator: str) -> None:
    """As `examples/slurm/char_gpt.sbatch` starts it, in a small setting."""
    size = {"n_layer": 1, "n_head": 1, "n_embd": 16, "block_size": 16, "sample_chars": 10}
    trainer = {"accelerator": accelerator, "devices": 2, "num_nodes": 1, "max_epochs": 1}
    trainer |= {"logger.init_args.save_dir": str(tmp_path), "val_check_interval": 20}
    command = [
        "-m",
        "tests.distributed.script",
        "examples/char_gpt.py",
        "fit",
        "--trainer.strategy",
        "ddp",
    ]
    command += [f"--trainer.{name}={value}" for name, value in trainer.items()]
    command += [f"--model.{name}={value}" for name, value in size.items()]
    command += ["--data.train_batches=80", "--data.val_batches=2", "--data.block_size=16"]
    command += ["--data.batch_size=4", "--data.max_chars=100000"]
    (said,) = torchrun(tmp_path, command, local_size=2)
    assert "11 warmed up, 29 replayed, 0 eager" in said, said[-3000:]


@pytest.mark.long  # in processes that are forked: test_steps.py
def test_the_example_of_fabric(tmp_path: Path, accelerator: str) -> None:
    (said,) = torchrun(tmp_path, ["examples/fabric_ddp.py", "--batches", "80"], local_size=2)
    assert "44 warmed up, 36 replayed, 0 eager; captured 3 time(s)" in said, said[-3000:]
    assert "10 warmed up, 10 replayed, 0 eager; captured 1 time(s)" in said, said[-3000:]
