"""The calls of a module with one signature: their warm-up, their graphs, and the guards on these."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cudagraph.checks.guards.guards import GuardedValues, Guards, OutsideModel, Unguarded
from lightning_cudagraph.compat.attributes import setting
from lightning_cudagraph.device.sentry.compiled import CompiledCode
from lightning_cudagraph.errors import UnsupportedError
from lightning_cudagraph.tensors.batch_signature import Signature
from lightning_cudagraph.tensors.static import refuse_shared_memory
from lightning_cudagraph.trainer.captured_modules.calls import LEAVE_OUT, Call, tensors_of
from lightning_cudagraph.trainer.captured_modules.gradients import GradientForms
from lightning_cudagraph.trainer.captured_modules.graph import ModuleGraph
from lightning_cudagraph.trainer.captured_modules.node import NO_SECOND
from lightning_cudagraph.trainer.captured_modules.run import ModulesRun
from lightning_cudagraph.trainer.common.host_rules import OWN_ATTRIBUTES, RUN_STATE, outside_of_model


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
        graph = ModuleGraph(self._run, self.guards, self._module, self._forward, call)
        graph.capture(forms if forms is not None and forms.is_plain else None)
        self.graphs.append(graph)
        self._run.counts.captures += 1
        return graph

    def replay(self, graph: ModuleGraph, call: Call) -> Any:
        """Replay a call, which is verified first if that is due.

        Raises:
            VerificationError: if the replay differs from an eager pass. Nothing has happened then.
        """
        guards, verifier = self.guards, self._run.verifier
        refuse_shared_memory(call.batch, graph.written)
        suspicion = guards.suspicions.of(graph)
        if suspicion or verifier.due(graph, graph.replays, graph.is_unproved):
            graph.check(call, suspicion)
            guards.clear_suspicion(graph)
        return graph.replay(call)

    def drop(self) -> list[ModuleGraph]:
        """Let go of all graphs; calls warm up again. Return the graphs, of which some may be in use."""
        if self.graphs:
            self.guards.drop()
        dropped, self.graphs = self.graphs, []
        for graph in dropped:
            graph.has_changed = True
        self._gradient_forms.clear()
        self._steps = 0
        return dropped
