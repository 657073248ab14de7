"""Prepared optimizers: the user's optimizer in a form that can be captured, and its restoration.

Eager steps are the user's own. A captured step of one of torch's own optimizers is that same step, and
each replay repeats its host arithmetic: numbers, state and counters are those of a run without this
package, bit for bit, whichever steps are replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_cudagraph.checks.audit.step_audit import option_error
from lightning_cudagraph.checks.verify.tape import floats_given
from lightning_cudagraph.checks.walk.scope import Root
from lightning_cudagraph.compat.attributes import bound, do_nothing
from lightning_cudagraph.compat.method_patches import OwnHook
from lightning_cudagraph.device.emulator.capturable_optimizers import allow_on_cpu
from lightning_cudagraph.device.host_work import work_under_capture
from lightning_cudagraph.device.refusals.first_refusal import is_of_receiver
from lightning_cudagraph.device.sentry.compiled import is_left_out
from lightning_cudagraph.errors import CaptureError, UnsupportedError, begun
from lightning_cudagraph.optim.compiled import is_compiled, refuse_changes
from lightning_cudagraph.optim.eager_optimizer import EagerOptimizer
from lightning_cudagraph.optim.groups import PreparedGroup, check_group
from lightning_cudagraph.optim.host_arithmetic.host_program import HostProgram, State
from lightning_cudagraph.optim.host_arithmetic.host_tensors import HostTensors
from lightning_cudagraph.optim.host_arithmetic.scalar_ops import TensorScalarMode
from lightning_cudagraph.optim.host_arithmetic.staged_numbers import Stage
from lightning_cudagraph.optim.host_arithmetic.traced_step import TracedStep
from lightning_cudagraph.optim.outcomes import Outcomes
from lightning_cudagraph.optim.supported_optimizers import (
    HostSide,
    form_of,
    host_state_of,
    inner_optimizers,
    refuse_other_groups,
    refuse_step_hooks,
    roots_of_read,
    step_hooks,
)
from lightning_cudagraph.tensors.local import address_of

_AS_CAPTURED = (
    "agreement with the captured `optimizer.step`, in its branches and in which parameters have had as"
    " many steps,"
)
_USE_TORCHS = "Use one of torch's own optimizers to have its step in the graph too."
# Host numbers that a graph has room for: those independent of counters, and those of each parameter.
_MAX_NUMBERS, _MAX_NUMBERS_EACH = 64, 8


class PreparedOptimizer(EagerOptimizer):
    """An optimizer prepared for capture; `restore` undoes it.

    `on_load` is called after `load_state_dict`, which replaces the tensors that a graph reads.
    """

    def __init__(
        self, optimizer: Optimizer, device: torch.device, on_load: Callable[[str], None]
    ) -> None:
        super().__init__(optimizer)
        self._form = form_of(optimizer)
        self._is_compiled = is_compiled(optimizer.step)
        if self._is_compiled:
            refuse_changes(optimizer, self._form, device)
        self._device = device
        self._on_load = on_load
        self._groups: list[PreparedGroup] = []
        self._tensors = HostTensors(optimizer, self._form.lists_on_device)
        self.outcomes = Outcomes(self._tensors.write)
        self._traced: TracedStep | None = None  # the step under capture
        self._programs: list[ref[HostProgram]] = []  # of the graphs that exist
        self._restored = False
        self._restore = ExitStack()
        self._prepare_groups()
        self._hooks = self._registered_hooks()
        if device.type == "cpu":
            allow_on_cpu(optimizer, self._restore)
        parameters = sum(len(group["params"]) for group in optimizer.param_groups)
        self._stage = Stage(device, _MAX_NUMBERS + _MAX_NUMBERS_EACH * parameters)

    def _registered_hooks(self) -> list[RemovableHandle]:
        optimizer, registered = self.optimizer, []
        try:
            hook = optimizer.register_state_dict_post_hook(OwnHook(self._as_the_user_has_it))
            registered.append(hook)
            registered.append(optimizer.register_load_state_dict_pre_hook(OwnHook(self._before_load)))
            registered.append(optimizer.register_load_state_dict_post_hook(OwnHook(self._after_load)))
        except (AttributeError, TypeError) as error:
            for hook in registered:
                hook.remove()
            raise UnsupportedError(
                f"`{type(optimizer).__qualname__}` takes no hooks on its state: its `__init__` does not"
                " call that of `torch.optim.Optimizer`.",
                "Call `super().__init__(params, defaults)` in it.",
                in_optimizer=True,
            ) from error
        return registered

    def _prepare_groups(self) -> None:
        """Prepare the param groups that are not prepared: at first all, later added or loaded ones."""
        known = {id(prepared.group): prepared for prepared in self._groups}
        groups: list[PreparedGroup] = []
        for index, group in enumerate(self.optimizer.param_groups):
            prepared = known.get(id(group))
            if prepared is None or not prepared.fits(group):
                check_group(self.optimizer, index, self._device)
                prepared = PreparedGroup(self._form, self.optimizer, index, self._is_compiled)
            groups.append(prepared)
        self._groups = groups

    def _sync_groups(self) -> None:
        current = self.optimizer.param_groups
        if (compiled := is_compiled(self.optimizer.step)) != self._is_compiled:
            self._is_compiled = compiled
            self._groups = []
        if len(current) != len(self._groups) or not all(
            prepared.fits(group) for prepared, group in zip(self._groups, current, strict=True)
        ):
            self._prepare_groups()

    def _as_the_user_has_it(self, optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any] | None:
        """The `state_dict`, live as torch gives it, but for state that was moved to the host."""
        self.outcomes.settle()
        moved = self._tensors.before_moves()
        if not moved:
            return None
        states = {
            index: {name: moved.get(id(value), value) for name, value in state.items()}
            if isinstance(state, dict) and any(id(value) in moved for value in state.values())
            else state
            for index, state in saved["state"].items()
        }
        return {**saved, "state": states}

    def _before_load(self, optimizer: Optimizer, _: dict[str, Any]) -> None:
        self.outcomes.settle()
        self._tensors.before_moves()  # the state to load may have these tensors

    def _after_load(self, optimizer: Optimizer) -> None:
        self._prepare_groups()
        self._on_load("a state was loaded into the optimizer")

    def hyperparameters(self) -> dict[str, Any]:
        self._sync_groups()
        found: dict[str, Any] = {
            "the number of param groups of the optimizer": len(self._groups),
            "compilation of `optimizer.step`": is_compiled(self.optimizer.step),
        }
        for prepared in self._groups:
            found.update(prepared.frozen())
        found[_AS_CAPTURED] = not any(self._as_captured())
        return found

    def _as_captured(self) -> tuple[frozenset[Any], frozenset[int]]:
        """The groups of counters that are not equal now, and the programs that would branch otherwise.

        Of all graphs, also of those that are not replayed now: a later capture can split a group.
        """
        programs = [program for reference in self._programs if (program := reference()) is not None]
        groups = {*self._tensors.alike}.union(*[program.groups for program in programs])
        unequal = frozenset([group for group in groups if not group.are_equal()])
        branching = [program for program in programs if program.decided]
        if not branching:
            return unequal, frozenset()
        if any(self.outcomes.have_moved_others(program.groups) for program in branching):
            self.outcomes.settle()
        broken = {_broken(branching, state) for state in self.outcomes.possible()}
        if len(broken) > 1:
            self.outcomes.settle()
            return unequal, _broken(branching, {})
        return unequal, broken.pop()

    def frozen_values(self) -> tuple[Any, ...]:
        return (*self.options(), *self._as_captured())

    def options(self) -> tuple[Any, ...]:
        values: list[Any] = [prepared.frozen_values() for prepared in self._groups]
        values.append(tuple(map(id, self.optimizer.param_groups)))  # added, or replaced
        values.append((id(self.optimizer.state), len(self.optimizer.state)))
        values.append(is_compiled(self.optimizer.step))
        return tuple(values)

    def places(self) -> list[Collection[Any]]:
        every = [self.optimizer, *inner_optimizers(self.optimizer)]
        kept = [optimizer.state.values() for optimizer in every]
        states = [state.values() for each in kept for state in each if isinstance(state, dict)]
        return [*super().places(), *kept, *states]

    @property
    def is_inspected(self) -> bool:
        return self._form.inspected

    def read(self) -> list[Root]:
        every = [self.optimizer, *inner_optimizers(self.optimizer)]
        return [root for each in every for root in roots_of_read(each, self.is_inspected)]

    @property
    def is_left_alone(self) -> bool:
        """True if a capture changes nothing of the optimizer, and its step keeps nothing on the host."""
        return all(prepared.is_left_alone for prepared in self._groups)

    def bring_state(self) -> None:
        if not self._form.inspected and not is_compiled(self.optimizer.step):
            self._tensors.bring()

    def check_state(self) -> None:
        # The step may have been compiled since the form was chosen, and hooks registered.
        compiled = is_compiled(self.optimizer.step)
        if compiled:
            refuse_changes(self.optimizer, self._form, self._device)
        self._sync_groups()
        refuse_step_hooks(self.optimizer)
        if not self._form.inspected and not compiled:
            self.outcomes.settle()
            self._tensors.gather()
            return
        refuse_other_groups(self.optimizer)
        reason = host_state_of(self.optimizer, self._device)
        if reason is not None:
            raise UnsupportedError(
                f"{begun(reason)}, where a replay would not change it.",
                _USE_TORCHS,
                in_optimizer=True,
            )

    def counters(self) -> list[int]:
        """The addresses of the state in host memory that a captured step moves."""
        return [place for alike in self._tensors.alike for place in alike.places]

    def state_tensors(self) -> dict[str, Tensor]:
        self.outcomes.settle()
        return self._state_tensors()

    def _state_tensors(self) -> dict[str, Tensor]:
        return {
            f"`{name}` of parameter {index} in param group {group_idx} of the optimizer": value
            for group_idx, group in enumerate(self.optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
            for name, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }

    def device_state(self) -> list[Tensor]:
        on_host = {id(tensor) for _, tensor in self._tensors.found()}
        return [tensor for tensor in self._state_tensors().values() if id(tensor) not in on_host]

    def addresses(self) -> dict[str, Any]:
        found = super().addresses()
        for name, tensor in self._state_tensors().items():
            found[name] = f"a tensor at {address_of(tensor):#x}"
        found["the number of hooks around the step of the optimizer"] = step_hooks(self.optimizer)
        return found

    def note_moves(self) -> None:
        for prepared in self._groups:
            prepared.note_moves()

    @contextmanager
    def step_arithmetic(self, capturing: bool = False) -> Iterator[None]:
        """Give the enclosed `step` the form that can be captured, in a capture.

        An eager step is the user's own.
        """
        for prepared in self._groups:
            prepared.note_moves()
        self.outcomes.settle()
        if not capturing:
            with floats_given(True):
                yield
            return
        traced: TracedStep | None = None
        with ExitStack() as stack:
            stack.enter_context(self._host_side_unchanged())
            if self._is_compiled:
                if is_left_out():
                    stack.enter_context(TensorScalarMode())
            elif not self.is_left_alone:  # compiled code guards on active modes: add none without need
                traced = self._tracing()
                stack.enter_context(traced)
                stack.enter_context(traced.selecting())
                stack.enter_context(_without_health_check(self.optimizer))
            self._traced = traced
            for prepared in self._groups:
                prepared.swap_in(traced)
            try:
                yield
            finally:
                was_set = [prepared.swap_out() for prepared in self._groups]
                for prepared in self._groups:
                    prepared.forget()
                self._traced = None
            self._refuse_set(was_set)
        if traced is not None:
            traced.register()
            others = [each for each in self._programs if each() not in (None, traced.program)]
            self._programs = [*others, ref(traced.program)]

    def _tracing(self) -> TracedStep:
        """The trace of the steps in this capture: a later one goes on with the last counters."""
        traced_steps = work_under_capture().traced
        key = id(self.optimizer)
        if key not in traced_steps:
            traced_steps[key] = TracedStep(
                self.optimizer, self._device, self._tensors, self._stage, self.outcomes
            )
        traced: TracedStep = traced_steps[key]
        return traced

    @contextmanager
    def _host_side_unchanged(self) -> Iterator[None]:
        """Refuse a step with effects on the host, and undo them."""
        host_side, before = HostSide(self.optimizer), self.addresses()
        try:
            yield
            if self._form.inspected and (change := host_side.changed()) is not None:
                raise CaptureError(
                    f"The step of the optimizer sets or changes {change} on the host, which a replay"
                    " would not do.",
                    _USE_TORCHS,
                    in_optimizer=True,
                )
            if self.addresses() != before:
                raise CaptureError(
                    f"`{type(self.optimizer).__qualname__}` makes state in this step that it did not"
                    " have after warm-up, because a parameter has its first gradient only now.",
                    "Raise `warmup_steps` until every parameter has had a gradient.",
                    in_optimizer=True,
                )
        except BaseException:
            host_side.restore()
            raise
        finally:
            host_side.release()

    @contextmanager
    def floats_inside(self, capturing: bool = False) -> Iterator[None]:
        if not capturing:
            with floats_given(False):
                yield
            return
        for prepared in self._groups:
            prepared.swap_out()
        if self._traced is not None:
            self._traced.is_under_way = False
        try:
            yield
        finally:
            if self._traced is not None:
                self._traced.is_under_way = True
            moved = [prepared.swap_in(self._traced) for prepared in self._groups]
        self._refuse_set(moved)

    def _refuse_set(self, are_set: list[bool]) -> None:
        """Refuse a step that sets learning rates: those of the groups with True."""
        groups = zip(self.optimizer.param_groups, are_set, strict=True)
        found = [n for n, (group, is_set) in enumerate(groups) if is_set and not is_of_receiver(group)]
        if found:
            path = f"param_groups[{found[0]}]['lr']"
            raise option_error(path, f"the optimizer `{type(self.optimizer).__qualname__}`")

    def restore(self) -> None:
        if self._restored:
            return
        self._restored = True
        with self._restore as stack:
            stack.callback(self.outcomes.settle)
            for hook in self._hooks:
                stack.callback(hook.remove)
            stack.callback(self._tensors.let_go)


def _broken(programs: list[HostProgram], state: State) -> frozenset[int]:
    """The numbers of the programs with a branch that would go otherwise than at their capture."""
    return frozenset([program.number for program in programs if not program.holds(state)])


def _without_health_check(optimizer: Optimizer) -> AbstractContextManager[None]:
    """Patch out the step's refusal of a capture with counters on the host, where replays count them.

    The method has another name from torch 2.13 on, or two.
    """
    names = [name for name in dir(optimizer) if name.endswith("_graph_capture_health_check")]
    return bound((vars(optimizer), name, do_nothing) for name in names)
