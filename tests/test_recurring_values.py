"""Steps that branch on an attribute that hooks change: a graph for each value that recurs.

`tests/gpu/test_recurring_values.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader

from lightning_cudagraph import CaptureError, CUDAGraphCallback, GraphedStep, HookError
from lightning_cudagraph.checks.guards.recurring import RecurringValues
from tests.harness import Net, Trace, assert_same, differences, loader, make, train
from tests.loops import Loop, device_of, run

BATCHES = 24


class Mode(Enum):
    PLAIN = "plain"
    PENALTY = "penalty"


@dataclass
class Loss:
    phase: Any = None


@dataclass
class Config:
    loss: Loss = field(default_factory=Loss)
    table: dict[str, Any] = field(default_factory=dict)


class InPhases(Net):
    """Branches on its phase, which a hook sets before each step."""

    def __init__(self, phases: Sequence[Any], phase_of: Callable[[int], int]) -> None:
        super().__init__(lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.3))
        self.phases, self.phase_of = phases, phase_of
        self.extra = nn.Linear(12, 4)
        self.config = Config()
        self.factor = 1.0
        self.steps = 0
        self.set_phase(phases[0])

    def set_phase(self, phase: Any) -> None:
        self.phase = phase

    def get_phase(self) -> Any:
        return self.phase

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.set_phase(self.phases[self.phase_of(self.steps) % len(self.phases)])
        self.steps += 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"] * self.factor
        phase = self.get_phase()
        if phase == self.phases[0]:
            return loss
        penalty = self.extra.weight.square().mean()
        self.log("penalty", penalty, on_step=True, on_epoch=True)
        loss = loss + penalty if phase == self.phases[1] else penalty - loss
        return {"loss": loss, "penalty": penalty}


class Nested(InPhases):
    def set_phase(self, phase: Any) -> None:
        self.config.loss.phase = phase

    def get_phase(self) -> Any:
        return self.config.loss.phase


class InATable(InPhases):
    def set_phase(self, phase: Any) -> None:
        self.config.table["phase"] = phase

    def get_phase(self) -> Any:
        return self.config.table["phase"]


class WithSlots(InPhases):
    class Slots:
        __slots__ = ("phase",)

    def set_phase(self, phase: Any) -> None:
        if not hasattr(self, "slots"):
            self.slots = self.Slots()
        self.slots.phase = phase

    def get_phase(self) -> Any:
        return self.slots.phase


class NewConfig(InPhases):
    """Replaces its config in the middle, while the old one goes on to change."""

    def __init__(self, *args: Any) -> None:
        self.old = Loss()
        super().__init__(*args)

    def set_phase(self, phase: Any) -> None:
        first, second, *_ = self.phases
        if self.steps == 40:
            self.config = Config(loss=Loss())
        elif self.steps == 0:
            self.old = self.config.loss
        self.old.phase = first if phase == second else second
        self.config.loss.phase = phase

    def get_phase(self) -> Any:
        return self.config.loss.phase


class ChangesMore(InPhases):
    """Another attribute changes for good together with the phase."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self.steps == 41:
            self.factor = 0.25


class TwoAtOnce(InPhases):
    """Two attributes that recur change in the same step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.factor = 1.0 if self.phase == self.phases[0] else 0.5


class NoValueAtTimes(InPhases):
    """Becomes a list for two steps, which is no value that can be compared."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if 40 <= self.steps < 42:
            self.phase = [self.phase]


@contextmanager
def never_recurring() -> Iterator[None]:
    with mock.patch.object(RecurringValues, "add", return_value=None):
        yield


def both(tmp_path: Path, accelerator: str, make_net: Any, **kwargs: Any) -> Trace:
    """Train without and with the callback, and return the second run, which must equal the first."""
    kwargs = {"accelerator": accelerator, "max_epochs": 4, **kwargs}
    kwargs.setdefault("train_loader", loader(batches=BATCHES, ragged=False))
    plain, graph = (
        train(make(make_net), tmp_path / name, callback, **kwargs)
        for name, callback in (("plain", None), ("graph", kwargs.pop("ours", CUDAGraphCallback())))
    )
    assert_same(plain, graph)
    return graph


def each_step(step: int) -> int:
    return step


