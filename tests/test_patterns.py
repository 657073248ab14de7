"""Dynamic patterns, each in a form that a graph can hold, and in one that it cannot.

Plain loops use `GraphedStep`, trainings the callback. Each form that works comes to the bits of the
same code without graphs. Elsewhere: random numbers and generators (test_random, test_step), learning
rates and step counters (test_family, test_step), fp16 (test_fp16, test_step_calls), `batch_idx`
(test_paths), a recommender (test_examples).

`tests/gpu/test_patterns.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_cudagraph import (
    CaptureError,
    CUDAGraphCallback,
    GraphedStep,
    UnsupportedError,
)
from tests.harness import Net, Trace, assert_same, differences, loader, make, train
from tests.loops import device_of

# Makes a step of a function, its modules and its optimizers.
Graphed = Callable[..., Any]
Loop = Callable[[str, Graphed], Any]


def run(loop: Loop, device: str, **options: Any) -> tuple[Any, list[Any]]:
    """The results of a loop, and the summaries of its steps."""
    steps: list[GraphedStep[..., Any]] = []

    def graphed(function: Callable[..., Any], *parts: Any) -> Any:
        steps.append(GraphedStep(function, *parts, **options))
        return steps[-1]

    torch.manual_seed(5)
    results = loop(device, graphed)
    for step in steps:
        step.close()
    return results, [step.summary.calls for step in steps]


def both(loop: Loop, accelerator: str) -> list[Any]:
    """Run a loop without and with graphs, which must come to the same; returns the summaries."""
    device = device_of(accelerator)
    plain, _ = run(loop, device, backend="off")
    graph, calls = run(loop, device)
    assert not differences(plain, graph)
    return calls


def batches(device: str, n: int = 12, shape: tuple[int, ...] = (8, 6)) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(n):
        yield torch.randn(shape, generator=generator).to(device)


def state_of(*parts: Any) -> list[Any]:
    """The final states of modules and optimizers."""
    return [part.state_dict() for part in parts]


# The whole network, and data-dependent control flow.


def whole_network(device: str, graphed: Graphed) -> Any:
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Linear(16, 4), nn.Dropout(0.1)).to(
        device
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(data: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad(set_to_none=True)
        predicted = model(data)
        loss = F.mse_loss(predicted, target)
        loss.backward()
        optimizer.step()
        return predicted, loss

    step = graphed(step, model, optimizer)
    seen = [step(data, data[:, :4] * 2) for data in batches(device)]
    return seen, state_of(model, optimizer)


class Routed:
    """Three modules, of which the second or the third follows the first, by the sign of its output."""

    def __init__(self, device: str) -> None:
        self.parts = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 4)]).to(device)
        self.optimizer = torch.optim.SGD(
            chain(*(p.parameters() for p in self.parts)), lr=0.1, momentum=0.9
        )

    def is_positive(self, data: Tensor) -> Tensor:
        with torch.no_grad():
            return self.parts[0](data).sum() > 0

    def learn(self, out: Tensor, target: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = F.mse_loss(out, target)
        loss.backward()
        self.optimizer.step()
        return loss

    def reads(self, data: Tensor, target: Tensor) -> Tensor:
        hidden = self.parts[0](data)
        chosen = self.parts[1] if hidden.sum().item() > 0 else self.parts[2]
        return self.learn(chosen(hidden), target)

    def told(self, data: Tensor, target: Tensor, is_positive: bool) -> Tensor:
        return self.learn(self.parts[1 if is_positive else 2](self.parts[0](data)), target)

    def computes_both(self, data: Tensor, target: Tensor) -> Tensor:
        hidden = self.parts[0](data)
        return self.learn(
            torch.where(hidden.sum() > 0, self.parts[1](hidden), self.parts[2](hidden)), target
        )


def reads_which(device: str, graphed: Graphed) -> Any:
    net = Routed(device)
    step = graphed(net.reads, net.parts, net.optimizer)
    return [step(data, data[:, :4]) for data in batches(device)], state_of(net.parts)


def told_which(device: str, graphed: Graphed) -> Any:
    """The host reads between two graphs; the second one has a path for each answer."""
    net = Routed(device)
    ask = graphed(net.is_positive, net.parts)
    step = graphed(net.told, net.parts, net.optimizer)
    seen = [step(data, data[:, :4], bool(ask(data))) for data in batches(device, 24)]
    return seen, state_of(net.parts, net.optimizer)


def computes_both(device: str, graphed: Graphed) -> Any:
    net = Routed(device)
    step = graphed(net.computes_both, net.parts, net.optimizer)
    return [step(data, data[:, :4]) for data in batches(device)], state_of(net.parts)


# Clipping, and steps of an optimizer that depend on the gradients.


class Small:
    def __init__(self, device: str) -> None:
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).to(device)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01, fused=True)
        self.found = torch.zeros((), device=device)

    def backward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.net(x).square().mean()
        (loss * scale).backward()
        return loss

    def norm(self) -> Tensor:
        gradients = [p.grad for p in self.net.parameters() if p.grad is not None]
        return torch.stack([gradient.norm() for gradient in gradients]).norm()

    def clips_by_a_branch(self, x: Tensor) -> Tensor:
        loss, norm = self.backward(x), self.norm()
        if norm > 0.1:
            for parameter in self.net.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(0.1 / norm)
        self.optimizer.step()
        return loss

    def clips_by_a_factor(self, x: Tensor) -> Tensor:
        loss, factor = self.backward(x), (0.1 / (self.norm() + 1e-6)).clamp(max=1.0)
        for parameter in self.net.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(factor)
        self.optimizer.step()
        return loss

    def unscaled(self, x: Tensor) -> Tensor:
        """Returns if a gradient is not finite, as 0 or 1."""
        self.backward(x, 1024.0)
        for parameter in self.net.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1 / 1024)
        return (~self.norm().isfinite()).float()

    def steps_if_finite(self, x: Tensor) -> Tensor:
        found = self.unscaled(x)
        if found.item() == 0:
            self.optimizer.step()
        return found

    def steps_on_the_device(self, x: Tensor) -> Tensor:
        self.found.copy_(self.unscaled(x))
        self.optimizer.step()
        return self.found


def _trained(device: str, graphed: Graphed, name: str) -> Any:
    small = Small(device)
    if name == "steps_on_the_device":
        small.optimizer.found_inf = small.found  # type: ignore[attr-defined]
    step = graphed(getattr(small, name), small.net, small.optimizer)
    seen = []
    for index, x in enumerate(batches(device)):
        seen.append(step(x * (torch.inf if index % 4 == 2 and "steps" in name else 1.0)).clone())
    assert all(bool(parameter.isfinite().all()) for parameter in small.net.parameters())
    return seen, state_of(small.net, small.optimizer)


def clips_by_a_branch(device: str, graphed: Graphed) -> Any:
    return _trained(device, graphed, "clips_by_a_branch")


def clips_by_a_factor(device: str, graphed: Graphed) -> Any:
    return _trained(device, graphed, "clips_by_a_factor")


def steps_if_finite(device: str, graphed: Graphed) -> Any:
    return _trained(device, graphed, "steps_if_finite")


def steps_on_the_device(device: str, graphed: Graphed) -> Any:
    return _trained(device, graphed, "steps_on_the_device")


# Early exit: an early classifier answers if it is sure, else the rest of the model.


class Exits:
    def __init__(self, device: str) -> None:
        self.early, self.exit = nn.Linear(6, 8).to(device), nn.Linear(8, 4).to(device)
        self.rest = nn.Sequential(nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).to(device)
        self.threshold = 0.358

    def first(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.early(x)
        logits = self.exit(hidden)
        return hidden, logits, logits.softmax(-1).amax(-1).mean()

    def reads(self, x: Tensor) -> Tensor:
        hidden, logits, sure = self.first(x)
        return logits if sure.item() > self.threshold else self.rest(hidden)

    def exits(self, x: Tensor) -> Tensor:
        return self.exit(self.early(x))

    def full(self, x: Tensor) -> Tensor:
        return self.rest(self.early(x))

    def where(self, x: Tensor) -> Tensor:
        hidden, logits, sure = self.first(x)
        return torch.where(sure > self.threshold, logits, self.rest(hidden))


@torch.no_grad()
def reads_confidence(device: str, graphed: Graphed) -> Any:
    step = graphed(Exits(device).reads)
    return [step(x) for x in batches(device)]


@torch.no_grad()
def early_then_rest(device: str, graphed: Graphed) -> Any:
    net = Exits(device)
    first, rest = graphed(net.first), graphed(net.rest)
    answers, ways = [], []
    for x in batches(device, 24):
        hidden, logits, sure = first(x)
        ways.append(sure.item() > net.threshold)
        answers.append(logits if ways[-1] else rest(hidden))
    assert 6 < sum(ways) < 18
    return answers, ways


@torch.no_grad()
def two_complete_paths(device: str, graphed: Graphed) -> Any:
    """The way is chosen by the norm of the input."""
    net = Exits(device)
    exits, full = graphed(net.exits), graphed(net.full)
    return [(exits if x.norm() < 7 else full)(x) for x in batches(device, 24)]


@torch.no_grad()
def both_and_where(device: str, graphed: Graphed) -> Any:
    step = graphed(Exits(device).where)
    return [step(x) for x in batches(device)]


# Tensors that are others in each iteration.

MEAN, STD = torch.zeros(6), torch.ones(6)


class GlobalNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - MEAN) / (STD + 1e-5)


def _normalises(device: str, graphed: Graphed, update: Callable[[Tensor, Tensor], None]) -> Any:
    global MEAN, STD
    MEAN, STD = torch.zeros(6, device=device), torch.ones(6, device=device)
    model = nn.Sequential(GlobalNorm(), nn.Linear(6, 4)).to(device)

    @torch.no_grad()
    def step(x: Tensor) -> Tensor:
        return model(x)

    step = graphed(step)
    outputs = []
    for batch in batches(device, 20):
        update(batch.mean(0), batch.std(0))
        outputs.append(step(batch))
    return outputs


def statistics_in_place(device: str, graphed: Graphed) -> Any:
    def update(mean: Tensor, std: Tensor) -> None:
        MEAN.copy_(mean)
        STD.copy_(std)

    return _normalises(device, graphed, update)


def statistics_rebound(device: str, graphed: Graphed) -> Any:
    def update(mean: Tensor, std: Tensor) -> None:
        global MEAN, STD
        MEAN, STD = mean, std

    return _normalises(device, graphed, update)


def lists_of_tensors(device: str, graphed: Graphed) -> Any:
    """Experts with inputs of several sizes, new in each call; the kernels get lists of addresses."""
    weights = [torch.randn(6, 6, device=device) for _ in range(3)]
    sizes = [4, 2, 7]

    def step(inputs: list[Tensor]) -> list[Tensor]:
        outputs = torch._foreach_mul(inputs, 2.0)
        torch._foreach_add_(weights, 0.5)
        return [out @ weight for out, weight in zip(outputs, weights, strict=True)]

    step = graphed(step)
    return [step([torch.randn(size, 6, device=device) for size in sizes]) for _ in range(10)], weights


def rebound_list(device: str, graphed: Graphed) -> Any:
    """The members of a list that the step finds in a closure are others in each iteration."""
    inputs = [torch.zeros(2, 6, device=device) for _ in range(3)]

    def step(scale: Tensor) -> list[Tensor]:
        return torch._foreach_mul(inputs, scale)

    step = graphed(step)
    outputs = []
    for index in range(20):
        inputs[index % 3] = torch.randn(2, 6, device=device)
        outputs.append(step(torch.full((), 0.5, device=device)))
    return outputs


def host_arrays(device: str, graphed: Graphed) -> Any:
    """An array on the host, made in the step and copied to the device, is gone after the step."""
    weights = torch.randn(3, 6, 6, device=device)

    def step(x: Tensor) -> Tensor:
        places = torch.tensor([2, 0, 1], dtype=torch.int64).to(device, non_blocking=True)
        starts = torch.as_tensor([0, 2, 4]).to(device, non_blocking=True)
        return torch.bmm(x[starts][:, None], weights[places])

    step = graphed(step)
    outputs = []
    for x in batches(device):
        outputs.append(step(x))
        # What frees and takes memory on the host finds no array of the graph.
        del [torch.full((3,), 7) for _ in range(64)][:]
    return outputs


@torch.library.custom_op("patterns::grouped_product", mutates_args=())
def grouped_product(inputs: Tensor, weights: Tensor, rows: list[int], width: int) -> Tensor:
    """A product for each pair of addresses, of float32 on the host."""

    def there(address: int, n: int) -> Tensor:
        array = (ctypes.c_float * (n * width)).from_address(address)
        return torch.frombuffer(array, dtype=torch.float32).view(n, width)

    pairs = zip(inputs.tolist(), weights.tolist(), rows, strict=True)
    return torch.cat([there(x, n) @ there(weight, width) for x, weight, n in pairs])


def arrays_of_addresses(device: str, graphed: Graphed) -> Any:
    """A grouped product: arrays of addresses are made on the host, copied, and gone after the step."""
    weights = [torch.randn(6, 6, device=device) for _ in range(3)]
    rows = [1, 2, 1]

    def addresses(tensors: Sequence[Tensor]) -> Tensor:
        found = [tensor.data_ptr() for tensor in tensors]
        return torch.tensor(found, dtype=torch.int64, device="cpu").to(device, non_blocking=True)

    def step(x: Tensor) -> Tensor:
        inputs = [torch.tanh(part) for part in x.split(rows)]
        return grouped_product(addresses(inputs), addresses(weights), rows, 6)

    step = graphed(step)
    outputs = []
    for x in batches(device, shape=(4, 6)):
        outputs.append(step(x))
        del [torch.full((3,), 7) for _ in range(64)][:]
        expected = [
            torch.tanh(part) @ weight for part, weight in zip(x.split(rows), weights, strict=True)
        ]
        assert torch.equal(outputs[-1], torch.cat(expected))
    return outputs


# Numbers that are others in each iteration.


def exponent_baked(device: str, graphed: Graphed) -> Any:
    exponent = 2.0

    def step(x: Tensor) -> Tensor:
        return torch.pow(x.abs(), exponent)

    step = graphed(step)
    outputs = []
    for index, x in enumerate(batches(device, 30)):
        exponent = 2.0 + index / 2
        outputs.append(step(x))
    return outputs


def exponent_as_argument(device: str, graphed: Graphed) -> Any:
    step = graphed(lambda x, exponent: torch.pow(x.abs(), exponent))
    return [step(x, 2.0 + index / 2) for index, x in enumerate(batches(device))]


def exponent_in_a_tensor(device: str, graphed: Graphed) -> Any:
    exponent = torch.tensor(2.0, device=device)

    def step(x: Tensor) -> Tensor:
        return torch.pow(x.abs(), exponent)

    step = graphed(step)
    outputs = []
    for index, x in enumerate(batches(device)):
        exponent.fill_(2.0 + index / 2)
        outputs.append(step(x))
    return outputs


# Shapes.


class Tokens(nn.Module):
    """Attention over tokens, in which those of padding (0) do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8, padding_idx=0)
        self.head = nn.Linear(8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        scores = x @ x.transpose(1, 2)
        scores = scores.masked_fill((tokens == 0)[:, None], -torch.inf)
        return self.head(scores.softmax(-1) @ x)


@torch.no_grad()
def _sequences(device: str, graphed: Graphed, buckets: list[int]) -> Any:
    model = Tokens().to(device)
    step = graphed(model)
    outputs = []
    generator = torch.Generator().manual_seed(2)
    for index in range(30):
        length = (3, 8, 5, 12, 11)[index % 5]
        tokens = torch.randint(1, 20, (2, length), generator=generator)
        bucket = min(size for size in buckets if size >= length)
        outputs.append(step(F.pad(tokens, (0, bucket - length)).to(device))[:, :length])
    return outputs


def padded_to_one_length(device: str, graphed: Graphed) -> Any:
    return _sequences(device, graphed, [12])


def padded_to_buckets(device: str, graphed: Graphed) -> Any:
    return _sequences(device, graphed, [4, 8, 12])


class Mixture(nn.Module):
    """A mixture of experts; the eager form takes as many rows for each as there are."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.gate, self.after = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def dropless(self, x: Tensor) -> Tensor:
        choice = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = choice == index
            out[rows] = expert(x[rows])
        return out

    def capacity(self, x: Tensor, size: int = 3) -> Tensor:
        """At most `size` rows for each expert: the first ones."""
        choice = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            chosen, rows = (choice == index).float().topk(size)
            out = out.index_add(0, rows, expert(x[rows]) * chosen[:, None])
        return out


def whole_mixture(device: str, graphed: Graphed) -> Any:
    net = Mixture().to(device)
    step = graphed(lambda x: net.after(net.dropless(net.before(x))), net)
    return [step(x) for x in batches(device)]


def static_parts_of_a_mixture(device: str, graphed: Graphed) -> Any:
    """Training with graphs around eager experts; the gradient goes from part to part by hand."""
    net = Mixture().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def tail(hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        hidden = hidden.detach().requires_grad_()
        loss = F.mse_loss(net.after(hidden), target)
        loss.backward()
        return loss, hidden.grad

    def backward(x: Tensor, gradient: Tensor) -> None:
        net.before(x).backward(gradient)

    head = graphed(net.before)
    tail, backward = graphed(tail, net.after), graphed(backward, net.before)
    losses = []
    for x in batches(device, 16):
        optimizer.zero_grad()
        hidden = head(x).detach().requires_grad_()
        routed = net.dropless(hidden)
        loss, gradient = tail(routed.detach(), x[:, :4])
        routed.backward(gradient)
        backward(x, hidden.grad)
        optimizer.step()
        losses.append(loss)
    return losses, state_of(net)


# One function, several graphs, and outputs that live on.


def _cube(x: Tensor) -> Tensor:
    return x * x * x


def _power(y: Tensor) -> Tensor:
    return y**y


def _power_of_absolute(y: Tensor) -> Tensor:
    return y.abs() ** y.abs()


def _noisy(z: Tensor) -> Tensor:
    return z * torch.rand_like(z)


def _inputs(device: str) -> Iterator[Tensor]:
    """Both paths: 1 → 2 → 4 four times, 1 → 3 → 4 alone, then in turn."""
    for index in range(24):
        sign = 1 if index < 6 or (index >= 12 and index % 2) else -1
        yield sign * torch.arange(1, 11, device=device) * (0.1 + 0.01 * index)


def foo_in_one(device: str, graphed: Graphed) -> Any:
    def foo(x: Tensor) -> Tensor:
        y = _cube(x)
        z = _power(y) if y.sum() > 0 else _power_of_absolute(y)
        return _noisy(z)

    foo = graphed(foo)
    return [foo(x) for x in _inputs(device)]


def foo_with_where(device: str, graphed: Graphed) -> Any:
    """One graph, by the remedy of the error: both paths, and a choice on the device."""

    def foo(x: Tensor) -> Tensor:
        y = _cube(x)
        return _noisy(torch.where(y.sum() > 0, _power(y), _power_of_absolute(y)))

    foo = graphed(foo)
    return [foo(x) for x in _inputs(device)]


def foo_in_parts(device: str, graphed: Graphed) -> Any:
    """Four graphs; the outputs of all calls are kept."""
    one, two, three, four = map(graphed, (_cube, _power, _power_of_absolute, _noisy))
    kept = []
    for x in _inputs(device):
        y = one(x)
        z = two(y) if y.sum() > 0 else three(y)
        kept.append((y, z, four(z)))
    return kept


def foo_with_two_paths(device: str, graphed: Graphed) -> Any:
    """Two graphs: the rest of the function has a path for each answer, in one pool."""
    one = graphed(_cube)

    def rest(y: Tensor, is_positive: bool) -> tuple[Tensor, Tensor]:
        z = _power(y) if is_positive else _power_of_absolute(y)
        return z, _noisy(z)

    rest = graphed(rest)
    kept = []
    for x in _inputs(device):
        y = one(x)
        kept.append((y, *rest(y, bool(y.sum() > 0))))
    return kept


def outputs_of_two_calls(device: str, graphed: Graphed) -> Any:
    my_model = graphed(lambda x: torch.matmul(x, x))
    kept = [my_model(x) for x in batches(device, shape=(10, 10))]
    assert len({y.data_ptr() for y in kept}) == len(kept)
    return kept


def keeps_its_output(device: str, graphed: Graphed) -> Any:
    """The step itself keeps a tensor that later replays would overwrite."""
    kept = {1: torch.zeros(())}

    def step(x: Tensor) -> Tensor:
        kept[1] = x * 2
        return kept[1] + 1

    step = graphed(step)
    return [(step(x), kept[1]) for x in batches(device)]


def last_output_as_input(device: str, graphed: Graphed) -> Any:
    """The output of a call, and a view of it, are arguments of the next one."""
    step = graphed(lambda x, before: torch.tanh(x @ before.t()) + before)
    outputs = [torch.ones(6, 6, device=device)]
    for x in batches(device, shape=(6, 6)):
        outputs.append(step(x, outputs[-1]))
    return outputs


# With the replays of each step.
WORKS: list[tuple[Loop, list[int]]] = [
    (whole_network, [9]),
    (told_which, [14, 14]),
    (computes_both, [9]),
    (clips_by_a_factor, [9]),
    (steps_on_the_device, [9]),
    (early_then_rest, [21, 8]),
    (two_complete_paths, [7, 11]),
    (both_and_where, [9]),
    (statistics_in_place, [17]),
    (lists_of_tensors, [7]),
    (host_arrays, [9]),
    (exponent_in_a_tensor, [9]),
    (padded_to_one_length, [27]),
    (padded_to_buckets, [21]),
    (static_parts_of_a_mixture, [13, 13, 13]),
    (foo_with_where, [21]),
    (foo_in_parts, [21, 9, 9, 21]),
    (foo_with_two_paths, [21, 18]),
    (outputs_of_two_calls, [9]),
    (last_output_as_input, [9]),
]


@pytest.mark.spread
@pytest.mark.parametrize(("loop", "replays"), WORKS, ids=lambda case: getattr(case, "__name__", ""))
def test_works(accelerator: str, loop: Loop, replays: list[int]) -> None:
    calls = both(loop, accelerator)
    assert [each.replayed for each in calls] == replays
    for each in calls:
        assert not each.eager, each
        assert not each.recaptures or loop is told_which  # more gradients, and more momentum, at first


def test_arrays_of_addresses(accelerator: str) -> None:
    if accelerator == "gpu":
        pytest.skip("the kernel that reads the addresses is one of the host")
    (calls,) = both(arrays_of_addresses, accelerator)
    assert (calls.replayed, calls.eager) == (9, {})


BRANCH = "a Python branch on a tensor"
# With what the error calls the reason, and a word of its remedy.
BREAKS: list[tuple[Loop, str, str]] = [
    (reads_which, BRANCH, "`torch.where`"),
    (clips_by_a_branch, BRANCH, "`torch.where`"),
    (steps_if_finite, BRANCH, "`torch.where`"),
    (reads_confidence, BRANCH, "`torch.where`"),
    (whole_mixture, "a boolean mask", "`torch.where"),
    (foo_in_one, BRANCH, "`torch.where`"),
    (keeps_its_output, "sets or changes `kept`", "return it"),
]


@pytest.mark.spread
@pytest.mark.parametrize(("loop", "reason", "remedy"), BREAKS, ids=lambda c: getattr(c, "__name__", ""))
def test_breaks(accelerator: str, loop: Loop, reason: str, remedy: str) -> None:
    """The form that no graph can hold is refused with a line and a remedy."""
    with pytest.raises(CaptureError) as caught:
        run(loop, device_of(accelerator))
    assert reason in caught.value.what
    assert remedy in caught.value.remedy
    assert str(caught.value.location).startswith(f"{__file__}:")


# With what the report says.
STALE: list[tuple[Loop, str]] = [
    (statistics_rebound, "`MEAN` of `tests.test_patterns` changed"),
    (rebound_list, "`inputs[1]` of the closure of `step` changed"),
    (exponent_baked, "`exponent` of the closure of `step` changed from 3.5 to 4.0"),
    (exponent_as_argument, "let there be few, or pass a tensor"),
]


@pytest.mark.parametrize(("loop", "said"), STALE, ids=lambda case: getattr(case, "__name__", ""))
def test_changes_are_seen(accelerator: str, loop: Loop, said: str) -> None:
    """A graph that would read an old address or number is not replayed, and the report says why."""
    (calls,) = both(loop, accelerator)
    assert calls.replayed == calls.captures  # a capture is replayed at once
    assert said in " ".join([*calls.recaptures, calls.not_captured])


def test_a_gradient_that_the_caller_reads(accelerator: str) -> None:
    """The step gives a gradient to its argument, or to a part of it that the caller keeps."""
    kept: list[Tensor] = []

    def own(x: Tensor) -> None:
        x.requires_grad_().square().sum().backward()

    def part(x: Tensor) -> None:
        kept[0].square().sum().backward()

    for function in (own, part):
        step = GraphedStep(function)
        with pytest.raises(UnsupportedError, match="its gradient would be lost"):  # noqa: PT012
            for x in batches(device_of(accelerator)):
                kept[:] = [x.detach().requires_grad_()]
                step(x)


@pytest.mark.parametrize(
    ("branch", "tensor"), [(steps_if_finite, steps_on_the_device), (reads_confidence, both_and_where)]
)
def test_both_forms_compute_the_same(accelerator: str, branch: Loop, tensor: Loop) -> None:
    one, other = (run(loop, device_of(accelerator), backend="off")[0] for loop in (branch, tensor))
    assert not differences(one, other)


# Training by the callback.


class Simple(Net):
    """Without batch norm, which would remember a batch that is not finite."""

    def __init__(self, make_optimizer: Any = None) -> None:
        super().__init__(make_optimizer)
        self.features = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Dropout(0.3))


def fit(
    module: Callable[[], Any],
    tmp_path: Path,
    accelerator: str,
    callback: CUDAGraphCallback | None = None,
    **kwargs: Any,
) -> Trace:
    """Train without and with the callback, and return the second run, which must equal the first."""
    plain, graph = (
        train(make(module), tmp_path / name, ours, accelerator=accelerator, checkpoint_every=0, **kwargs)
        for name, ours in (("plain", None), ("graph", callback or CUDAGraphCallback()))
    )
    assert_same(plain, graph)
    return graph


def _with_bad_batches() -> DataLoader[Any]:
    data = loader(ragged=False).dataset
    x, y = (t.clone() for t in data.tensors)  # type: ignore[attr-defined]
    x[33::9] = torch.nan  # in the last three of seven batches
    return DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)


class StopsAtBadLoss(Simple):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        if loss.isnan() or loss.isinf():
            return None
        return loss


class SkipsBadLosses(Simple):
    """No wait: a fused optimizer skips the step, and a counter counts it."""

    def configure_optimizers(self) -> Any:
        self.register_buffer("bad", torch.zeros((), device=self.device), persistent=False)
        self.register_buffer("skipped", torch.zeros((), device=self.device))
        optimizer: Any = torch.optim.AdamW(self.parameters(), fused=True)
        optimizer.found_inf = self.bad
        return optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        self.bad.copy_(~torch.isfinite(loss.detach()))
        self.skipped += self.bad
        return loss


def test_steps_skipped_without_a_wait(tmp_path: Path, accelerator: str) -> None:
    with pytest.raises(CaptureError, match=r"whether numbers are finite.*\n.*\n.*nan_checks"):
        train(
            make(StopsAtBadLoss),
            tmp_path / "breaks",
            CUDAGraphCallback(),
            accelerator=accelerator,
            train_loader=_with_bad_batches(),
        )
    trace = fit(SkipsBadLosses, tmp_path, accelerator, train_loader=_with_bad_batches())
    assert trace.counts.replayed > 12
    module: Any = trace.module
    assert module.skipped == 3 * 3
    assert all(bool(parameter.isfinite().all()) for parameter in module.parameters())
    assert trace.trainer is not None
    steps = trace.trainer.optimizers[0].state[next(module.parameters())]["step"]
    assert steps == 3 * (7 - 3)


class ClipsInAHook(Simple):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", nn.utils.clip_grad_norm_(self.parameters(), 0.1))


class ClipsByABranch(Simple):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        if norm > 0.1:
            for gradient in gradients:
                gradient.mul_(0.1 / norm)


@pytest.mark.spread
@pytest.mark.parametrize(
    ("module", "clip"), [(Simple, 0.1), (ClipsInAHook, None), (ClipsByABranch, None)]
)
def test_clipping(tmp_path: Path, accelerator: str, module: Any, clip: float | None) -> None:
    """A branch on the norm, in a hook, leaves the optimizer outside of the graph."""
    build = lambda: module(lambda p: torch.optim.AdamW(p, lr=1e-2))  # noqa: E731
    trace = fit(build, tmp_path, accelerator, gradient_clip_val=clip)
    assert trace.counts.replayed > 12
    is_outside = "the optimizer steps eagerly" in str(trace.summary)
    assert is_outside == (module is ClipsByABranch)


class Numbers(Net):
    """Others in each step: an exponent, a temperature, the weight of a loss; and the epoch."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("exponent", "temperature", "weight", "epoch"):
            self.register_buffer(name, torch.ones(()))

    def on_train_epoch_start(self) -> None:
        self.epoch.fill_(self.current_epoch)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.exponent.fill_(2.0 + 0.1 * self.global_step)
        self.temperature.fill_(0.95**self.global_step)
        self.weight.fill_(min(1.0, 0.1 * self.global_step))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x) / self.temperature
        penalty = torch.pow(logits.abs().mean(), self.exponent)
        self.log("penalty", penalty)
        return F.cross_entropy(logits, y) + self.weight * penalty / (1 + self.epoch)


