"""Captured modules in eager steps (`scope="modules"`): the same run as without them, bit for bit.

`tests/gpu/test_captured_modules.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from torchmetrics import MeanMetric

from lightning_cudagraph import ConfigurationError, CUDAGraphCallback, UnsupportedError
from lightning_cudagraph.checks.guards.guards import Guards
from lightning_cudagraph.device.sentry.sentry import is_capturing
from lightning_cudagraph.trainer.captured_modules.graph import ModuleGraph
from tests.harness import Net, Trace, assert_same, loader, make, train

FULL, STEPS = 21, 24  # those of the default loader in three epochs; ragged batches come three times
WARMUP = 3


def runs(
    tmp_path: Path,
    build: Any,
    modules: list[str],
    accelerator: str = "cpu",
    *,
    on_unsupported: Any = "raise",
    max_graphs: int = 8,
    evaluation: bool = False,
    **kwargs: Any,
) -> Trace:
    """Train without and with the callback; both must be the same. Return the second run."""
    callback = CUDAGraphCallback(
        scope="modules",
        modules=modules,
        on_unsupported=on_unsupported,
        max_graphs=max_graphs,
        evaluation=evaluation,
    )
    kwargs["accelerator"] = accelerator
    plain = train(make(build), tmp_path / "plain", **kwargs)
    graph = train(make(build), tmp_path / "graph", callback, **kwargs)
    assert_same(plain, graph)
    return graph


def note(run: Trace, name: str) -> str:
    """The note on a module in the report."""
    return next(line for line in run.summary.notes if f"`{name}`: " in line).partition(f"`{name}`: ")[2]


class Dynamic(Net):
    """A step that no graph can hold: it reads a number of each batch on the host."""

    def logits(self, x: Tensor, batch_idx: int) -> Any:
        hidden = self.features(x)
        if hidden.sum() > 0:
            hidden = hidden * 2
        return self.head(hidden)

    def loss(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.logits(x, batch_idx), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(*batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss


@pytest.mark.spread
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
        {"precision": "bf16-mixed"},
        pytest.param({"precision": "bf16-true"}, marks=pytest.mark.long),
        pytest.param({"precision": "64-true"}, marks=pytest.mark.long),
    ],
    ids=["plain", "accumulation", "bf16", "bf16-true", "64-true"],
)
def test_a_step_with_a_branch_on_the_host(
    tmp_path: Path, accelerator: str, kwargs: dict[str, Any]
) -> None:
    run = runs(tmp_path, Dynamic, ["features", "head"], accelerator, **kwargs)
    assert run.counts.replayed == FULL - WARMUP
    assert run.counts.warmed_up == STEPS - run.counts.replayed
    assert run.counts.captures == 2
    assert run.counts.checked >= 4
    for name in ("features", "head"):
        assert note(run, name) == "1 captures; calls: 18 replays; 6 in warm-up"


@pytest.mark.long
def test_fp16_with_a_scaler(tmp_path: Path, accelerator: str) -> None:
    device = "cuda" if accelerator == "gpu" else "cpu"
    traces = []
    for callback in (None, CUDAGraphCallback(scope="modules", modules=["features", "head"])):
        plugins = [MixedPrecision("16-mixed", device, torch.amp.GradScaler(device, init_scale=2.0**20))]
        folder = tmp_path / str(len(traces))
        traces.append(train(make(Dynamic), folder, callback, accelerator=accelerator, plugins=plugins))
    assert_same(*traces)
    assert traces[1].counts.replayed == FULL - WARMUP


@dataclass
class Out:
    main: Tensor
    others: dict[str, Any]


class Nested(nn.Module):
    """Takes keywords and a dictionary, and returns all kinds of containers, with unused parts."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.unused = nn.Linear(12, 24), nn.Linear(12, 24), nn.Linear(12, 3)

    def forward(self, given: dict[str, Tensor], *, scale: float, mask: Tensor | None = None) -> Out:
        one = self.one(given["x"]) * scale
        two = self.two(given["x"])
        if mask is not None:
            one = one.masked_fill(mask, 0.0)
        rest = (self.unused(given["x"]), two.argmax(dim=-1), "name", 3)
        return Out(one, {"two": two, "rest": rest, "again": two})


class NestedNet(Dynamic):
    def __init__(self) -> None:
        super().__init__()
        self.nested = Nested()

    def logits(self, x: Tensor, batch_idx: int) -> Tensor:
        out = self.nested({"x": x}, scale=0.5, mask=torch.rand(len(x), 24, device=x.device) < 0.1)
        assert out.others["again"] is out.others["two"]
        assert out.others["rest"][2:] == ("name", 3)
        assert not out.others["rest"][1].requires_grad
        return self.head(out.main + out.others["two"] * (out.others["rest"][1].max() > 3))


def test_keywords_nested_and_unused_outputs(tmp_path: Path, accelerator: str) -> None:
    run = runs(tmp_path, NestedNet, ["nested"], accelerator)
    assert run.counts.replayed == FULL - WARMUP
    assert run.module is not None
    assert run.module.nested.unused.weight.grad is None  # as without a graph: not zeros


