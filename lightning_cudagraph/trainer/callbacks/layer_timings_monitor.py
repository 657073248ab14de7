"""`LayerTimingsMonitor`: layer times of an eager run, under the tags of a run with graphs."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_cudagraph.errors import ConfigurationError
from lightning_cudagraph.timing.layers.layer_selection import AUTOMATIC_LAYERS, LayerTimings
from lightning_cudagraph.timing.output.summary import RunSummary
from lightning_cudagraph.trainer.config.support import callbacks_of
from lightning_cudagraph.trainer.training.times.eager_times import EagerTimes


class LayerTimingsMonitor(Callback):
    """The times of layers in a run without graphs, with the same events and tags as in a graph.

    It changes no number of the run. With `CUDAGraphCallback`, pass the `LayerTimings` to that instead.
    Steps of manual optimization are not timed, with graphs or without.

    Args:
        timings: the layers that are timed, and the interval in steps.

    Attributes:
        summary: summary of the last run; empty before its end. `str` of it is the report.

    Raises:
        ConfigurationError: if `timings` is no `LayerTimings`.

    Example::

        trainer = Trainer(callbacks=[LayerTimingsMonitor(LayerTimings(types=["Linear"]))])
    """

    def __init__(self, timings: LayerTimings = AUTOMATIC_LAYERS) -> None:
        if not isinstance(timings, LayerTimings):
            raise ConfigurationError(
                f"`LayerTimingsMonitor({timings!r})`: expected a `LayerTimings`, such as"
                ' `LayerTimings(modules=["blocks.*"])`.'
            )
        self.timings = timings
        self.summary = RunSummary()
        self._run: EagerTimes | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out objects bound to a trainer, so that copies and pickles always work."""
        return {**vars(self), "_run": None}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._close()  # a run that ended in an exception of another callback, before our hooks
        if stage == "fit":
            self.summary = RunSummary()  # now, because the run may end before its first step
        ours = [
            callback for callback in callbacks_of(trainer) if isinstance(callback, LayerTimingsMonitor)
        ]
        if len(ours) > 1:
            raise ConfigurationError(
                f"The trainer has {len(ours)} `LayerTimingsMonitor`s; expected one, for which"
                " `LayerTimings` may name several `modules` and `types`. Remove the others."
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close()
        if not pl_module.automatic_optimization:
            self.summary = RunSummary(refused="layers are not timed in manual optimization")
            return
        self.summary = RunSummary()
        self._run = EagerTimes(trainer, pl_module, self.timings)

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
            self.summary = self._run.finish()
        self._close()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.summary.refused:
            rank_zero_info(str(self.summary))

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        try:
            if self._run is not None:
                self.summary = self._run.finish(exception)
                rank_zero_info(f"\n{self.summary}")  # below the line of a progress bar
        finally:
            self._close()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.close()