def test_numbers_that_change(tmp_path: Path, accelerator: str) -> None:
    trace = fit(Numbers, tmp_path, accelerator)
    assert trace.counts.replayed > 12
    assert not trace.counts.recaptures
    penalties = [float(step["logged_metrics"]["penalty"]) for step in trace.steps]
    assert len({*penalties}) == len(penalties)


class Statistics(Net):
    """Normalizes with tensors of the Python module, written or replaced between two steps."""

    rebinds = False

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        global MEAN, STD
        if self.rebinds or MEAN.shape != (12,) or self.global_step == 0:
            MEAN, STD = batch[0].mean(0), batch[0].std(0)
        else:
            MEAN.copy_(batch[0].mean(0))
            STD.copy_(batch[0].std(0))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return super().training_step(((x - MEAN) / (STD + 1e-5), y), batch_idx)


class ReboundStatistics(Statistics):
    rebinds = True


@pytest.mark.spread
@pytest.mark.parametrize("module", [Statistics, ReboundStatistics])
def test_global_statistics(tmp_path: Path, accelerator: str, module: type[Statistics]) -> None:
    trace = fit(module, tmp_path, accelerator)
    if module.rebinds:
        assert "`MEAN` of `tests.test_patterns` changed" in trace.counts.recaptures
        assert trace.counts.replayed <= trace.counts.captures
    else:
        assert not trace.counts.recaptures
        assert trace.counts.replayed > 12