class Heads(nn.Module):
    """Several results, one of them of attention with dropout, and layers that some do not need."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(12, 24), nn.LayerNorm(24), nn.Tanh())
        self.own = nn.Linear(12, 24)
        self.one, self.two = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        trunk = self.trunk(x)
        q = trunk.view(1, 2, -1, 12)
        seen = nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.2).reshape(-1, 24)
        return self.one(trunk), self.two(self.one(seen)), self.own(other), other.clone(), trunk.sin()


class Given(torch.autograd.Function):
    """Has a gradient for its weight also where none comes to its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.sum(0)


class InTurn(Dynamic):
    """Each step takes other results; of the others no weight gets a gradient, and no hook runs.

    Hooks draw random numbers: their order counts.
    """

    def __init__(self) -> None:
        super().__init__(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1))
        self.heads, self.weight = Heads(), nn.Parameter(torch.ones(12))

    def on_train_start(self) -> None:
        for index, parameter in enumerate(self.heads.parameters()):
            if index % 2:
                parameter.register_hook(lambda gradient: gradient + torch.randn_like(gradient) * 0.01)
            else:
                parameter.register_post_accumulate_grad_hook(self.add_noise)

    def add_noise(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad += torch.randn_like(parameter) * 0.01

    def logits(self, x: Tensor, batch_idx: int) -> Tensor:
        one, two, own, clone, trunk = self.heads(x, Given.apply(x, self.weight))
        if batch_idx % 4 == 3:
            trunk.sum().backward(retain_graph=True)  # an expanded gradient
        return self.head((one, one + two, two + own, two * clone.mean())[batch_idx % 4])


def test_outputs_that_are_taken_in_turn(tmp_path: Path, accelerator: str) -> None:
    run = runs(tmp_path, InTurn, ["heads"], accelerator)
    assert note(run, "heads") == "1 captures; calls: 18 replays; 6 in warm-up"


class TwoLosses(Dynamic):
    """Two backward passes, through parts of the module that have nothing in common."""

    def logits(self, x: Tensor, batch_idx: int) -> Tensor:
        one, _, own, *_ = self.heads(x, x)
        own.square().mean().backward()
        return self.head(one)

    def __init__(self) -> None:
        super().__init__()
        self.heads = Heads()


@pytest.mark.long
def test_two_losses_with_backward_passes_of_their_own(tmp_path: Path, accelerator: str) -> None:
    assert runs(tmp_path, TwoLosses, ["heads"], accelerator).counts.replayed == FULL - WARMUP


class Strided(Dynamic):
    """Each step has a gradient with other strides."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.features(batch[0])
        wide = torch.ones(len(hidden), 24 + self.global_step, device=self.device)
        hidden.backward(wide[:, :24])
        return super().training_step(batch, batch_idx)


@pytest.mark.long
def test_gradients_in_too_many_forms(tmp_path: Path, accelerator: str) -> None:
    run = runs(tmp_path, Strided, ["features"], accelerator)
    assert "with other strides, again and again" in note(run, "features")


class Cell(nn.Module):
    """Uses a weight twice and an argument three times, draws random numbers, and counts in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(24, 24)
        self.norm = nn.BatchNorm1d(24)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        once = torch.tanh(self.weight(h) + x)
        again = self.weight(nn.functional.dropout(once, 0.2, self.training))
        return self.norm(h + again * h) + x


class Loops(Dynamic):
    """Calls a module again and again on its own results, as often as a batch says."""

    calls = 1

    def __init__(self) -> None:
        super().__init__()
        self.cell = Cell()
        self.into = nn.Linear(12, 24)

    def logits(self, x: Tensor, batch_idx: int) -> Tensor:
        x = self.into(x)
        h = torch.zeros_like(x)
        for _ in range(1 + (batch_idx + int(x.sum() > 0)) % 4):
            h = self.cell(h, x) + x + h  # `h` and `x` get gradients from here too
        return self.head(h + nn.functional.linear(h, self.cell.weight.weight))


@pytest.mark.long
def test_a_module_that_is_called_many_times(tmp_path: Path, accelerator: str) -> None:
    run = runs(tmp_path, Loops, ["cell"], accelerator, accumulate_grad_batches=2)
    assert run.counts.replayed >= FULL - 2 * WARMUP
    assert run.counts.captures == 3


def test_no_more_graphs_than_allowed(tmp_path: Path, accelerator: str) -> None:
    run = runs(tmp_path, Loops, ["cell"], accelerator, max_graphs=2)
    assert run.counts.captures == 2
    assert "eager: its 2 graphs were all in use" in note(run, "cell")


class Teacher(Dynamic):
    """A teacher without gradients, in evaluation mode, and a frozen layer in the student."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Dropout(0.5))
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.features[0].weight.requires_grad_(False)

    def logits(self, x: Tensor, batch_idx: int) -> Tensor:
        self.teacher.eval()
        with torch.no_grad():
            target = self.teacher(x)
        x = self.frozen(x)
        assert not target.requires_grad
        assert not x.requires_grad
        assert not self.features.training or self.training
        hidden = self.features(x)
        with torch.no_grad():  # another mode of the same module
            same = self.features(x)
        return self.head(hidden + target * bool(same.sum() > 0))


def test_no_grad_eval_mode_and_frozen_weights(tmp_path: Path, accelerator: str) -> None:
    run = runs(tmp_path, Teacher, ["teacher", "frozen", "features"], accelerator)
    assert run.counts.replayed == FULL - WARMUP
    assert run.counts.captures == 4


class Inputs(Dynamic):
    """Arguments that require gradients, as leaves and as results, and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.ones(12))

    def logits(self, x: Tensor, batch_idx: int) -> Tensor:
        leaf = x.clone().requires_grad_()
        hidden = self.features(x) + self.features(leaf) + self.features(x * self.token)
        if hidden.sum() > 0:
            hidden = hidden * 2
        logits = self.head(hidden)
        (gradient,) = torch.autograd.grad(logits.sum(), leaf, retain_graph=True)
        return logits + gradient.abs().sum()


