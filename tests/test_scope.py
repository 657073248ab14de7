"""Where the optimizer cannot be captured, it steps eagerly behind a captured forward and backward pass.

All of it bit for bit as without the callback. `tests/gpu/test_scope.py` collects these tests again.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_cudagraph import ConfigurationError, CUDAGraphCallback, UnsupportedError
from tests.harness import Net, assert_same, cosine, make, train
from tests.optimizers import (
    Adan,
    BranchesOnTheDevice,
    CallsTwice,
    Chooses,
    CountsInGroup,
    CountsInState,
    CountsOnItself,
    FusedAndDecayed,
    Lamb,
    MultipliesByTheRealPart,
    Own,
    ReadsBack,
    SharesGroups,
    TakesARoot,
    TakesARootByNumPy,
    TakesARootInABranch,
    TakesTheRealPart,
    WantsAFloat,
    Wraps,
)

O = torch.optim  # noqa: E741


def one_cycle(optimizer: O.Optimizer) -> Any:
    return O.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=30)


def cyclic(optimizer: O.Optimizer) -> Any:
    return O.lr_scheduler.CyclicLR(optimizer, 1e-3, 1e-1, step_size_up=4)


def hooked(parameters: Any) -> O.Optimizer:
    optimizer = O.SGD(parameters, lr=0.1)
    optimizer.register_step_post_hook(lambda *args: None)
    return optimizer


# What keeps the optimizer out of the graph, and what the report says of it.
BEHIND: dict[str, tuple[Callable[[Any], O.Optimizer], Any, str]] = {
    "LBFGS": (lambda p: O.LBFGS(p, lr=0.1, max_iter=2), None, "`torch.optim.lbfgs.LBFGS` calls its"),
    "OneCycle": (
        lambda p: O.AdamW(p, fused=True),
        one_cycle,
        r"A schedule moves `beta1` in each step, which a fused kernel \(`_fused_adamw_`\)",
    ),
    "optimizer hooks": (hooked, None, "register_step_post_hook"),
    "counts in state": (CountsInState, None, r"changes `state\[0\]` of the optimizer `Counts"),
    "counts on itself": (CountsOnItself, None, "changes `steps` of the optimizer `CountsOnItself`"),
    "counts-in-group": (CountsInGroup, None, r"`param_groups\[0\]\['k'\]` of the .* changed"),
    "chooses": (Chooses, cosine, "gives `where` a number that is another one in each step"),
    "branches": (BranchesOnTheDevice, None, r"reads from the device.*found at .*optimizers.py"),
    "takes a root": (TakesARoot, cosine, "gives `math.sqrt` a number that is another one"),
    "takes the real part": (TakesTheRealPart, cosine, "a number that C code has made of one that moves"),
    "multiplies by it": (
        MultipliesByTheRealPart,
        cosine,
        "a number that C code has made of one that moves",
    ),
    "branches on a root": (TakesARootInABranch, cosine, "gives `math.sqrt` a number"),
    "takes a root by NumPy": (TakesARootByNumPy, cosine, "converts a number that it computes"),
    "shares groups": (SharesGroups, None, "`SharesGroups` takes no hooks on its state"),
    "wraps": (Wraps, None, r"keeps a `torch.optim.sgd.SGD` with param groups of its own"),
    "options of NumPy's": (
        lambda p: O.AdamW(p, betas=(np.float64(0.9), np.float64(0.99))),
        None,
        "an option of NumPy's type",
    ),
    "tensors as options": (
        lambda p: O.AdamW(p, betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False),
        None,
        "`betas` of param group 0 of `AdamW` is or has a tensor",
    ),
}


@pytest.mark.spread(2)
@pytest.mark.parametrize("name", BEHIND)
def test_the_optimizer_steps_behind_the_graph(tmp_path: Path, accelerator: str, name: str) -> None:
    make_optimizer, make_scheduler, reason = BEHIND[name]

    def build() -> Net:
        return Net(make_optimizer, make_scheduler)

    kwargs: dict[str, Any] = {"accelerator": accelerator}
    if "LBFGS" not in name:
        kwargs |= {"gradient_clip_val": 0.1}
    plain = train(make(build), tmp_path / "plain", **kwargs)
    callback = CUDAGraphCallback()
    graph = train(make(build), tmp_path / "graph", callback, **kwargs)
    assert_same(plain, graph)
    assert graph.counts.captures == 1
    assert graph.counts.replayed >= 14
    assert "the optimizer steps eagerly" in str(callback.summary)
    assert re.search(reason, str(callback.summary)), callback.summary


class FrozenWithGradient(Net):
    """Freezes a parameter before the capture, and drops its gradient in the step after that."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        for parameter in list(self.parameters())[::2]:
            parameter.grad = None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 3:
            self.features[0].weight.requires_grad_(False)


