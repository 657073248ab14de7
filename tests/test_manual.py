"""Manual optimization in Lightning, with `GraphedStep` for its parts, against the run without graphs.

`tests/gpu/test_manual.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

import copy
import io
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.profilers import SimpleProfiler
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError

from lightning_cudagraph import (
    CUDAGraphCallback,
    GraphedStep,
    LayerTimingsMonitor,
    UnsupportedError,
)
from tests.harness import Net, differences, make, train

STEPS = 8  # in an epoch

pytestmark = [
    # Lightning's advice on what to checkpoint.
    pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization"),
]


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(8 * STEPS + 3, 4, generator=generator)), batch_size=8)


def net(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, outputs)
    )


class GAN(pl.LightningModule):
    """Two nets, two optimizers, two schedules; `graphs` says whether the two steps are captured."""

    options: Any = {}  # noqa: RUF012

    def __init__(self, graphs: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.graphs = graphs
        self.generator = net(3, 4)
        self.critic = net(4, 1)
        self.weight = 0.5

    def on_fit_start(self) -> None:
        generator, critic = self.optimizers()
        options = {**self.options, **({} if self.graphs else {"backend": "off"})}
        self.critic_step = GraphedStep(self._critic_step, optimizers=critic, **options)
        self.generator_step = GraphedStep(self._generator_step, optimizers=generator, **options)

    def on_fit_end(self) -> None:
        self.critic_step.close()
        self.generator_step.close()

    def _critic_step(self, real: Tensor) -> Any:
        _, optimizer = self.optimizers()
        fake = self.generator(torch.randn(len(real), 3, device=real.device)).detach()
        loss = self.critic(fake).mean() - self.critic(real).mean() + self.weight * real.std()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return {"loss": loss, "fake": fake}

    def _generator_step(self, real: Tensor) -> Any:
        optimizer, _ = self.optimizers()
        loss = -self.critic(self.generator(torch.randn(len(real), 3, device=real.device))).mean()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (real,) = batch
        generator, critic = self.optimizers()
        self.toggle_optimizer(critic)
        out = self.critic_step(real)
        self.untoggle_optimizer(critic)
        self.log("critic", out["loss"], on_step=True, on_epoch=True, prog_bar=True)
        self.log("spread", out["fake"].std())
        self.toggle_optimizer(generator)
        loss = self.generator_step(real)
        self.untoggle_optimizer(generator)
        self.log("generator", loss, on_step=True, on_epoch=True)
        for scheduler in self.lr_schedulers():
            scheduler.step()
        return loss

    def configure_optimizers(self) -> Any:
        optimizers = [
            torch.optim.AdamW(self.generator.parameters(), lr=1e-2, fused=True),
            torch.optim.SGD(self.critic.parameters(), lr=1e-2, momentum=0.9),
        ]
        return optimizers, [torch.optim.lr_scheduler.CosineAnnealingLR(o, 30) for o in optimizers]


class Untoggled(GAN):
    """Gradients flow into the other net, and are never used, and never dropped."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (real,) = batch
        self.log("critic", self.critic_step(real)["loss"])
        return self.generator_step(real)


class InOne(GAN):
    """Both in one graph: the critic steps between two backward passes."""

    def on_fit_start(self) -> None:
        backend = "auto" if self.graphs else "off"
        self.both = GraphedStep(self._both, optimizers=self.optimizers(), backend=backend)
        self.critic_step = self.generator_step = self.both

    def _both(self, real: Tensor) -> Any:
        return self._critic_step(real), self._generator_step(real)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out, loss = self.both(batch[0])
        self.log_dict({"critic": out["loss"], "generator": loss})
        return loss