def test_inputs_with_and_without_gradients_and_a_graph_that_is_retained(
    tmp_path: Path, accelerator: str
) -> None:
    run = runs(tmp_path, Inputs, ["features", "head"], accelerator)
    assert run.counts.replayed == FULL - WARMUP


class Hooked(Dynamic):
    """Hooks on weights, outputs and the module, which count and change gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_train_start(self) -> None:
        self.features[0].weight.register_hook(self.halved)
        self.head.weight.register_post_accumulate_grad_hook(lambda p: self.seen.append(float(p.sum())))
        self.head.register_full_backward_hook(self.backward_hook)
        self.head.register_forward_hook(lambda module, args, out: out * 2)

    def halved(self, gradient: Tensor) -> Tensor:
        self.seen.append(float(gradient.sum()))
        return gradient / 2

    def backward_hook(self, module: Any, inputs: Any, outputs: Any) -> None:
        self.seen.append(float(inputs[0].sum()))

    def logits(self, x: Tensor, batch_idx: int) -> Tensor:
        hidden = self.features(x)
        hidden.register_hook(self.halved)
        return self.head(hidden)

    def on_train_end(self) -> None:
        self.register_buffer("all_seen", torch.tensor(self.seen))


def test_hooks_run_as_in_eager_steps(tmp_path: Path, accelerator: str) -> None:
    run = runs(tmp_path, Hooked, ["features", "head"], accelerator)
    assert run.counts.replayed == FULL - WARMUP
    assert run.module is not None
    assert len(run.module.all_seen) == 4 * STEPS


class Manual(Dynamic):
    """Two optimizers by hand; one backward pass through a graph twice, and toggled parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.features, self.head)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        one, two = self.optimizers()
        for optimizer in (one, two):
            self.toggle_optimizer(optimizer)
            loss = self.loss(*batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss, retain_graph=True)
            self.manual_backward(loss * 0.5)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.log("loss", loss)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")
def test_manual_optimization_with_toggled_weights(tmp_path: Path, accelerator: str) -> None:
    run = runs(tmp_path, Manual, ["features", "head"], accelerator)
    assert run.counts.replayed == FULL - WARMUP
    assert run.counts.captures == 4


class SecondBackward(Dynamic):
    """A second backward pass through a graph that torch has freed."""

    def logits(self, x: Tensor, batch_idx: int) -> Tensor:
        hidden = self.features(x)
        hidden.sum().backward()
        if batch_idx == 6:
            with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
                hidden.sum().backward()
        return self.head(hidden.detach())


def test_a_graph_that_is_freed_is_freed(tmp_path: Path, accelerator: str) -> None:
    assert runs(tmp_path, SecondBackward, ["features"], accelerator).counts.replayed == FULL - WARMUP


class WritesBetween(Dynamic):
    """A weight is written between forward and backward pass, which torch refuses."""

    def logits(self, x: Tensor, batch_idx: int) -> Tensor:
        logits = self.head(self.features(x))
        if self.global_step == 6:
            with torch.no_grad():
                self.features[0].weight.mul_(2)  # is not needed any more
                self.head.weight.mul_(2)
        return logits


def test_a_weight_that_is_written_before_the_backward_pass(tmp_path: Path, accelerator: str) -> None:
    callback = CUDAGraphCallback(scope="modules", modules=["features", "head"])
    said = "modified by an inplace operation", "A weight or buffer of a captured module"
    for each, text in zip((None, callback), said, strict=True):
        folder = tmp_path / str(each is None)
        run = train(make(WritesBetween), folder, each, accelerator=accelerator, raises=RuntimeError)
        assert text in str(run.error)


class Penalty(Dynamic):
    """A gradient penalty: gradients of gradients."""

    first = 0

    def logits(self, x: Tensor, batch_idx: int) -> Tensor:
        x = x.clone().requires_grad_()
        hidden = self.features(x)
        more = 0.0
        if self.global_step >= self.first:
            (gradient,) = torch.autograd.grad(hidden.sum(), x, create_graph=True)
            more = gradient.square().sum()
        return self.head(hidden) + more


class LatePenalty(Penalty):
    first = 10


def test_gradients_of_gradients_are_eager(tmp_path: Path, accelerator: str) -> None:
    run = runs(tmp_path, Penalty, ["features", "head"], accelerator, on_unsupported="eager")
    assert "Gradients of gradients are asked for" in note(run, "features")
    assert not run.counts.replayed
    assert "18 replays" in note(run, "head")


