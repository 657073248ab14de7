"""One process of a run on two machines, as `torchrun` starts it.

Both are this machine; processes identify their machine by the agent that started them. So ranks are not
local ranks, and processes of different agents share no memory.

    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 2 --rdzv-backend static \
        --master-addr 127.0.0.1 --master-port PORT -m tests.distributed.hosts FOLDER cpu
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy

from lightning_cudagraph import CUDAGraphCallback
from lightning_cudagraph.processes import peers
from lightning_cudagraph.processes.peers import Peers
from tests.distributed.cases import _fit_of_all
from tests.harness import Net, Trace, assert_same, loader, make, train

_EPOCHS = 4


def _machine() -> str:
    return f"{socket.gethostname()} of agent {os.environ['GROUP_RANK']}"


def _run(folder: Path, callback: CUDAGraphCallback | None, accelerator: str) -> Trace:
    folder.mkdir(parents=True, exist_ok=True)
    local_size, size = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    return train(
        make(Net),
        folder,
        callback,
        accelerator=accelerator,
        strategy=DDPStrategy(),
        devices=local_size,
        num_nodes=size // local_size,
        fit=_fit_of_all,
        train_loader=loader(ragged=False, batches=7 * size),
        val_loader=loader(seed=1, ragged=False, batches=size),
        max_epochs=_EPOCHS,
    )


def main(folder: Path, accelerator: str) -> None:
    """Train without the callback and with it, and compare."""
    pages: list[object] = []
    shared_page = Peers._shared_page

    def noted(of: Peers) -> Any:
        pages.append(shared_page(of))
        return pages[-1]

    sent: list[int] = []
    over_sockets = Peers._over_sockets

    def counted(of: Peers, word: int) -> list[int]:
        sent.append(word)
        return over_sockets(of, word)

    peers.machine = _machine
    Peers._shared_page = noted  # type: ignore[method-assign]
    Peers._over_sockets = counted  # type: ignore[method-assign]
    plain = _run(folder / "plain", None, accelerator)
    graph = _run(folder / "graph", CUDAGraphCallback(timings=None), accelerator)
    assert_same(plain, graph)
    assert graph.counts.replayed >= 10, graph.counts
    assert pages == [None], "processes of two machines have found memory in common"
    steps = graph.counts.warmed_up + graph.counts.replayed + sum(graph.counts.eager.values())
    assert len(sent) == steps + 2 * _EPOCHS, "more than a vote before each step, validation and end"
    trainer = graph.trainer
    assert trainer is not None
    assert isinstance(trainer.strategy.cluster_environment, TorchElasticEnvironment)
    assert trainer.global_rank == dist.get_rank() == int(os.environ["RANK"])
    assert (
        trainer.node_rank == int(os.environ["GROUP_RANK"]) == trainer.global_rank // trainer.num_devices
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    said = Path(sys.argv[1]) / f"rank{os.environ['RANK']}.json"
    try:
        main(Path(sys.argv[1]), sys.argv[2])
        said.write_text(json.dumps("ok"))
    except BaseException:
        said.write_text(json.dumps(traceback.format_exc()))
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
