"""The run with the callback is the run without it, bit for bit.

`tests/gpu/test_equivalence.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_cudagraph import (
    CUDAGraphCallback,
    RunSummary,
)
from lightning_cudagraph.checks.guards.guards import Guards
from tests.harness import Net, Trace, assert_same, differences, loader, make, train

O = torch.optim  # noqa: E741
NEVER = 10**6

# Bit-equal to a run without the callback: the kernels are the same ones.
SAME_KERNELS: dict[str, Callable[[Any], O.Optimizer]] = {
    "AdamW-fused": lambda p: O.AdamW(p, lr=1e-2, fused=True),
    "Adam-fused-amsgrad": lambda p: O.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1, fused=True),
    "SGD": lambda p: O.SGD(p, lr=0.1),
    "SGD-momentum": lambda p: O.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "SGD-nesterov": lambda p: O.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "SGD-dampening-maximize": lambda p: O.SGD(p, lr=1e-3, momentum=0.9, dampening=0.1, maximize=True),
    "SGD-foreach": lambda p: O.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD-single": lambda p: O.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "SGD-fused": lambda p: O.SGD(p, lr=0.1, momentum=0.9, fused=True),
}
# Their counters are on the host, and what they compute from these.
COUNTED: dict[str, Callable[[Any], O.Optimizer]] = {
    "Adam": lambda p: O.Adam(p, lr=1e-2),
    "AdamW-foreach": lambda p: O.AdamW(p, lr=1e-2, foreach=True),
    "AdamW-single": lambda p: O.AdamW(p, lr=1e-2, foreach=False),
    "NAdam": lambda p: O.NAdam(p, lr=1e-2),
    "RAdam": lambda p: O.RAdam(p, lr=1e-2),
    "Adamax": lambda p: O.Adamax(p, lr=1e-2),
    "RMSprop": lambda p: O.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "Adadelta": lambda p: O.Adadelta(p, lr=1.0),
    "Adagrad": lambda p: O.Adagrad(p, lr=1e-2, lr_decay=0.01),
    "Rprop": lambda p: O.Rprop(p),
    "ASGD": lambda p: O.ASGD(p, lr=1e-2),
}


def graphed(steps: int = 18, eager: int = 3) -> dict[str, int]:
    """What must have become of the 24 steps of three epochs."""
    return {"warmed_up": 3, "captures": 1, "replayed": steps, "eager": eager}


def counted(trace: Trace) -> dict[str, int]:
    counts = trace.counts
    return {
        "warmed_up": counts.warmed_up,
        "captures": counts.captures,
        "replayed": counts.replayed,
        "eager": sum(counts.eager.values()),
    }


@pytest.mark.spread  # each two of them meet in test_family.py
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "64-true", "16-true"])
@pytest.mark.parametrize("clip", [None, ("norm", 0.1), ("value", 0.01)], ids=str)
def test_same_as_plain(
    tmp_path: Path, accelerator: str, precision: str, clip: tuple[str, float] | None
) -> None:
    kwargs: dict[str, Any] = {"precision": precision, "accelerator": accelerator}
    if clip is not None:
        kwargs |= {"gradient_clip_algorithm": clip[0], "gradient_clip_val": clip[1]}

    def build() -> Net:
        # Lightning refuses to clip for fused optimizers under mixed precision. In double precision the
        # fused step takes a moving learning rate from the host alone.
        if precision == "64-true":
            return Net(COUNTED["Adam"])
        return Net(SAME_KERNELS["SGD-momentum"] if clip and "mixed" in precision else None)

    plain = train(make(build), tmp_path / "plain", **kwargs)
    again = train(make(build), tmp_path / "again", **kwargs)
    graph = train(make(build), tmp_path / "graph", CUDAGraphCallback(), **kwargs)
    assert_same(plain, again)
    assert_same(plain, graph)
    assert counted(graph) == graphed()


@pytest.mark.spread(3)  # all of them: test_family.py
@pytest.mark.parametrize("name", SAME_KERNELS)
def test_optimizers_with_the_same_kernels(tmp_path: Path, accelerator: str, name: str) -> None:
    def build() -> Net:
        return Net(SAME_KERNELS[name])

    plain = train(make(build), tmp_path / "plain", accelerator=accelerator)
    graph = train(make(build), tmp_path / "graph", CUDAGraphCallback(), accelerator=accelerator)
    assert_same(plain, graph)
    assert counted(graph) == graphed()


@pytest.mark.spread(5)  # all of them: test_family.py
@pytest.mark.parametrize("name", COUNTED)
def test_optimizers_that_count_on_the_host(tmp_path: Path, accelerator: str, name: str) -> None:
    def build() -> Net:
        return Net(COUNTED[name])

    plain = train(make(build), tmp_path / "plain", accelerator=accelerator)
    graph = train(make(build), tmp_path / "graph", CUDAGraphCallback(), accelerator=accelerator)
    assert_same(plain, graph)
    assert graph.counts.captures == 1 + (name == "RAdam")  # of which another branch is taken later
    assert graph.counts.replayed >= 12
    for file, saved in plain.checkpoints.items():
        theirs = saved["optimizer_states"][0]["state"]
        ours = graph.checkpoints[file]["optimizer_states"][0]["state"]
        for index, state in theirs.items():
            for key, value in state.items():
                mine = ours[index][key]
                assert (mine.device, mine.dtype, mine.shape) == (value.device, value.dtype, value.shape)
                assert mine.untyped_storage().nbytes() == value.untyped_storage().nbytes()


def test_several_groups_and_a_schedule_by_hand(tmp_path: Path, accelerator: str) -> None:
    class ByHand(Net):
        def configure_optimizers(self) -> Any:
            return O.AdamW(
                [
                    {"params": self.features.parameters(), "lr": 1e-2},
                    {"params": self.head.parameters(), "lr": 1e-3, "weight_decay": 0.0},
                ],
                fused=True,
            )

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            for index, group in enumerate(self.trainer.optimizers[0].param_groups):
                group["lr"] = 1e-2 / (1 + self.global_step + index)

    plain = train(make(ByHand), tmp_path / "plain", accelerator=accelerator)
    graph = train(make(ByHand), tmp_path / "graph", CUDAGraphCallback(), accelerator=accelerator)
    assert_same(plain, graph)
    assert counted(graph) == graphed()


@pytest.mark.long
def test_no_timings(tmp_path: Path, accelerator: str) -> None:
    plain = train(make(Net), tmp_path / "plain", accelerator=accelerator)
    graph = train(
        make(Net), tmp_path / "graph", CUDAGraphCallback(timings=None), accelerator=accelerator
    )
    assert_same(plain, graph)
    assert counted(graph) == graphed()


def test_off(tmp_path: Path, accelerator: str) -> None:
    plain = train(make(Net), tmp_path / "plain", accelerator=accelerator)
    off = train(make(Net), tmp_path / "off", CUDAGraphCallback(backend="off"), accelerator=accelerator)
    assert_same(plain, off)
    assert off.callback is not None
    assert off.callback.summary == RunSummary()


def test_mid_epoch_validation_and_limits(tmp_path: Path, accelerator: str) -> None:
    kwargs: dict[str, Any] = {
        "accelerator": accelerator,
        "val_check_interval": 3,
        "max_epochs": -1,
        "max_steps": 19,
        "log_every_n_steps": 4,
    }
    plain = train(make(Net), tmp_path / "plain", **kwargs)
    graph = train(make(Net), tmp_path / "graph", CUDAGraphCallback(), **kwargs)
    assert_same(plain, graph)
    assert graph.final["global_step"] == 19


@pytest.mark.long
def test_module_hooks_inside_the_step(tmp_path: Path, accelerator: str) -> None:
    class Hooked(Net):
        def on_after_backward(self) -> None:
            self.log("grad_peak", self.head.weight.grad.abs().max())

        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5)
            self.log("grad_norm", norm, on_step=True)

    plain = train(make(Hooked), tmp_path / "plain", accelerator=accelerator)
    graph = train(make(Hooked), tmp_path / "graph", CUDAGraphCallback(), accelerator=accelerator)
    assert_same(plain, graph)
    assert counted(graph) == graphed()


def test_optimizer_step_override_stays_on_the_host(tmp_path: Path, accelerator: str) -> None:
    class OwnWarmup(Net):
        def optimizer_step(
            self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
        ) -> None:
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * min(1.0, (self.global_step + 1) / 10)
            optimizer.step(closure=optimizer_closure)

    plain = train(make(OwnWarmup), tmp_path / "plain", accelerator=accelerator)
    graph = train(make(OwnWarmup), tmp_path / "graph", CUDAGraphCallback(), accelerator=accelerator)
    assert_same(plain, graph)
    assert counted(graph) == graphed()


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_resume_and_second_fit(tmp_path: Path, accelerator: str) -> None:
    kwargs: dict[str, Any] = {"accelerator": accelerator}
    first = train(make(Net), tmp_path / "first", CUDAGraphCallback(), max_epochs=2, **kwargs)
    last = str(tmp_path / "first" / "ckpt" / "last.ckpt")
    # A file written with the callback is resumed without it, and the other way round.
    plain = train(make(Net), tmp_path / "plain", ckpt_path=last, max_epochs=4, **kwargs)
    graph = train(
        make(Net), tmp_path / "graph", CUDAGraphCallback(), ckpt_path=last, max_epochs=4, **kwargs
    )
    assert_same(plain, graph)
    assert counted(graph)["captures"] == 1

    assert first.trainer is not None
    assert first.module is not None
    callback = first.callback
    assert callback is not None
    first.trainer.fit_loop.max_epochs = 3
    first.trainer.fit(first.module, loader(), loader(seed=1, batches=2))
    assert callback.summary.fit.captures == 1


class Swapped(Net):
    """Gives a parameter another storage in the middle of an epoch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step == 13:
            self.kept = self.head.weight.data  # a stale graph would go on writing here
            self.head.weight.data = self.kept.clone()


