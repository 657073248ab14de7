"""Hooks that Lightning calls in the middle of a step: on the host, in their places, at every step."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel
from torchmetrics import MeanSquaredError

from lightning_cudagraph import CaptureError, CUDAGraphCallback, HookError, UnsupportedError
from lightning_cudagraph.capture.graph import CaptureInstance
from lightning_cudagraph.device.backend_for import backend_for
from tests.harness import Apart, Net, assert_same, differences, make, train
from tests.rows import refused, row

STEPS = 24  # of three epochs; three have a ragged batch, which is not replayed


def _seen(trainer: Any, module: Any) -> dict[str, Any]:
    """All that a hook can look at, as it is now."""
    return copy.deepcopy(
        {
            "step": trainer.global_step,
            "progress": trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.state_dict(),
            "weights": {name: value.detach() for name, value in module.state_dict().items()},
            "gradients": [p.grad for p in module.parameters()],
            "metrics": dict(trainer.callback_metrics),
            "lr": [group["lr"] for group in trainer.optimizers[0].param_groups],
        }
    )


class Looks(Net):
    """Looks at everything in its hooks around the dropping of gradients."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.apart = Apart(seen=[])  # which no walk enters: it would take longer than the run

    @property
    def seen(self) -> list[Any]:
        return self.apart["seen"]

    def note(self, name: str, *args: Any) -> None:
        self.seen.append((name, self._current_fx_name, args, _seen(self.trainer, self)))
        self.log(f"module/{name}", float(len(self.seen)), on_step=True)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.note("on_before_zero_grad", type(optimizer))

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.note("optimizer_zero_grad", epoch, batch_idx, type(optimizer))
        optimizer.zero_grad()


class LookingCallback(Callback):
    """Looks at everything in all hooks inside the step."""

    def __init__(self) -> None:
        self.apart = Apart(seen=[])

    @property
    def seen(self) -> list[Any]:
        return self.apart["seen"]

    def note(self, name: str, trainer: Any, module: Any, *args: Any) -> None:
        self.seen.append((name, module._current_fx_name, args, _seen(trainer, module)))
        self.log(f"callback/{name}", float(len(self.seen)), on_step=True, on_epoch=True)

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.note("on_before_zero_grad", trainer, pl_module, type(optimizer))

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self.note("on_before_backward", trainer, pl_module, loss.detach())


class LookingBehind(LookingCallback):
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.note("on_after_backward", trainer, pl_module)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.note("on_before_optimizer_step", trainer, pl_module, type(optimizer))


def _trained(
    tmp_path: Path,
    build: Callable[[], pl.LightningModule],
    ours: CUDAGraphCallback,
    callbacks: Callable[[], tuple[Any, ...]] = tuple,
    **kwargs: Any,
) -> tuple[list[Any], list[tuple[Any, ...]], Any]:
    """A plain run and one with the callback: their modules, their callbacks, and the second trace."""
    modules, others, traces = [], [], []
    for name, callback in (("plain", None), ("graph", ours)):
        modules.append(make(build))
        others.append(callbacks())
        traces.append(train(modules[-1], tmp_path / name, callback, callbacks=others[-1], **kwargs))
    assert_same(*traces)
    return modules, others, traces[1]


@pytest.mark.spread
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("looking", [LookingCallback, LookingBehind])
@pytest.mark.parametrize("timed", [True, False])
def test_everything_a_hook_can_see(
    tmp_path: Path, accelerator: str, every: int, looking: type[LookingCallback], timed: bool
) -> None:
    ours = CUDAGraphCallback(**({} if timed else {"timings": None}))
    modules, others, graph = _trained(
        tmp_path,
        Looks,
        ours,
        lambda: (looking(), looking()),
        accelerator=accelerator,
        accumulate_grad_batches=every,
        gradient_clip_val=0.5,
        max_epochs=5 if every == 2 else 3,
    )
    assert graph.counts.replayed >= 15
    assert len(modules[0].seen) >= 2 * STEPS / every
    assert not differences(modules[0].seen, modules[1].seen)
    for plain, graphed in zip(*others, strict=True):
        assert not differences(plain.seen, graphed.seen)


