"""One run of the matrix: a model of two tiny layers, trained, evaluated, or stepped in a plain loop."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_cudagraph import (
    CUDAGraphCallback,
    CUDAGraphError,
    GraphedStep,
    Verification,
)
from tests.loops import device_of
from tests.matrix.effects import Effect
from tests.matrix.moments import EPOCH, Mode, Moment, Never
from tests.matrix.places import Place

Use = Literal["factor", "branch", "shape"]
Where = Literal["forward", "gradient hook", "pre-hook of the optimizer"]
EPOCHS = 3
BATCH = 4


def used(how: Use, loss: Tensor, logits: Tensor, number: float) -> Tensor:
    """A loss that depends on a number: by an argument of an op, a branch, or a shape."""
    if how == "factor":
        return loss * (1 + 0.25 * number)
    if how == "branch":
        return loss * 2 if number > 2 else loss
    return loss + logits[:, : int(number)].square().mean()


class _Body:
    """Common part of a module and of a net for a plain loop."""

    body: nn.Sequential
    made: Place | Effect
    use: Use
    where: Where

    def build(self, make: Callable[[Any], Place | Effect], use: Use, where: Where) -> None:
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3))
        self.use, self.where = use, where
        self.made = make(self)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.body(x)
        loss = nn.functional.cross_entropy(logits, y)
        if isinstance(self.made, Place):
            return used(self.use, loss, logits, self.made.read())
        if self.where == "forward" and self.made.has_begun:
            self.made.act(x)
        return loss

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Register the effect, if it is not in the forward pass."""
        if isinstance(self.made, Place):
            return
        act, weight = self.made.act, self.body[2].weight
        if self.where == "gradient hook":
            weight.register_hook(lambda gradient: act(gradient[:, :4]))
        if self.where == "pre-hook of the optimizer":
            optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: act(weight[:, :4]))


class TrainedNet(_Body, pl.LightningModule):
    """The step reads the place, or has the effect."""

    def __init__(self, make: Any, use: Use, where: Where, moment: Moment) -> None:
        super().__init__()
        self.build(make, use, where)
        # Nothing of the net leads to it but the hooks that a moment adds.
        self.make_scheduler = moment.scheduler
        self.register_hooks = moment.watch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = self.make_scheduler(optimizer)
        self.watch(optimizer)
        self.register_hooks(self, optimizer)
        del self.make_scheduler, self.register_hooks
        if scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self) -> None:
        self.made.start()