class TogglesInside(GAN):
    """`toggle_optimizer` in the captured function, which leaves `requires_grad` as it was."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("critic", self.critic_step(batch[0])["loss"])
        return self.generator_step(batch[0])

    def _critic_step(self, real: Tensor) -> Any:
        with self.toggled_optimizer(self.optimizers()[1]):
            return super()._critic_step(real)

    def _generator_step(self, real: Tensor) -> Any:
        with self.toggled_optimizer(self.optimizers()[0]):
            return super()._generator_step(real)


class Watch(Callback):
    def __init__(self) -> None:
        self.steps: list[Any] = []

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.steps.append(
            {
                "outputs": outputs,
                "global_step": trainer.global_step,
                "logged": dict(trainer.logged_metrics),
                "bar": dict(trainer.progress_bar_metrics),
                "gradients": copy.deepcopy([p.grad for p in module.parameters()]),
                "trained": [p.requires_grad for p in module.parameters()],
            }
        )

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.final = copy.deepcopy(
            {
                "weights": module.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
                "loops": trainer.fit_loop.state_dict(),
                "random": torch.get_rng_state(),
                "metrics": dict(trainer.callback_metrics),
            }
        )


def fit(folder: Path, accelerator: str, module: pl.LightningModule, **kwargs: Any) -> Any:
    watch = Watch()
    saver = ModelCheckpoint(folder / "ckpt", every_n_train_steps=5, save_top_k=-1)
    trainer = pl.Trainer(
        accelerator=accelerator,
        devices=1,
        max_epochs=3,
        logger=CSVLogger(folder),
        log_every_n_steps=1,
        callbacks=[watch, saver, *kwargs.pop("callbacks", ())],
        enable_progress_bar=False,
        enable_model_summary=False,
        **kwargs,
    )
    pl.seed_everything(7, verbose=False)
    trainer.fit(module, loader())
    saved = {}
    for path in sorted((folder / "ckpt").glob("*.ckpt")):
        saved[path.name] = torch.load(path, weights_only=False)
        saved[path.name].pop("callbacks")
    assert saved
    csv = next(folder.rglob("metrics.csv")).read_text()
    return {"steps": watch.steps, "final": watch.final, "saved": saved, "csv": csv}


def build(cls: type[GAN], graphs: bool) -> GAN:
    pl.seed_everything(3, verbose=False)
    return cls(graphs)


def assert_same(
    folder: Path, accelerator: str, cls: type[GAN], kwargs: Any = dict, **trainer_kwargs: Any
) -> GAN:
    """Fail unless the runs with graphs and without are the same; `kwargs` makes more for each."""
    plain = fit(folder / "a", accelerator, build(cls, False), **kwargs(), **trainer_kwargs)
    module = build(cls, True)
    graphed = fit(folder / "b", accelerator, module, **kwargs(), **trainer_kwargs)
    found = differences(plain, graphed)
    assert not found, f"{len(found)} differences, the first: {found[:8]}"
    return module


# Of the steps of each epoch, the last has another shape: 24 of the one and 3 of the other.
@pytest.mark.spread
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("cls", [GAN, Untoggled, InOne, TogglesInside])
def test_same_as_plain(tmp_path: Path, accelerator: str, cls: type[GAN], precision: Any) -> None:
    module = assert_same(tmp_path, accelerator, cls, precision=precision)
    for step in (module.critic_step, module.generator_step):
        # One more in warm-up, where the gradients of the other net are there from the second call on.
        assert step.summary.calls.replayed == (20 if cls is Untoggled else 21), step.summary
        assert not step.summary.calls.eager
        assert not step.summary.calls.recaptures


def test_global_step_counts_the_steps_of_optimizers(tmp_path: Path, accelerator: str) -> None:
    """Replays too: `max_steps` ends the run where it ends without graphs."""
    run = fit(tmp_path, accelerator, build(GAN, True), max_steps=30)
    assert run["steps"][-1]["global_step"] == 30
    assert len(run["steps"]) == 15


class Boost(Callback):
    """A few batches whose gradients do not fit into 16 bits."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        batch[0].mul_(1e30 if batch_idx % 6 == 5 else 1.0)


