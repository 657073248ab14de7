"""A plain training loop, with a record of everything that must not depend on graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_cudagraph import GraphedStep
from tests.harness import differences

STEPS = 12


class Net(nn.Module):
    """A net with dropout, batch norm, and a buffer that the step writes."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 4)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Loop:
    """A training loop as a user writes it; subclasses define the step."""

    sizes: tuple[int, ...] = (8,)
    kwargs: ClassVar[dict[str, Any]] = {}
    steps = STEPS

    def __init__(self, device: str) -> None:
        self.device = device
        torch.manual_seed(3)
        self.build()

    def build(self) -> None:
        self.net = Net().to(self.device)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)

    def step(self, x: Tensor, y: Tensor) -> Any:
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.net(x), y)
        loss.backward()
        self.optimizer.step()
        return loss

    def around(self, index: int) -> None:
        """The loop's host work after each call."""

    def call(self, step: Any, index: int, x: Tensor, y: Tensor) -> Any:
        return step(x, y)

    def modules(self) -> Any:
        return self.net

    def optimizers(self) -> Any:
        return self.optimizer

    def state(self) -> Any:
        """The state to compare after each step."""
        nets, optimizers = self.modules(), self.optimizers()
        nets = nets if isinstance(nets, list) else [nets]
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        return {
            "nets": [net.state_dict() for net in nets],
            "gradients": [[p.grad for p in net.parameters()] for net in nets],
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            "random": torch.get_rng_state(),
            "random_device": torch.cuda.get_rng_state() if self.device == "cuda" else None,
        }

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for index in range(self.steps):
            n = self.sizes[index % len(self.sizes)]
            x = torch.randn(n, 6, generator=generator)
            yield x.to(self.device), torch.randint(0, 4, (n,), generator=generator).to(self.device)


def device_of(accelerator: str) -> str:
    return "cuda" if accelerator == "gpu" else "cpu"


def run(loop: Loop, graphed: bool) -> tuple[list[Any], GraphedStep[..., Any]]:
    """Run a loop to its end; returns outputs and state after each step, and the step."""
    step = GraphedStep(loop.step, loop.modules(), loop.optimizers(), **loop.kwargs)
    torch.manual_seed(7)
    history = []
    kept: list[Any] = []
    with step:
        for index, (x, y) in enumerate(loop.batches()):
            kept.append(loop.call(step if graphed else loop.step, index, x, y))
            loop.around(index)
            history.append(copy.deepcopy(loop.state()))
    return [history, kept], step


def assert_equal_runs(build: Callable[[], Loop], replays: int) -> GraphedStep[..., Any]:
    """Fail unless the loop with graphs equals the one without, with the expected number of replays."""
    plain, _ = run(build(), graphed=False)
    graphed, step = run(build(), graphed=True)
    found = differences(plain, graphed)
    assert not found, f"{len(found)} differences, the first: {found[:8]}"
    assert step.summary.calls.replayed == replays, step.summary
    return step
