"""Transfer of a batch to the device: one copy from the loader's memory into the static inputs.

Lightning moves a batch to the device, and a replay would copy it from there into the static inputs that
the graph reads. If no user code sees the batch in between, one copy is enough: from the loader's memory,
pinned or not, into the static inputs. User hooks, the user's own calls of `batch_to_device`, and eager
steps get a batch of their own, which no later step overwrites.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import RunningStage

from lightning_cudagraph.capture.engine import StepEngine
from lightning_cudagraph.capture.signatures.by_signature import GraphsOfSignature
from lightning_cudagraph.compat.method_patches import Original
from lightning_cudagraph.trainer.training.captured_step.recorded_step import StepOutputs
from lightning_cudagraph.trainer.training.closures import GraphClosure
from lightning_cudagraph.trainer.training.hooks.user_hooks import batches_unseen, is_known
from lightning_cudagraph.trainer.training.run import TrainingRun

# The name of the current hook, as Lightning's loops set it while they move a batch.
TRANSFER = "batch_to_device"


class BatchTransfer:
    """Patch of `Strategy.batch_to_device`."""

    def __init__(self, run: TrainingRun, engine: StepEngine[StepOutputs]) -> None:
        self._run = run
        self._graphs = engine.graphs
        self._trainer = run.trainer
        self._module = run.module
        self._clock = run.times.clock
        self._original = Original(run.trainer.strategy, TRANSFER)
        self._unseen: bool | None = None
        # The graphs of the latest batch, and the batch that Lightning would have moved.
        self._handed: tuple[GraphsOfSignature[StepOutputs], Any] | None = None

    def suspect(self) -> None:
        """Look for hooks that see batches again: code other than training steps has run."""
        self._unseen = None

    def __call__(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if self._module._current_fx_name != TRANSFER:
            # User code that moves batches (a prefetching loader, for example) may keep them.
            return self._original(batch, *args, **kwargs)
        self._handed = None
        if not self._has_static() or self._trainer.state.stage is not RunningStage.TRAINING:
            return self._original(batch, *args, **kwargs)
        self.suspect()  # on Lightning's own path, any code may have run
        given = self.straight(batch)
        if given is not None:
            return given
        with self._copying() or nullcontext():
            return self._original(batch, *args, **kwargs)

    def straight(self, batch: Any) -> Any:
        """Copy a loader's batch into the static inputs if no user code sees it; else return None."""
        if not self._has_static():
            return None
        if self._unseen is None:
            self._unseen = self._is_unseen()
        if not self._unseen:
            return None
        numbers: dict[str, int] = {}
        if self._graphs.reads.is_any:
            progress: Any = self._trainer.fit_loop.epoch_loop.batch_progress.current
            numbers = self._run.numbers.of(progress.ready)  # the batch is counted after its transfer
        if (found := self._graphs.find(batch, numbers, from_loader=True)) is None:
            return None
        graphs, tensors, values = found
        static = graphs.static
        if (copying := self._copying()) is None:
            static.fill(tensors, values)
        else:
            with copying:
                static.fill(tensors, values)
        self._handed = graphs, batch
        return static.batch

    def graphs_of(self, batch: Any) -> GraphsOfSignature[StepOutputs] | None:
        """The graphs of a batch, if it is their static batch, which later replays overwrite."""
        handed = self._handed
        return handed[0] if handed is not None and batch is handed[0].static.batch else None

    def own(self, batch: Any) -> Any:
        """The batch for code that may keep it: a new transfer if `batch` is the static one."""
        if self._handed is None or self.graphs_of(batch) is None:
            return batch
        # Without hooks: there were none when this batch arrived, and code may have set some since.
        return move_data_to_device(self._handed[1], self._trainer.strategy.root_device)

    def use_own(self, closure: GraphClosure) -> None:
        """Give an eager step a batch of its own, which later replays do not overwrite."""
        before = closure.batch
        if (batch := self.own(before)) is before:
            return
        closure.kwargs[next(iter(closure.kwargs))] = batch
        results = self._trainer.fit_loop.epoch_loop._results
        if results.batch is before:  # `self.log` takes the batch size from it
            results.batch = batch

    def _has_static(self) -> bool:
        # Batches that only update batch norm are never replayed.
        return not self._run.optimization._skip_backward and bool(self._graphs)

    def _copying(self) -> AbstractContextManager[None] | None:
        return self._clock.copying() if self._clock.is_due(self._run.steps_before) else None

    def _is_unseen(self) -> bool:
        method = self._original.now
        by_lightning = getattr(method, "__func__", None) is Strategy.batch_to_device
        return by_lightning and is_known(method) and batches_unseen(self._trainer, self._module)
