"""`GraphedStep`: what changes between calls, and what a function must not do.

`tests/gpu/test_step_changes.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

import copy
import queue
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from lightning_cudagraph import (
    CaptureError,
    GraphedStep,
    UnsupportedError,
    Verification,
    VerificationError,
)
from tests.harness import differences
from tests.loops import Loop, assert_equal_runs, device_of, run

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


class ChangesBetas(Changes):
    """In place, in a list."""

    def build(self) -> None:
        super().build()
        groups = [{"params": [*self.net.parameters()], "betas": [0.9, 0.99]}]
        self.optimizer = O.AdamW(groups, lr=0.01)

    def change(self) -> None:
        self.optimizer.param_groups[0]["betas"][0] = 0.5


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


class Loose(Changes):
    """A parameter that the optimizer knows, and no module."""

    def build(self) -> None:
        super().build()
        self.loose = [nn.Parameter(torch.ones(6, device=self.device))]
        self.optimizer = O.SGD([*self.net.parameters(), *self.loose], lr=0.1)

    def step(self, x: Tensor, y: Tensor) -> Any:
        return super().step(x * self.loose[0], y)

    def state(self) -> Any:
        return {**super().state(), "loose": self.loose}


class FreezesLoose(Loose):
    def change(self) -> None:
        self.loose[0].requires_grad_(False)
        self.loose[0].grad = None


class HooksLoose(Loose):
    def change(self) -> None:
        self.loose[0].register_hook(lambda gradient: gradient * 0.1)


CHANGES: dict[type[Changes], str] = {
    FreezesLoose: "`requires_grad` of the parameter 6 in param group 0 of the optimizer changed from",
    HooksLoose: "`_backward_hooks` of the parameter 6 in param group 0 of the optimizer changed from",
    Freezes: "`requires_grad` of parameter `layers.0.weight` changed from True to False",
    GoesToEval: "`training` of `Net` changed from True to False",
    ReplacesLayer: "the module `layers.4` changed from a `Linear` to another one",
    MovesStorage: "the address of parameter `layers.0.weight` changed",
    ChangesMomentum: "`momentum` of param group 0 changed from 0.9 to 0.5",
    ChangesBetas: "`betas` of param group 0 changed from (0.9, 0.99) to (0.5, 0.99)",
    ChangesGlobal: "`SCALE` of `tests.test_step_changes` changed from 1.0 to 2.0",
    ChangesOwn: "`self.weight` of `Loop.step` changed from 1.0 to 2.0",
    LoadsState: "a state was loaded into the optimizer",
    AddsHook: "`_forward_hooks` of `layers.0` changed from none",
}


@pytest.mark.spread(2)
@pytest.mark.parametrize("loop", CHANGES, ids=lambda loop: loop.__name__)
def test_changes_lead_to_another_capture(
    accelerator: str, loop: type[Changes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build() -> Loop:
        monkeypatch.setitem(globals(), "SCALE", 1.0)
        return loop(device_of(accelerator))

    step = assert_equal_runs(build, 8)
    (reason,) = step.summary.calls.recaptures
    assert CHANGES[loop].split(" of `Loop")[0] in reason


class TwoHeads(Loop):
    """A loop with a body and two heads; the second takes part from the ninth call on."""

    steps = 18

    def build(self) -> None:
        self.body, self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.all = nn.ModuleList([self.body, self.a, self.b]).to(self.device)
        self.optimizer = O.SGD(self.all.parameters(), lr=0.1, weight_decay=0.1)

    def modules(self) -> Any:
        return self.all


class OneAfterTheOther(TwoHeads):
    """Back at the first head, the gradients of the second are zeros, and no longer absent."""

    def step(self, x: Tensor, y: Tensor, task: str) -> Any:
        self.optimizer.zero_grad(set_to_none=False)
        loss = nn.functional.cross_entropy((self.a if task == "a" else self.b)(self.body(x)), y)
        loss.backward()
        self.optimizer.step()
        return loss

    def call(self, step: Any, index: int, x: Tensor, y: Tensor) -> Any:
        return step(x, y, "b" if index in (8, 9, 10) else "a")


class OptimizerAlone(TwoHeads):
    """Gradients come from the host."""

    def step(self, scale: Tensor) -> Any:
        norm = nn.utils.clip_grad_norm_(self.all.parameters(), 1.0) * scale
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def call(self, step: Any, index: int, x: Tensor, y: Tensor) -> Any:
        out = self.body(x)
        loss = nn.functional.cross_entropy(self.a(out) + (self.b(out) if index >= 8 else 0), y)
        loss.backward()
        return step(x.new_ones(()))


class LossBeside(TwoHeads):
    """One head is trained in the step, the other outside of it; one optimizer."""

    def step(self, x: Tensor, y: Tensor) -> Any:
        loss = nn.functional.cross_entropy(self.a(self.body(x)), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def call(self, step: Any, index: int, x: Tensor, y: Tensor) -> Any:
        if index >= 8:
            self.b(self.body(x).detach()).mean().backward()
        return step(x, y)


@pytest.mark.spread
@pytest.mark.parametrize("loop", [OneAfterTheOther, OptimizerAlone, LossBeside])
def test_a_parameter_that_has_a_gradient_later(accelerator: str, loop: type[Loop]) -> None:
    replays = {OneAfterTheOther: 7, OptimizerAlone: 11, LossBeside: 11}[loop]
    step = assert_equal_runs(lambda: loop(device_of(accelerator)), replays)
    assert step.summary.calls.recaptures == (
        "a parameter that had no gradient before the step has one now",
    )


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
    assert not step.summary.calls.recaptures


class StepsOnHost(Loop):
    def build(self) -> None:
        super().build()
        self.optimizer = O.Adagrad(self.net.parameters(), lr=0.1)


def test_an_optimizer_that_counts_its_steps_on_the_host(accelerator: str) -> None:
    step = assert_equal_runs(lambda: StepsOnHost(device_of(accelerator)), 9)
    assert not step.summary.calls.recaptures


class Sparse(Loop):
    def build(self) -> None:
        super().build()
        self.table = nn.Embedding(4, 6, sparse=True).to(self.device)

    def step(self, x: Tensor, y: Tensor) -> Any:
        return super().step(x + self.table(y), y)


REFUSED_AT_ONCE: dict[type[Loop], str] = {
    Sparse: r"`table` is a `Embedding\(sparse=True\)`",
}


@pytest.mark.parametrize("loop", REFUSED_AT_ONCE, ids=lambda loop: loop.__name__)
def test_refused_at_once(accelerator: str, loop: type[Loop]) -> None:
    """With the first call; or all calls are plain ones."""
    with pytest.raises(UnsupportedError, match=f"(?s){REFUSED_AT_ONCE[loop]}"):
        run(loop(device_of(accelerator)), graphed=True)

    class Eager(loop):  # type: ignore[misc,valid-type]
        kwargs = {"on_unsupported": "eager"}  # noqa: RUF012

    step = assert_equal_runs(lambda: Eager(device_of(accelerator)), 0)
    assert str(step.summary).startswith("lightning_cudagraph: all calls eager. ")


REFUSED: dict[type[Loop], str] = {
    Items: r"`\.item\(\)`.* found at .*test_step_changes\.py",
    Counts: r"changes `calls` of the `Counts`,.* found at .*test_step_changes\.py.*before you call the",
    Toggles: r"changes `requires_grad` of `layers\.0\.weight` from True to False \(2 parameter",
    StepsScheduler: r"use of `LRScheduler\.step`.*_changes\.py.*Call the scheduler after the step",
    SetsRate: r"changes `param_groups\[0\]\[.lr.\]` of.*_changes\.py:\d+ .*before you call the",
    Prints: r"use of `print`.*test_step_changes\.py.*after the call of the step",
    Scaled: r"use of `GradScaler\.scale`.*Pass the scaler: `GraphedStep\(",
    HiddenOptimizer: r"calls `SGD\.step\(\)` of an optimizer that it was not given",
    HiddenModule: r"the gradient of a tensor of shape \(6, 6\) that belongs to none of the modules",
}


@pytest.mark.spread
@pytest.mark.parametrize("loop", REFUSED, ids=lambda loop: loop.__name__)
def test_refused(accelerator: str, loop: type[Loop]) -> None:
    one = loop(device_of(accelerator))
    with pytest.raises(UnsupportedError, match=f"(?s){REFUSED[loop]}") as error:
        run(one, graphed=True)
    for word in ("CUDAGraphCallback", "on_train_batch", "training_step"):
        assert word not in str(error.value)
    # The optimizer is as it was made, and nothing stays replaced.
    assert "lightning_cudagraph" not in str(vars(one.optimizer).get("step"))
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


@pytest.mark.spread(2)
@pytest.mark.parametrize("loop", REFUSED, ids=lambda loop: loop.__name__)
def test_refused_and_eager(accelerator: str, loop: type[Loop]) -> None:
    """With `on_unsupported="eager"` all comes out as without a graph."""

    class Eager(loop):  # type: ignore[misc,valid-type]
        kwargs = {"on_unsupported": "eager"}  # noqa: RUF012

    step = assert_equal_runs(lambda: Eager(device_of(accelerator)), 0)
    assert sum(step.summary.calls.eager.values()) == 9


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


class Shows(Loop):
    """Reads its loss in calls with another argument."""

    steps = 16

    def step(self, x: Tensor, y: Tensor, shows: bool) -> Any:
        loss = super().step(x, y)
        return loss.item() if shows else loss

    def call(self, step: Any, index: int, x: Tensor, y: Tensor) -> Any:
        return step(x, y, index % 3 == 0)


def test_calls_of_another_kind_without_a_graph(
    accelerator: str, caplog: pytest.LogCaptureFixture
) -> None:
    step = assert_equal_runs(lambda: Shows(device_of(accelerator)), 7)
    assert (step.summary.calls.warmed_up, sum(step.summary.calls.eager.values())) == (6, 3)
    (line,) = caplog.messages
    assert "run eagerly" in line
    assert "`.item()`" in line


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


@pytest.mark.usefixtures("only_numbers_are_checked")
def test_verification_catches_what_no_audit_sees(accelerator: str) -> None:
    with pytest.raises(VerificationError, match=r"(?s)other numbers.*: first in the output, expected"):
        run(Planted(device_of(accelerator)), graphed=True)


def test_verification_can_be_repeated(accelerator: str) -> None:
    class Often(Loop):
        kwargs = {"verify": Verification(every_n_steps=3, replays=1)}  # noqa: RUF012

    step = assert_equal_runs(lambda: Often(device_of(accelerator)), 9)
    assert "4 replay(s) verified" in str(step.summary)


def _in_a_group(optimizer: Any) -> int:
    group = optimizer.param_groups[0]
    group["calls"] = group.get("calls", 0) + 1
    return int(group["calls"])


def _in_a_list(optimizer: Any) -> int:
    calls = optimizer.param_groups[0].setdefault("calls", [0])
    calls[0] += 1
    return int(calls[0])


def _in_an_attribute(optimizer: Any) -> int:
    optimizer.calls = getattr(optimizer, "calls", 0) + 1
    return int(optimizer.calls)


@pytest.mark.parametrize("count", [_in_a_group, _in_a_list, _in_an_attribute])
def test_a_step_that_counts_its_calls_with_an_optimizer(
    accelerator: str, count: Callable[[Any], int]
) -> None:
    """Every seventh loss is another: no check of the first replays would see it."""
    device = device_of(accelerator)

    def run(graphed: bool, **kwargs: Any) -> tuple[list[Tensor], GraphedStep[..., Any]]:
        torch.manual_seed(1)
        model = nn.Linear(6, 2).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            if count(optimizer) % 7 == 0:
                loss = loss * 3
            loss.backward()
            optimizer.step()
            return loss

        graph = GraphedStep(step, model, optimizer, **kwargs)
        batches = torch.randn(14, 8, 6, generator=torch.Generator().manual_seed(2)).to(device)
        with graph:
            return [(graph if graphed else step)(x).detach().clone() for x in batches], graph

    (plain, _), (graphed, graph) = run(False), run(True, on_unsupported="eager")
    assert not differences(plain, graphed)
    assert not graph.summary.calls.replayed
    assert "sets or changes" in str(graph.summary)
    with pytest.raises(CaptureError, match=r"(?s)sets or changes .* of the optimizer `SGD`.*\.py:\d+"):
        run(True)
