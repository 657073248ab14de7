"""The captured runs of a callback: one `fit`, one kind of evaluation, or both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy

from lightning_cudagraph.capture.steps import StepCounts
from lightning_cudagraph.compat.method_patches import Original, patch_method
from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.device.backend_for import backend_for
from lightning_cudagraph.errors import UnsupportedError
from lightning_cudagraph.processes.agreement import made_by_all
from lightning_cudagraph.processes.nccl import check_nccl
from lightning_cudagraph.processes.shards import sharded_modules
from lightning_cudagraph.trainer.captured_modules.training import ModulesTraining
from lightning_cudagraph.trainer.common.fit_processes import FitProcesses, wrapped_on_side_stream
from lightning_cudagraph.trainer.config.settings import Settings
from lightning_cudagraph.trainer.config.support import Stage, check_run
from lightning_cudagraph.trainer.evaluation import GraphedEvaluation
from lightning_cudagraph.trainer.manual.training import ManualTraining
from lightning_cudagraph.trainer.training.loop import GraphedTraining

Training = GraphedTraining | ManualTraining | ModulesTraining


class CapturedRuns:
    """The objects of a callback that are bound to a trainer. All are released by `close`."""

    def __init__(self) -> None:
        self.training: Training | None = None
        self.evaluation: GraphedEvaluation | None = None
        self.processes: FitProcesses | None = None
        self._evaluating: FitProcesses | None = None  # of evaluations outside of a `fit` with graphs
        self.not_evaluated: UnsupportedError | None = None
        self._backend: Backend | None = None
        self._wrapping = ExitStack()

    def __reduce__(self) -> Any:
        return type(self), ()  # a copy, or a pickle when loaded, has no runs

    def backend(self, trainer: pl.Trainer, name: str) -> Backend:
        """Return the backend of a run; there is one, so that all graphs share a memory pool."""
        if self._backend is None:
            self._backend = backend_for(trainer.strategy.root_device, name, "CUDAGraphCallback")
        return self._backend

    def connect(self, trainer: pl.Trainer, backend: str) -> None:
        """Prepare for a `fit`: tell other processes of a failure already before training starts."""
        self.processes = FitProcesses(trainer)
        if isinstance(trainer.strategy, DDPStrategy):
            wrapped_on_side_stream(trainer.strategy, self.backend(trainer, backend), self._wrapping)

    def begin_fit(self, trainer: pl.Trainer) -> FitProcesses:
        """Release all but the processes, and the backend on whose side stream a DDP wrapper was made."""
        backend = self._backend
        processes, self.processes = self.processes or FitProcesses(trainer), None
        self.close()
        self._backend, self.processes = backend, processes
        return processes

    def train(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        settings: Settings,
        asked: Mapping[str, Any],
    ) -> Training:
        """Begin the captured training of a `fit`, if all its processes can have the same."""
        processes = self.processes
        assert processes is not None

        def make() -> Training:
            is_modules = settings.scope == "modules"
            has_modules = is_modules or (bool(settings.modules) and not settings.is_examined)
            check_run(trainer, module, is_whole=not has_modules)
            if processes.agreement is not None:
                check_nccl(trainer.strategy.root_device)
            backend = self.backend(trainer, asked["backend"])
            modules = ModulesTraining(trainer, module, backend, settings) if has_modules else None
            if is_modules:
                assert modules is not None
                return modules
            return self._widest(trainer, module, backend, settings, modules)

        def compare(training: Training | None, refused: UnsupportedError | None) -> None:
            processes.compare(asked, refused)
            if isinstance(training, GraphedTraining) and processes.agreement is not None:
                training.agree(processes.agreement)

        self.training = training = made_by_all(make, compare)
        save = Original(trainer.strategy, "save_checkpoint")

        def save_checkpoint(*args: Any, **kwargs: Any) -> None:
            self.settle()
            save(*args, **kwargs)

        patch_method(trainer.strategy, "save_checkpoint", save_checkpoint, self._wrapping)
        return training

    def _widest(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        backend: Backend,
        settings: Settings,
        modules: ModulesTraining | None,
    ) -> Training:
        """Begin with whole steps, or with `modules` if the run shows that these cannot be captured."""
        if modules is None:
            return self._whole(trainer, module, backend, settings)
        if trainer.world_size > 1:
            raise UnsupportedError(
                "In several processes, modules do not take the place of whole steps: each process would"
                " begin with another step.",
                'Pass `scope="modules"`, or leave `modules` out.',
            )
        refused: UnsupportedError | None = None

        def narrow(error: UnsupportedError) -> bool:
            nonlocal refused
            refused = error
            return True

        try:
            check_run(trainer, module)
            whole = self._whole(trainer, module, backend, settings, narrow)
        except UnsupportedError as error:
            modules.replace(StepCounts(), error)
            return modules
        loop = trainer.fit_loop.epoch_loop
        advance = Original(loop, "advance")
        patches = self._wrapping.enter_context(ExitStack())

        def advanced(data_fetcher: Any) -> None:
            if refused is not None:  # by the step before; modules are captured from this one on
                optimizer = whole.optimizer_is_eager if isinstance(whole, GraphedTraining) else ""
                whole.close()  # first, because it has patched the loop after this
                patches.close()
                modules.install()
                modules.replace(whole.counts, refused, optimizer)
                self.training = modules
            advance(data_fetcher)

        patch_method(loop, "advance", advanced, patches)
        return whole

    def _whole(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        backend: Backend,
        settings: Settings,
        narrow: Callable[[UnsupportedError], bool] = lambda error: False,
    ) -> GraphedTraining | ManualTraining:
        if not module.automatic_optimization:
            return ManualTraining(trainer, module, backend, settings, narrow)
        assert self.processes is not None
        agreement, run = self.processes.agreement, self.processes.run
        return GraphedTraining(trainer, module, backend, settings, narrow, agreement, run)

    def leave_others(self) -> None:
        """Go on without graphs and without votes."""
        processes, self.processes = self.processes, None
        if processes is not None:
            processes.close()

    def make_evaluation(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        asked: Mapping[str, Any],
        settings: Settings,
        stage: Stage,
    ) -> None:
        if self.evaluation is not None:
            return
        processes = self._voting(trainer) if sharded_modules(trainer.strategy.model) else None
        agreement = None if processes is None else processes.agreement

        def make() -> GraphedEvaluation:
            if agreement is not None:
                check_nccl(trainer.strategy.root_device)
            found = self.backend(trainer, asked["backend"])
            return GraphedEvaluation(trainer, module, found, settings, stage, agreement)

        def compare(evaluation: GraphedEvaluation | None, refused: UnsupportedError | None) -> None:
            if processes is not None:
                processes.compare(asked, refused)

        self.evaluation = made_by_all(make, compare)

    def _voting(self, trainer: pl.Trainer) -> FitProcesses:
        """The processes, which vote: those of a `fit` with graphs, or of evaluations alone."""
        if self.processes is not None:
            return self.processes
        if self._evaluating is None:
            self._evaluating = FitProcesses(trainer)
            self._evaluating.start()
        return self._evaluating

    def fail(self, exception: BaseException) -> None:
        """End the other processes too, because of `exception`."""
        for processes in (self.processes, self._evaluating):
            if processes is not None:
                processes.fail(exception)

    def evaluate(self) -> None:
        """Begin an evaluation, in a `fit` or on its own."""
        assert self.evaluation is not None
        if self.training is not None:
            self.training.leave()
        self.evaluation.start()

    def settle(self) -> None:
        """Wait for all replays, and raise an error if a check of one of them on the host has failed."""
        if self._backend is not None:
            self._backend.checks.settle()

    def close(self) -> None:
        training, self.training = self.training, None
        evaluation, self.evaluation = self.evaluation, None
        processes, self.processes = self.processes, None
        evaluating, self._evaluating = self._evaluating, None
        self.not_evaluated = self._backend = None
        wrapping, self._wrapping = self._wrapping, ExitStack()
        with ExitStack() as stack:  # all of them, even if one fails; graphs before process groups
            for each in (wrapping, processes, evaluating, evaluation, training):
                if each is not None:
                    stack.callback(each.close)
