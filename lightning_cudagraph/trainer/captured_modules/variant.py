"""The calls of a module with one signature: their warm-up, their graphs, and the guards on these."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from time import perf_counter
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_cudagraph.capture.steps import Phase, StepCounts
from lightning_cudagraph.checks.audit.step_audit import step_audit
from lightning_cudagraph.checks.guards.guards import GuardedValues, Guards, OutsideModel, Unguarded
from lightning_cudagraph.checks.verify.verifier import Verifier
from lightning_cudagraph.compat.attributes import OfThread, setting
from lightning_cudagraph.device.backend import Backend, Graph
from lightning_cudagraph.device.sentry.compiled import CompiledCode
from lightning_cudagraph.errors import UnsupportedError
from lightning_cudagraph.graphed_step.processes import CollectiveRules, is_in_group
from lightning_cudagraph.tensors.batch import retains_gradient
from lightning_cudagraph.tensors.batch_signature import Signature
from lightning_cudagraph.tensors.static import refuse_shared_memory
from lightning_cudagraph.trainer.captured_modules.calls import LEAVE_OUT, Call, tensors_of
from lightning_cudagraph.trainer.captured_modules.gradients import GradientForms
from lightning_cudagraph.trainer.captured_modules.graph import ModuleGraph
from lightning_cudagraph.trainer.captured_modules.node import NO_SECOND
from lightning_cudagraph.trainer.common.host_rules import (
    OWN_ATTRIBUTES,
    RUN_STATE,
    host_rules,
    outside_of_model,
)
from lightning_cudagraph.trainer.config.settings import Settings

T = TypeVar("T")

# Of a LightningModule inside: a replay logs nothing.
_LOGGING = {
    function.__code__: (f"self.{function.__name__}", "Return the value, and log it in `training_step`.")
    for function in (pl.LightningModule.log, pl.LightningModule.log_dict)
}
_ALONE = "a module that is captured by itself"


def _none(module: nn.Module) -> bool:
    """False: a metric in a captured module would be called in no replay."""
    return False


@dataclass
class ModulesRun:
    """The state that all captured modules of a `fit` share.

    Attributes:
        on: a training step is under way, and no call of one of the modules that is watched.
        step: the number of the step.
        rules: those of the host code in a captured module.
        calls: the phase of each call in that step, and the reason of an eager one.
        retired: graphs that are invalid, and may still be in use.
    """

    trainer: pl.Trainer
    backend: Backend
    settings: Settings
    announce: Callable[[str], None]
    counts: StepCounts = field(default_factory=StepCounts)
    on: OfThread[bool] = field(default_factory=lambda: OfThread(False))
    step: int = 0
    calls: list[tuple[Phase, str]] = field(default_factory=list)
    retired: list[ModuleGraph] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.verifier = Verifier(self.backend, self.settings.verify)
        rules = host_rules(self.trainer, self.settings.harmless, _none)
        self.rules = replace(rules, refused={**rules.refused, **_LOGGING})

    def begin_step(self) -> None:
        """Count a step, and release graphs that are invalid and not in use any more."""
        self.step += 1
        self.calls.clear()
        for graph in [each for each in self.retired if not each.is_in_use]:
            self.retired.remove(graph)
            graph.release()

    def release(self) -> None:
        """Release all graphs that were let go, in use or not."""
        for graph in self.retired:
            graph.release()
        self.retired.clear()

    def end_step(self) -> None:
        """Count a step by the calls in it: one that is not a replay counts for all."""
        none = Phase.EAGER, "no captured module was called"
        order = Phase.EAGER, Phase.WARMING, Phase.CAPTURED
        self.counts.note(*min(self.calls, key=lambda call: order.index(call[0]), default=none))


class Variant:
    """The calls of a module with one signature.

    Attributes:
        graphs: those of the first, second, ... call in use at a time.
        refused: why its calls are eager for good; None if they are not.
    """

    def __init__(self, run: ModulesRun, module: nn.Module, forward: Callable[..., Any], call: Call):
        self._run, self._module, self._forward = run, module, forward
        self.signature: Signature = call.signature
        self.graphs: list[ModuleGraph] = []
        self.refused: UnsupportedError | None = None
        self._compiled = CompiledCode()
        self._gradient_forms: dict[int, GradientForms] = {}
        self._step, self._position, self._steps = -1, 0, 0

    @cached_property
    def guards(self) -> Guards:
        """The guards on what its graphs bake in; made when the warm-up ends."""
        trainer = self._run.trainer
        return Guards(
            self._module,
            GuardedValues(dict, dict),
            Unguarded(OWN_ATTRIBUTES | self._run.settings.harmless, stops=RUN_STATE),
            OutsideModel({"trainer": trainer}, roots=lambda: outside_of_model(trainer)),
        )

    def changed(self, before_capture: bool = False) -> str | None:
        """The first change since the captures, in words; None if there is none.

        Args:
            before_capture: compare everything, as the record is that of a new graph from then on.
        """
        if before_capture:
            self.guards.suspect()
        if change := self.guards.changed():
            return change
        moved = self._run.backend.host_value_moved()
        return "a tensor in host memory, which a graph has as a number, changed" if moved else None

    def begin(self) -> None:
        """Count a call."""
        if self._step != self._run.step:
            self._step, self._position = self._run.step, 0
            self._steps += 1
        else:
            self._position += 1
        self.refused = self.refused or next((g.refused for g in self.graphs if g.refused), None)

    @property
    def is_warm(self) -> bool:
        """True if there have been enough steps with such calls before this one."""
        return self._steps > self._run.settings.warmup_steps

    def warm_up(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module eagerly. In the last step of the warm-up, note what it does.

        Calls of a signature that comes seldom take no longer than without this package.
        """
        if self._steps < self._run.settings.warmup_steps:
            return self._forward(*args, **kwargs)
        guards = self.guards
        guards.effects.kind = self.signature, None
        with ExitStack() as stack:
            stack.enter_context(setting(self._run.on, value=False))
            stack.enter_context(self._run.backend.generators.learning())
            stack.enter_context(guards.effects.watched())
            stack.enter_context(self._compiled.noticed())
            returned = self._forward(*args, **kwargs)
        self._await_gradients(returned)
        return returned

    def _await_gradients(self, returned: Any) -> None:
        """Note the form of the gradients that come to what the module returned."""
        with_grad = [output for output in tensors_of(returned) if output.grad_fn is not None]
        arrived: list[Tensor | None] = [None] * len(with_grad)
        for index, output in enumerate(with_grad):
            output.register_hook(partial(self._note, arrived, self._position, index))

    def _note(self, arrived: list[Any], position: int, index: int, gradient: Tensor | None) -> None:
        if torch.is_grad_enabled():
            self.refused = UnsupportedError(*NO_SECOND)
        # None for an output of cuDNN's LSTM that the loss does not use.
        arrived[index] = None if gradient is None else gradient.detach()
        self._gradient_forms[position] = GradientForms.of(arrived, self._run.backend.device)

    def capture(self, call: Call) -> ModuleGraph:
        """Capture a call."""
        if self._compiled.is_called:
            raise UnsupportedError("The module calls compiled code.", LEAVE_OUT)
        others = [*self._gradient_forms.values()]  # of calls of the same step, if not of this one
        forms = self._gradient_forms.get(self._position, others[0] if others else None)
        run, module, take = self._run, self._module, self.guards.take
        graph = ModuleGraph(run.backend, module, self._forward, call, self.record, self.changed, take)
        graph.capture(forms if forms is not None and forms.is_plain else None)
        self.graphs.append(graph)
        run.counts.captures += 1
        return graph

    def record(self, body: Callable[[], T], first: Graph | None) -> tuple[Graph, T, bool]:
        """Capture a part of a call, and refuse what a replay would not repeat.

        Args:
            body: the part.
            first: the graph of the first part, whose memory pool is that of all.

        Returns:
            The graph, what `body` returns, and True if it has called user code.
        """
        run, guards = self._run, self.guards
        before = len(guards.mentioned)
        started_s = perf_counter()

        def audited() -> T:
            with ExitStack() as stack:
                if is_in_group():
                    stack.enter_context(CollectiveRules(_ALONE, LEAVE_OUT))
                audit = step_audit(self._module, run.trainer, run.backend.device, run.rules)
                mentioned = stack.enter_context(audit).mentioned
                guards.mentioned.append(mentioned)
                found = body()
                if "retain_grad" in mentioned.users:
                    error = retains_gradient("The module calls `retain_grad()`.")
                    error.is_effect = True
                    raise error
            return found

        with ExitStack() as stack:
            stack.enter_context(setting(run.on, value=False))
            stack.enter_context(guards.effects.refused(guards.all_mentioned))
            stack.enter_context(run.backend.in_pool(first))
            stack.enter_context(setting(run.backend, streams=1))
            graph, found = run.backend.capture(audited)
        run.counts.capture_ms += (perf_counter() - started_s) * 1e3
        run.counts.memory_bytes = run.backend.graph_bytes()
        return graph, found, any(names.users_code for names in guards.mentioned[before:])

    def replay(self, graph: ModuleGraph, call: Call) -> Any:
        """Replay a call, which is verified first if that is due.

        Raises:
            VerificationError: if the replay differs from an eager pass. Nothing has happened then.
        """
        guards, verifier = self.guards, self._run.verifier
        refuse_shared_memory(call.batch, graph.written)
        suspicion = guards.suspicions.of(graph)
        if suspicion or verifier.due(graph, graph.replays, graph.is_unproved):
            with setting(self._run.on, value=False):
                graph.check(call, verifier, suspicion, guards.effects)
            guards.clear_suspicion(graph)
        return graph.replay(call)

    def drop(self) -> None:
        """Let go of all graphs, of which some may be in use; calls warm up again."""
        if self.graphs:
            self.guards.drop()
        for graph in self.graphs:
            graph.has_changed = True
        self._run.retired += self.graphs
        self.graphs = []
        self._gradient_forms.clear()
        self._steps = 0
