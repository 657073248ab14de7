"""fp16 with Lightning's own plugin and scaler: overflows are skipped inside the graph.

`tests/gpu/test_fp16.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_cudagraph import CUDAGraphCallback, UnsupportedError
from lightning_cudagraph.optim.outcomes import Outcomes
from tests.harness import (
    BATCH_SIZE,
    Net,
    Trace,
    assert_same,
    differences,
    loader,
    make,
    train,
)
from tests.optimizers import Own

O = torch.optim  # noqa: E741


class Overflows(Net):
    """Every eleventh batch has a loss whose gradients do not fit into 16 bits."""

    def on_fit_start(self) -> None:
        self.register_buffer("boost", torch.ones((), device=self.device), persistent=False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.boost.fill_(1e9 if self.global_step % 11 == 10 else 1.0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        output["loss"] = output["loss"] * self.boost
        return output


class SkipsBadBatches(Overflows):
    """A fused optimizer leaves out a step whose loss is not finite, in full precision."""

    def on_fit_start(self) -> None:
        """There are buffers before there is an optimizer."""

    def configure_optimizers(self) -> Any:
        self.register_buffer("boost", torch.ones((), device=self.device), persistent=False)
        self.register_buffer("bad", torch.zeros((), device=self.device), persistent=False)
        optimizer: Any = O.AdamW(self.parameters(), fused=True)
        optimizer.found_inf = self.bad
        return optimizer

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.boost.fill_(math.inf if self.global_step % 11 == 10 else 1.0)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.bad.copy_(~torch.stack(norms).isfinite().all())


class Scales(Callback):
    """Keeps the scale and the growth tracker of each step."""

    def __init__(self) -> None:
        self.history: list[tuple[Tensor, Tensor]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        scaler = trainer.precision_plugin.scaler
        self.history.append((scaler._scale.clone(), scaler._growth_tracker.clone()))

    @property
    def skipped(self) -> int:
        scales = [2.0**16, *(float(scale) for scale, _ in self.history)]
        return sum(now < before for before, now in pairwise(scales))


def run(
    folder: Path,
    accelerator: str,
    build: Callable[[], Net],
    callback: CUDAGraphCallback | None,
    init_scale: float = 2.0**16,
    **kwargs: Any,
) -> tuple[Trace, Scales]:
    device = "cuda" if accelerator == "gpu" else "cpu"
    scales = Scales()
    scaler = torch.amp.GradScaler(device, init_scale=init_scale, growth_interval=7)
    trace = train(
        make(build),
        folder,
        callback,
        accelerator=accelerator,
        plugins=[MixedPrecision("16-mixed", device, scaler)],
        callbacks=(scales,),
        **kwargs,
    )
    return trace, scales


FORMS: dict[str, Callable[[Any], O.Optimizer]] = {
    "AdamW-fused": lambda p: O.AdamW(p, lr=1e-3, fused=True),
    "SGD-momentum": lambda p: O.SGD(p, lr=1e-2, momentum=0.9, dampening=0.1),
    "RMSprop-single": lambda p: O.RMSprop(p, lr=1e-4, foreach=False),
    "AdamW-foreach": lambda p: O.AdamW(p, lr=1e-3, foreach=True),
    "Adagrad": lambda p: O.Adagrad(p, lr=1e-2),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "clip"),
    [  # Lightning itself refuses to clip for fused optimizers in mixed precision
        *(("AdamW-fused", None), ("SGD-momentum", None), ("SGD-momentum", 0.05)),
        *(("RMSprop-single", 0.05), ("AdamW-foreach", 0.05), ("Adagrad", None)),
    ],
)
def test_two_hundred_steps(tmp_path: Path, accelerator: str, form: str, clip: float | None) -> None:
    def build() -> Net:
        return Overflows(FORMS[form])

    kwargs: dict[str, Any] = {"max_epochs": 25, "gradient_clip_val": clip, "checkpoint_every": 50}
    callback = CUDAGraphCallback()
    plain, plain_scales = run(tmp_path / "plain", accelerator, build, None, **kwargs)
    graph, graph_scales = run(tmp_path / "graph", accelerator, build, callback, **kwargs)
    assert len(graph_scales.history) == 200
    assert graph_scales.skipped >= 10
    assert not differences(plain_scales.history, graph_scales.history)
    assert_same(plain, graph)
    assert graph.counts.captures == 2  # the last batch of each epoch is smaller
    assert graph.counts.replayed >= 165
    assert f"{graph_scales.skipped} step(s) skipped, because a gradient overflowed" in str(
        callback.summary
    )


class OverflowsByData(Net):
    """Some batches overflow, two of them in a row, without user code between the steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        output["loss"] = output["loss"] * torch.where(batch[0][0, 0] > 0.3, 1e9, 1.0)
        return output