# A first step that overflows is skipped, without graphs too.
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.long
@pytest.mark.parametrize("cls", [GAN, InOne])
def test_fp16(tmp_path: Path, accelerator: str, cls: type[GAN]) -> None:
    device = "cuda" if accelerator == "gpu" else "cpu"

    def kwargs() -> Any:
        scaler = torch.amp.GradScaler(device, growth_interval=5)
        return {"plugins": [MixedPrecision("16-mixed", device, scaler)], "callbacks": [Boost()]}

    module = assert_same(tmp_path, accelerator, cls, kwargs)
    assert module.critic_step.summary.calls.replayed == 21, module.critic_step.summary


@pytest.mark.long
def test_profiler(tmp_path: Path, accelerator: str) -> None:
    profiler = SimpleProfiler(dirpath=tmp_path, filename="profile")
    fit(tmp_path, accelerator, build(GAN, True), profiler=profiler)
    assert len(profiler.recorded_durations["optimizer_step"]) == 2 * 27


def test_copies_hold_no_graph(tmp_path: Path, accelerator: str) -> None:
    class Copies(Callback):
        copied: Any = None

        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == 6:
                self.copied = copy.deepcopy(module.critic_step)
                torch.save(module.critic_step, file := io.BytesIO())
                file.seek(0)
                torch.load(file, weights_only=False)

    copies = Copies()
    module = build(GAN, True)
    fit(tmp_path, accelerator, module, callbacks=[copies])
    assert module.critic_step.summary.calls.replayed == 21
    with pytest.raises(RuntimeError, match="is a copy, or was unpickled"):
        copies.copied(torch.zeros(8, 4))


class Logs(GAN):
    def _critic_step(self, real: Tensor) -> Any:
        out = super()._critic_step(real)
        self.log("inside", out["loss"])
        return out


class ReadsGlobalStep(GAN):
    def _critic_step(self, real: Tensor) -> Any:
        if self.global_step > 10**6:
            real = -real
        return super()._critic_step(real)


class StepsScheduler(GAN):
    def _critic_step(self, real: Tensor) -> Any:
        out = super()._critic_step(real)
        self.lr_schedulers()[1].step()
        return out


class CountsCalls(GAN):
    calls = 0

    def _critic_step(self, real: Tensor) -> Any:
        self.calls += 1
        return super()._critic_step(real)


class ReadsWhileToggled(TogglesInside):
    """Refused where `requires_grad` is not what it was, and no one is there to put it back."""

    def _critic_step(self, real: Tensor) -> Any:
        _, optimizer = self.optimizers()
        self.toggle_optimizer(optimizer)
        out = GAN._critic_step(self, real)
        assert out["loss"].item() < 1e9
        self.untoggle_optimizer(optimizer)
        return out


class UpdatesMetric(GAN):
    def __init__(self, graphs: bool) -> None:
        super().__init__(graphs)
        self.error = MeanSquaredError()

    def _critic_step(self, real: Tensor) -> Any:
        out = super()._critic_step(real)
        self.error.update(out["fake"].contiguous(), real)
        return out


class ForgetsOptimizer(GAN):
    def on_fit_start(self) -> None:
        super().on_fit_start()
        if self.graphs:
            self.critic_step = GraphedStep(self._critic_step, **self.options)


REFUSED: dict[str, tuple[type[GAN], str]] = {
    "self.log": (Logs, r"use of `self\.log`.* found at .*test_manual.py.*log it after the call"),
    "global_step": (ReadsGlobalStep, r"read of `self\.global_step`.*test_manual.py.*before you call"),
    "scheduler": (StepsScheduler, r"use of `LRScheduler\.step`.*Call the scheduler after the step"),
    "counter": (CountsCalls, r"sets or changes `calls` of the `CountsCalls`,.*at .*test_manual.py"),
    "metric": (UpdatesMetric, r"sets or changes `.*` of `error`"),
    "item": (ReadsWhileToggled, r"`\.item\(\)`.*test_manual\.py"),
    "no optimizer": (ForgetsOptimizer, r"calls `SGD\.step\(\)` of an optimizer that it was not given"),
}


@pytest.mark.spread
@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path: Path, accelerator: str, case: str) -> None:
    cls, message = REFUSED[case]
    with pytest.raises(UnsupportedError, match=f"(?s){message}") as error:
        fit(tmp_path, accelerator, build(cls, True))
    assert "CUDAGraphCallback" not in str(error.value)
    assert "on_train_batch" not in str(error.value)