class Saves(Callback):
    """Looks, and saves, when gradients have been dropped, and Lightning has counted that."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self.seen.append(_seen(trainer, pl_module))
        trainer.save_checkpoint(Path(trainer.default_root_dir) / f"before-{len(self.seen)}.ckpt")


@pytest.mark.spread(2)
@pytest.mark.parametrize("every", [1, 2])
def test_a_checkpoint_in_the_middle(tmp_path: Path, accelerator: str, every: int) -> None:
    seen = []

    def setting(folder: Path) -> dict[str, Any]:
        seen.append(Saves())
        return {"callbacks": (seen[-1],), "default_root_dir": folder}

    done = row(tmp_path, accelerator, Net, setting, accumulate_grad_batches=every)
    assert done.graph.counts.replayed > 8
    assert not differences(seen[0].seen, seen[1].seen)
    for number in (1, 9, 18):
        plain, graph = (
            torch.load(trace.trainer.default_root_dir + f"/before-{number}.ckpt", weights_only=False)
            for trace in (done.plain, done.graph)
            if trace.trainer is not None
        )
        plain["callbacks"], graph["callbacks"] = {}, {}  # paths of the folder of the run
        assert not differences(plain, graph)


class Stops(Callback):
    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        if trainer.global_step == 11:
            raise KeyError("stop")


def test_an_exception_before_the_backward_pass(tmp_path: Path, accelerator: str) -> None:
    ends = [
        train(
            make(Net),
            tmp_path / str(bool(callback)),
            callback,
            accelerator=accelerator,
            callbacks=(Stops(),),
            raises=KeyError,
        )
        for callback in (None, CUDAGraphCallback())
    ]
    assert ends[1].counts.replayed > 4
    plain, graph = (_seen(end.trainer, end.module) for end in ends)
    assert not differences(plain, graph)


def _average(averaged: Tensor, current: Tensor, number: Tensor) -> Tensor:
    # Torch's own cannot average integers on CUDA.
    return averaged + (current - averaged) / (number + 1)


class MovingAverage(Callback):
    """An average of weights and buffers, kept before gradients are dropped."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.average = AveragedModel(pl_module.features, use_buffers=True, avg_fn=_average)

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.average.update_parameters(pl_module.features)


@pytest.mark.long
def test_an_average_of_weights_and_buffers(tmp_path: Path, accelerator: str) -> None:
    _, others, graph = _trained(
        tmp_path, Net, CUDAGraphCallback(), lambda: (MovingAverage(),), accelerator=accelerator
    )
    assert graph.counts.replayed == 18
    averages = [callbacks[0].average.state_dict() for callbacks in others]
    assert not differences(*averages)


class Distills(Net):
    """The forward pass reads what `on_before_zero_grad` writes after it: a teacher, and a noise."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(12, 4).requires_grad_(False)
        self.student = nn.Linear(12, 4)
        self.register_buffer("noise", torch.zeros(4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        distance = (self.student(batch[0]) - self.teacher(batch[0]) - self.noise).square().mean()
        self.log("distance", distance)
        return loss + distance

    @torch.no_grad()
    def on_before_zero_grad(self, optimizer: Any) -> None:
        for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            slow.lerp_(fast, 0.1)
        # From the generator that dropout draws from in the forward pass before.
        self.noise.copy_(torch.randn(4, device=self.device) + self.features[1].running_mean[:4])


def test_a_hook_that_writes_what_the_forward_pass_reads(tmp_path: Path, accelerator: str) -> None:
    done = row(tmp_path, accelerator, Distills)
    assert done.graph.counts.replayed == 18


@pytest.mark.long
def test_another_order_would_be_seen(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison means something: with the hooks before the replay, the numbers are others."""
    take_turns = CaptureInstance.replay

    def hooks_first(self: Any, between: Any, *args: Any) -> Any:
        if between is not None:
            between(self.outputs, 0)
        return take_turns(self, None, *args)

    monkeypatch.setattr(CaptureInstance, "replay", hooks_first)
    traces = [
        train(make(Distills), tmp_path / name, ours, accelerator=accelerator)
        for name, ours in (("plain", None), ("graph", CUDAGraphCallback()))
    ]
    assert differences(traces[0].final["weights"], traces[1].final["weights"])


