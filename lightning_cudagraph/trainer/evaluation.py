"""Captured evaluation: validation, test and prediction.

The strategy's `validation_step`, `test_step` or `predict_step` is patched: there the engine takes a
batch through warm-up, capture or replay. Evaluation has its own engine, guards and verification, because
its modules are in another mode than in training. Between two evaluations, training may change the values
of parameters but not their addresses. Each batch signature has a graph: that of the last batch of a
dataloader, and those of other dataloaders.

Processes of a group decide each by itself, and may have different numbers of batches: a captured step
with a collective is refused. Lightning calls the step through the DDP wrapper, which broadcasts buffers
in the first forward pass after a training step: that batch runs eagerly. With sharded weights, which
each batch gathers, the processes vote before each.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_cudagraph.capture.context import RunContext
from lightning_cudagraph.capture.engine import StepEngine
from lightning_cudagraph.capture.graph import BreakGraph
from lightning_cudagraph.capture.steps import AccumulationPhase, Step
from lightning_cudagraph.checks.audit.calls_without_tensors import MODULES_ALONE
from lightning_cudagraph.compat.method_patches import Original, patch_method
from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.device.cuda.capture_errors import NO_TIMINGS_OR_USE
from lightning_cudagraph.errors import CaptureError, Wording
from lightning_cudagraph.graphed_step.record import StepResult
from lightning_cudagraph.processes.agreement import Agreement
from lightning_cudagraph.tensors.batch import map_leaves, refuse_odd_outputs
from lightning_cudagraph.tensors.host_values import as_output, copied_output
from lightning_cudagraph.timing.output.stages import StageSummary
from lightning_cudagraph.trainer.common.captured_run import CapturedRun, announce, gradients_kept
from lightning_cudagraph.trainer.common.profilers import unprofiled
from lightning_cudagraph.trainer.config.settings import Settings
from lightning_cudagraph.trainer.config.support import Stage, check_evaluation
from lightning_cudagraph.trainer.metrics.calls import Later

# The one accumulation phase: evaluation has no gradients.
_ACCUMULATION = AccumulationPhase(drops=True, steps=False)
# A capture is under `no_grad` instead, where this call would return False.
_NO_INFERENCE_MODE = {
    torch.is_inference_mode_enabled: (
        "torch.is_inference_mode_enabled()",
        "Ask `self.training` or `torch.is_grad_enabled()`, which say the same in it.",
    )
}


@dataclass(kw_only=True, eq=False)
class EvaluationStep(Step[StepResult]):
    """The step of one batch.

    Attributes:
        name: the method of the strategy, as of the module.
        eagerly: the method itself.
        indices: of the batch, and of its dataloader, if there are several.
        others: calls that are refused in captures.
    """

    evaluation: CapturedRun
    name: str
    eagerly: Callable[..., Any]
    indices: tuple[int, ...]
    others: dict[Any, tuple[str, str]]
    returned: list[Any] = field(default_factory=list)

    def refresh(self, outputs: StepResult | None) -> None:
        self.evaluation.metrics.state.adopt()

    def run(self) -> None:
        self.returned.append(self.eagerly(self.batch, *self.indices))

    def record(self, batch: Any, cut: BreakGraph | None, timed: bool) -> StepResult:
        run, signature, indices = self.evaluation, self.signature, self.indices
        trainer, capturing = run.trainer, cut is not None
        arguments: list[Any] = [*indices]
        if capturing and signature is not None and indices:
            arguments[0] = run.numbers.noted(signature.reads, indices[0])
        with (
            unprofiled(trainer),
            gradients_kept(dict(run.module.named_parameters()), self._leaves_gradients),
            run.recorded(signature, capturing, other_in_captures=self.others) as parts,
        ):
            try:
                returned = self.eagerly(batch, *arguments)
            except RuntimeError as error:
                if "Inplace update to inference tensor" not in str(error):
                    raise
                raise CaptureError(
                    f"`{self.name}` writes into a tensor that was made in inference mode, which a"
                    " capture is not in.",
                    "Pass `Trainer(inference_mode=False)`, or make the tensor in `setup`.",
                ) from error
        logged = run.logs.finished(parts.events, signature, capturing)
        what = f"the output of `{self.name}`"
        refuse_odd_outputs(returned, what)
        notes: list[Callable[[], object]] = [attribute.hand_over for attribute in parts.recomputed]
        notes += [run.replicas.evaluated, partial(logged.hand_over, trainer)]
        return StepResult(map_leaves(returned, self._detached), what, {}, notes, logged.values)

    def _leaves_gradients(self, name: str) -> CaptureError:
        """The error for a step that changes a gradient, which belongs to the training graphs."""
        return CaptureError(
            f"`{self.name}` leaves gradients in `{name}`.",
            "Use `torch.autograd.grad`, which returns them.",
        )

    def _detached(self, leaf: Any) -> Any:
        if isinstance(leaf, Later):
            leaf.refuse()
        if not isinstance(leaf, Tensor):
            return as_output(leaf)
        if leaf.requires_grad and leaf.grad_fn is not None:
            raise CaptureError(
                f"The output of `{self.name}` holds a tensor with autograd's graph of one step,"
                " which a replay cannot renew.",
                "Return it detached: `tensor.detach()`.",
            )
        return leaf.detach()

    def state(self) -> dict[str, Tensor]:
        run = self.evaluation
        buffers = {f"buffer `{name}`": buffer for name, buffer in run.module.named_buffers()}
        return {**buffers, **run.metrics.state.tensors()}

    def transaction(self) -> AbstractContextManager[None]:
        return self.evaluation.undone()

    def learning(self) -> AbstractContextManager[None]:
        return self.evaluation.learning()


class GraphedEvaluation:
    """The captured evaluations of one run; steps that cannot be captured are refused."""

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        backend: Backend,
        settings: Settings,
        stage: Stage,
        agreement: Agreement | None = None,
    ) -> None:
        check_evaluation(trainer, module, stage)
        self._trainer = trainer
        self._stage = stage
        self._step_name = f"{stage}_step"
        self._patches = ExitStack()
        self._eager_step: Original | None = None
        gather = f"Log with `sync_dist=True`, or gather in `on_{stage}_epoch_end`"
        apart = "an evaluation step", f"{gather}; or leave out `evaluation=True`."
        self._run = run = CapturedRun(
            trainer,
            module,
            backend,
            settings,
            is_training=False,
            not_collective=apart if agreement is None else None,
        )
        context = RunContext(
            backend,
            settings,
            run.carried,
            announce=announce,
            wording=wording_of(stage),
            agreement=agreement,
            tries_streams_together=True,
        )
        self._engine: StepEngine[StepResult] = StepEngine(context, run.guards)

    @property
    def stage_name(self) -> str:
        """The name of the trainer's method for this stage."""
        return "validate" if self._stage == "validation" else self._stage

    @property
    def stage(self) -> StageSummary:
        """Counts and times of the batches so far."""
        return StageSummary.of(self._engine.counts, self._engine.verifier.checked)

    @property
    def notes(self) -> list[str]:
        notes = [*self._engine.verifier.notes, *self._engine.notes, *self._run.metrics.notes]
        return [f"evaluation: {note}" for note in notes]

    def start(self) -> None:
        """Begin an evaluation: patch the strategy, and recheck all guards."""
        self._engine.pause()
        if self._eager_step is not None:
            return
        strategy = self._trainer.strategy
        self._eager_step = Original(strategy, self._step_name)
        patch_method(strategy, self._step_name, self._step, self._patches)

    def close(self) -> None:
        with ExitStack() as stack:  # all of them, even if one fails
            stack.callback(self._engine.close)
            stack.callback(self._patches.close)

    def _step(self, batch: Any, *indices: int) -> Any:
        """Take a batch through its phase; replaces the strategy's method."""
        run = self._run
        assert self._eager_step is not None
        # After the index of the batch comes that of the dataloader, if there are several.
        dataloader_idx = indices[1:]
        step = EvaluationStep(
            batch,
            _ACCUMULATION,
            specialization={"dataloader_idx": dataloader_idx[0] if dataloader_idx else None},
            numbers=run.numbers.of(indices[0]) if indices else {},
            eager_reason=run.replicas.reason_in_evaluation(),
            evaluation=run,
            name=self._step_name,
            eagerly=self._eager_step,
            indices=indices,
            others=_NO_INFERENCE_MODE if torch.is_inference_mode_enabled() else {},
        )
        shards = run.replicas.shards
        is_eager = step.eager_reason or self._engine.given_up
        with nullcontext() if is_eager else shards.in_place():
            _, outputs = self._engine.step(step)
        if outputs is None:
            shards.note_gathered()
            return step.returned[0]
        for note in outputs.host_notes:
            note()
        run.metrics.state.count_references()
        # Copies: Lightning keeps predictions, and the next replay overwrites static outputs.
        return map_leaves(outputs.returned, copied_output)


def wording_of(stage: Stage) -> Wording:
    """Return the translation of messages from training to an evaluation."""
    return Wording(
        steps="Evaluation",
        words={
            "training_step": f"{stage}_step",
            "training step": f"{stage} step",
            "on_train_batch_": f"on_{stage}_batch_",
            "To train on": "To go on",
            MODULES_ALONE: "",
            NO_TIMINGS_OR_USE: "Use",
            'to switch graphs off altogether, pass `backend="off"`': (
                "to have graphs for training alone, leave out `evaluation=True`"
            ),
        },
    )
