"""A function of the user's as it is captured, rehearsed, and run eagerly.

What it does on the host in a capture is undone, or refused, if a replay would leave it out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor, nn

from lightning_cudagraph.checks.audit.frozen import frozen_python_audit
from lightning_cudagraph.checks.audit.host_calls import HostRules
from lightning_cudagraph.checks.guards.guards import Guards
from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.errors import CaptureError
from lightning_cudagraph.graphed_step.gradients import GradientHabits
from lightning_cudagraph.graphed_step.processes import CollectiveRules, is_in_group
from lightning_cudagraph.graphed_step.replicas import StepReplicas
from lightning_cudagraph.graphed_step.surroundings import PlainLoop
from lightning_cudagraph.optim.steps import OptimizerSteps
from lightning_cudagraph.tensors.batch import compared_outputs, map_leaves, refuse_odd_outputs

__all__ = ["Arguments", "StepRecorder", "StepResult", "copied"]

_ALONE = "a function that works on no `DistributedDataParallel`"
_PASS_IT = (
    "If the step does work on one, pass it: `GraphedStep(step, modules=model)`; or call the collective"
    " outside of the step."
)


@dataclass(frozen=True)
class Arguments:
    """What the function is called with.

    Attributes:
        batch: all arguments, by the names that the function has for them.
        positional: how many of them, from the first on, are positional.
    """

    batch: dict[str, Any]
    positional: int

    def call(self, function: Callable[..., Any], batch: dict[str, Any] | None = None) -> Any:
        """Call a function with them, or with others of the same names in their places."""
        items = list((self.batch if batch is None else batch).items())
        values = [value for _, value in items[: self.positional]]
        return function(*values, **dict(items[self.positional :]))


@dataclass
class StepResult:
    """What a captured function returned: static tensors, and what else is to be done after a replay."""

    returned: Any
    gradients: dict[str, nn.Parameter]
    host_notes: list[Callable[[], object]]

    def values(self) -> dict[str, Tensor]:
        """What can be compared just after the step, by name."""
        named = compared_outputs(self.returned, "the output")
        for name, parameter in self.gradients.items():
            if parameter.grad is not None:
                named[f"the gradient of `{name}`"] = parameter.grad
        return named


class StepRecorder:
    """Runs a function so that it can be captured.

    Args:
        function: the user's.
        model: all modules that it works on, as one.
        optimizers: those that it steps.
        surroundings: what it is called from.
        rules: what the names of the surroundings mean.
        backend: where it runs.
        replicas: the `DistributedDataParallel`s among the modules.
        are_agreed: whether all processes, if there are several, decide together.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        model: nn.Module,
        optimizers: OptimizerSteps,
        surroundings: PlainLoop,
        rules: HostRules,
        backend: Backend,
        replicas: StepReplicas,
        are_agreed: bool,
    ) -> None:
        self._function = function
        self._model = model
        self._optimizers = optimizers
        self._surroundings = surroundings
        self._rules = rules
        self._backend = backend
        self._replicas = replicas
        self._are_agreed = are_agreed
        self._handed = _handed(function)
        self._names = _argument_names(function)

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The arguments of a call, by name."""
        names = self._names[: len(args)]
        names += [f"argument {index}" for index in range(len(names), len(args))]
        if not kwargs.keys().isdisjoint(names):
            # A positional argument and a member of `**kwargs` may have one name, if the first is only
            # positional; of all others this raises the error that Python has for it.
            inspect.signature(self._function).bind(*args, **kwargs)
            names = [
                f"argument {index} (`{name}`)" if name in kwargs else name
                for index, name in enumerate(names)
            ]
        return Arguments({**dict(zip(names, args, strict=True)), **kwargs}, len(args))

    def parameters(self) -> dict[str, nn.Parameter]:
        """All parameters that the function is known to work on, each once, by name."""
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for name, parameter in chain(
            self._model.named_parameters(), self._optimizers.parameters().items()
        ):
            found.setdefault(id(parameter), (name, parameter))
        return dict(found.values())

    def state(self, habits: GradientHabits) -> dict[str, Tensor]:
        """All tensors that the step changes, by name, in the order of a step."""
        state: dict[str, Tensor] = {
            f"buffer `{name}`": buffer for name, buffer in self._model.named_buffers()
        }
        for index, parameter in enumerate(habits.parameters()[1]):
            if (gradient := parameter.grad) is not None:
                state[f"the gradient of a parameter that the step only adds to ({index})"] = gradient
        state |= self._optimizers.state_tensors()
        return state | {f"parameter `{name}`": value for name, value in self.parameters().items()}

    def run(self, arguments: Arguments) -> Any:
        """The function itself, in the arithmetic of a captured one."""
        with self._optimizers.running(capturing=False):
            return arguments.call(self._function)

    def record(
        self,
        batch: dict[str, Any],
        arguments: Arguments,
        habits: GradientHabits,
        guards: Guards,
        capturing: bool,
    ) -> StepResult:
        """Run the function on the static arguments.

        Args:
            batch: the static arguments.
            arguments: those of this call.
            habits: what the function does to gradients.
            guards: told what it mentions.
            capturing: whether a capture is under way.

        Raises:
            UnsupportedError: if it leaves something on the host that a replay would not leave.
        """
        if capturing:
            habits.check()
        self._optimizers.check()
        host_notes: list[Callable[[], object]] = []
        with ExitStack() as stack:
            stack.enter_context(self._surroundings.noted(host_notes))
            if capturing:
                trainer = next(iter(self._surroundings.around.values()), None)
                audit = frozen_python_audit(
                    self._model, trainer, self._backend.device, self._rules, self._handed
                )
                mentioned = stack.enter_context(audit).mentioned
                guards.mentioned.append(mentioned)
                name = getattr(self._function, "__qualname__", "the step")
                handed = {"__name__": name, **self._handed}
                mentioned.user_globals += [(handed, name) for name in self._handed]
                stack.enter_context(self._surroundings.reads(mentioned))
            stack.enter_context(_trained_as_before(self.parameters()))
            stack.enter_context(self._optimizers.running(capturing))
            if is_in_group():
                alone = "" if self._are_agreed else _ALONE
                stack.enter_context(CollectiveRules(alone, _PASS_IT))
            returned = arguments.call(self._function, batch)
        left = self._replicas.left()
        host_notes.append(lambda: self._replicas.leave(left))
        refuse_odd_outputs(returned, "the output of the step")
        drops, adds = habits.parameters()
        touched = {id(parameter) for parameter in (*drops, *adds)}
        gradients = {name: p for name, p in self.parameters().items() if id(p) in touched}
        return StepResult(map_leaves(returned, _detached), gradients, host_notes)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undo what a recorded step does to gradients, to the scaler and to wrappers."""
        before = [(parameter, parameter.grad) for parameter in self.parameters().values()]
        with self._replicas.undone(), self._optimizers.undone():
            try:
                yield
            finally:
                for parameter, gradient in before:
                    parameter.grad = gradient


@contextmanager
def _trained_as_before(parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Put `requires_grad` back, and refuse a step after which it is another."""
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
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def copied(tree: Any) -> Any:
    """What a function returned, with copies of its tensors."""
    return map_leaves(tree, _copied)


def _handed(function: Callable[..., Any]) -> dict[str, Any]:
    """The objects of the user's that a function is bound to, by name."""
    if isinstance(function, partial):
        return {**_handed(function.func), "args": function.args, "keywords": function.keywords}
    owner = getattr(function, "__self__", None)
    if owner is not None:
        return {"self": owner}
    return {} if inspect.isfunction(function) else {"self": function}


def _argument_names(function: Callable[..., Any]) -> list[str]:
    """What the positional arguments are called."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