class SetsTheRate(Net):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + self.global_step % 5)


@pytest.mark.long
def test_a_learning_rate_set_in_the_middle(tmp_path: Path, accelerator: str) -> None:
    done = row(tmp_path, accelerator, SetsTheRate)
    assert done.graph.counts.replayed == 18


class ZeroesWhere(Net):
    """Zeroes gradients in place, always or from some step on."""

    def __init__(self, first_step: int = 0) -> None:
        super().__init__()
        self.first_step = first_step

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=self.global_step < self.first_step)


class KeepsAShare(Net):
    """Keeps a share of the gradients of the step before, as a momentum of its own."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


@pytest.mark.spread
@pytest.mark.parametrize("build", [ZeroesWhere, KeepsAShare])
@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("scope", ["step", "forward_backward"])
def test_gradients_left_in_place(
    tmp_path: Path, accelerator: str, build: Callable[[], Net], batches: int, scope: Any
) -> None:
    done = row(
        tmp_path,
        accelerator,
        build,
        ours=lambda: CUDAGraphCallback(scope=scope),
        accumulate_grad_batches=batches,
        max_epochs=4,
    )
    assert done.graph.counts.replayed >= 4
    assert not done.graph.counts.recaptures


@pytest.mark.long
def test_one_warm_up_step_does_not_show_the_gradients_left(tmp_path: Path, accelerator: str) -> None:
    done = row(tmp_path, accelerator, ZeroesWhere, ours=lambda: CUDAGraphCallback(warmup_steps=1))
    assert done.graph.counts.warmed_up >= 2
    assert done.graph.counts.replayed > 0


class Freezes(Net):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.global_step == 10:
            self.features[0].weight.requires_grad_(False)


class ChangesTheDecay(Net):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.global_step == 10:
            optimizer.param_groups[0]["weight_decay"] = 0.5


class MakesAGradient(Callback):
    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        if trainer.global_step == 10:
            pl_module.head.bias.grad = torch.ones_like(pl_module.head.bias)


class ScalesTheLoss(Callback):
    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        if trainer.global_step == 10:
            loss.mul_(0.5)


IN_THE_MIDDLE: dict[str, tuple[Callable[[], Net], Callable[[], tuple[Any, ...]], str]] = {
    "requires_grad": (
        Freezes,
        tuple,
        r"`Freezes.on_before_zero_grad` \(.*test_hooks.py:\d+\), `requires_grad` of parameter `features",
    ),
    "a hyperparameter": (ChangesTheDecay, tuple, "`weight_decay`.* changed from 0.01 to 0.5"),
    "gradients left": (
        lambda: ZeroesWhere(10),
        tuple,
        "`ZeroesWhere.optimizer_zero_grad` .*leaves the gradient of a parameter",
    ),
    "a gradient made": (
        Net,
        lambda: (MakesAGradient(),),
        r"`MakesAGradient.on_before_backward` .*sets or drops the gradient of a parameter \(4\)",
    ),
    "the loss written": (
        Net,
        lambda: (ScalesTheLoss(),),
        "`ScalesTheLoss.on_before_backward` .*writes into the loss",
    ),
}


@pytest.mark.spread(2)
@pytest.mark.parametrize("name", IN_THE_MIDDLE)
def test_what_the_rest_of_the_graph_cannot_follow(tmp_path: Path, accelerator: str, name: str) -> None:
    """It works in a plain run; the replay ends with an error, before it uses what is stale."""
    build, callbacks, match = IN_THE_MIDDLE[name]
    train(make(build), tmp_path / "plain", accelerator=accelerator, callbacks=callbacks())
    module = make(build)
    ours = CUDAGraphCallback(on_unsupported="eager")
    with pytest.raises(HookError, match=match):
        train(module, tmp_path / "graph", ours, accelerator=accelerator, callbacks=callbacks())
    assert module.trainer.global_step == 10


class Differentiates(Callback):
    def __init__(self, first_step: int = 0) -> None:
        self.first_step = first_step
        self.seen: list[Tensor] = []

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        if trainer.global_step >= self.first_step:
            self.seen += torch.autograd.grad(loss, pl_module.head.weight, retain_graph=True)


@pytest.mark.long
def test_autograd_of_the_loss(tmp_path: Path, accelerator: str) -> None:
    message = r"`Differentiates\.on_before_backward` .* asks for the autograd of the loss"
    seen: list[Differentiates] = []

    def setting(folder: Path) -> dict[str, Any]:
        seen.append(Differentiates())
        return {"callbacks": (seen[-1],)}

    refused(tmp_path, accelerator, Net, setting, match=message)
    assert not differences(seen[-2].seen, seen[-1].seen)
    with pytest.raises(HookError, match=message):
        train(
            make(Net),
            tmp_path / "late",
            CUDAGraphCallback(),
            accelerator=accelerator,
            callbacks=(Differentiates(12),),
        )


class Fails(Net):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.global_step == 10:
            raise ZeroDivisionError("a hook of mine")


def test_an_exception_in_the_middle(tmp_path: Path, accelerator: str) -> None:
    done = row(tmp_path, accelerator, Fails, raises=ZeroDivisionError)
    assert done.graph.counts.replayed == 6
    plain, graph = (trace.module for trace in (done.plain, done.graph))
    assert plain is not None
    assert graph is not None
    assert not differences(plain.state_dict(), graph.state_dict())


def _doubles(trainer: Any, pl_module: Any) -> None:
    for parameter in pl_module.parameters():
        parameter.grad = parameter.grad * 2  # another tensor


class DropsSome(Callback):
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_step % 4 == 0:
            pl_module.head.bias.grad = None


class ScaledBehind(Net):
    """The module's own hook comes after those of callbacks."""

    def on_after_backward(self) -> None:
        self.log("peak_gradient", self.head.weight.grad.abs().max())  # type: ignore[union-attr]
        if self.global_step % 3 == 0:
            self.head.weight.grad.clamp_(-0.01, 0.01)  # type: ignore[union-attr]


