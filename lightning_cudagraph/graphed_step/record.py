"""The user's function: its capture, rehearsal and eager run.

The effects of a capture on the host are undone; those that a replay would leave out are refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_cudagraph.capture.gradients.lost_gradients import LostGradients
from lightning_cudagraph.checks.audit.calls.rules import HostRules
from lightning_cudagraph.checks.audit.step_audit import is_audited, step_audit
from lightning_cudagraph.checks.guards.guards import Guards
from lightning_cudagraph.checks.rebound_attributes import ReboundAttributes
from lightning_cudagraph.checks.verify.compare import buffers_and_gradients
from lightning_cudagraph.errors import CaptureError
from lightning_cudagraph.graphed_step.framework import PlainLoop
from lightning_cudagraph.graphed_step.gradients import GradientEffects, NoGradients
from lightning_cudagraph.graphed_step.processes import CollectiveRules, is_in_group
from lightning_cudagraph.graphed_step.replicas import StepReplicas
from lightning_cudagraph.optim.steps import OptimizerSteps
from lightning_cudagraph.tensors.batch import compared_outputs, map_leaves, refuse_odd_outputs
from lightning_cudagraph.tensors.host_values import held
from lightning_cudagraph.tensors.local import local

_ALONE = "a function that works on no `DistributedDataParallel` or `fully_shard` module"
_UNKNOWN = (
    "that belongs to none of the modules and optimizers that it was given; its gradient would be lost"
)
_PASS_ALL = "Pass all modules that the step trains: `GraphedStep(step, modules=[...])`."
_PASS_IT = (
    "If the step does work on one, pass it: `GraphedStep(step, modules=model)`; or call the collective"
    " outside of the step."
)


@dataclass(frozen=True)
class Arguments:
    """The arguments of one call.

    Attributes:
        numbers: integers beside the batch, by name; what captured steps read of them counts.
    """

    batch: Any
    positional: int
    numbers: Mapping[str, int] = field(default_factory=dict)

    def call(self, function: Callable[..., Any], batch: Any = None) -> Any:
        """Call a function with these arguments, or with those of `batch` under the same names."""
        items = list((self.batch if batch is None else batch).items())
        values = [value for _, value in items[: self.positional]]
        return function(*values, **dict(items[self.positional :]))


@dataclass
class StepResult:
    """The result of a captured function: static tensors, and after-replay work.

    Attributes:
        what: what the function returns, in words.
        host_notes: the calls that follow each replay.
        logged: returns the values that the function logs, by their names in messages.
    """

    returned: Any
    what: str
    gradients: dict[str, nn.Parameter]
    host_notes: list[Callable[[], object]]
    logged: Callable[[], dict[str, Tensor]] = dict

    def values(self) -> dict[str, Tensor]:
        named = {**self.logged(), **compared_outputs(map_leaves(self.returned, held), self.what)}
        for name, parameter in self.gradients.items():
            if parameter.grad is not None:
                named[f"the gradient of `{name}`"] = local(parameter.grad)
        return named


class StepRecorder:
    """Recorder of a function's calls.

    Attributes:
        carried: the rebound attributes that graphs carry. None here: a function that rebinds one is
            refused.
    """

    def __init__(
        self,
        of: StepFunction,
        optimizers: OptimizerSteps,
        rules: HostRules,
        device: torch.device,
        are_agreed: bool,
    ) -> None:
        self._function = of.function
        self._model = of.model
        self._framework = of.framework
        self._replicas = of.replicas
        self._optimizers = optimizers
        self._has_gradients = of.has_gradients
        self._rules = rules
        self._device = device
        self._are_agreed = are_agreed
        self._handed = _handed(of.function)
        nothing = nn.Module()
        self.carried = ReboundAttributes(nothing, device, frozenset(), of.framework.stays_on_host)
        self._names = _argument_names(of.function)

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        names = self._names[: len(args)]
        names += [f"argument {index}" for index in range(len(names), len(args))]
        if not kwargs.keys().isdisjoint(names):
            # Positional-only arguments and members of `**kwargs` may share a name. For all others this
            # raises Python's own error.
            inspect.signature(self._function).bind(*args, **kwargs)
            names = [
                f"argument {index} (`{name}`)" if name in kwargs else name
                for index, name in enumerate(names)
            ]
        return Arguments({**dict(zip(names, args, strict=True)), **kwargs}, len(args))

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return all parameters that the function is known to use, each once, by name."""
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for name, parameter in chain(
            self._model.named_parameters(), self._optimizers.parameters().items()
        ):
            found.setdefault(id(parameter), (name, parameter))
        return dict(found.values())

    def gradient_effects(self) -> GradientEffects:
        """Return a new record of the function's effects on gradients."""
        kind = self._device.type
        return GradientEffects(self.parameters, kind) if self._has_gradients else NoGradients(kind)

    def state(self, gradient_effects: GradientEffects) -> dict[str, Tensor]:
        """Return all tensors that the step changes, by name, in the order of a step."""
        state = buffers_and_gradients(self._model, gradient_effects.parameters()[1])
        state |= self._optimizers.state_tensors()
        return state | {f"parameter `{name}`": value for name, value in self.parameters().items()}

    def lost_gradients(self, batch: Any) -> LostGradients:
        """Return the watch of a capture for gradients that a replay would not make."""
        # Those of arguments too: the caller can read them.
        return LostGradients(
            self._model, self._optimizers.parameters().values(), unknown=(_UNKNOWN, _PASS_ALL)
        )

    def run(self, arguments: Arguments) -> Any:
        """Call the function itself, with the arithmetic of a captured step."""
        with self._optimizers.running(capturing=False):
            return arguments.call(self._function)

    def record(
        self,
        batch: dict[str, Any],
        arguments: Arguments,
        gradient_effects: GradientEffects,
        guards: Guards,
        capturing: bool,
    ) -> StepResult:
        """Run the function on the static arguments, in a capture or in a rehearsal."""
        if capturing:
            self._framework.check()
        self._optimizers.check()
        host_notes: list[Callable[[], object]] = []
        lost = self.lost_gradients(batch) if capturing else None
        with ExitStack() as stack:
            if lost is not None:
                stack.enter_context(lost.restored())
            stack.enter_context(self._framework.noted(host_notes))
            if is_audited(capturing):
                trainer = next(iter(self._framework.around.values()), None)
                audit = step_audit(self._model, trainer, self._device, self._rules, self._handed)
                mentioned = stack.enter_context(audit).mentioned
                name = getattr(self._function, "__qualname__", "the step")
                handed = {"__name__": name, **self._handed}
                mentioned.user_globals += [(handed, name) for name in self._handed]
                stack.enter_context(self._framework.reads(mentioned))
                if capturing:
                    guards.mentioned.append(mentioned)
            stack.enter_context(_trained_as_before(self.parameters()))
            stack.enter_context(self._optimizers.running(capturing))
            if is_in_group():
                alone = "" if self._are_agreed else _ALONE
                stack.enter_context(CollectiveRules(alone, _PASS_IT))
            stack.enter_context(self.carried.inside(lambda: ""))
            if lost is not None:
                stack.enter_context(lost.watched())
            returned = arguments.call(self._function, batch)
        left = self._replicas.left()
        host_notes.append(lambda: self._replicas.leave(left))
        refuse_odd_outputs(returned, "the output of the step")
        returned = map_leaves(returned, _detached)
        if lost is not None:
            lost.check()
        drops, adds = gradient_effects.parameters()
        touched = {id(parameter) for parameter in (*drops, *adds)}
        gradients = {name: p for name, p in self.parameters().items() if id(p) in touched}
        return StepResult(returned, "the output", gradients, host_notes)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undo the effects of a recorded step on gradients, the scaler and wrappers."""
        before = [(parameter, parameter.grad) for parameter in self.parameters().values()]
        with self._replicas.undone(), self._optimizers.undone():
            try:
                yield
            finally:
                for parameter, gradient in before:
                    parameter.grad = gradient


@dataclass(frozen=True)
class StepFunction:
    """The user's function, and the objects that it uses."""

    function: Callable[..., Any]
    model: nn.Module
    optimizers: Mapping[str, Optimizer]
    scaler: GradScaler | None
    framework: PlainLoop
    replicas: StepReplicas
    has_gradients: bool = True
    recorder: type[StepRecorder] = StepRecorder


@contextmanager
def _trained_as_before(parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Restore `requires_grad`, and refuse a step that changes it."""
    trained = {name: parameter.requires_grad for name, parameter in parameters.items()}
    toggled: list[str] = []
    try:
        yield
    finally:
        for name, parameter in parameters.items():
            if parameter.requires_grad != trained[name]:
                toggled.append(name)
                parameter.requires_grad_(trained[name])
    if toggled:
        was = trained[toggled[0]]
        raise CaptureError(
            f"The step changes `requires_grad` of `{toggled[0]}` from {was} to {not was}"
            f" ({len(toggled)} parameter(s) in all), which a replay would not do.",
            "Set it back at the end of the step, or change it outside of it.",
        )


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else held(leaf)


def copied(tree: Any) -> Any:
    """Return the result of a function with copies of its tensors."""
    return map_leaves(tree, _copied)


def _handed(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the user's objects that a function is bound to, by name."""
    if isinstance(function, partial):
        return {**_handed(function.func), "args": function.args, "keywords": function.keywords}
    owner = getattr(function, "__self__", None)
    if owner is not None:
        return {"self": owner}
    return {} if inspect.isfunction(function) else {"self": function}


def _argument_names(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