def each_fourth(step: int) -> int:
    return step // 4


def irregularly(step: int) -> int:
    return (step * step // 3) % 7


def each_epoch(step: int) -> int:
    return step // BATCHES


STRINGS = ("first", "second")


ROWS = (
    (InPhases, STRINGS, each_step),
    (InPhases, STRINGS, each_fourth),
    (InPhases, ("first", "second", "third"), irregularly),
    (InPhases, (False, True), each_step),
    (InPhases, (None, "set"), each_fourth),
    (InPhases, (0.5, 1, None), each_step),
    (InPhases, (Mode.PLAIN, Mode.PENALTY), each_step),
    (Nested, STRINGS, each_step),
    (InATable, STRINGS, each_fourth),
    (WithSlots, STRINGS, each_step),
    (TwoAtOnce, STRINGS, each_step),
)


# Each row trains three times; the default run has one, of manual optimization.
long = pytest.mark.long


@long
@pytest.mark.parametrize(
    ("net", "phases", "phase_of"), ROWS, ids=lambda case: getattr(case, "__name__", "")
)
def test_values_that_recur(
    tmp_path: Path, accelerator: str, net: Any, phases: Any, phase_of: Any
) -> None:
    run = both(tmp_path, accelerator, lambda: net(phases, phase_of))
    counts = run.counts
    assert len(counts.recaptures) < 3
    assert counts.replayed > 2 * BATCHES
    with never_recurring():
        without = both(tmp_path / "without", accelerator, lambda: net(phases, phase_of)).counts
    assert without.replayed < counts.replayed / 2


@long
def test_a_value_that_returns_after_an_epoch(tmp_path: Path, accelerator: str) -> None:
    def net() -> InPhases:
        return InPhases(STRINGS, each_epoch)

    run = both(tmp_path, accelerator, net, max_epochs=6)
    assert len(run.counts.recaptures) == 1
    # Of the first value, the graph of the first epoch is stale; from the third epoch on there are two.
    assert run.counts.captures == 3
    with never_recurring():
        without = both(tmp_path / "without", accelerator, net, max_epochs=6).counts
    assert len(without.recaptures) == 5


@long
def test_values_that_never_recur(tmp_path: Path, accelerator: str) -> None:
    phases = tuple(range(4 * BATCHES))
    run = both(tmp_path, accelerator, lambda: InPhases(phases, each_step))
    assert len(run.counts.recaptures) == 8
    assert any("given up after 8 captures" in reason for reason in run.counts.eager)
    (remedy,) = {change.remedy for change in run.counts.recaptures}
    assert "compare `self.global_step`" in remedy


@long
@pytest.mark.parametrize("net", [ChangesMore, NewConfig, NoValueAtTimes])
def test_another_change(tmp_path: Path, accelerator: str, net: Any) -> None:
    """It makes all graphs stale; then the values that recur have new ones."""
    run = both(tmp_path, accelerator, lambda: net(STRINGS, each_step))
    assert 1 < len(run.counts.recaptures) < 4
    assert run.counts.replayed > BATCHES


@long
def test_more_values_than_graphs(tmp_path: Path, accelerator: str) -> None:
    def net() -> InPhases:
        return InPhases(("a", "b", "c"), lambda step: step // 12)

    run = both(tmp_path, accelerator, net, max_epochs=6, ours=CUDAGraphCallback(max_graphs=2))
    assert run.counts.evictions
    assert len(run.counts.recaptures) == 2


@long
def test_verification(tmp_path: Path, accelerator: str) -> None:
    """Each graph is checked as that of another signature is."""
    run = both(tmp_path, accelerator, lambda: InPhases(STRINGS, each_step))
    assert run.summary.fit.checked >= run.counts.captures == 3


@long
def test_accumulation(tmp_path: Path, accelerator: str) -> None:
    run = both(
        tmp_path,
        accelerator,
        lambda: InPhases(STRINGS, lambda step: step // 3),
        accumulate_grad_batches=2,
    )
    assert run.counts.replayed > BATCHES


class TurnsInTheMiddle(Callback):
    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if trainer.global_step == 60:
            pl_module.phase = "second" if pl_module.phase == "first" else "first"


@pytest.mark.long
def test_a_change_in_the_middle_of_a_step(tmp_path: Path, accelerator: str) -> None:
    """The rest of the graph is for the value that the step began with."""
    module = make(lambda: InPhases(STRINGS, each_step))
    with pytest.raises(HookError, match=r"`InPhases\.phase` changed; the rest of the graph holds"):
        train(
            module,
            tmp_path,
            CUDAGraphCallback(),
            accelerator=accelerator,
            callbacks=(TurnsInTheMiddle(),),
            train_loader=loader(batches=BATCHES, ragged=False),
            max_epochs=4,
        )
    assert module.trainer.global_step == 60


class Named(InPhases):
    """Returns the name of its batch, which is in the static inputs of the phase before."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        *tensors, name = batch
        outputs = super().training_step(tensors, batch_idx)
        return {**(outputs if isinstance(outputs, dict) else {"loss": outputs}), "name": name}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["name"] == batch[-1] == f"file {batch_idx}"


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`:UserWarning")
@long
def test_names_in_batches(tmp_path: Path, accelerator: str) -> None:
    data: Any = [(*each, f"file {i}") for i, each in enumerate(loader(batches=BATCHES, ragged=False))]
    run = both(
        tmp_path,
        accelerator,
        lambda: Named(STRINGS, each_step),
        train_loader=DataLoader(data, batch_size=None),
    )
    assert run.counts.replayed > 2 * BATCHES


@pytest.mark.long
def test_the_report_names_the_value(tmp_path: Path, accelerator: str) -> None:
    run = both(tmp_path, accelerator, lambda: InPhases(STRINGS, each_step))
    (reason,) = run.counts.eager
    assert reason.startswith("another path: `InPhases.phase`, which the step reads at ")
    assert "expected 'second', found 'first'" in reason or "expected 'first'" in reason


class ByHand(InPhases):
    """Steps by hand; the phase says which parameters have gradients."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        outputs = super().training_step(batch, batch_idx)
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return outputs


class InTurns(InPhases):
    """Trains one of two layers with an optimizer of its own, as the phase says."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizers: Any = self.optimizers()
        is_first = self.phase == self.phases[0]
        optimizer = optimizers[0 if is_first else 1]
        self.toggle_optimizer(optimizer)
        x, y = batch
        loss = nn.functional.cross_entropy(self(x) + self.extra(x), y)
        self.log("loss of one" if is_first else "loss of another", loss)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        halves = [*self.features.parameters(), *self.head.parameters()], self.extra.parameters()
        return [torch.optim.Adam(parameters, lr=1e-2) for parameters in halves]


class ByHandAndMore(ByHand, ChangesMore):
    pass


class ByHandNewConfig(ByHand, NewConfig):
    pass


class ByHandNoValue(ByHand, NoValueAtTimes):
    pass


class ByHandTwoAtOnce(ByHand, TwoAtOnce):
    pass


class ByHandOnPaths(ByHand):
    """Reads the number of the batch too, so that each value has two paths."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return super().training_step((x * 2 if batch_idx % 2 else x, y), batch_idx)


BY_HAND = (
    (ByHand, STRINGS, each_step),
    (InTurns, STRINGS, each_fourth),
    (InTurns, STRINGS, each_step),
    (ByHand, ("first", "second", "third"), irregularly),
    (ByHand, (0.5, 1, None), each_step),
    (ByHandTwoAtOnce, (Mode.PLAIN, Mode.PENALTY), each_step),
    (ByHandOnPaths, STRINGS, each_fourth),
    (ByHandAndMore, STRINGS, each_step),
    (ByHandNewConfig, STRINGS, each_step),
    (ByHandNoValue, STRINGS, each_step),
)


by_hand = pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")


@by_hand
@pytest.mark.parametrize(
    ("net", "phases", "phase_of"),
    [BY_HAND[0], *(pytest.param(*row, marks=long) for row in BY_HAND[1:])],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_manual_optimization(
    tmp_path: Path, accelerator: str, net: Any, phases: Any, phase_of: Any
) -> None:
    counts = both(tmp_path, accelerator, lambda: net(phases, phase_of)).counts
    assert len(counts.recaptures) < 4
    assert counts.replayed > 2.8 * BATCHES


@long
@by_hand
def test_manual_optimization_without_values_that_recur(tmp_path: Path, accelerator: str) -> None:
    with never_recurring():
        run = both(tmp_path, accelerator, lambda: ByHand(STRINGS, each_step))
    assert run.counts.replayed < BATCHES


KIND = "first"


class PlainPhases(Loop):
    """A loop of its own, with a step that branches on what the loop changes."""

    steps = 48
    period = 1

    def build(self) -> None:
        super().build()
        self.extra = nn.Linear(6, 4).to(self.device)
        self.optimizer = torch.optim.AdamW([*self.net.parameters(), *self.extra.parameters()])
        self.options: dict[str, Any] = {}
        self.set_kind("first")

    def set_kind(self, kind: str) -> None:
        self.options["kind"] = kind

    def get_kind(self) -> str:
        return self.options["kind"]

    def modules(self) -> Any:
        return [self.net, self.extra]

    def around(self, index: int) -> None:
        self.set_kind("first" if (index + 1) // self.period % 2 == 0 else "second")

    def step(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        self.optimizer.zero_grad()
        is_first = self.get_kind() == "first"
        loss = nn.functional.cross_entropy(self.net(x) if is_first else self.extra(x), y)
        loss.backward()
        self.optimizer.step()
        return loss


class OfTheLoop(PlainPhases):
    def set_kind(self, kind: str) -> None:
        self.kind = kind

    def get_kind(self) -> str:
        return self.kind


class AGlobal(PlainPhases):
    period = 4

    def set_kind(self, kind: str) -> None:
        global KIND
        KIND = kind

    def get_kind(self) -> str:
        return KIND


class TwoShapes(PlainPhases):
    """The kind changes less often than the shape: graphs of another kind are not kept for a value."""

    sizes = (8, 5)
    period = 7
    steps = 96


class AnArgument(PlainPhases):
    """An argument that is no tensor counts as well."""

    def call(self, step: Any, index: int, x: torch.Tensor, y: torch.Tensor) -> Any:
        return step(x, y, 0.5 if index % 4 < 2 else "no")

    def step(self, x: torch.Tensor, y: torch.Tensor, scale: Any = None) -> Any:  # type: ignore[override]
        return super().step(x if scale == "no" else x * scale, y)


@long
@pytest.mark.parametrize("build", [PlainPhases, OfTheLoop, AGlobal, TwoShapes, AnArgument])
def test_graphed_steps(accelerator: str, build: Any) -> None:
    def make() -> Any:
        return build(device_of(accelerator))

    plain, _ = run(make(), graphed=False)
    graphed, step = run(make(), graphed=True)
    assert not differences(plain, graphed)
    calls = step.summary.calls
    assert len(calls.recaptures) < 4
    assert calls.replayed > build.steps // 2
    with never_recurring():
        _, without = run(make(), graphed=True)
    assert without.summary.calls.replayed < calls.replayed / 2


def test_a_number_that_a_closure_reads(accelerator: str) -> None:
    phase = 1.0
    x = torch.ones(3, device=device_of(accelerator))
    with GraphedStep(lambda x: x * 2 if phase == 1.0 else x * 3) as step:
        for index in range(40):
            phase = (1.0, 2.0)[index // 4 % 2]
            assert torch.equal(step(x), x * (2, 3)[index // 4 % 2])
    calls = step.summary.calls
    assert (len(calls.recaptures), calls.captures) == (1, 3)
    (reason,) = calls.eager
    assert reason.startswith("another path: `phase`, which the step reads at ")
    assert reason.endswith("expected 2.0, found 1.0")


class Summing:
    """Trains two layers, and drops the gradients of those that it is told to drop."""

    def __init__(self, accelerator: str) -> None:
        torch.manual_seed(1)
        self.nets = nn.ModuleList([nn.Linear(6, 4), nn.Linear(6, 4)]).to(device_of(accelerator))
        self.optimizer = torch.optim.SGD(self.nets.parameters(), lr=0.1)
        self.drops_first = self.drops_second = True
        self.then: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.drops_first:
            self.nets[0].zero_grad()
        if self.drops_second:
            self.nets[1].zero_grad()
        return self.train(x)

    def train(self, x: torch.Tensor) -> torch.Tensor:
        loss = sum(net(x).square().mean() for net in self.nets)
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        self.optimizer.step()
        return self.then(loss)

    def graphed(self, **options: Any) -> Any:
        return GraphedStep(self, modules=self.nets, optimizers=self.optimizer, **options)


@pytest.mark.spread
@pytest.mark.parametrize("others", [frozenset(range(3)), frozenset(range(0, 48, 5))])
@pytest.mark.parametrize("options", [{"verify": None}, {"on_unsupported": "eager"}, {}])
def test_a_warm_up_that_drops_what_the_capture_adds_to(
    accelerator: str, options: dict[str, Any], others: frozenset[int]
) -> None:
    """Gradients are dropped in the steps of the warm-up alone, or in some of the later ones."""

    def losses(is_graphed: bool) -> list[torch.Tensor]:
        train = Summing(accelerator)
        found: list[torch.Tensor] = []
        with train.graphed(**options) as graphed:
            for index in range(48):
                train.drops_first = train.drops_second = index < 3 or index in others
                x = torch.randn(8, 6, device=device_of(accelerator))
                found.append((graphed if is_graphed else train)(x))
            assert not is_graphed or graphed.summary.calls.replayed > 24
        return found

    assert not differences(losses(is_graphed=False), losses(is_graphed=True))


class SummingBehindNames(Summing):
    """Decides by attributes whose names are put together at run time, which guards do not compare."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for net, name in zip(self.nets, ("first", "second"), strict=True):
            if getattr(self, f"drops_{name}"):
                net.zero_grad()
        return self.train(x)


@pytest.mark.long
def test_warm_ups_that_never_agree_with_the_capture(accelerator: str) -> None:
    """Each capture adds to a gradient that the steps of its own warm-up have dropped."""
    train = SummingBehindNames(accelerator)
    x = torch.randn(8, 6, device=device_of(accelerator))
    with train.graphed(on_unsupported="eager") as step:
        for index in range(60):
            train.drops_first = index % 6 != 3
            train.drops_second = index % 6 != 0 or index == 0
            step(x)
        calls = step.summary.calls
    assert calls.captures == 1  # before the first of them
    assert any("on another path than these, again and again" in reason for reason in calls.eager)


def test_gradients_that_user_code_holds_while_a_warm_up_begins_again(accelerator: str) -> None:
    """They are those of the parameters still, and are added to."""

    def sums(is_graphed: bool) -> list[torch.Tensor]:
        train = Summing(accelerator)
        train.optimizer = torch.optim.SGD(train.nets[1].parameters(), lr=0.1)
        train.drops_first = False
        first = [*train.nets[0].parameters()]
        kept: list[Any] = []
        with train.graphed(verify=None) as graphed:
            for index in range(14):
                train.drops_second = index < 10
                x = torch.randn(8, 6, device=device_of(accelerator))
                (graphed if is_graphed else train)(x)
                if index == 6:
                    kept = [parameter.grad for parameter in first]
            assert all(p.grad is gradient for p, gradient in zip(first, kept, strict=True))
        return [gradient.clone() for gradient in kept]

    assert not differences(sums(is_graphed=False), sums(is_graphed=True))


@pytest.mark.parametrize("reads", [False, True])
def test_an_error_after_a_warm_up_that_begins_again(accelerator: str, reads: bool) -> None:
    """The user's own error stands alone, and so does the finding of a step that is refused."""
    train = Summing(accelerator)
    x = torch.randn(8, 6, device=device_of(accelerator))

    def then(loss: torch.Tensor) -> torch.Tensor:
        if not (train.drops_first or reads):
            raise ValueError("of the user")
        return loss * 2 if reads and loss.item() > 0 else loss

    def calls(number: int) -> None:
        for _ in range(number):
            step(x)

    train.then = then
    with train.graphed() as step:
        calls(3)
        train.drops_first = train.drops_second = False
        with pytest.raises((ValueError, CaptureError)) as caught:
            calls(6)
    assert caught.value.__context__ is None
    assert "MixedWarmUp" not in str(caught.value)
    assert isinstance(caught.value, CaptureError if reads else ValueError)
