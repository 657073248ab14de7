"""The times of layers: an argument of `CUDAGraphCallback`, and a callback of its own for eager runs."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_cudagraph.errors import ConfigurationError
from lightning_cudagraph.timing.layers.layers import LayerChoice
from lightning_cudagraph.trainer.config.support import callbacks_of
from lightning_cudagraph.trainer.training.times.eager_times import EagerTimes

__all__ = ["LayerTimings"]


class LayerTimings(LayerChoice, Callback):
    """Times the layers of a model, in a graph or without one, with the same tags in TensorBoard.

    ``CUDAGraphCallback(timings=LayerTimings(...))`` times them by events in the graph. In the list of
    callbacks, `LayerTimings` times an ordinary run, to be compared with one that has graphs; it changes
    no number of it.

    `modules`, `types` and `depth` choose together: a layer is timed if it satisfies each that is given.
    Without any of them the layers are chosen automatically, level by level from the outside in, as deep
    as `max_layers` allows: the model is covered, and containers stay beside their members. If the
    outermost level alone is more than that, the first so many of it are timed.

    Args:
        modules: glob patterns of module names as `named_modules` gives them, such as
            ``["blocks.*", "head"]``. ``*`` crosses dots.
        types: names of classes, such as ``["Linear"]`` or ``["torch.nn.Linear"]``. Classes that are
            derived from them count.
        depth: how many levels are timed, from the outside in: 1 for the children of the model. A
            `ModuleList` or `ModuleDict` without a `forward` is no level: it is never called itself.
        max_layers: how many layers the automatic choice may take, at most.
        every_n_steps: the last of so many steps of the optimizer is timed, with all batches whose
            gradients it takes, as `log_every_n_steps` counts; the others replay a graph without events.
            In manual optimization, batches are counted.
        placement: ``"forked"``: events are recorded on a branch of the graph that no kernel waits for.
            ``"serial"``: they are recorded between two kernels, and each adds about 4 µs.
        window_steps: aggregates are made over so many timed steps.
        trace_steps: how many of the last timed steps are written as a Chrome trace; 0 for none.

    Attributes:
        report: the report of the last run that this timed as a callback, or None before its end.

    Raises:
        ConfigurationError: if one of them is not what it should be.

    Example::

        trainer = Trainer(callbacks=[LayerTimings(types=["Linear"], every_n_steps=10)])
    """

    report: str | None = None
    _run: EagerTimes | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without what is bound to a trainer, so that copies and pickles work at any time."""
        return {name: value for name, value in vars(self).items() if name != "_run"}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._close()  # a run that another callback's exception ended before our hooks
        if stage == "fit":
            self.report = None  # which may end before its first step
        ours = [callback for callback in callbacks_of(trainer) if isinstance(callback, LayerTimings)]
        if len(ours) > 1:
            raise ConfigurationError(
                f"The trainer has {len(ours)} `LayerTimings`; expected one, which may have several"
                " `modules` and `types`. Remove the others."
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close()
        self.report = None
        self._run = EagerTimes(trainer, pl_module, self)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._run is not None:
            self._run.epoch_changes()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._run is not None:
            self._run.epoch_changes()

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._run is not None:
            self._run.pause()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._run is not None:
            self._run.pause()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._run is not None:
            self._run.batch_starts()

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Any) -> None:
        if self._run is not None:
            self._run.forward_ended(loss)

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._run is not None:
            self._run.backward_ended()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self._run is not None:
            self._run.batch_ended()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._run is not None:
            self.report = self._run.finish()
        self._close()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.report is not None:
            rank_zero_info(self.report)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        try:
            if self._run is not None:
                self.report = self._run.finish(exception)
                rank_zero_info(f"\n{self.report}")  # below the line of a progress bar
        finally:
            self._close()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        if (run := vars(self).pop("_run", None)) is not None:
            run.close()