def test_gradients_of_gradients_that_come_later_are_refused(tmp_path: Path, accelerator: str) -> None:
    callback = CUDAGraphCallback(scope="modules", modules=["features"], on_unsupported="eager")
    run = train(make(LatePenalty), tmp_path, callback, accelerator=accelerator, raises=UnsupportedError)
    assert "Leave it out of `modules`" in str(run.error)


class Writes(Dynamic):
    """Modules that no graph can stand for."""

    def __init__(self) -> None:
        super().__init__()
        self.writes, self.returns, self.shares = WritesInput(), nn.Identity(), Shares()
        self.reads, self.counts, self.keeps = ReadsHost(), Counts(), Keeps()
        self.outside, self.logs, self.measures = UsesOutside(), Logs(), Measures()
        self.logs.owner = [self]
        self.hooks, self.retains, self.leaf, self.gives = Hooks(), Retains(), MakesLeaf(), Gives()

    def logits(self, x: Tensor, batch_idx: int) -> Tensor:
        self.outside.scale = self.head.bias.sum()
        h = self.writes(self.returns(x).clone())
        one, two = self.shares(h)
        h = self.counts(self.reads(self.logs(one + two))) + self.measures(x)
        h = self.features(h) * self.gives() + self.leaf(x[:, :1])
        kept = self.keeps(h)
        logits = self.head(self.outside(self.retains(self.hooks(kept))))
        kept.register_hook(lambda gradient: gradient * (1.0 if self.hooks.training else 2.0))
        return logits


class WritesInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2).sin()