@pytest.mark.long
@pytest.mark.parametrize("every", [1, 2])
def test_gradients_changed_by_callbacks(tmp_path: Path, accelerator: str, every: int) -> None:
    done = row(
        tmp_path,
        accelerator,
        ScaledBehind,
        lambda folder: {"callbacks": (LambdaCallback(on_after_backward=_doubles), DropsSome())},
        gradient_clip_val=0.5,
        accumulate_grad_batches=every,
        max_epochs=4,
    )
    assert done.graph.counts.replayed >= 15
    assert done.graph.callback is not None
    assert "`LambdaCallback.on_after_backward` (" in str(done.graph.callback.summary)


def test_scope_step(tmp_path: Path, accelerator: str) -> None:
    match = r"`DropsSome.on_after_backward` \(.*test_hooks.py:\d+\) runs on the host"
    with pytest.raises(UnsupportedError, match=f"(?s){match}"):
        train(
            make(Net),
            tmp_path,
            CUDAGraphCallback(scope="step"),
            accelerator=accelerator,
            callbacks=(DropsSome(),),
        )


class Adds(Callback):
    """Adds callbacks with hooks inside the step, in the middle of a run."""

    def __init__(self) -> None:
        self.added: list[LookingBehind] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 12:
            self.added.append(LookingBehind())
            trainer.callbacks.append(self.added[0])
            self.added[0].log = trainer.lightning_module.log  # type: ignore[method-assign]


@pytest.mark.long
def test_callbacks_that_come_later(tmp_path: Path, accelerator: str) -> None:
    _, others, graph = _trained(
        tmp_path, Net, CUDAGraphCallback(), lambda: (Adds(),), accelerator=accelerator
    )
    assert "the hooks inside the step changed from [] to ['`LookingBehind" in graph.counts.recaptures[0]
    assert not differences(*(callbacks[0].added[0].seen for callbacks in others))