@pytest.mark.spread(4)
@pytest.mark.parametrize("case", REFUSED)
def test_refused_and_eager(tmp_path: Path, accelerator: str, case: str) -> None:
    """With `on_unsupported="eager"` all comes out as without graphs."""

    class Eager(REFUSED[case][0]):  # type: ignore[misc]
        options: Any = {"on_unsupported": "eager"}  # noqa: RUF012

    module = assert_same(tmp_path, accelerator, Eager)
    assert not module.critic_step.summary.calls.replayed
    assert sum(module.critic_step.summary.calls.eager.values()) == 27 - 6, str(
        module.critic_step.summary
    )
    assert module.generator_step.summary.calls.replayed == 21


class Norms(Callback):
    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.seen = True


def test_callbacks_inside_are_refused(tmp_path: Path, accelerator: str) -> None:
    with pytest.raises(UnsupportedError, match=r"`Norms\.on_before_optimizer_step` is called between"):
        fit(tmp_path, accelerator, build(GAN, True), callbacks=[Norms()])
    with pytest.raises(UnsupportedError, match=r"(?s)has a `LayerTimingsMonitor`, .* with `Profiler`"):
        fit(tmp_path, accelerator, build(GAN, True), callbacks=[LayerTimingsMonitor()])


@pytest.mark.long
def test_weight_that_changes_leads_to_another_capture(tmp_path: Path, accelerator: str) -> None:
    class Anneals(GAN):
        def on_train_epoch_start(self) -> None:
            self.weight = 0.5 if self.current_epoch < 2 else 0.25

    module = assert_same(tmp_path, accelerator, Anneals)
    (reason,) = module.critic_step.summary.calls.recaptures
    assert reason.startswith("`weight` of the `")
    assert reason.endswith("Anneals` changed from 0.5 to 0.25")
    assert module.critic_step.summary.calls.replayed == 18


def test_the_callback_refuses_a_step_with_graphs_of_its_own(tmp_path: Path, accelerator: str) -> None:
    with pytest.raises(UnsupportedError, match=r"`GAN\.critic_step` is a `GraphedStep`"):
        fit(tmp_path, accelerator, build(GAN, True), callbacks=[CUDAGraphCallback()])


@pytest.mark.long
def test_callback_that_stays_eager_beside_graphed_steps(tmp_path: Path, accelerator: str) -> None:
    callback = CUDAGraphCallback(on_unsupported="eager")
    with pytest.warns(UserWarning, match="is a `GraphedStep`"):
        module = assert_same(tmp_path, accelerator, GAN, lambda: {"callbacks": [callback]})
    assert module.critic_step.summary.calls.replayed == 21
    assert "all steps eager" in str(callback.summary)


class Distills(Net):
    """Automatic optimization, with a teacher whose forward pass is a graph of its own."""

    def __init__(self, graphs: bool) -> None:
        super().__init__()
        self.teacher = [nn.Linear(12, 4)]
        self.graphs = graphs

    def on_fit_start(self) -> None:
        self.teacher[0].to(self.device)
        backend = "auto" if self.graphs else "off"
        self.teach = GraphedStep(self.teacher[0], backend=backend)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            wanted = self.teach(batch[0])
        return (self(batch[0]) - wanted).square().mean()


@pytest.mark.spread
@pytest.mark.parametrize("warmup_steps", [2, 6])
def test_inside_a_step_of_the_callback(tmp_path: Path, accelerator: str, warmup_steps: int) -> None:
    """In its capture, the inner step is a plain part of it; around that, it has its own graph."""
    plain = train(make(lambda: Distills(False)), tmp_path / "a", accelerator=accelerator)
    callback = CUDAGraphCallback(warmup_steps=warmup_steps)
    graph = train(make(lambda: Distills(True)), tmp_path / "b", callback, accelerator=accelerator)
    found = differences([plain.steps, plain.final], [graph.steps, graph.final])
    assert not found
    assert graph.counts.replayed == 21 - warmup_steps, callback.summary
    assert graph.counts.captures == 1