class EvaluatedNet(TrainedNet):
    """The step of evaluation reads the place, or has the effect."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.body(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.log("val_loss", loss, on_step=True, on_epoch=True)
        return loss


class LoopNet(_Body, nn.Module):
    """A net of a plain loop."""

    def __init__(self, make: Any, use: Use, where: Where) -> None:
        super().__init__()
        self.build(make, use, where)


class _Batches(pl.LightningDataModule):
    def __init__(self, train: Any, validation: Any) -> None:
        super().__init__()
        self.train, self.validation = train, validation

    def train_dataloader(self) -> Any:
        return self.train

    def val_dataloader(self) -> Any:
        return self.validation


@dataclass
class Record:
    """The record of a run, with everything that must not depend on graphs.

    Attributes:
        left: tensors, numbers, logs, and the final state of the place or the effect.
        replayed: number of replays.
        recaptures: the reasons of invalidations.
        error: the error of this package that ended the run, or None.
        report: the report of the run.
    """

    left: dict[str, Any] = field(default_factory=dict)
    replayed: int = 0
    recaptures: tuple[str, ...] = ()
    error: CUDAGraphError | None = None
    report: str = ""


@dataclass(frozen=True)
class Setting:
    """Settings of the graphs of a run.

    Attributes:
        verify: number of first replays that are verified.
        quick: without timings, which take a second capture, and without trials of streams.
        eager: `on_unsupported="eager"`.
    """

    verify: int = 2
    quick: bool = True
    eager: bool = False

    def __str__(self) -> str:
        said = [*([] if self.verify else ["not verified"]), *([] if self.quick else ["timed"])]
        return ", ".join(said)

    def shared(self) -> dict[str, Any]:
        on_unsupported = "eager" if self.eager else "raise"
        streams = 1 if self.quick else "auto"
        return {
            "verify": Verification(replays=self.verify),
            "on_unsupported": on_unsupported,
            "streams": streams,
        }

    def callback(self, mode: Mode) -> CUDAGraphCallback:
        kwargs = {**self.shared(), "timings": None} if self.quick else self.shared()
        return CUDAGraphCallback(evaluation=mode == "evaluate", **kwargs)


CHECKED, UNCHECKED = Setting(), Setting(verify=0)
# All at its defaults: with a second take for timings, and trials of streams.
DEFAULT = Setting(quick=False)


def _data(batches: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH * batches, 4, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (BATCH * batches,), generator=generator))


def run(
    make: Callable[[Any], Place | Effect],
    mode: Mode,
    setting: Setting | None,
    accelerator: str,
    *,
    moment: type[Moment] = Never,
    use: Use = "factor",
    where: Where = "forward",
    changes: int = 2,
) -> Record:
    """Run once.

    Args:
        make: the place that the step reads, or the effect that it has, given the net.
        mode: the kind of step that is graphed.
        setting: the settings of its graphs, or None for a run without.
        accelerator: ``"cpu"`` or ``"gpu"``.
        moment: of the change of the place.
        use: the way in which its number enters the loss.
        where: the position of the effect in the step.
        changes: number of changes of the place; the second one comes after a re-capture.
    """
    made: list[Place | Effect] = []

    def build(net: Any) -> Place | Effect:
        made.append(make(net))
        return made[0]

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(3)
        chosen = moment(mode, Path(folder), changes)
        try:
            if mode == "step":
                record = _looped(LoopNet(build, use, where), chosen, setting, accelerator)
            else:
                base = TrainedNet if mode == "train" else EvaluatedNet
                kind = type("Net", (base,), {**chosen.module_hooks, "__module__": __name__})
                record = _fitted(kind(build, use, where, chosen), chosen, setting, accelerator)
            assert chosen.is_over() or record.error is not None, "the moment did not come"
            return record
        finally:
            for thing in (chosen, *made):
                thing.close()


def _looped(net: LoopNet, moment: Moment, setting: Setting | None, accelerator: str) -> Record:
    device = device_of(accelerator)
    net.to(device)
    net.optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    done = 0
    moment.place, moment.now = net.made, lambda: done  # type: ignore[assignment]
    net.made.start()
    scheduler = moment.scheduler(net.optimizer)
    net.watch(net.optimizer)
    moment.watch(net, net.optimizer)

    def step(x: Tensor, y: Tensor) -> Tensor:
        net.optimizer.zero_grad()
        loss = net.loss(x, y)
        loss.backward()
        net.optimizer.step()
        return loss

    kwargs = {"backend": "off"} if setting is None else setting.shared()
    losses = []
    record = Record()
    torch.manual_seed(7)
    graphed = GraphedStep(step, net, net.optimizer, **kwargs)
    try:
        with graphed:
            for x, y in DataLoader(_data(EPOCH * EPOCHS), batch_size=BATCH):
                moment.between()
                losses.append(graphed(x.to(device), y.to(device)).detach().clone())
                if scheduler is not None:
                    scheduler.step()
                done += 1
    except CUDAGraphError as error:
        record.error = error
    record.replayed, record.recaptures = graphed.summary.calls.replayed, graphed.summary.calls.recaptures
    record.report = str(graphed.summary)
    record.left = _left(net, net.optimizer, {"losses": losses})
    return record


def _fitted(net: TrainedNet, moment: Moment, setting: Setting | None, accelerator: str) -> Record:
    mode, folder = moment.mode, moment.folder
    data = _data(EPOCH)
    graphed_data, graphed_kwargs = moment.dataset(data), moment.loader(data)
    changed = DataLoader(graphed_data, batch_size=BATCH, **graphed_kwargs)
    other = DataLoader(data, batch_size=BATCH)
    validates = mode == "evaluate" or "validation_step" in moment.module_hooks
    train, validation = (changed, other) if mode == "train" else (other, changed)
    batches: dict[str, Any] = {"train_dataloaders": train}
    if validates:
        batches["val_dataloaders"] = validation
    if net.made.needs_datamodule:
        batches = {"datamodule": _Batches(train, validation if validates else [])}
    callback = None if setting is None else setting.callback(mode)
    ours = [] if callback is None else [callback]
    kwargs: dict[str, Any] = {
        "accelerator": accelerator,
        "devices": 1,
        "max_epochs": EPOCHS,
        "limit_train_batches": EPOCH if mode == "train" else 1,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": folder,
        "logger": CSVLogger(folder),
        **moment.trainer(),
    }
    trainer = pl.Trainer(callbacks=[*ours, *net.made.callbacks, *moment.callbacks()], **kwargs)
    moment.place = net.made  # type: ignore[assignment]
    if mode == "train":
        moment.now = lambda: trainer.global_step
    else:
        progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
        moment.now = lambda: trainer.current_epoch * EPOCH + progress.current.ready
    record = Record()
    torch.manual_seed(7)
    try:
        trainer.fit(net, **batches)
    except CUDAGraphError as error:
        record.error = error
        return record
    if callback is not None:
        counts = callback.summary.fit if mode == "train" else callback.summary.validate
        record.report = str(callback.summary)
        if counts is not None:
            record.replayed, record.recaptures = counts.replayed, counts.recaptures
    logs = [path.read_text() for path in sorted(folder.rglob("metrics.csv"))]
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    record.left = _left(net, trainer.optimizers[0], {"logs": logs, "metrics": metrics})
    return record


def _left(net: Any, optimizer: torch.optim.Optimizer, others: dict[str, Any]) -> dict[str, Any]:
    """A copy of the final state of a run."""
    device = net.body[0].weight.device
    return copy.deepcopy(
        {
            "weights": net.state_dict(),
            "optimizer": optimizer.state_dict(),
            "made": net.made.seen(),
            "random": torch.get_rng_state(),
            "random_device": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
            **others,
        }
    )