@pytest.mark.long
def test_a_frozen_parameter_with_a_gradient(tmp_path: Path, accelerator: str) -> None:
    plain = train(make(FrozenWithGradient), tmp_path / "plain", accelerator=accelerator)
    callback = CUDAGraphCallback()
    graph = train(make(FrozenWithGradient), tmp_path / "graph", callback, accelerator=accelerator)
    assert_same(plain, graph)
    assert graph.counts.replayed >= 2
    assert "also that of parameter 0 in param group 0, which is frozen" in str(callback.summary)


CYCLED: dict[str, tuple[Callable[[Any], O.Optimizer], Any]] = {
    "OneCycle": (lambda p: O.AdamW(p), one_cycle),
    "OneCycle-single": (lambda p: O.Adam(p, foreach=False), one_cycle),
    "Cyclic": (lambda p: O.SGD(p, lr=0.1, momentum=0.9, nesterov=True), cyclic),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CYCLED)
def test_cycled_momentum_is_in_the_graph(tmp_path: Path, accelerator: str, name: str) -> None:
    def build() -> Net:
        return Net(*CYCLED[name])

    plain = train(make(build), tmp_path / "plain", accelerator=accelerator)
    callback = CUDAGraphCallback()
    graph = train(make(build), tmp_path / "graph", callback, accelerator=accelerator)
    assert_same(plain, graph)
    assert (graph.counts.captures, graph.counts.replayed) == (1, 18)
    assert "the optimizer steps eagerly" not in str(callback.summary)


@pytest.mark.long
def test_cycled_momentum_under_accumulation(tmp_path: Path, accelerator: str) -> None:
    """The momentum moves once in each window: that is every step of the optimizer."""

    def build() -> Net:
        return Net(*CYCLED["OneCycle-single"])

    kwargs: dict[str, Any] = {"accelerator": accelerator, "accumulate_grad_batches": 4, "max_epochs": 6}
    plain = train(make(build), tmp_path / "plain", **kwargs)
    graph = train(make(build), tmp_path / "graph", CUDAGraphCallback(), **kwargs)
    assert_same(plain, graph)
    assert graph.counts.captures == 3  # first, middle and last
    assert graph.counts.replayed == 30