COUNTING: dict[str, Callable[[Any], O.Optimizer]] = {
    "AdamW": lambda p: O.AdamW(p, lr=1e-3),
    "Adam-amsgrad": lambda p: O.Adam(p, lr=1e-3, amsgrad=True),
    "NAdam-single": lambda p: O.NAdam(p, lr=1e-3, foreach=False),
    "RAdam": lambda p: O.RAdam(p, lr=1e-3),
}


def _unwatched(
    tmp_path: Path,
    accelerator: str,
    form: str,
    callback: CUDAGraphCallback | None,
    module: Net | None = None,
    **kwargs: Any,
) -> Trace:
    device = "cuda" if accelerator == "gpu" else "cpu"
    scaler = torch.amp.GradScaler(device, init_scale=2.0**16, growth_interval=7)
    return train(
        module or make(lambda: OverflowsByData(COUNTING[form])),
        tmp_path,
        callback,
        accelerator=accelerator,
        plugins=[MixedPrecision("16-mixed", device, scaler)],
        max_epochs=6,
        checkpoint_every=5,
        log_every_n_steps=20,
        watched=False,
        **kwargs,
    )


def states_possible(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of states that each replay of an optimizer's step may begin with."""
    own, numbers = Outcomes.possible, list[int]()

    def possible(outcomes: Outcomes) -> list[Any]:
        states = own(outcomes)
        numbers.append(len(states))
        return states

    monkeypatch.setattr(Outcomes, "possible", possible)
    return numbers


@pytest.mark.spread
@pytest.mark.parametrize("form", COUNTING)
def test_counters_are_right_without_a_wait(
    tmp_path: Path, accelerator: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next replay is launched before the host knows if this one was skipped."""
    numbers = states_possible(monkeypatch)
    plain = _unwatched(tmp_path / "plain", accelerator, form, None)
    graph = _unwatched(tmp_path / "graph", accelerator, form, CUDAGraphCallback(timings=None))
    assert len(graph.checkpoints) > 8
    assert_same(plain, graph)
    steps = {float(entry["step"]) for entry in graph.final["optimizer"]["state"].values()}
    assert len(steps) == 1
    assert steps.pop() < graph.counts.replayed
    assert graph.counts.replayed > 30
    if accelerator == "cpu":  # a GPU may be done with a small step before the next is launched
        assert numbers.count(2) > 12


class Reads(Callback):
    """User code that reads counters between two steps."""

    def __init__(self) -> None:
        self.counters: list[float] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        states = trainer.optimizers[0].state.values()
        self.counters += {float(state["step"]) for state in states if "step" in state}


def test_user_code_finds_the_counters_of_its_step(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = states_possible(monkeypatch)
    one, other = Reads(), Reads()
    plain = _unwatched(tmp_path / "plain", accelerator, "AdamW", None, callbacks=(one,))
    callback = CUDAGraphCallback(timings=None)
    graph = _unwatched(tmp_path / "graph", accelerator, "AdamW", callback, callbacks=(other,))
    assert_same(plain, graph)
    assert one.counters == other.counters
    assert 1 < len(set(one.counters)) < len(one.counters)
    assert set(numbers) == {1}


class Restarts(O.lr_scheduler.LRScheduler):
    """Takes the rate from the counters, and sets them back at times."""

    def get_lr(self) -> list[float]:
        steps = [state["step"] for state in self.optimizer.state.values() if "step" in state]
        rate = 1 / (1 + max(map(float, steps), default=0.0))
        if self.last_epoch % 7 == 6:
            for step in steps:
                step.zero_()
        return [base * rate for base in self.base_lrs]


def _from_counters(optimizer: O.Optimizer) -> Any:
    def factor(epoch: int) -> float:
        return 1 / (1 + max((float(state["step"]) for state in optimizer.state.values()), default=0.0))

    return O.lr_scheduler.LambdaLR(optimizer, factor)


def _restarts_later(optimizer: O.Optimizer) -> Any:
    schedulers = [O.lr_scheduler.ConstantLR(optimizer, 0.5), Restarts(optimizer)]
    return O.lr_scheduler.SequentialLR(optimizer, schedulers, [4])


@pytest.mark.long
@pytest.mark.parametrize("schedule", [Restarts, _from_counters, _restarts_later])
def test_a_schedule_finds_the_counters_of_its_step(
    tmp_path: Path, accelerator: str, schedule: Any
) -> None:
    def run(name: str, callback: CUDAGraphCallback | None) -> Trace:
        module = make(lambda: OverflowsByData(COUNTING["AdamW"], schedule))
        return _unwatched(tmp_path / name, accelerator, "AdamW", callback, module)

    plain, graph = run("plain", None), run("graph", CUDAGraphCallback(timings=None, verify=None))
    final = "weights", "optimizer"
    assert not differences([plain.final[n] for n in final], [graph.final[n] for n in final])
    assert graph.counts.replayed > 30


def _numbers(optimizer: O.Optimizer) -> Any:
    length = 30
    return O.lr_scheduler.LambdaLR(optimizer, lambda epoch: math.cos(epoch / length))


@pytest.mark.long
@pytest.mark.parametrize("schedule", [_numbers, O.lr_scheduler.LinearLR, O.swa_utils.SWALR])
def test_a_schedule_of_numbers_does_not_make_the_host_wait(
    tmp_path: Path, accelerator: str, schedule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"swa_lr": 1e-3} if schedule is O.swa_utils.SWALR else {}
    module = make(lambda: OverflowsByData(COUNTING["AdamW"], lambda o: schedule(o, **more)))
    numbers = states_possible(monkeypatch)
    _unwatched(tmp_path, accelerator, "AdamW", CUDAGraphCallback(timings=None), module)
    assert accelerator != "cpu" or numbers.count(2) > 12


class ReadsAtTheEnd(Callback):
    def __init__(self) -> None:
        self.counters: list[float] = []

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.counters += [float(state["step"]) for state in trainer.optimizers[0].state.values()]


class Breaks(TensorDataset):
    """Fails in a batch; the last steps before it overflow."""

    def __getitem__(self, index: int) -> Any:
        if index == 16 * BATCH_SIZE:
            raise OSError("The disk is gone.")
        return super().__getitem__(index)


def test_counters_are_right_after_an_exception(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = states_possible(monkeypatch)
    batches = DataLoader(Breaks(*loader(batches=20).dataset.tensors), batch_size=BATCH_SIZE)
    found = []
    for name, callback in (("plain", None), ("graph", CUDAGraphCallback(timings=None))):
        reads = ReadsAtTheEnd()
        _unwatched(
            *(tmp_path / name, accelerator, "AdamW", callback),
            callbacks=(reads,),
            train_loader=batches,
            raises=OSError,
        )
        found.append(reads.counters)
    assert found[0] == found[1]
    assert 0 < found[0][0] < 12
    assert accelerator != "cpu" or 2 in numbers


class Averages(Own):
    """Keeps a tensor on itself, and none in its state."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.average: Tensor | None = None

    def update(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if self.average is None:
            self.average = torch.zeros((), device=p.device)
        self.average.mul_(0.9).add_(p.grad.abs().mean(), alpha=0.1)
        p.sub_(p.grad / (1 + self.average) * group["lr"])


class Draws(Own):
    """Adds noise."""

    def update(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.add_(torch.randn_like(p) * group["lr"] * 1e-3)
        super().update(p, state, group)


@pytest.mark.spread
@pytest.mark.parametrize("kind", [Own, Averages, Draws])
def test_optimizers_of_others(tmp_path: Path, accelerator: str, kind: Any) -> None:
    def build() -> Net:
        return Overflows(kind)

    callback = CUDAGraphCallback()
    plain, one = run(tmp_path / "plain", accelerator, build, None)
    graph, other = run(tmp_path / "graph", accelerator, build, callback)
    assert one.skipped > 0
    assert not differences(one.history, other.history)
    assert_same(plain, graph)
    assert graph.counts.replayed > 10
    assert ("draws random numbers" in str(callback.summary)) is (kind is Draws)
    assert ("steps eagerly" in str(callback.summary)) is (kind is Draws)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_the_first_steps_overflow(tmp_path: Path, accelerator: str) -> None:
    """Warm-up goes on until a step was applied, because only then is there state to capture."""
    kwargs: dict[str, Any] = {"init_scale": 2.0**26}

    def build() -> Net:
        return Overflows(FORMS["SGD-momentum"])

    plain, _ = run(tmp_path / "plain", accelerator, build, None, **kwargs)
    graph, _ = run(tmp_path / "graph", accelerator, build, CUDAGraphCallback(), **kwargs)
    assert_same(plain, graph)
    assert graph.counts.warmed_up > 5
    assert graph.counts.captures == 1
    assert graph.counts.recaptures == ()


class ChangesTheScaler(Overflows):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self.global_step == 10:
            self.trainer.precision_plugin.scaler.set_growth_interval(3)
        if self.global_step == 15:
            state = self.trainer.precision_plugin.scaler.state_dict()
            self.trainer.precision_plugin.scaler.load_state_dict({**state, "scale": 2.0**9})


@pytest.mark.long
def test_the_scaler_changed_by_hand(tmp_path: Path, accelerator: str) -> None:
    plain, one = run(tmp_path / "plain", accelerator, ChangesTheScaler, None)
    graph, other = run(tmp_path / "graph", accelerator, ChangesTheScaler, CUDAGraphCallback())
    assert not differences(one.history, other.history)
    assert_same(plain, graph)
    assert graph.counts.recaptures == ("`growth_interval` of the gradient scaler changed from 7 to 3",)


class ReplacesTheScaler(Overflows):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self.global_step == 12:
            scaler = torch.amp.GradScaler(self.device.type, init_scale=2.0**8, growth_interval=2)
            self.trainer.precision_plugin.scaler = scaler


@pytest.mark.long
@pytest.mark.parametrize("scope", ["step", "forward_backward"])
def test_another_scaler_in_the_middle_of_a_run(tmp_path: Path, accelerator: str, scope: Any) -> None:
    plain, one = run(tmp_path / "plain", accelerator, ReplacesTheScaler, None)
    callback = CUDAGraphCallback(scope=scope)
    graph, other = run(tmp_path / "graph", accelerator, ReplacesTheScaler, callback)
    assert not differences(one.history, other.history)
    assert_same(plain, graph)
    assert graph.counts.captures == 2
    assert "the trainer has another gradient scaler" in graph.counts.recaptures


@pytest.mark.long
def test_a_scaler_that_is_switched_off(tmp_path: Path, accelerator: str) -> None:
    device = "cuda" if accelerator == "gpu" else "cpu"

    def plugins() -> Any:
        return [MixedPrecision("16-mixed", device, torch.amp.GradScaler(device, enabled=False))]

    kwargs: dict[str, Any] = {"accelerator": accelerator}
    plain = train(make(Net), tmp_path / "plain", plugins=plugins(), **kwargs)
    graph = train(make(Net), tmp_path / "graph", CUDAGraphCallback(), plugins=plugins(), **kwargs)
    assert_same(plain, graph)
    assert graph.counts.replayed == 18


class ItemLate(Overflows):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 1.0).item()


@pytest.mark.long
def test_a_refused_capture_leaves_the_scaler_alone(tmp_path: Path, accelerator: str) -> None:
    def build() -> Net:
        return ItemLate(FORMS["SGD-momentum"])

    with pytest.raises(UnsupportedError, match=re.escape("`.item()`")):
        run(tmp_path / "raise", accelerator, build, CUDAGraphCallback(scope="step"))
    plain, one = run(tmp_path / "plain", accelerator, build, None, max_epochs=2)
    for name, callback in (
        ("eager", CUDAGraphCallback(scope="step", on_unsupported="eager")),
        ("behind", CUDAGraphCallback()),
    ):
        graph, other = run(tmp_path / name, accelerator, build, callback, max_epochs=2)
        assert not differences(one.history, other.history)
        assert_same(plain, graph)
        assert graph.counts.captures == (0 if name == "eager" else 1)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_resumed_with_and_without(tmp_path: Path, accelerator: str) -> None:
    def build() -> Net:
        return Overflows(FORMS["AdamW-fused"])

    run(tmp_path / "first", accelerator, build, CUDAGraphCallback())
    last = str(tmp_path / "first" / "ckpt" / "last.ckpt")
    assert "MixedPrecision" in torch.load(last, weights_only=True, map_location="cpu")
    kwargs: dict[str, Any] = {"ckpt_path": last, "max_epochs": 5}
    plain, one = run(tmp_path / "plain", accelerator, build, None, **kwargs)
    graph, other = run(tmp_path / "graph", accelerator, build, CUDAGraphCallback(), **kwargs)
    assert not differences(one.history, other.history)
    assert_same(plain, graph)
    assert graph.counts.replayed >= 10


@pytest.mark.spread
@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_fused_optimizer_skips_bad_batches(tmp_path: Path, accelerator: str, accumulated: int) -> None:
    """The recipe of docs/recipes/nan_checks.md, with batches to skip."""
    kwargs = {
        "accelerator": accelerator,
        "accumulate_grad_batches": accumulated,
        "max_epochs": 3 * accumulated,
    }
    plain = train(make(SkipsBadBatches), tmp_path / "plain", **kwargs)
    callback = CUDAGraphCallback()
    graph = train(make(SkipsBadBatches), tmp_path / "graph", callback, **kwargs)
    assert_same(plain, graph)
    assert graph.counts.replayed > 11
    module, trainer = graph.module, graph.trainer
    assert module is not None
    assert trainer is not None
    assert all(bool(parameter.isfinite().all()) for parameter in module.parameters())
    state = trainer.optimizers[0].state[next(module.parameters())]
    assert 0 < float(state["step"]) < trainer.global_step