def test_a_capture_in_parts(accelerator: str) -> None:
    device = torch.device("cuda", 0) if accelerator == "gpu" else torch.device("cpu")
    backend = backend_for(device)
    weight = nn.Parameter(torch.arange(1.0, 4.0, device=device))
    total = torch.zeros(3, device=device)

    def body() -> Tensor:
        total.add_(torch.rand(3, device=device))
        product = (weight * weight * total).sum()
        backend.cut()
        (gradient,) = torch.autograd.grad(product, weight)
        backend.cut()
        return gradient + torch.rand(3, device=device)

    pl.seed_everything(1, verbose=False)
    with backend.on_side_stream():
        captured, static = backend.capture(body)
    turns: list[tuple[int, Tensor]] = []

    def between(index: int) -> None:
        turns.append((index, total.clone()))
        with torch.no_grad():
            weight.mul_(2)  # the backward pass reads it where it is

    for _ in range(2):
        captured.replay(between)
    captured.replay()

    pl.seed_everything(1, verbose=False)
    expected, value = torch.zeros(3, device=device), torch.arange(1.0, 4.0, device=device)
    for replay in range(3):
        expected += torch.rand(3, device=device)
        scale = 2.0 if replay < 2 else 1.0
        gradient = 2 * value * scale * expected + torch.rand(3, device=device)
        value = value * scale * scale
        if replay < 2:
            assert torch.equal(turns[2 * replay][1], expected)
    assert [index for index, _ in turns] == [0, 1, 0, 1]
    torch.testing.assert_close(static, gradient)
    backend.release(captured)


class Captured(Net):
    """Tensor work in every hook of the module that is captured, with logs."""

    def on_before_backward(self, loss: Tensor) -> None:
        self.log("before_backward", loss * 2, on_step=True, on_epoch=True)

    def backward(self, loss: Tensor) -> None:
        (loss * 0.5).backward()

    def on_after_backward(self) -> None:
        self.log("after_backward", self.head.weight.grad.norm())  # type: ignore[union-attr]
        self.features[0].weight.grad = self.features[0].weight.grad.clamp(-0.01, 0.01)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.log("norm", torch.stack(norms).norm(), on_step=True)
        self.head.bias.grad.mul_(0.1)  # type: ignore[union-attr]

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, 0.5, "norm")
        self.log("clipped", self.head.weight.grad.norm())  # type: ignore[union-attr]


@pytest.mark.spread
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("scope", ["step", "forward_backward"])
def test_tensor_work_is_captured(tmp_path: Path, accelerator: str, scope: Any, every: int) -> None:
    def ours() -> CUDAGraphCallback:
        return CUDAGraphCallback(scope=scope)

    done = row(
        tmp_path,
        accelerator,
        Captured,
        ours=ours,
        accumulate_grad_batches=every,
        max_epochs=1 + 2 * every,
    )
    assert done.graph.counts.replayed >= 18


class DropsOne(Net):
    """Has no gradient for one parameter, in a way that a capture can hold."""

    def on_after_backward(self) -> None:
        self.head.bias.grad = None


@pytest.mark.spread(2)
@pytest.mark.parametrize("every", [1, 3])
def test_a_gradient_that_is_dropped(tmp_path: Path, accelerator: str, every: int) -> None:
    done = row(tmp_path, accelerator, DropsOne, accumulate_grad_batches=every, max_epochs=5)
    assert done.graph.counts.replayed >= 15