# With those that add a multiple of a tensor, which a CPU rounds in two ways.
OF_16_BITS: dict[str, tuple[Callable[[Any], O.Optimizer], tuple[str, ...]]] = {
    "AdamW": (lambda p: O.AdamW(p, lr=1e-2), ()),
    "NAdam": (lambda p: O.NAdam(p, lr=1e-2), ()),
    "RMSprop": (lambda p: O.RMSprop(p, lr=1e-3, momentum=0.9, centered=True), ("cpu",)),
    "SGD": (lambda p: O.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1), ("cpu",)),
    "ASGD": (lambda p: O.ASGD(p, lr=1e-2), ("cpu",)),
    "Adafactor": (lambda p: O.Adafactor(p, lr=1e-2), ("cpu",)),
    "Muon": (lambda p: O.Muon([q for q in p if q.ndim == 2], lr=1e-2), ("cpu",)),
    "custom": (Own, ("cpu",)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", OF_16_BITS)
@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_parameters_of_16_bits(tmp_path: Path, accelerator: str, name: str, precision: str) -> None:
    make_optimizer, behind = OF_16_BITS[name]
    kwargs: dict[str, Any] = {"accelerator": accelerator, "precision": precision}
    plain = train(make(lambda: Net(make_optimizer)), tmp_path / "plain", **kwargs)
    callback = CUDAGraphCallback()
    graph = train(make(lambda: Net(make_optimizer)), tmp_path / "graph", callback, **kwargs)
    assert_same(plain, graph)
    assert graph.counts.replayed >= 2
    assert ("of 16 bits" in str(callback.summary)) is (accelerator in behind)


class Scaled(Net):
    """A net with a parameter of one number."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


@pytest.mark.spread
@pytest.mark.parametrize(
    "make_optimizer", [Own, CallsTwice, FusedAndDecayed, Lamb, Adan, ReadsBack, WantsAFloat]
)
def test_an_optimizer_of_which_nothing_is_known_is_captured(
    tmp_path: Path, accelerator: str, make_optimizer: Any
) -> None:
    def build() -> Net:
        return Scaled(make_optimizer, cosine)

    plain = train(make(build), tmp_path / "plain", accelerator=accelerator)
    callback = CUDAGraphCallback()
    graph = train(make(build), tmp_path / "graph", callback, accelerator=accelerator)
    assert_same(plain, graph)
    assert (graph.counts.captures, graph.counts.replayed) == (1, 18)
    assert "eagerly" not in str(callback.summary).replace("eager steps", "")


class OwnAdam(O.Adam):
    """A subclass that changes nothing about the step."""


@pytest.mark.long
def test_a_subclass_with_the_same_step(tmp_path: Path, accelerator: str) -> None:
    def build() -> Net:
        return Net(lambda p: OwnAdam(p, lr=1e-2, fused=True))

    plain = train(make(build), tmp_path / "plain", accelerator=accelerator)
    graph = train(make(build), tmp_path / "graph", CUDAGraphCallback(), accelerator=accelerator)
    assert_same(plain, graph)
    assert graph.counts.replayed == 18


@pytest.mark.spread(2)
@pytest.mark.parametrize("name", ["LBFGS", "OneCycle", "chooses"])
@pytest.mark.filterwarnings("ignore:lightning_cudagraph. all steps eager")
def test_scope_step_insists(tmp_path: Path, accelerator: str, name: str) -> None:
    make_optimizer, make_scheduler, reason = BEHIND[name]

    def build() -> Net:
        return Net(make_optimizer, make_scheduler)

    with pytest.raises(UnsupportedError, match=f"(?s){reason}"):
        train(make(build), tmp_path, CUDAGraphCallback(scope="step"), accelerator=accelerator)
    plain = train(make(build), tmp_path / "plain", accelerator=accelerator)
    callback = CUDAGraphCallback(scope="step", on_unsupported="eager")
    eager = train(make(build), tmp_path / "eager", callback, accelerator=accelerator)
    assert_same(plain, eager)


def test_scope_forward_backward(tmp_path: Path, accelerator: str) -> None:
    def build() -> Net:
        return Net(lambda p: O.AdamW(p, lr=1e-2, foreach=True))

    plain = train(make(build), tmp_path / "plain", accelerator=accelerator)
    callback = CUDAGraphCallback(scope="forward_backward")
    graph = train(make(build), tmp_path / "graph", callback, accelerator=accelerator)
    # The arithmetic of the optimizer is the user's own.
    assert_same(plain, graph)
    assert (graph.counts.captures, graph.counts.replayed) == (1, 18)


class Watches(Callback):
    """Host code before the optimizer's step."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.norms.append(float(pl_module.head.weight.grad.norm()))


@pytest.mark.long
def test_a_callback_before_the_optimizers_step(tmp_path: Path, accelerator: str) -> None:
    watchers = [Watches(), Watches()]
    plain = train(make(Net), tmp_path / "plain", accelerator=accelerator, callbacks=(watchers[0],))
    graph = train(
        make(Net), tmp_path / "b", CUDAGraphCallback(), accelerator=accelerator, callbacks=(watchers[1],)
    )
    assert_same(plain, graph)
    assert watchers[0].norms == watchers[1].norms
    assert graph.counts.replayed == 18


@pytest.mark.long
def test_another_optimizer_in_the_middle_of_a_run(tmp_path: Path, accelerator: str) -> None:
    class Switches(Net):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.trainer.optimizers = [O.LBFGS(self.parameters(), lr=0.1, max_iter=2)]
            if self.current_epoch == 2:
                self.trainer.optimizers = [O.SGD(self.parameters(), lr=0.1)]

    kwargs: dict[str, Any] = {"accelerator": accelerator}
    plain = train(make(Switches), tmp_path / "plain", **kwargs)
    graph = train(make(Switches), tmp_path / "graph", CUDAGraphCallback(), **kwargs)
    assert_same(plain, graph)
    assert graph.counts.captures == 3


def test_bad_scope() -> None:
    with pytest.raises(ConfigurationError, match="scope='all'"):
        CUDAGraphCallback(scope="all")  # type: ignore[arg-type]


class ReadsNorms(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        self.norm = sum(grad.norm().item() ** 2 for grad in grads)


def test_a_read_in_a_hook_is_none_of_the_optimizer(tmp_path: Path, accelerator: str) -> None:
    callback = CUDAGraphCallback()
    plain = train(make(ReadsNorms), tmp_path / "plain", accelerator=accelerator)
    graph = train(make(ReadsNorms), tmp_path / "graph", callback, accelerator=accelerator)
    assert_same(plain, graph)
    report = str(callback.summary)
    assert "the optimizer steps eagerly: A CUDA graph cannot hold `.item()`" in report, report
