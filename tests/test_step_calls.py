"""`GraphedStep`: scalers, several optimizers, shapes, modes and closing; wrong uses.

`tests/gpu/test_step_calls.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from lightning_cudagraph import (
    ConfigurationError,
    GraphedStep,
    UnsupportedError,
)
from tests.harness import differences
from tests.loops import Loop, Net, assert_equal_runs, device_of

O = torch.optim  # noqa: E741


class Scales(Loop):
    """fp16 with a scaler that the step is given; some batches overflow."""

    steps = 24

    def build(self) -> None:
        super().build()
        self.scaler = torch.amp.GradScaler(self.device, growth_interval=4, init_scale=2.0**10)
        self.kwargs = {"scaler": self.scaler}

    def step(self, x: Tensor, y: Tensor) -> Any:
        self.optimizer.zero_grad()
        with torch.autocast(self.device, dtype=torch.float16):
            loss = nn.functional.cross_entropy(self.net(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def call(self, step: Any, index: int, x: Tensor, y: Tensor) -> Any:
        return step(x * (1e5 if index % 7 == 5 else 1.0), y)

    def state(self) -> Any:
        return {**super().state(), "scaler": self.scaler.state_dict()}


class ScalesTwo(Scales):
    """Two optimizers, each with its own update."""

    def build(self) -> None:
        super().build()
        self.optimizers_ = [
            O.SGD(self.net.layers[:3].parameters(), lr=0.1, momentum=0.9),
            O.AdamW(self.net.layers[3:].parameters(), lr=1e-2, fused=True),
        ]

    def step(self, x: Tensor, y: Tensor) -> Any:
        for optimizer in self.optimizers_:
            optimizer.zero_grad()
            with torch.autocast(self.device, dtype=torch.float16):
                loss = nn.functional.cross_entropy(self.net(x), y)
            self.scaler.scale(loss).backward()
            self.scaler.step(optimizer)
            self.scaler.update()
        return loss

    def optimizers(self) -> Any:
        return self.optimizers_


class ScalesTwice(Scales):
    """Two steps of one optimizer, of which one or the other overflows."""

    def step(self, x: Tensor, y: Tensor) -> Any:
        for half in (x[::2], x[1::2]):
            self.optimizer.zero_grad()
            loss = self.net(half).square().mean()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return loss

    def call(self, step: Any, index: int, x: Tensor, y: Tensor) -> Any:
        if index >= 10:
            x = x.index_fill(0, torch.tensor([index % 3], device=x.device), torch.inf)
        return step(x, y)


class ScalesInAClosure(Scales):
    """A function that finds model, optimizer and scaler in its closure."""

    def build(self) -> None:
        super().build()
        net, optimizer, scaler = self.net, self.optimizer, self.scaler

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss

        self.step = step  # type: ignore[method-assign]


# The gradients of the second's parameters are added to, and then dropped: learned in two more steps.
@pytest.mark.spread
@pytest.mark.parametrize(
    ("loop", "replays"), [(Scales, 21), (ScalesTwo, 19), (ScalesTwice, 21), (ScalesInAClosure, 21)]
)
def test_fp16(accelerator: str, loop: type[Loop], replays: int) -> None:
    step = assert_equal_runs(lambda: loop(device_of(accelerator)), replays)
    assert not step.summary.calls.eager


class TwoOptimizers(Loop):
    """Two that step in one function, one between two backward passes, with schedules of their own."""

    def build(self) -> None:
        super().build()
        self.other = Net(8).to(self.device)
        self.other_optimizer = O.Adam(self.other.parameters(), lr=1e-2, fused=True)
        self.schedules = [
            O.lr_scheduler.StepLR(self.optimizer, 2, 0.5),
            O.lr_scheduler.StepLR(self.other_optimizer, 3, 0.5),
        ]

    def step(self, x: Tensor, y: Tensor) -> Any:
        self.optimizer.zero_grad()
        self.other_optimizer.zero_grad()
        out = self.net(x)
        nn.functional.cross_entropy(out, y).backward()
        self.optimizer.step()
        loss = (self.other(x) - out.detach()).square().mean()
        loss.backward()
        self.other_optimizer.step()
        return loss, out

    def around(self, index: int) -> None:
        for schedule in self.schedules:
            schedule.step()

    def modules(self) -> Any:
        return [self.net, self.other]

    def optimizers(self) -> Any:
        return [self.optimizer, self.other_optimizer]


def test_two_optimizers(accelerator: str) -> None:
    step = assert_equal_runs(lambda: TwoOptimizers(device_of(accelerator)), 9)
    assert not step.summary.calls.recaptures


def test_two_steps_share_an_optimizer(accelerator: str) -> None:
    """Each may close when it likes."""
    device = device_of(accelerator)

    def trained(graphed: bool) -> Any:
        loop = Loop(device)
        loop.optimizer = O.Adam(loop.net.parameters(), lr=1e-2, fused=True)
        steps: list[Any] = [GraphedStep(loop.step, loop.net, loop.optimizer) for _ in range(2)]
        torch.manual_seed(7)
        outputs = []
        for index, (x, y) in enumerate([*loop.batches()] * 2):
            step = steps[index % 2 if index < 18 else 1]
            outputs.append((step if graphed else loop.step)(x, y))
            if index == 17:
                steps[0].close()
        steps[1].close()
        assert not graphed or [step.summary.calls.replayed for step in steps] == [6, 12]
        return outputs, loop.state()

    assert not differences(trained(False), trained(True))


@pytest.mark.parametrize("form", [torch.optim.Adam, torch.optim.NAdam])
def test_a_kind_that_steps_a_part_of_the_parameters(accelerator: str, form: Any) -> None:
    """Its graph tells counters apart that are one for the kind before, which is not called any more."""
    device = device_of(accelerator)

    def run(backend: Any) -> tuple[list[Tensor], GraphedStep[..., Any]]:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).to(device)
        optimizer = form(net.parameters(), lr=0.01)

        def step(x: Tensor, is_whole: bool) -> Tensor:
            optimizer.zero_grad()
            loss = (net(x) if is_whole else net[0](x)).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        with GraphedStep(step, net, optimizer, backend=backend) as graph:
            calls = [True] * 10 + [False] * 20 + [True] * 10
            losses = [
                graph(torch.full((5, 6), float(index), device=device), is_whole).clone()
                for index, is_whole in enumerate(calls)
            ]
        counters = [state["step"] for state in optimizer.state.values()]
        return [*losses, *counters, *net.state_dict().values()], graph

    (plain, _), (graphed, graph) = run("off"), run("auto")
    assert all(map(torch.equal, plain, graphed))
    assert graph.summary.calls.replayed >= 28


def test_more_shapes_than_graphs(accelerator: str) -> None:
    class Bounded(Loop):
        sizes = (8, 5, 4)
        steps = 30
        kwargs = {"max_graphs": 2}  # noqa: RUF012

    step = assert_equal_runs(lambda: Bounded(device_of(accelerator)), 14)
    (reason,) = step.summary.calls.eager
    assert reason.startswith("more than 2 signatures")
    assert step.summary.calls.eager[reason] == 7


@pytest.mark.long
def test_the_least_recently_used_is_released(accelerator: str) -> None:
    """Sizes that come later take the place of those that come no more."""

    class Grows(Loop):
        sizes = tuple(size for size in (8, 5, 4, 3) for _ in range(24))
        steps = 96
        kwargs = {"max_graphs": 2}  # noqa: RUF012

    step = assert_equal_runs(lambda: Grows(device_of(accelerator)), 2 * (24 - 3) + 2 * (24 - 3 - 8))
    calls = step.summary.calls
    assert (calls.captures, calls.evictions, sum(calls.eager.values())) == (4, 2, 16)
    assert "released for others 2 time(s)" in str(step.summary)


def test_the_report_names_the_lengths_to_pad_to(accelerator: str) -> None:
    """Lengths 3 to 6 have graphs; with so many others, the eldest of them are forgotten, and counted."""
    step = GraphedStep(lambda x: x * 2, max_graphs=4, verify=None)
    lengths = [*range(3, 7)] * 4 + [*range(7, 103)]
    for length in lengths:
        step(torch.ones(2, length, device=device_of(accelerator)))
    eager = len(lengths) - 16
    first = str(step.summary).splitlines()[0]
    assert (
        f"{100 * eager // len(lengths)}% of your calls ran eagerly: dimension 1 of `arguments[" in first
    )
    assert "has 100 lengths; pad it to 18, 46, 74 or 102 (docs/recipes/buckets.md); 4 of 112" in first
    step.close()


class TakesTurns(Loop):
    """Every second call finds the model in another mode, with other parameters frozen."""

    steps = 20

    def call(self, step: Any, index: int, x: Tensor, y: Tensor) -> Any:
        is_first = index % 2 == 0
        self.net.train(is_first)
        self.net.layers[0].requires_grad_(is_first)
        return step(x, y, is_first)

    def step(self, x: Tensor, y: Tensor, is_first: bool) -> Any:
        return super().step(x, y)


def test_calls_of_each_kind_find_their_own_surroundings(accelerator: str) -> None:
    step = assert_equal_runs(lambda: TakesTurns(device_of(accelerator)), 14)
    assert not step.summary.calls.recaptures
    assert not step.summary.calls.eager


class ReadsSome(Loop):
    """Calls of one kind wait for the loss, which no graph can hold; those of the other kind do not."""

    kwargs: ClassVar[dict[str, Any]] = {"on_unsupported": "eager"}
    steps = 20

    def call(self, step: Any, index: int, x: Tensor, y: Tensor) -> Any:
        return step(x, y, index % 2 == 0)

    def step(self, x: Tensor, y: Tensor, is_read: bool) -> Any:
        loss = super().step(x, y)
        return loss.item() if is_read else loss


def test_what_one_kind_of_calls_cannot_do_is_no_concern_of_the_others(accelerator: str) -> None:
    step = assert_equal_runs(lambda: ReadsSome(device_of(accelerator)), 7)
    assert sum(step.summary.calls.eager.values()) == 7


class NamesDiffer(Loop):
    """An argument that is another text in every call."""

    def call(self, step: Any, index: int, x: Tensor, y: Tensor) -> Any:
        return step(x, y, f"{index}.png")

    def step(self, x: Tensor, y: Tensor, name: str) -> Any:
        return super().step(x, y)


def test_arguments_that_never_look_alike(accelerator: str) -> None:
    step = assert_equal_runs(lambda: NamesDiffer(device_of(accelerator)), 0)
    said = "`arguments['name']` changed: expected '0.png', found '5.png'"
    assert step.summary.calls.not_captured.startswith(
        "5 different signatures of arguments came before one of them had come more"
    )
    assert said in step.summary.calls.not_captured
    assert said in str(step.summary)


def test_outputs_stay(accelerator: str) -> None:
    loop = Loop(device_of(accelerator))
    with GraphedStep(loop.step, loop.net, loop.optimizer) as step:
        kept = []
        for x, y in loop.batches():
            loss = step(x, y)
            assert not loss.requires_grad
            kept.append((loss, loss.clone()))
        assert step.summary.calls.replayed == 9
    assert all(torch.equal(now, was) for now, was in kept)
    assert len({float(was) for _, was in kept}) == len(kept)


def test_off_and_eager_are_plain_calls(accelerator: str) -> None:
    loop = Loop(device_of(accelerator))
    x, y = next(loop.batches())
    off = GraphedStep(loop.step, loop.net, loop.optimizer, backend="off")
    assert off(x, y).requires_grad
    assert off.eager(x, y).requires_grad
    assert not off.summary.calls.warmed_up


def test_closing_gives_everything_back(accelerator: str) -> None:
    loop = Loop(device_of(accelerator))
    loop.optimizer = O.Adam(loop.net.parameters(), lr=1e-2)
    attributes = {name: id(value) for name, value in vars(loop.optimizer).items()}
    hooks = len(loop.optimizer._optimizer_state_dict_post_hooks)
    with GraphedStep(loop.step, loop.net, loop.optimizer) as step:
        for x, y in loop.batches():
            step(x, y)
    assert {name: id(value) for name, value in vars(loop.optimizer).items()} == attributes
    assert len(loop.optimizer._optimizer_state_dict_post_hooks) == hooks
    assert not loop.optimizer.param_groups[0]["capturable"]
    assert all(state["step"].device.type == "cpu" for state in loop.optimizer.state.values())
    assert "9 replayed" in str(step.summary)
    step(*next(loop.batches()))  # begins anew
    assert step.summary.calls.warmed_up == 1
    step.close()


def test_copies_are_empty(accelerator: str) -> None:
    loop = Loop(device_of(accelerator))
    with GraphedStep(loop.step, loop.net, loop.optimizer) as step:
        for x, y in loop.batches():
            step(x, y)
        for made in (copy.deepcopy(step), pickle.loads(pickle.dumps(step))):
            with pytest.raises(ConfigurationError, match="is a copy, or was unpickled"):
                made(x, y)
            made.close()
        step(x, y)
        assert step.summary.calls.replayed == 10


def _function(x: Tensor) -> Tensor:
    return x * 2


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"function": 1}, r"GraphedStep\(function=1\)"),
    ({"modules": 3}, r"GraphedStep\(modules=3\)`: expected one, a list or a dictionary of `Module`s"),
    ({"optimizers": [3]}, r"optimizers\[0\]` is a `int`"),
    ({"warmup_steps": 0}, r"warmup_steps=0\)`: expected an int of at least 1"),
    ({"verify": True}, r"verify=True"),
    ({"max_graphs": 0}, r"max_graphs=0"),
    ({"backend": "cpu"}, r"backend='cpu'\)`: expected one of 'auto'"),
    ({"on_unsupported": "no"}, r"on_unsupported='no'"),
    ({"harmless": "print"}, r"harmless='print'\)`: expected a list of names"),
    ({"scaler": 1.0}, r"scaler=1.0"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        GraphedStep(**{"function": _function, **arguments})


CALLS: list[tuple[Callable[[Any, Tensor], Any], str]] = [
    (lambda step, x: step(x.requires_grad_()), r"`arguments\['x'\]` requires a gradient"),
    (lambda step, x: step(3.0), r"neither a module with parameters nor a tensor"),
]


@pytest.mark.parametrize(("call", "message"), CALLS)
def test_wrong_calls(accelerator: str, call: Any, message: str) -> None:
    x = torch.zeros(3, device=device_of(accelerator))
    with pytest.raises(UnsupportedError, match=f"(?s){message}"):
        call(GraphedStep(_function), x)


def test_modes_that_are_refused(accelerator: str) -> None:
    device = device_of(accelerator)
    x = torch.zeros(3, device=device)
    with torch.autocast(device), pytest.raises(UnsupportedError, match="with its cache of weights on"):
        GraphedStep(_function)(x)
    with torch.inference_mode(), pytest.raises(UnsupportedError, match="inference_mode"):
        GraphedStep(_function)(x)
    wrong = "emulator" if device == "cuda" else "cuda"
    with pytest.raises(ConfigurationError, match=f"backend='{wrong}'"):
        GraphedStep(_function, backend=wrong)(x)
    with pytest.raises(TypeError, match="missing a required argument"):
        GraphedStep(_function)()  # type: ignore[call-arg]


def test_a_step_inside_another_is_a_part_of_it(accelerator: str) -> None:
    class Nested(Loop):
        def build(self) -> None:
            super().build()
            self.inner = GraphedStep(_function)

        def step(self, x: Tensor, y: Tensor) -> Any:
            return super().step(self.inner(x), y)

    assert_equal_runs(lambda: Nested(device_of(accelerator)), 9)


def test_function_of_a_closure_finds_its_modules(accelerator: str) -> None:
    one = Loop(device_of(accelerator))
    net, optimizer = one.net, one.optimizer

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    with GraphedStep(train_step, optimizers=optimizer) as step:
        for x, y in one.batches():
            step(x, y)
    assert step.summary.calls.replayed == 9