def test_another_storage_is_noticed(tmp_path: Path, accelerator: str) -> None:
    plain = train(make(Swapped), tmp_path / "plain", accelerator=accelerator)
    graph = train(make(Swapped), tmp_path / "graph", CUDAGraphCallback(), accelerator=accelerator)
    assert_same(plain, graph)
    assert graph.counts.captures == 2
    assert "the address of parameter `head.weight`" in graph.counts.recaptures[0]


@pytest.mark.long
def test_a_stale_graph_would_be_caught(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison means something: without guards, a graph that misses a change is seen."""
    monkeypatch.setattr(Guards, "changed", lambda self: None)
    plain = train(make(Swapped), tmp_path / "plain", accelerator=accelerator)
    graph = train(make(Swapped), tmp_path / "graph", CUDAGraphCallback(), accelerator=accelerator)
    assert differences(plain.final["weights"], graph.final["weights"])


class _Whole(Net):
    """An op that comes to the dispatcher as one and consists of others, which autocast applies to."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Bilinear(12, 12, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        result["loss"] = result["loss"] + self.both(batch[0], batch[0].flip(0)).square().mean()
        return result


class _Products(Net):
    """A backward pass that goes another way under a mode of the dispatcher."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        result["loss"] = result["loss"] + self(batch[0]).sigmoid().prod(1).mean() * 100
        return result


@pytest.mark.spread
@pytest.mark.parametrize(
    ("kind", "options"), [(_Whole, {"precision": "bf16-mixed"}), (_Products, {"max_steps": 3})]
)
def test_warm_up_is_under_no_mode_of_the_dispatcher(
    tmp_path: Path, accelerator: str, kind: type[Net], options: dict[str, Any]
) -> None:
    plain = train(make(kind), tmp_path / "plain", accelerator=accelerator, **options)
    callback = CUDAGraphCallback(on_unsupported="eager")
    eager = train(make(kind), tmp_path / "eager", callback, accelerator=accelerator, **options)
    assert_same(plain, eager)