class Measures(Net):
    """A metric that is called in the graph, and a captured hook after it."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        self.mean(self.head.weight, self.head.weight * loss)
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        return loss

    def on_after_backward(self) -> None:
        self.log("peak_gradient", self.head.weight.grad.max())  # type: ignore[union-attr]


@pytest.mark.long
@pytest.mark.parametrize("looking", [(), (LookingCallback,)])
def test_a_metric_and_a_captured_hook(tmp_path: Path, accelerator: str, looking: Any) -> None:
    done = row(
        tmp_path,
        accelerator,
        Measures,
        lambda folder: {"callbacks": tuple(cls() for cls in looking)},
        ours=lambda: CUDAGraphCallback(scope="step"),
    )
    assert done.graph.counts.replayed >= 15


class Pruned(Net):
    """An attribute that a hook of torch sets in the forward pass, and a captured hook after it."""

    def __init__(self) -> None:
        super().__init__()
        prune.l1_unstructured(self.head, "weight", 0.5)  # type: ignore[no-untyped-call]

    def on_after_backward(self) -> None:
        self.log("masked", self.head.weight_orig.grad.norm())


@pytest.mark.long
def test_pruned_weights_and_a_captured_hook(tmp_path: Path, accelerator: str) -> None:
    done = row(tmp_path, accelerator, Pruned, ours=lambda: CUDAGraphCallback(scope="step"))
    assert done.graph.counts.replayed == 18


def _logs_norms(self: Any, *args: Any, **kwargs: Any) -> None:
    # Lightning's own utility makes a tensor of a list of tensors.
    self.log_dict(grad_norm(self.head, norm_type=2), on_step=True, on_epoch=True)


def _counts(self: Any, *args: Any, **kwargs: Any) -> None:
    self.calls = getattr(self, "calls", 0) + 1
    self.log("calls", float(self.calls), on_step=True)
    if self.global_step % 3 == 0:
        self.head.weight.grad.mul_(0.5)
    if self.global_step % 5 == 0:
        self.head.bias.grad = None


@pytest.mark.long
@pytest.mark.spread
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("work", [_logs_norms, _counts])
@pytest.mark.parametrize(
    "hook", ["on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping"]
)
def test_host_work_after_the_backward_pass(
    tmp_path: Path,
    accelerator: str,
    hook: str,
    work: Callable[..., None],
    every: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cls: Any = type("Works", (Net,), {hook: work})
    kwargs: dict[str, Any] = {"accumulate_grad_batches": every, "max_epochs": 1 + 2 * every}
    done = row(tmp_path, accelerator, cls, **kwargs)
    assert done.graph.counts.replayed >= 12
    assert done.graph.callback is not None
    report = str(done.graph.callback.summary)
    assert "and the optimizer steps eagerly" in report
    assert report.count("test_hooks.py:") == 1
    remedy = "Remedy: " + ("Compute the norms in the hook itself" if work is _logs_norms else "")
    assert "the optimizer steps eagerly: " in caplog.text.partition(remedy)[0]
    with pytest.raises(CaptureError, match=rf"(?s)test_hooks.py:\d+ \(`self\..*{remedy}"):
        train(make(cls), tmp_path / "step", CUDAGraphCallback(scope="step"), accelerator=accelerator)


class ClipsStrictly(Net):
    """Asks on the host whether the gradients are finite, and is given others where `spoilt` says so."""

    spoilt = -1

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == self.spoilt:
            batch[0].fill_(float("inf"))

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.5, error_if_nonfinite=True)


class ClipsStrictlyInVain(ClipsStrictly):
    spoilt = 12


@pytest.mark.long
@pytest.mark.parametrize("every", [1, 2])
def test_clipping_that_asks_for_finite_gradients(tmp_path: Path, accelerator: str, every: int) -> None:
    done = row(
        tmp_path, accelerator, ClipsStrictly, accumulate_grad_batches=every, max_epochs=1 + 2 * every
    )
    assert done.graph.counts.replayed >= 14
    assert done.graph.callback is not None
    assert "the optimizer steps eagerly" not in str(done.graph.callback.summary)


@pytest.mark.long
@pytest.mark.parametrize("every", [1, 2])
def test_clipping_that_finds_other_gradients(tmp_path: Path, accelerator: str, every: int) -> None:
    done = row(
        tmp_path,
        accelerator,
        ClipsStrictlyInVain,
        accumulate_grad_batches=every,
        max_epochs=1 + 2 * every,
        raises=RuntimeError,
    )
    assert "is non-finite, so it cannot be clipped" in str(done.graph.error)
    assert done.graph.counts.replayed >= 4
    for left in (
        lambda trace: trace.module.state_dict(),
        lambda trace: [parameter.grad for parameter in trace.module.parameters()],
        lambda trace: trace.trainer.optimizers[0].state_dict(),
        lambda trace: trace.trainer.fit_loop.state_dict(),
    ):
        assert not differences(left(done.plain), left(done.graph))


@pytest.mark.long
@pytest.mark.parametrize("hook", ["on_before_backward", "backward"])
def test_host_work_before_and_in_the_backward_pass(tmp_path: Path, accelerator: str, hook: str) -> None:
    def work(self: Any, loss: Tensor) -> None:
        self.calls = getattr(self, "calls", 0) + 1
        if hook == "backward":
            loss.backward()

    cls: Any = type("Works", (Net,), {hook: work})
    match = r"sets or changes `calls` of the `Works`,.* found at .*test_hooks.py:\d+ \(`self.calls = "
    refused(tmp_path, accelerator, cls, match=match)


class StepsItsOwnWay(Net):
    """A warm-up of the learning rate, no step on every third batch, two passes on another."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, (self.global_step + 1) / 10)
        if batch_idx % 3 == 2:
            optimizer_closure()
            return
        if batch_idx % 3 == 1:
            optimizer_closure()
            for parameter in self.parameters():
                parameter.grad.mul_(0.5)  # type: ignore[union-attr]
        optimizer.step(closure=optimizer_closure)