class Shares(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.cos()
        return x, x[:, :1]


class ReadsHost(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(x.sum())


class Counts(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


class Hooks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.register_hook(lambda gradient: -gradient)
        return x * 2


class Retains(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.retain_grad()
        return x * 2


class Gives(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(24))

    def forward(self) -> Tensor:
        return self.weight


class MakesLeaf(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 2).detach().requires_grad_()


class Logs(nn.Module):
    owner: list[pl.LightningModule]

    def forward(self, x: Tensor) -> Tensor:
        self.owner[0].log("inside", x.mean())
        return x * 2


class Measures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanMetric(nan_strategy="disable")

    def forward(self, x: Tensor) -> Tensor:
        return x * self.metric(x.detach())


class Keeps(nn.Module):
    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        before, self.last = self.last, x.detach()
        return x if before is None or before.shape != x.shape else x + before


class UsesOutside(nn.Module):
    scale: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


REFUSED = {
    "writes": "in place",
    "returns": "The module returns an argument",
    "shares": "two tensors that share memory",
    "reads": "`x.sum()`|`item\\(\\)`|float",
    "counts": "`calls`",
    "keeps": "`last`",
    "logs": "`self.log`",
    "hooks": "registers a hook with an argument",
    "retains": "`retain_grad\\(\\)`",
    "leaf": "a leaf that requires a gradient",
    "gives": "The module returns a parameter",
    "measures": "of `metric`|of the `MeanMetric`",
    "outside": "requires a gradient, and is neither|scale",
}


@pytest.mark.long
def test_what_no_graph_can_hold_is_eager(tmp_path: Path, accelerator: str) -> None:
    run = runs(tmp_path, Writes, [*REFUSED, "features"], accelerator, on_unsupported="eager")
    for name, reason in REFUSED.items():
        said = note(run, name)
        assert "0 replays" in said, said
        assert re.search(reason, said), said
    assert "18 replays" in note(run, "features")
    assert run.module is not None
    assert not run.module.gives.weight._backward_hooks


@pytest.mark.spread
@pytest.mark.parametrize("name", ["counts", "keeps", "retains"])
def test_what_a_module_leaves_behind_is_to_happen_outside(
    tmp_path: Path, accelerator: str, name: str
) -> None:
    callback = CUDAGraphCallback(scope="modules", modules=[name])
    run = train(make(Writes), tmp_path, callback, accelerator=accelerator, raises=UnsupportedError)
    assert "Remedy: Do it outside of the module, where all is eager: in the step" in str(run.error)


@pytest.mark.parametrize("name", ["writes", "counts"])
def test_what_no_graph_can_hold_is_refused(tmp_path: Path, accelerator: str, name: str) -> None:
    callback = CUDAGraphCallback(scope="modules", modules=[name])
    run = train(make(Writes), tmp_path, callback, accelerator=accelerator, raises=UnsupportedError)
    assert f"`{name}`: " in str(run.error)
    assert "Remedy" in str(run.error)
    assert "test_captured_modules.py" in str(run.error)


class Scales(torch.autograd.Function):
    """Has a factor that its backward pass reads on the host."""

    factor = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * Scales.factor


class Between(Dynamic):
    """The factor is another one in the backward pass, between two calls, and from epoch to epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.lasts, self.moves = Backwards(), Backwards()

    def logits(self, x: Tensor, batch_idx: int) -> Tensor:
        Scales.factor = 1.0 + self.current_epoch // 2
        hidden = self.lasts(self.features(x))
        Scales.factor += 0.5 * (self.global_step == 12)
        hidden = self.moves(self.lasts(hidden))
        hidden.register_hook(self.moved)
        return self.head(hidden)

    def moved(self, gradient: Tensor) -> None:
        Scales.factor += 0.5 * (self.current_epoch == 3)


class Backwards(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Scales.apply(x)
        return found


@pytest.mark.long
def test_what_a_backward_pass_reads_on_the_host(tmp_path: Path, accelerator: str) -> None:
    run = runs(tmp_path, Between, ["lasts", "moves"], accelerator, max_epochs=4)
    assert run.counts.captures >= 2


class Empty(Dynamic):
    """Modules that launch nothing, forward or backward."""

    def __init__(self) -> None:
        super().__init__()
        self.copies, self.says = Copies(), Says()

    def logits(self, x: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.copies(self.features(x))) * self.says(x)


class Copies(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.clone()


class Says(nn.Module):
    def forward(self, x: Tensor) -> int:
        return len(x)


def test_graphs_without_work(tmp_path: Path, accelerator: str) -> None:
    run = runs(tmp_path, Empty, ["copies", "says"], accelerator)
    assert run.counts.replayed == FULL - WARMUP


class Changes(Dynamic):
    """Features that depend on things which change between steps, and in them."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = Scaled()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 12:
            self.features[3].p = 0.6
        if self.global_step == 15:
            self.features[0].weight.requires_grad_(False)

    def logits(self, x: Tensor, batch_idx: int) -> Tensor:
        self.scaled.factor = 2.0 if self.global_step < 10 else 3.0
        return self.head(self.scaled(self.features(x)))


class Scaled(nn.Module):
    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def test_a_stale_graph_is_noticed(tmp_path: Path, accelerator: str) -> None:
    run = runs(tmp_path, Changes, ["features", "scaled"], accelerator)
    changes = " ".join(run.counts.recaptures)
    assert "`factor`" in changes
    assert "`p`" in changes
    assert run.counts.replayed >= 8


class KeepsChanging(Changes):
    """Features that depend on a number which is another one every six steps."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        pass

    def logits(self, x: Tensor, batch_idx: int) -> Tensor:
        self.scaled.factor = 1.0 + self.global_step // 6
        return self.head(self.scaled(self.features(x)))


def test_graphs_that_serve_few_replays_are_given_up(tmp_path: Path, accelerator: str) -> None:
    run = runs(tmp_path, KeepsChanging, ["features", "scaled"], accelerator, max_epochs=4)
    assert len(run.counts.recaptures) == 3
    said = note(run, "scaled")
    assert said.startswith("3 captures; calls: ")
    assert "eager: given up after 3 captures that served few replays; `factor` of the `Scaled`" in said


class CountsLater(Scaled):
    """Counts once a hook has said so, under a name that is put together."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = [0]

    def forward(self, x: Tensor) -> Tensor:
        if getattr(self, "".join(("is_", "counting")), False):
            self.calls[0] += 1
        return super().forward(x)


class HoldsCounter(Dynamic):
    def __init__(self) -> None:
        super().__init__()
        self.scaled = CountsLater()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 12:
            setattr(self.scaled, "".join(("is_", "counting")), True)

    def on_train_end(self) -> None:
        assert self.scaled.calls[0] == self.global_step - 12

    def logits(self, x: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.scaled(self.features(x)))


def test_an_effect_that_begins_later(tmp_path: Path, accelerator: str) -> None:
    """The graph is stale, and the effect is done once; the next capture is refused."""
    run = runs(tmp_path, HoldsCounter, ["features", "scaled"], accelerator, on_unsupported="eager")
    assert any("`calls" in reason for reason in run.counts.recaptures)


@pytest.mark.long
def test_control_without_guards_the_run_differs(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Guards, "changed", lambda self: None)
    monkeypatch.setattr(ModuleGraph, "check", lambda *args: None)
    with pytest.raises(AssertionError, match="differ at"):
        runs(tmp_path, Changes, ["features", "scaled"], accelerator)


def test_a_wrong_replay_is_found(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing tells that the factor is another, and then the check of the next epoch finds it."""

    class Late(Changes):
        def logits(self, x: Tensor, batch_idx: int) -> Tensor:
            self.scaled.factor = 2.0 if self.current_epoch < 1 else 3.0
            return self.head(self.scaled(self.features(x)))

    monkeypatch.setattr(Guards, "changed", lambda self: None)
    run = runs(tmp_path, Late, ["scaled"], accelerator, checkpoint_every=0, limit_val_batches=0)
    assert "got another argument at" in note(run, "scaled")
    assert run.counts.captures == 2


class Raises(Dynamic):
    """A module raises an error in the step in which it would be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.head = RaisesSometimes(24, 4)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.head.step = self.global_step


class RaisesSometimes(nn.Linear):
    step = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.step == WARMUP:
            raise ValueError("the module's own")
        return super().forward(x)


def test_an_error_of_the_module_is_its_own(tmp_path: Path, accelerator: str) -> None:
    run = runs(tmp_path, Raises, ["head"], accelerator, raises=ValueError)
    assert run.module is not None
    assert "forward" not in vars(run.module.head)


class RaisesInCaptures(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if is_capturing():
            raise ValueError("not in here")
        return super().forward(x)


def test_an_error_that_only_a_capture_raises_has_its_line(tmp_path: Path, accelerator: str) -> None:
    def build() -> Dynamic:
        net = Dynamic()
        net.head = RaisesInCaptures(24, 4)
        return net

    match = r"(?s)in the capture: not in here; eagerly it did not\.\s+found at .*_modules.py:"
    with pytest.raises(UnsupportedError, match=match):
        runs(tmp_path / "raise", build, ["head"], accelerator)
    run = runs(tmp_path / "eager", build, ["head"], accelerator, on_unsupported="eager")
    assert "not in here" in note(run, "head")


class Kept(Dynamic):
    """Outputs and gradients of several steps are kept, and compared with copies."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[Tensor, Tensor]] = []

    def logits(self, x: Tensor, batch_idx: int) -> Tensor:
        hidden = self.features(x)
        self.kept.append((hidden.detach(), hidden.detach().clone()))
        return self.head(hidden)

    def on_train_start(self) -> None:
        self.features[0].weight.register_hook(self.keep)

    def keep(self, gradient: Tensor) -> None:
        self.kept.append((gradient, gradient.clone()))

    def on_after_backward(self) -> None:
        gradient = self.features[0].weight.grad
        assert gradient is not None
        self.keep(gradient)

    def on_train_end(self) -> None:
        assert len(self.kept) == 3 * STEPS
        assert all(torch.equal(one, other) for one, other in self.kept)


def test_outputs_and_gradients_may_be_kept(tmp_path: Path, accelerator: str) -> None:
    assert runs(tmp_path, Kept, ["features"], accelerator).counts.replayed == FULL - WARMUP


class Strides(torch.autograd.Function):
    """Has another gradient where it is given an expanded one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (2 if gradient.stride() == (0, 0) else 1)


class AsksForStrides(nn.Linear):
    def forward(self, x: Tensor, same: Tensor | None = None) -> Tensor:
        found: Tensor = Strides.apply(super().forward(x))
        return found * (2 if same is not None and same.stride() == (0, 1) else 1)


class Expanded(Dynamic):
    """The gradient of the output is one number, expanded; an argument is one sample, expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.head = AsksForStrides(24, 4)

    def loss(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        loss = self.head(self.features(x), x[:1].expand_as(x)).sum() * 0.01
        return loss * (1 + bool(loss > 0))


def test_an_expanded_gradient_has_the_same_bits(tmp_path: Path, accelerator: str) -> None:
    run = runs(tmp_path, Expanded, ["features", "head"], accelerator)
    assert run.counts.replayed == FULL - WARMUP
    assert "eager" not in note(run, "head")


class _Head(nn.Linear):
    """A layer whose class gets another `forward` in the middle of an epoch."""


class OtherForward(Dynamic):
    def __init__(self) -> None:
        super().__init__()
        _Head.forward = nn.Linear.forward
        self.head = _Head(24, 4)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 10:
            _Head.forward = _halved


def _halved(self: nn.Linear, x: Tensor) -> Tensor:
    return nn.Linear.forward(self, x) * 0.5


def test_another_forward_of_a_class(tmp_path: Path, accelerator: str) -> None:
    run = runs(tmp_path, OtherForward, ["features", "head"], accelerator)
    assert "invalidated" in str(run.callback.summary)


class Layers(Dynamic):
    """Layers of torch with kernels of their own, on results of eager code that writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 24, 2, batch_first=True, dropout=0.2)
        self.attention = nn.TransformerEncoderLayer(24, 4, 32, batch_first=True)

    def logits(self, x: Tensor, batch_idx: int) -> Tensor:
        out, (h, _) = self.lstm(x.view(-1, 3, 4))
        out = self.attention(out * 2)
        h = h[-1].clone() if batch_idx % 2 else h[-1] * 1
        return self.head(out.mean(1).add_(h)).relu_()


@pytest.mark.long
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_layers_of_torch(tmp_path: Path, accelerator: str, precision: Any) -> None:
    modules = ["lstm", "attention", "head"]
    run = runs(tmp_path, Layers, modules, accelerator, precision=precision, on_unsupported="eager")
    assert "18 replays" in note(run, "attention")
    assert "18 replays" in note(run, "head")


class Transformed(Dynamic):
    """Calls in which a replay would hide its ops from code that looks for them, and others beside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.twice, self.swapped = nn.Linear(24, 24), nn.Linear(24, 24)
        self.counted, self.energy = nn.Linear(24, 24), nn.Linear(24, 24)
        self.cached, self.own_weight = weight_norm(nn.Linear(24, 24)), OwnWeight()

    def logits(self, x: Tensor, batch_idx: int) -> Tensor:
        hidden = checkpoint(self.features, x, use_reentrant=False)
        hidden = hidden + self.inner(hidden)
        hidden = torch.func.vmap(self.twice)(hidden)
        weights = {name: p * 2 for name, p in self.swapped.named_parameters()}
        hidden = torch.func.functional_call(self.swapped, weights, (hidden,))
        hidden = self.own_weight(hidden, self.own_weight.weight)
        with parametrize.cached():
            hidden = self.cached(hidden) + self.cached(-hidden)
        with FlopCounterMode(display=False) as flops:
            hidden = self.counted(hidden)
        assert flops.get_total_flops()
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(hidden.detach(), torch.ones_like(hidden))
            slope = forward_ad.unpack_dual(self.energy(dual)).tangent
        assert slope is not None
        return self.head(hidden) + slope.mean()


class Inner(nn.Module):
    """Uses autograd and checkpointing inside."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return self.two(self.one(x).tanh()).sin()

        found = checkpoint(inner, x, use_reentrant=False, preserve_rng_state=False)
        assert isinstance(found, Tensor)
        return found


class OwnWeight(nn.Module):
    """Uses a weight of its own, and an argument that is the same, in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, 24) * 0.2)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return ((x @ weight).sin() @ self.weight).sin() @ weight


EAGER = {
    "own_weight": "is a weight of the module too",
    "cached": "inside `parametrize.cached()`",
    "features": "activation checkpointing",
    "twice": "a transform of `torch.func`",
    "swapped": "requires a gradient, and is neither",
    "counted": "inside a mode of torch's",
    "energy": "forward-mode autograd",
}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_calls_in_which_no_replay_would_do_are_eager(tmp_path: Path, accelerator: str) -> None:
    run = runs(tmp_path, Transformed, [*EAGER, "inner", "head"], accelerator, on_unsupported="eager")
    for name, reason in EAGER.items():
        assert f"eager: The module is called {reason}" in note(run, name) or reason in note(run, name)
        assert "0 replays" in note(run, name)
    assert "18 replays" in note(run, "inner")
    assert "18 replays" in note(run, "head")


class OwnBackward(Dynamic):
    """A module with a backward pass of its own, which leaves gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.own = Own()

    def logits(self, x: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.own(x))


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 24)

    def forward(self, x: Tensor) -> Tensor:
        self.layer(x).square().sum().backward()
        return self.layer(x)


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_backward_pass_inside_is_eager(tmp_path: Path, accelerator: str, accumulate: int) -> None:
    kwargs: dict[str, Any] = {"on_unsupported": "eager", "accumulate_grad_batches": accumulate}
    run = runs(tmp_path, OwnBackward, ["own", "head"], accelerator, **kwargs)
    assert "eager: The module calls `backward()`" in note(run, "own")


class Experts(Dynamic):
    """A mixture of experts with eager routing: an expert gets as many samples as are sent to it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(24, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.GELU()) for _ in range(3))

    def logits(self, x: Tensor, batch_idx: int) -> Tensor:
        hidden = self.features(x)
        weights = self.router(hidden).softmax(-1)
        found = torch.zeros_like(hidden)
        for index, expert in enumerate(self.experts):
            (chosen,) = torch.where(weights.argmax(-1) == index)
            if len(chosen):
                sent = expert(hidden[chosen]) * weights[chosen, index, None]
                found = found.index_add(0, chosen, sent.to(found.dtype))
        return self.head(hidden + found)


class OneOfTwo(Dynamic):
    """The second module or the third follows the first, by the sign of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(24, 4)

    def logits(self, x: Tensor, batch_idx: int) -> Tensor:
        hidden = self.features(x)
        return self.head(hidden) if hidden.sum().item() > 0 else self.other(hidden)


class Detector(Dynamic):
    """A fixed backbone, and heads on boxes, of which each image has another number."""

    def __init__(self) -> None:
        super().__init__()
        self.box_head = nn.Linear(24, 4)

    def loss(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        maps = self.features(x)
        losses = []
        for image, boxes in zip(maps, (y + 1).tolist(), strict=True):
            found = self.box_head(image.expand(boxes, -1))
            losses.append(nn.functional.l1_loss(found, torch.full_like(found, boxes)))
        return torch.stack(losses).mean()


class EarlyExit(Dynamic):
    """Leaves after the first exit if that is sure enough, for the batch or for each sample."""

    per_sample = False

    def __init__(self) -> None:
        super().__init__()
        self.more, self.exit = nn.Linear(24, 24), nn.Linear(24, 4)

    def logits(self, x: Tensor, batch_idx: int) -> Tensor:
        hidden = self.features(x)
        early = self.exit(hidden)
        sure = early.softmax(-1).amax(-1) > 0.35
        if not self.per_sample:
            return early if sure.float().mean() > 0.5 else self.head(self.more(hidden)) + early
        (others,) = torch.where(~sure)
        return early.index_add(0, others, self.head(self.more(hidden[others])))


class EarlyExitOfSamples(EarlyExit):
    per_sample = True


@pytest.mark.spread
@pytest.mark.parametrize(
    ("build", "modules"),
    [
        (Experts, ["features", "router", "experts.0", "experts.1", "experts.2", "head"]),
        (Detector, ["features", "box_head"]),
        pytest.param(OneOfTwo, ["features", "head", "other"], marks=pytest.mark.long),
        pytest.param(EarlyExit, ["features", "more", "exit", "head"], marks=pytest.mark.long),
        (EarlyExitOfSamples, ["features", "more", "exit", "head"]),
    ],
)
def test_dynamic_models(tmp_path: Path, accelerator: str, build: Any, modules: list[str]) -> None:
    run = runs(tmp_path, build, modules, accelerator)
    assert "18 replays" in note(run, "features")
    assert "eager: The" not in str(run.summary)


def widest(tmp_path: Path, build: Any, accelerator: str, **kwargs: Any) -> Trace:
    """Train without and with modules that `scope="auto"` may fall back to; both must be the same."""
    callback = CUDAGraphCallback(modules=["features", "head"])
    kwargs["accelerator"] = accelerator
    plain = train(make(build), tmp_path / "plain", **kwargs)
    graph = train(make(build), tmp_path / "graph", callback, **kwargs)
    assert_same(plain, graph)
    assert "advance" not in vars(graph.trainer.fit_loop.epoch_loop)
    assert "forward" not in vars(graph.module.head)
    return graph


def hooked(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.register_step_post_hook(lambda *args: None)
    return optimizer


class HookedDynamic(Dynamic):
    def __init__(self) -> None:
        super().__init__(hooked)


NO_GRAPH = "whole steps are not captured: A CUDA graph cannot hold"


@pytest.mark.spread
@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")
@pytest.mark.parametrize(
    ("build", "kwargs", "reasons"),
    [
        (HookedDynamic, {}, ["the optimizer was not to be captured: `torch.optim.sgd.SGD`", NO_GRAPH]),
        (Dynamic, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}, [NO_GRAPH]),
        (Manual, {}, [NO_GRAPH]),
        pytest.param(Experts, {"precision": "bf16-mixed"}, [NO_GRAPH], marks=pytest.mark.long),
    ],
)
def test_modules_take_the_place_of_whole_steps(
    tmp_path: Path, accelerator: str, build: Any, kwargs: dict[str, Any], reasons: list[str]
) -> None:
    """`scope="auto"` takes the widest part of a step that a graph can hold, and says why."""
    run = widest(tmp_path, build, accelerator, **kwargs)
    notes = [note for note in run.summary.notes if "not captured: " in note or "not to be" in note]
    assert len(notes) == len(reasons)
    assert all(map(str.startswith, notes, reasons)), notes
    assert f"found at {__file__}" in notes[-1]
    counts = run.counts
    assert counts.captures >= 2
    assert counts.warmed_up + counts.replayed + counts.eager_steps == STEPS
    assert counts.replayed >= STEPS - 2 * WARMUP - 1 - 3 - 5


class Scripted(Dynamic):
    """Whole steps are refused before the first one: they have TorchScript in them."""

    def __init__(self) -> None:
        super().__init__()
        self.scripted = torch.jit.script(nn.Linear(12, 12))

    def logits(self, x: Tensor, batch_idx: int) -> Any:
        return super().logits(self.scripted(x), batch_idx)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_modules_of_a_run_that_captures_no_whole_steps(tmp_path: Path, accelerator: str) -> None:
    run = widest(tmp_path, Scripted, accelerator)
    assert run.counts.replayed == FULL - WARMUP
    assert "whole steps are not captured: " in str(run.summary)


@pytest.mark.long
def test_modules_of_which_whole_steps_have_no_need(tmp_path: Path, accelerator: str) -> None:
    run = widest(tmp_path, Net, accelerator)
    assert (run.counts.captures, run.counts.replayed) == (1, FULL - WARMUP)
    assert "modules" not in str(run.summary)


def test_modules_of_several_processes_take_no_place(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pl.Trainer, "world_size", 2)
    with pytest.raises(UnsupportedError, match="In several processes, modules do not take the place"):
        train(make(Net), tmp_path, CUDAGraphCallback(modules=["head"]), accelerator=accelerator)


class Resets(Callback):
    """Other code writes weights in the middle of an epoch."""

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with torch.no_grad():
            pl_module.features[0].weight.mul_(0.9)


@pytest.mark.long
def test_with_evaluation_graphs(tmp_path: Path, accelerator: str) -> None:
    kwargs: dict[str, Any] = {"val_check_interval": 2, "callbacks": (Resets(),)}
    run = runs(tmp_path, Dynamic, ["features", "head"], accelerator, evaluation=True, **kwargs)
    assert run.counts.replayed == FULL - WARMUP
    assert run.summary.validate.replayed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scope": "modules"}, r"modules=\(\)\)`: expected a list of names"),
        (
            {"scope": "step", "modules": ["features"]},
            r"modules=\['features'\]\)`: expected a list of names",
        ),
        (
            {"scope": "modules", "modules": "features"},
            r"modules='features'\)`: expected a list of names",
        ),
    ],
)
def test_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        CUDAGraphCallback(**arguments)


class WithBlocks(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Identity(), nn.ModuleList([nn.Identity()])])
        self.scales = nn.ParameterList([torch.zeros(1)])


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (["encoder"], "there is no module `encoder`.*The first ones are `features`, `head`"),
        ([""], "there is no module ``"),
        (
            ["blocks"],
            "`blocks` is a `ModuleList`, which has no `forward`.* members: `blocks.0`, `blocks.1.0`",
        ),
        (["scales"], "`scales` is a `ParameterList`, .* Name a module that the step calls"),
        (
            ["features", "features.0"],
            "`features.0` and `features` are one module, or have one in common",
        ),
    ],
)
def test_names(tmp_path: Path, modules: list[str], message: str) -> None:
    callback = CUDAGraphCallback(scope="modules", modules=modules)
    with pytest.raises(ConfigurationError, match=message):
        train(make(WithBlocks), tmp_path, callback, train_loader=loader())
