"""`GraphedStep` comes to the same as the function that it wraps, in plain loops of the user's own.

`tests/gpu/test_step.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from lightning_cudagraph import CaptureError, GraphedStep
from tests.harness import differences
from tests.loops import Loop, assert_equal_runs, device_of

O = torch.optim  # noqa: E741


class Adam(Loop):
    """Fused, with a schedule by step."""

    def build(self) -> None:
        super().build()
        self.optimizer = O.AdamW(self.net.parameters(), lr=1e-2, fused=True)
        self.scheduler = O.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=20)

    def around(self, index: int) -> None:
        self.scheduler.step()


class ZeroesAfter(Loop):
    """`zero_grad` at the end, so that no gradients are left."""

    def step(self, x: Tensor, y: Tensor) -> Any:
        loss = nn.functional.cross_entropy(self.net(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss": loss, "names": ["a", 1]}


class ZeroesInPlace(Loop):
    def step(self, x: Tensor, y: Tensor) -> Any:
        self.optimizer.zero_grad(set_to_none=False)
        loss = nn.functional.cross_entropy(self.net(x), y)
        loss.backward()
        self.optimizer.step()
        return loss


class ZeroesOutside(Loop):
    def step(self, x: Tensor, y: Tensor) -> Any:
        loss = nn.functional.cross_entropy(self.net(x), y)
        loss.backward()
        self.optimizer.step()
        return loss

    def around(self, index: int) -> None:
        self.optimizer.zero_grad()


class StepsOutside(Loop):
    """Forward and backward alone; any optimizer may follow."""

    def build(self) -> None:
        super().build()
        self.optimizer = O.Adagrad(self.net.parameters(), lr=0.1)

    def step(self, x: Tensor, y: Tensor) -> Any:
        self.net.zero_grad()
        loss = nn.functional.cross_entropy(self.net(x), y)
        loss.backward()
        return loss, self.net(x)

    def around(self, index: int) -> None:
        self.optimizer.step()

    def optimizers(self) -> Any:
        return []

    def state(self) -> Any:
        return {**super().state(), "optimizer": self.optimizer.state_dict()}


class Accumulates(Loop):
    """Gradients of three calls are added up; the optimizer steps outside."""

    steps = 30

    def step(self, x: Tensor, y: Tensor) -> Any:
        loss = nn.functional.cross_entropy(self.net(x), y) / 3
        loss.backward()
        return loss

    def around(self, index: int) -> None:
        if index % 3 == 2:
            self.optimizer.step()
            self.optimizer.zero_grad()


class AccumulatesInPlace(Accumulates):
    """The gradients stay where they are."""

    def around(self, index: int) -> None:
        if index % 3 == 2:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=False)


class NoGradients(Loop):
    """A forward pass alone, called under `no_grad`."""

    def step(self, x: Tensor, y: Tensor) -> Any:
        return self.net(x).softmax(-1)

    def call(self, step: Any, index: int, x: Tensor, y: Tensor) -> Any:
        with torch.no_grad():
            return step(x, y)


class KeywordsAndNesting(Loop):
    def step(self, batch: dict[str, Any], *more: Tensor, weight: float = 1.0) -> Any:
        self.optimizer.zero_grad()
        x, (y, *_) = batch["x"], batch["rest"]
        loss = weight * nn.functional.cross_entropy(self.net(x) + more[0], y)
        loss.backward()
        self.optimizer.step()
        return {"loss": loss, "pair": (loss * 2, [x.sum()])}

    def call(self, step: Any, index: int, x: Tensor, y: Tensor) -> Any:
        return step({"x": x, "rest": [y, "text"]}, x[:, :4] * 0.1, weight=0.5)


class TwoModes(NoGradients):
    """The same function with and without gradients: each has its own graph."""

    steps = 20

    def call(self, step: Any, index: int, x: Tensor, y: Tensor) -> Any:
        with torch.set_grad_enabled(index % 2 == 0):
            return step(x, y)


class TwoShapes(Loop):
    sizes = (8, 5)
    steps = 24


class ShapesInTurnAccumulate(Accumulates):
    sizes = (8, 5)
    steps = 60


class Clips(Loop):
    def step(self, x: Tensor, y: Tensor) -> Any:
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.net(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
        self.optimizer.step()
        return loss, norm


class Closure(Loop):
    """The optimizer calls a closure, which reads the learning rate as the float that it is."""

    def step(self, x: Tensor, y: Tensor) -> Any:
        def closure() -> Tensor:
            assert isinstance(self.optimizer.param_groups[0]["lr"], float)
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.net(x), y)
            loss.backward()
            return loss

        return self.optimizer.step(closure)


class Autocast(Loop):
    def step(self, x: Tensor, y: Tensor) -> Any:
        with torch.autocast(self.device, dtype=torch.bfloat16):
            return super().step(x, y)


class AutocastAround(Loop):
    def call(self, step: Any, index: int, x: Tensor, y: Tensor) -> Any:
        with torch.autocast(self.device, dtype=torch.bfloat16, cache_enabled=False):
            return step(x, y)


class ManyGenerators(Loop):
    """Draws from a generator of its own."""

    def build(self) -> None:
        super().build()
        self.generator = torch.Generator(self.device).manual_seed(5)

    def step(self, x: Tensor, y: Tensor) -> Any:
        noise = torch.empty_like(x).normal_(generator=self.generator)
        return super().step(x + 0.1 * noise, y)

    def state(self) -> Any:
        return {**super().state(), "generator": self.generator.get_state()}


class ReplacesGradients(Loop):
    """Reads the gradients of the call before, and puts others in their places."""

    def step(self, x: Tensor, y: Tensor) -> Any:
        before = [p.grad for p in self.net.parameters()]
        loss = super().step(x, y)
        for parameter, gradient in zip(self.net.parameters(), before, strict=True):
            if gradient is not None:
                parameter.grad = parameter.grad + gradient
        return loss


class UsesThenDrops(Loop):
    """Uses the gradients of the call before, and drops them then."""

    def step(self, x: Tensor, y: Tensor) -> Any:
        if self.net.layers[0].weight.grad is not None:
            x = x + 0.01 * self.net.layers[0].weight.grad.sum()
        return super().step(x, y)


class KeepsGradients(Loop):
    """Keeps the gradients of all calls as they are, without copies."""

    def build(self) -> None:
        super().build()
        self.kept: list[Any] = []

    def call(self, step: Any, index: int, x: Tensor, y: Tensor) -> Any:
        out = step(x, y)
        self.kept.append([parameter.grad for parameter in self.net.parameters()])
        return out

    def state(self) -> Any:
        return {**super().state(), "kept": self.kept}


class KeepsInTwoShapes(KeepsGradients):
    sizes = (8, 5)
    steps = 24


class KeepsWhileAccumulating(KeepsGradients, Accumulates):
    """Those of one window are one tensor, which grows."""


class WithFabric(Loop):
    """Fabric wraps net and optimizer, and casts."""

    def build(self) -> None:
        super().build()
        self.fabric = Fabric(accelerator=self.device, devices=1, precision="bf16-mixed")
        self.net, self.optimizer = self.fabric.setup(self.net, self.optimizer)

    def step(self, x: Tensor, y: Tensor) -> Any:
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.fabric.backward(loss)
        self.optimizer.step()
        return loss


class PositionalOnly(Loop):
    """A member of `**options` has the name of an argument."""

    def step(self, a: Tensor, b: Tensor, /, **options: Tensor) -> Any:
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.net(a), b) * options["a"]
        loss.backward()
        self.optimizer.step()
        return loss

    def call(self, step: Any, index: int, x: Tensor, y: Tensor) -> Any:
        return step(x, y, a=x.new_tensor(0.1 * index))


LOOPS: list[tuple[type[Loop], int]] = [
    (Loop, 9),
    (Adam, 9),
    (ZeroesAfter, 9),
    (ZeroesInPlace, 7),
    (ZeroesOutside, 9),
    (StepsOutside, 9),
    (Accumulates, 24),
    (AccumulatesInPlace, 25),
    (NoGradients, 9),
    (KeywordsAndNesting, 9),
    (PositionalOnly, 9),
    (TwoModes, 14),
    (TwoShapes, 18),
    (ShapesInTurnAccumulate, 48),
    (Clips, 9),
    (Closure, 9),
    (Autocast, 9),
    (AutocastAround, 9),
    (ManyGenerators, 9),
    (KeepsGradients, 6),
    (KeepsInTwoShapes, 12),
    (KeepsWhileAccumulating, 18),
    (WithFabric, 9),
    (ReplacesGradients, 7),
    (UsesThenDrops, 7),
]


@pytest.mark.spread(2)
@pytest.mark.parametrize(("loop", "replays"), LOOPS, ids=lambda value: getattr(value, "__name__", ""))
def test_same_as_the_function(accelerator: str, loop: type[Loop], replays: int) -> None:
    step = assert_equal_runs(lambda: loop(device_of(accelerator)), replays)
    assert not step.summary.calls.eager
    kept = "user code holds a reference to a gradient, or to a part of one, or gave one other memory"
    assert {*step.summary.calls.recaptures} <= ({kept} if issubclass(loop, KeepsGradients) else set())


@pytest.mark.spread(2)
@pytest.mark.parametrize("sizes", [(8,), (8, 8, 5)])
def test_backward_and_optimizer_apart(accelerator: str, sizes: tuple[int, ...]) -> None:
    """Two graphs: one leaves gradients, the other finds them, wherever an eager call has left them."""

    class Apart(Loop):
        steps = 24

        def build(self) -> None:
            super().build()
            self.scheduler = O.lr_scheduler.StepLR(self.optimizer, 2, 0.9)

        def backward(self, x: Tensor, y: Tensor) -> Any:
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.net(x), y)
            loss.backward()
            return loss.detach()

        def step(self, scale: Tensor) -> Any:
            norm = nn.utils.clip_grad_norm_(self.net.parameters(), 1.0) * scale
            self.optimizer.step()
            return norm

        def look(self) -> Tensor:
            return torch.stack([p.grad.sum() for p in self.net.parameters()])

    def trained(graphed: bool) -> Any:
        loop = Apart(device_of(accelerator))
        loop.sizes = sizes
        steps: list[Any] = [loop.backward, loop.look, loop.step]
        if graphed:
            steps = [GraphedStep(f, loop.net, loop.optimizer, max_graphs=1) for f in steps]
        torch.manual_seed(7)
        history = []
        for x, y in loop.batches():
            loss, seen = steps[0](x, y), steps[1]()
            norm = steps[2](x.new_ones(()))
            loop.scheduler.step()
            history.append(copy.deepcopy([loss, seen, norm, loop.state()]))
        return history, steps

    plain, _ = trained(False)
    graph, steps = trained(True)
    assert not differences(plain, graph)
    assert [step.summary.calls.replayed for step in steps[1:]] == [21, 20]
    for step in steps:
        assert not step.summary.calls.recaptures
        step.close()


@pytest.mark.parametrize("on_unsupported", ["raise", "eager"])
def test_sparse_tensors(accelerator: str, on_unsupported: Any) -> None:
    """Warm-up, which looks at memory, lets them pass; the capture does not."""
    device = device_of(accelerator)
    neighbours = torch.eye(6, device=device).to_sparse()

    def run(graphed: bool) -> list[Tensor]:
        torch.manual_seed(1)
        model = nn.Linear(6, 6).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = torch.sparse.mm(neighbours, model(x).t()).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        with GraphedStep(step, model, optimizer, on_unsupported=on_unsupported) as graph:
            call = graph if graphed else step
            losses = [call(torch.full((5, 6), float(i), device=device)).clone() for i in range(6)]
        return [*losses, *model.state_dict().values()]

    plain = run(False)
    if on_unsupported == "raise":
        with pytest.raises(
            CaptureError,
            match=r"(?s)layout `torch.sparse_coo`\.\n  found at .*test_step\.py",
        ):
            run(True)
    else:
        assert all(map(torch.equal, plain, run(True)))


@pytest.mark.parametrize("on_unsupported", ["raise", "eager"])
def test_optimizers_that_count_in_one_tensor(accelerator: str, on_unsupported: Any) -> None:
    """`load_state_dict` keeps the counters that it is given: those of the other optimizer."""
    device = device_of(accelerator)

    def run(backend: Any) -> list[Tensor]:
        torch.manual_seed(1)
        net = nn.Linear(6, 6).to(device)
        one, other = (torch.optim.Adam(net.parameters(), lr=rate) for rate in (0.1, 0.01))

        def step(x: Tensor) -> Tensor:
            one.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            one.step()
            other.step()
            return loss

        step(torch.ones(5, 6, device=device))
        other.load_state_dict(one.state_dict())
        graph = GraphedStep(step, net, (one, other), backend=backend, on_unsupported=on_unsupported)
        with graph:
            losses = [graph(torch.full((5, 6), float(i), device=device)).clone() for i in range(9)]
        counters = [state["step"] for state in one.state.values()]
        return [*losses, *counters, *net.state_dict().values()]

    if on_unsupported == "raise":
        with pytest.raises(CaptureError, match="Two optimizers of the step count in one tensor"):
            run("auto")
    else:
        assert all(map(torch.equal, run("off"), run("auto")))


@pytest.mark.spread
@pytest.mark.parametrize("form", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam])
def test_an_optimizer_that_steps_several_times(accelerator: str, form: Any) -> None:
    """Its counters in host memory move on with each step, also without a check that would notice."""
    device = "cuda" if accelerator == "gpu" else "cpu"
    found = []
    for backend in ("off", "auto"):
        torch.manual_seed(0)
        net = nn.Linear(4, 4, device=device)
        optimizer = form(net.parameters(), lr=1e-2)

        def thrice(x: Tensor, net: Any = net, optimizer: Any = optimizer) -> Tensor:
            for _ in range(3):
                optimizer.zero_grad()
                loss: Tensor = net(x).square().mean()
                loss.backward()
                optimizer.step()
            return loss.detach()

        with GraphedStep(thrice, net, optimizer, backend=backend, verify=None) as step:  # type: ignore[arg-type]
            losses = [step(torch.randn(3, 4, device=device)).clone() for _ in range(12)]
            found.append([losses, net.state_dict(), optimizer.state_dict()])
            assert step.summary.calls.replayed == (9 if backend == "auto" else 0)
    assert differences(*found) == []