@pytest.mark.long
def test_a_step_of_ones_own(tmp_path: Path, accelerator: str) -> None:
    done = row(tmp_path, accelerator, StepsItsOwnWay, max_epochs=5)
    assert done.graph.counts.replayed >= 15


threads: set[tuple[int, bool]] = set()  # the thread of a hook, and whether autograd may use others


def _note_thread() -> None:
    threads.add((threading.get_ident(), torch._C._is_multithreading_enabled()))


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any) -> Tensor:
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        _note_thread()
        return gradients[0] * ctx.module.scale, None


class ScalesGradients(Net):
    """Multiplies gradients, in three ways, by a number that is another one in each epoch."""

    scale = 1.0

    def configure_model(self) -> None:
        self.head.bias.register_post_accumulate_grad_hook(self._accumulated)

    def _accumulated(self, parameter: Tensor) -> None:
        _note_thread()
        assert parameter.grad is not None
        parameter.grad.mul_(self.scale)

    def _scaled(self, gradient: Tensor) -> Tensor:
        _note_thread()
        return gradient * self.scale

    def on_train_epoch_start(self) -> None:
        self.scale = 1.0 + self.current_epoch

    def forward(self, x: Tensor) -> Any:
        out = _Scaled.apply(super().forward(x), self)  # type: ignore[no-untyped-call]
        if out.requires_grad:
            out.register_hook(self._scaled)
        return out


def test_python_in_the_backward_pass_is_watched(tmp_path: Path, accelerator: str) -> None:
    """On a GPU too, where autograd would call it in a thread of its own."""
    plain = train(make(ScalesGradients), tmp_path / "plain", accelerator=accelerator, max_epochs=2)
    threads.clear()
    callback = CUDAGraphCallback(verify=None, harmless=["threads"])
    graph = train(
        make(ScalesGradients), tmp_path / "graph", callback, accelerator=accelerator, max_epochs=2
    )
    assert_same(plain, graph)
    assert graph.counts.replayed > 6
    assert any("`scale`" in reason for reason in graph.counts.recaptures)
    assert threads == {(threading.get_ident(), False)}


class HostHooks(Net):
    """Keeps what each hook on the host is given, and changes the course of the run in some."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def note(self, name: str, *args: Any) -> None:
        self.seen.append((name, self.global_step, self.current_epoch, args))

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.note("on_before_batch_transfer", dataloader_idx)
        return [batch[0] * 2, batch[1]]

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        self.note("transfer_batch_to_device", dataloader_idx)
        return [part.to(device) for part in batch]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batch[0] += 0.5
        self.note("on_after_batch_transfer", dataloader_idx, batch)
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        self.note("on_train_batch_start", batch_idx, batch)
        return -1 if self.current_epoch == 1 and batch_idx == 5 else None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note("on_train_batch_end", batch_idx, outputs, batch)
        self.log("last_index", float(batch_idx))

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.note("lr_scheduler_step", type(scheduler), metric)
        if self.global_step % 3:
            scheduler.step()

    def on_train_epoch_end(self) -> None:
        self.note("on_train_epoch_end", dict(self.trainer.callback_metrics))


def test_hooks_on_the_host(tmp_path: Path, accelerator: str) -> None:
    modules, _, trace = _trained(
        tmp_path, HostHooks, CUDAGraphCallback(), accelerator=accelerator, max_epochs=4
    )
    assert trace.counts.replayed >= 18
    # What was kept of batches and outputs is what it was, though it was not copied.
    assert not differences(modules[0].seen, modules[1].seen)
