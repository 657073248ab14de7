"""`GraphedStep` on sharded weights, in a plain loop and under Fabric."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_cudagraph import GraphedStep, UnsupportedError
from tests.distributed.cases import Here
from tests.distributed.step_cases import FabricInOne, Plain, _device, _same, join
from tests.loops import Net

STEPS = 16
WARM_UP = 3


def _sharded(net: nn.Module, **arguments: Any) -> Any:
    for layer in net.layers:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **arguments)
    return fully_shard(net, **arguments)


def _parts(state: Any) -> Any:
    """The same state with the local parts of all tensors."""
    if isinstance(state, dict):
        return {key: _parts(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_parts(value) for value in state]
    return state.detach().to_local() if isinstance(state, DTensor) else state


class ShardedLoop(Plain):
    """Each layer is gathered when it is needed."""

    steps = STEPS
    reshard: bool | None = None

    def build(self) -> None:
        mesh = dist.init_device_mesh(self.device.type, (self.here.size,))
        self.net = _sharded(Net().to(self.device), mesh=mesh, reshard_after_forward=self.reshard)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)

    def state(self) -> Any:
        # The module's own `state_dict()` would let go of gathered weights.
        sharded = self.optimizer.param_groups[0]["params"]
        return _parts(
            {
                "weights": [*sharded, *self.net.buffers()],
                "gradients": [p.grad for p in sharded],
                "optimizer": self.optimizer.state_dict(),
                "random": torch.get_rng_state(),
            }
        )


class NeverResharded(ShardedLoop):
    reshard = False


class Windows(ShardedLoop):
    """Two calls add up their gradients; the optimizer steps outside."""

    steps = 2 * STEPS

    def step(self, x: Tensor, y: Tensor) -> Any:
        loss = nn.functional.cross_entropy(self.net(x), y) / 2
        loss.backward()
        return loss

    def around(self, index: int) -> None:
        if index % 2 == 1:
            self.optimizer.step()
            self.optimizer.zero_grad()


class WaitsOnce(Windows):
    """The first of two calls leaves its gradients unreduced."""

    def call(self, step: Any, index: int, x: Tensor, y: Tensor) -> Any:
        self.net.set_requires_gradient_sync(index % 2 == 1)
        return step(x, y)


class Evaluated(ShardedLoop):
    """A pass in between leaves the outermost weights gathered."""

    def around(self, index: int) -> None:
        if index % 5 == 4:
            self.net.eval()
            with torch.no_grad():
                self.net(torch.ones(8, 6, device=self.device))
            self.net.train()


class MovesAWeight(ShardedLoop):
    """Gives a gathered weight other memory, which later gathers do not reach."""

    def around(self, index: int) -> None:
        if index == 9:
            with torch.no_grad():
                self.net(torch.ones(8, 6, device=self.device))
            weight = self.net.layers[1].weight
            weight.data = weight.data * 1.5


class LooksOnly(ShardedLoop):
    """Calls without gradients, of which the first leaves weights gathered; one writes such a weight."""

    def step(self, x: Tensor, y: Tensor) -> Any:
        self.net.layers[1].weight.mul_(1.01)
        return self.net(x)

    def call(self, step: Any, index: int, x: Tensor, y: Tensor) -> Any:
        with torch.no_grad():
            return step(x, y)


class LooksInWindows(LooksOnly):
    """The same while gradients of training steps would not be reduced."""

    def around(self, index: int) -> None:
        self.net.set_requires_gradient_sync(index < 9)


class ForgetsToDrop(ShardedLoop):
    """Some calls add to the gradients of the one before, which a graph of the others would drop."""

    drops = True
    adding = (3, 9)  # the first is that of the capture

    def step(self, x: Tensor, y: Tensor) -> Any:
        if self.drops:
            self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.net(x), y)
        loss.backward()
        self.optimizer.step()
        return loss

    def around(self, index: int) -> None:
        self.drops = index + 1 not in self.adding


class WithFabric(ShardedLoop):
    """Fabric shards the net, and clips inside of the step."""

    def join(self) -> None:
        def sharded(net: nn.Module, mesh: Any) -> nn.Module:
            return _sharded(net, mesh=mesh["data_parallel"])

        strategy = ModelParallelStrategy(sharded, data_parallel_size=2, tensor_parallel_size=1)
        self.fabric = Fabric(accelerator=self.here.accelerator, devices=2, strategy=strategy)
        self.fabric.launch()

    def build(self) -> None:
        self.net = self.fabric.setup(Net())
        self.optimizer = self.fabric.setup_optimizers(torch.optim.AdamW(self.net.parameters(), lr=1e-2))

    step: Any = FabricInOne.step


def a_loop(here: Here) -> None:
    """Gathered, reduced and stepped in one graph."""
    for loop in (ShardedLoop, NeverResharded):
        step = _same(here, loop, STEPS - WARM_UP)
        assert step.summary.calls.captures == 1, step.summary


def windows(here: Here) -> None:
    """A graph for calls that find gradients, and one for those that do not."""
    step = _same(here, Windows, 2 * STEPS - 2 * WARM_UP)
    assert step.summary.calls.captures == 2, step.summary


def windows_that_wait_once(here: Here) -> None:
    """Gradients that wait to be reduced are on the host: such calls, and those after them, are eager."""
    step = _same(here, WaitsOnce, 0)
    assert any("gradients wait to be reduced" in text for text in step.summary.calls.eager)


def passes_in_between(here: Here) -> None:
    """A call that finds weights gathered is eager."""
    step = _same(here, Evaluated, STEPS - WARM_UP - 3)
    assert any("weights are gathered before it" in text for text in step.summary.calls.eager)


def a_weight_that_is_moved(here: Here) -> None:
    """Calls from then on are eager."""
    step = _same(here, MovesAWeight, 10 - WARM_UP)
    assert any("given other memory" in text for text in step.summary.calls.eager), step.summary


def calls_without_gradients(here: Here) -> None:
    """Weights that stay gathered are used in place, as in an evaluation."""
    step = _same(here, LooksOnly, STEPS - 1 - WARM_UP)
    assert any("stay so" in text for text in step.summary.calls.eager), step.summary
    step = _same(here, LooksInWindows, 10 - 1 - WARM_UP)
    assert any("gradients wait to be reduced" in text for text in step.summary.calls.eager), step.summary


def alone(here: Here) -> None:
    """One process; a capture on another path than its warm-up begins again."""
    _same(here, ShardedLoop, STEPS - WARM_UP)
    step = _same(here, ForgetsToDrop, 7)
    assert step.summary.calls.captures == 1, step.summary


def under_fabric(here: Here) -> None:
    """The whole step, with clipping by the norm of all."""
    _same(here, WithFabric, STEPS - WARM_UP)


def refused(here: Here) -> None:
    """Tensor parallelism, and weights in host memory."""
    join(here)
    device = _device(here)
    mesh = dist.init_device_mesh(device.type, (2,))

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    x = torch.randn(8, 6, device=device)
    net: Any = parallelize_module(
        Net().layers.to(device), mesh, {"0": ColwiseParallel(), "4": RowwiseParallel()}
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    with pytest.raises(UnsupportedError, match=r"is a `DTensor`"):
        GraphedStep(step)(x)
    net = _sharded(Net().to(device), mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    with pytest.raises(UnsupportedError, match="keeps weights in host memory"):
        GraphedStep(step)(x)