class TwoExits(Net):
    """Trains a head for batches that are easy, and a larger one for the others."""

    def __init__(self) -> None:
        super().__init__(lambda p: torch.optim.SGD(p, lr=0.01))
        self.rest = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4))

    def sure(self, x: Tensor) -> Tensor:
        return x.abs().mean() < 0.8


class ReadsExit(TwoExits):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.features(x)
        return self.head(hidden) if self.sure(x) else self.rest(hidden)


class BothExits(TwoExits):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.features(x)
        return torch.where(self.sure(x), self.head(hidden), self.rest(hidden))


class ToldExit(TwoExits):
    """The host decides before the step; each answer has a graph."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return (*batch, bool(self.sure(batch[0]))) if self.trainer.training else batch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, is_sure = batch
        hidden = self.features(x)
        return F.cross_entropy(self.head(hidden) if is_sure else self.rest(hidden), y)


class DroplessMixture(Net):
    def __init__(self) -> None:
        super().__init__()
        self.mixture = Mixture()
        self.before = nn.Linear(12, 6)

    def route(self, x: Tensor) -> Tensor:
        return self.mixture.dropless(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.mixture.after(self.route(self.mixture.before(self.before(x))))


class CapacityMixture(DroplessMixture):
    def route(self, x: Tensor) -> Tensor:
        return self.mixture.capacity(x)


@pytest.mark.spread
@pytest.mark.parametrize("module", [BothExits, ToldExit, CapacityMixture])
def test_training_along_paths(tmp_path: Path, accelerator: str, module: Any) -> None:
    trace = fit(module, tmp_path, accelerator, max_epochs=6, train_loader=loader(ragged=False))
    assert trace.counts.replayed > 12
    assert trace.counts.captures == (2 if module is ToldExit else 1)


@pytest.mark.parametrize("module", [ReadsExit, DroplessMixture])
def test_training_along_paths_breaks(tmp_path: Path, accelerator: str, module: Any) -> None:
    with pytest.raises(CaptureError, match=r"found at .*test_patterns.py.*\n.*Remedy: .*`torch.where"):
        train(make(module), tmp_path, CUDAGraphCallback(), accelerator=accelerator)


class Masked(Net):
    """The loss of some tokens alone, without a shape that depends on the mask."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        counts = x.sum(1) > 0
        losses = F.cross_entropy(self(x), y, reduction="none")
        return (losses * counts).sum() / counts.sum().clamp(min=1)


class Gathered(Masked):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        rows = (x.sum(1) > 0).nonzero().flatten()
        return F.cross_entropy(self(x)[rows], y[rows])


def test_masks(tmp_path: Path, accelerator: str) -> None:
    assert fit(Masked, tmp_path, accelerator).counts.replayed > 12
    with pytest.raises(CaptureError, match="`nonzero`"):
        train(make(Gathered), tmp_path / "breaks", CUDAGraphCallback(), accelerator=accelerator)


class KeepsActivations(Net):
    """Keeps what steps have returned, and what they left on the module, without copies."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = super().training_step(batch, batch_idx)
        self.act = out["logits"] * 2
        return out

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.kept.append((self.act, outputs["logits"], self.act.clone()))


def test_outputs_of_earlier_steps(tmp_path: Path, accelerator: str) -> None:
    trace = fit(KeepsActivations, tmp_path, accelerator)
    assert trace.counts.replayed > 12
    module: Any = trace.module
    for act, logits, was in module.kept:
        assert torch.equal(act, was)
        assert torch.equal(logits * 2, was)
