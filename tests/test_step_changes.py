"""`GraphedStep`: what changes between calls, what a function must not do, and wrong uses.

`tests/gpu/test_step_changes.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

import copy
import pickle
import queue
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from lightning_cudagraph import (
    CaptureError,
    ConfigurationError,
    GraphedStep,
    UnsupportedError,
    VerificationError,
)
from tests.harness import differences
from tests.loops import Loop, Net, assert_equal_runs, device_of, run

O = torch.optim  # noqa: E741
SCALE = 1.0


class Changes(Loop):
    """Something changes after the seventh call, which leads to another capture."""

    steps = 14

    def around(self, index: int) -> None:
        if index == 6:
            self.change()

    def change(self) -> None: ...


class Freezes(Changes):
    def change(self) -> None:
        self.net.layers[0].requires_grad_(False)


class GoesToEval(Changes):
    def change(self) -> None:
        self.net.eval()


class ReplacesLayer(Changes):
    def change(self) -> None:
        for parameter in self.net.layers[4].parameters():
            del self.optimizer.state[parameter]
        self.net.layers[4] = nn.Linear(16, 4).to(self.device)
        self.optimizer.param_groups[0]["params"][-2:] = self.net.layers[4].parameters()


class MovesStorage(Changes):
    def change(self) -> None:
        weight = self.net.layers[0].weight
        weight.data = weight.data.clone()


class ChangesMomentum(Changes):
    def change(self) -> None:
        self.optimizer.param_groups[0]["momentum"] = 0.5


class ChangesGlobal(Changes):
    def step(self, x: Tensor, y: Tensor) -> Any:
        return super().step(x * SCALE, y)

    def change(self) -> None:
        global SCALE
        SCALE = 2.0


class ChangesOwn(Changes):
    """A number on the object whose method the step is, which is no module."""

    weight = 1.0

    def step(self, x: Tensor, y: Tensor) -> Any:
        return super().step(x * self.weight, y)

    def change(self) -> None:
        self.weight = 2.0


class LoadsState(Changes):
    def change(self) -> None:
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))


class AddsHook(Changes):
    def change(self) -> None:
        self.net.layers[0].register_forward_hook(lambda module, args, out: out * 2)


CHANGES: dict[type[Changes], str] = {
    Freezes: "`requires_grad` of parameter `layers.0.weight` changed from True to False",
    GoesToEval: "`training` of `Net` changed from True to False",
    ReplacesLayer: "changed",
    MovesStorage: "the address of parameter `layers.0.weight` changed",
    ChangesMomentum: "`momentum` of param group 0 changed from 0.9 to 0.5",
    ChangesGlobal: "`SCALE` of `tests.test_step_changes` changed from 1.0 to 2.0",
    ChangesOwn: "`self.weight` of `Loop.step` changed from 1.0 to 2.0",
    LoadsState: "a state was loaded into the optimizer",
    AddsHook: "`_forward_hooks` of `layers.0` changed from none",
}


@pytest.mark.parametrize("loop", CHANGES, ids=lambda loop: loop.__name__)
def test_changes_lead_to_another_capture(
    accelerator: str, loop: type[Changes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build() -> Loop:
        monkeypatch.setitem(globals(), "SCALE", 1.0)
        return loop(device_of(accelerator))

    step = assert_equal_runs(build, 8)
    (reason,) = step.counts.recaptures
    assert CHANGES[loop].split(" of `Loop")[0] in reason


class Items(Loop):
    def step(self, x: Tensor, y: Tensor) -> Any:
        loss = super().step(x, y)
        return loss.item()


class Counts(Loop):
    calls = 0

    def step(self, x: Tensor, y: Tensor) -> Any:
        self.calls += 1
        return super().step(x, y)


class Toggles(Loop):
    """Leaves other parameters trained than it found."""

    def step(self, x: Tensor, y: Tensor) -> Any:
        loss = super().step(x, y)
        self.net.layers[0].requires_grad_(False)
        return loss

    def around(self, index: int) -> None:
        self.net.layers[0].requires_grad_(True)


class StepsScheduler(Loop):
    def build(self) -> None:
        super().build()
        self.scheduler = O.lr_scheduler.StepLR(self.optimizer, 1000)

    def step(self, x: Tensor, y: Tensor) -> Any:
        loss = super().step(x, y)
        self.scheduler.step()
        return loss


class SetsRate(Loop):
    def step(self, x: Tensor, y: Tensor) -> Any:
        loss = super().step(x, y)
        self.optimizer.param_groups[0]["lr"] *= 0.9
        return loss


class Prints(Loop):
    def step(self, x: Tensor, y: Tensor) -> Any:
        print("a step")
        return super().step(x, y)


class Scaled(Loop):
    """A gradient scaler that the step was not given."""

    def build(self) -> None:
        super().build()
        self.scaler = torch.amp.GradScaler(self.device)

    def step(self, x: Tensor, y: Tensor) -> Any:
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss


class HiddenOptimizer(Loop):
    def build(self) -> None:
        super().build()
        self.other = O.SGD(self.net.layers[0].parameters(), lr=0.1)

    def step(self, x: Tensor, y: Tensor) -> Any:
        loss = super().step(x, y)
        self.other.step()
        return loss


class HiddenModule(Loop):
    """Trains a module that the step was not given."""

    def build(self) -> None:
        super().build()
        self.other = [nn.Linear(6, 6).to(self.device)]

    def step(self, x: Tensor, y: Tensor) -> Any:
        return super().step(self.other[0](x), y)


class Named(Counts):
    """A count of calls that the user says is harmless, by the name that the error gives."""

    kwargs: ClassVar[dict[str, Any]] = {"harmless": ["calls"]}


def test_harmless(accelerator: str) -> None:
    step = assert_equal_runs(lambda: Named(device_of(accelerator)), 9)
    assert not step.counts.recaptures


class StepsOnHost(Loop):
    def build(self) -> None:
        super().build()
        self.optimizer = O.Adagrad(self.net.parameters(), lr=0.1)


class Compiled(Loop):
    def build(self) -> None:
        super().build()
        self.net.layers[0].compile(backend="eager")


class Sparse(Loop):
    def build(self) -> None:
        super().build()
        self.table = nn.Embedding(4, 6, sparse=True).to(self.device)

    def step(self, x: Tensor, y: Tensor) -> Any:
        return super().step(x + self.table(y), y)


REFUSED_AT_ONCE: dict[type[Loop], str] = {
    StepsOnHost: r"`torch\.optim\.adagrad\.Adagrad` counts its steps on the host",
    Compiled: r"`layers\.0` is compiled",
    Sparse: r"`table` is a `Embedding\(sparse=True\)`",
}


@pytest.mark.parametrize("loop", REFUSED_AT_ONCE, ids=lambda loop: loop.__name__)
def test_refused_at_once(accelerator: str, loop: type[Loop]) -> None:
    """With the first call; or all calls are plain ones."""
    with pytest.raises(UnsupportedError, match=REFUSED_AT_ONCE[loop]):
        run(loop(device_of(accelerator)), graphed=True)

    class Eager(loop):  # type: ignore[misc,valid-type]
        kwargs = {"on_unsupported": "eager"}  # noqa: RUF012

    step = assert_equal_runs(lambda: Eager(device_of(accelerator)), 0)
    assert step.report.startswith("lightning_cudagraph: all calls eager. ")


REFUSED: dict[type[Loop], str] = {
    Items: r"`\.item\(\)`.* found at .*test_step_changes\.py",
    Counts: r"sets or changes `calls` of the `Counts` at .*test_step_changes\.py.*before you call the",
    Toggles: r"changes `requires_grad` of `layers\.0\.weight` from True to False \(2 parameter",
    StepsScheduler: r"use of `LRScheduler\.step`.*_changes\.py.*Call the scheduler after the step",
    SetsRate: r"sets a learning rate, or another option of an optimizer",
    Prints: r"use of `print`.*test_step_changes\.py.*after the call of the step",
    Scaled: r"use of `GradScaler\.scale`.*Pass the scaler: `GraphedStep\(",
    HiddenOptimizer: r"calls `SGD\.step\(\)` of an optimizer that it was not given",
    HiddenModule: r"a parameter of shape \(6, 6\) that belongs to none of the modules",
}


@pytest.mark.parametrize("loop", REFUSED, ids=lambda loop: loop.__name__)
def test_refused(accelerator: str, loop: type[Loop]) -> None:
    one = loop(device_of(accelerator))
    with pytest.raises(UnsupportedError, match=REFUSED[loop]) as error:
        run(one, graphed=True)
    for word in ("CUDAGraphCallback", "on_train_batch", "training_step"):
        assert word not in str(error.value)
    # The optimizer is as it was made, and nothing stays replaced.
    assert "lightning_cudagraph" not in str(vars(one.optimizer).get("step"))
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


@pytest.mark.parametrize("loop", REFUSED, ids=lambda loop: loop.__name__)
def test_refused_and_eager(accelerator: str, loop: type[Loop]) -> None:
    """With `on_unsupported="eager"` all comes out as without a graph."""

    class Eager(loop):  # type: ignore[misc,valid-type]
        kwargs = {"on_unsupported": "eager"}  # noqa: RUF012

    step = assert_equal_runs(lambda: Eager(device_of(accelerator)), 0)
    assert sum(step.counts.eager.values()) == 9


def test_a_failed_capture_has_done_nothing(accelerator: str) -> None:
    loop = Items(device_of(accelerator))
    batches = list(loop.batches())
    torch.manual_seed(7)
    with GraphedStep(loop.step, loop.net, loop.optimizer) as step:
        for x, y in batches[:3]:
            step(x, y)
        before = copy.deepcopy(loop.state())
        with pytest.raises(CaptureError):
            step(*batches[3])
        assert not differences(before, loop.state())


class Planted(Loop):
    """A `queue.Queue` hides a number from every audit and guard."""

    def build(self) -> None:
        super().build()
        self.numbers: queue.Queue[float] = queue.Queue()
        self.numbers.put(1.0)

    def step(self, x: Tensor, y: Tensor) -> Any:
        return super().step(x * self.numbers.queue[0], y)

    def around(self, index: int) -> None:
        self.numbers.queue[0] += 0.5


def test_verification_catches_what_no_audit_sees(accelerator: str) -> None:
    with pytest.raises(VerificationError, match=r"other numbers.* What the step returned differs"):
        run(Planted(device_of(accelerator)), graphed=True)


def test_verification_can_be_repeated(accelerator: str) -> None:
    class Often(Loop):
        kwargs = {"verify_every_n_steps": 3, "verify_replays": 1}  # noqa: RUF012

    step = assert_equal_runs(lambda: Often(device_of(accelerator)), 9)
    assert "4 replay(s) verified" in step.report


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


# The gradients of the second's parameters are added to, and then dropped: learned in two more steps.
@pytest.mark.parametrize(("loop", "replays"), [(Scales, 21), (ScalesTwo, 19)])
def test_fp16(accelerator: str, loop: type[Loop], replays: int) -> None:
    step = assert_equal_runs(lambda: loop(device_of(accelerator)), replays)
    assert not step.counts.eager


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
    assert not step.counts.recaptures


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
        assert not graphed or [step.counts.replayed for step in steps] == [6, 12]
        return outputs, loop.state()

    assert not differences(trained(False), trained(True))


def test_more_shapes_than_graphs(accelerator: str) -> None:
    class Bounded(Loop):
        sizes = (8, 5, 4)
        steps = 30
        kwargs = {"max_graphs": 2}  # noqa: RUF012

    step = assert_equal_runs(lambda: Bounded(device_of(accelerator)), 14)
    (reason,) = step.counts.eager
    assert reason.startswith("more than 2 signatures")
    assert step.counts.eager[reason] == 7


def test_outputs_stay(accelerator: str) -> None:
    loop = Loop(device_of(accelerator))
    with GraphedStep(loop.step, loop.net, loop.optimizer) as step:
        kept = []
        for x, y in loop.batches():
            loss = step(x, y)
            assert not loss.requires_grad
            kept.append((loss, loss.clone()))
        assert step.counts.replayed == 9
    assert all(torch.equal(now, was) for now, was in kept)
    assert len({float(was) for _, was in kept}) == len(kept)


def test_off_and_eager_are_plain_calls(accelerator: str) -> None:
    loop = Loop(device_of(accelerator))
    x, y = next(loop.batches())
    off = GraphedStep(loop.step, loop.net, loop.optimizer, backend="off")
    assert off(x, y).requires_grad
    assert off.eager(x, y).requires_grad
    assert not off.counts.warmed_up


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
    assert "9 replayed" in step.report
    step(*next(loop.batches()))  # begins anew
    assert step.counts.warmed_up == 1
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
        assert step.counts.replayed == 10


def _function(x: Tensor) -> Tensor:
    return x * 2


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"function": 1}, r"GraphedStep\(function=1\)"),
    ({"modules": 3}, r"GraphedStep\(modules=3\)`: expected one, a list or a dictionary of `Module`s"),
    ({"optimizers": [3]}, r"optimizers\[0\]` is a `int`"),
    ({"warmup_steps": 0}, r"warmup_steps=0\)`: expected an int of at least 1"),
    ({"verify_replays": True}, r"verify_replays=True"),
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
    (lambda step, x: step(x.requires_grad_()), r"`batch\['x'\]` requires a gradient"),
    (lambda step, x: step(3.0), r"neither a module with parameters nor a tensor"),
]


@pytest.mark.parametrize(("call", "message"), CALLS)
def test_wrong_calls(accelerator: str, call: Any, message: str) -> None:
    x = torch.zeros(3, device=device_of(accelerator))
    with pytest.raises(UnsupportedError, match=message):
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
    assert step.counts.replayed == 9
