"""Weights that are split between processes: refused with the reason of the table, or eager."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from lightning_cudagraph import CUDAGraphCallback, GraphedStep, UnsupportedError
from tests.distributed.cases import Here
from tests.distributed.step_cases import _device, _join
from tests.harness import differences, loader

STEPS = 6


class Sharded(pl.LightningModule):
    """Each layer is gathered when it is needed."""

    reshard: bool | None = None

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 4))
        self.losses: list[Tensor] = []

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in (self.net[0], self.net[2]):
            fully_shard(layer, mesh=mesh, reshard_after_forward=self.reshard)
        fully_shard(self, mesh=mesh, reshard_after_forward=self.reshard)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class ReshardedAlways(Sharded):
    reshard = True


class ReshardedNever(Sharded):
    reshard = False


class TensorParallel(Sharded):
    """Each matrix is split between the processes."""

    def configure_model(self) -> None:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)


class Whole(Sharded):
    """The strategy does it all."""

    def configure_model(self) -> None:
        pass


def _fit(
    here: Here,
    build: type[Sharded],
    strategy: Any,
    callback: CUDAGraphCallback | None,
    batches: DataLoader[Any],
) -> list[Any]:
    pl.seed_everything(3, verbose=False)
    module = build()
    trainer = pl.Trainer(
        accelerator=here.accelerator,
        devices=2,
        strategy=strategy,
        max_steps=STEPS,
        callbacks=[] if callback is None else [callback],
        default_root_dir=here.folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, batches)
    weights = [getattr(p, "_local_tensor", p).detach().clone() for p in module.parameters()]
    dist.barrier()
    return [module.losses, weights, trainer.global_step]


def _refused_or_eager(here: Here, build: type[Sharded], strategy: Any, reason: str) -> None:
    """Raise with the reason; with the other policy, say it, and train the same eagerly.

    Args:
        here: where.
        build: makes the module.
        strategy: makes the strategy.
        reason: why.
    """
    batches = loader(ragged=False, seed=here.rank, batches=STEPS)
    with pytest.raises(UnsupportedError, match=reason):
        _fit(here, build, strategy(), CUDAGraphCallback(), batches)
    callback = CUDAGraphCallback(on_unsupported="eager")
    with pytest.warns(UserWarning, match=reason) if here.rank == 0 else _nothing():
        eager = _fit(here, build, strategy(), callback, batches)
    plain = _fit(here, build, strategy(), None, batches)
    found = differences(plain, eager)
    assert not found, found[:8]
    assert plain[2] == STEPS
    assert "all steps eager" in (callback.report or ""), callback.report


class _nothing:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


def fully_sharded(here: Here) -> None:
    """FSDP2, however it reshards."""

    def strategy() -> ModelParallelStrategy:
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)

    for build in (Sharded, ReshardedAlways, ReshardedNever):
        _refused_or_eager(here, build, strategy, "with `fully_shard`, every layer's")


def tensor_parallel(here: Here) -> None:
    """What is one matrix to the module is half of one to each process."""

    def strategy() -> ModelParallelStrategy:
        return ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)

    _refused_or_eager(here, TensorParallel, strategy, "with tensor parallelism, parameters are")


def fully_sharded_as_one(here: Here) -> None:
    """FSDP1, which Lightning has on GPUs alone."""
    _refused_or_eager(here, Whole, FSDPStrategy, "FSDP1 gathers weights")


def sharded_steps(here: Here) -> None:
    """`GraphedStep` on weights that are split, in a plain loop and under Fabric."""
    _join(here)
    device = _device(here)
    mesh = dist.init_device_mesh(device.type, (2,))

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    x, y = torch.randn(8, 12, device=device), torch.zeros(8, dtype=torch.long, device=device)
    net: Any = fully_shard(Sharded().net.to(device), mesh=mesh)
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-2)
    with pytest.raises(UnsupportedError, match=r"split between devices \(`fully_shard`\)"):
        GraphedStep(step)(x, y)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    net = parallelize_module(Sharded().net.to(device), mesh, plan)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    with pytest.raises(UnsupportedError, match=r"The parameter `0\.weight` is a `DTensor`"):
        GraphedStep(step)(x, y)

    def sharded(module: nn.Module, mesh: Any) -> nn.Module:
        return fully_shard(module, mesh=mesh["data_parallel"])

    strategy = FabricModelParallelStrategy(sharded, data_parallel_size=2, tensor_parallel_size=1)
    fabric = Fabric(accelerator=here.accelerator, devices=2, strategy=strategy)
    fabric.launch()
    net = fabric.setup(Sharded().net)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(net.parameters(), lr=1e-2))
    with pytest.raises(UnsupportedError, match="with `fully_shard`, every layer's"):
        GraphedStep(step)(x, y)
    eager = GraphedStep(step, on_unsupported="eager")
    assert eager(x, y).isfinite()
    assert "all calls eager" in eager.report