def test_error_in_the_function_leaves_nothing(tmp_path: Path, accelerator: str) -> None:
    class Fails(GAN):
        late = False

        def _critic_step(self, real: Tensor) -> Any:
            out = super()._critic_step(real)
            if self.late:
                raise ValueError("late")
            return out

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.late = batch_idx == 3

    module = build(Fails, True)
    with pytest.raises(ValueError, match="late"):
        fit(tmp_path, accelerator, module)
    for wrapper in module.trainer.strategy._lightning_optimizers:
        assert "lightning_cudagraph" not in str(wrapper._on_before_step)
        assert "lightning_cudagraph" not in str(vars(wrapper.optimizer)["step"])
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert not sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks


class Validates(GAN):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", self.critic(batch[0]).mean())


@pytest.mark.long
def test_validation_and_resuming(tmp_path: Path, accelerator: str) -> None:
    """A run with graphs goes on from the checkpoint of one without, and the other way round."""

    def trained(graphs: bool, epochs: int, ckpt_path: Path | None = None) -> pl.Trainer:
        trainer = pl.Trainer(
            accelerator=accelerator,
            devices=1,
            max_epochs=epochs,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = build(Validates, graphs)
        pl.seed_everything(7, verbose=False)
        trainer.fit(module, loader(), loader(), ckpt_path=ckpt_path, weights_only=False)
        if graphs:
            assert module.critic_step.summary.calls.replayed > 5
            assert not module.critic_step.summary.calls.recaptures
        return trainer

    def left(trainer: pl.Trainer) -> list[Any]:
        optimizers = [optimizer.state_dict() for optimizer in trainer.optimizers]
        weights = trainer.lightning_module.state_dict()
        return [weights, optimizers, trainer.fit_loop.state_dict(), dict(trainer.callback_metrics)]

    trainers = [trained(graphs, 3) for graphs in (False, True)]
    assert not differences(*map(left, trainers))
    paths = [tmp_path / "plain.ckpt", tmp_path / "graphs.ckpt"]
    for trainer, path in zip(trainers, paths, strict=True):
        trainer.save_checkpoint(path)
    resumed = [trained(False, 5, paths[1]), trained(True, 5, paths[0])]
    assert not differences(*map(left, resumed))


class ReadsMetric(pl.LightningModule):
    """The step reads what the host has put into a metric at the end of an epoch."""

    def __init__(self, graphs: bool, reads_count: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.graphs, self.reads_count = graphs, reads_count
        self.net = nn.Linear(4, 1)
        self.best = MeanSquaredError()
        self.losses: list[Tensor] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_fit_start(self) -> None:
        options = {} if self.graphs else {"backend": "off"}
        self.part = GraphedStep(self._part, self, self.optimizers(), verify=None, **options)

    def on_fit_end(self) -> None:
        self.part.close()

    def _part(self, x: Tensor) -> Tensor:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        factor = self.best.update_count if self.reads_count else self.best.sum_squared_error
        loss = self.net(x).square().mean() / (1 + factor)
        self.manual_backward(loss)
        optimizer.step()
        return loss.detach()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.losses.append(self.part(batch[0]))

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def on_train_epoch_end(self) -> None:
        self.best.update(torch.ones(3, device=self.device), torch.zeros(3, device=self.device))


@pytest.mark.parametrize("reads_count", [False, True])
def test_reads_a_metric_of_the_host(tmp_path: Path, accelerator: str, reads_count: bool) -> None:
    results = []
    for graphs in (False, True):
        module = make(lambda g=graphs: ReadsMetric(g, reads_count))
        train(module, tmp_path / str(graphs), train_loader=loader(), accelerator=accelerator)
        results.append([module.losses, dict(module.net.state_dict())])
    assert not differences(*results)
    assert module.part.summary.calls.replayed > 0
    # The count is a number; the state is written where it is.
    assert len(module.part.summary.calls.recaptures) == (2 if reads_count else 0)
