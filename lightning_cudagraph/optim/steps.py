"""Optimizers and gradient scaler of one captured step, prepared together.

The user's own function calls them, where and as often as it likes. So each optimizer is patched only for
the time of its own `step`, and the code around it reads learning rates as floats.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_cudagraph.checks.audit.step_audit import option_error
from lightning_cudagraph.checks.walk.parts import same
from lightning_cudagraph.checks.walk.scope import Root
from lightning_cudagraph.compat.attributes import bound
from lightning_cudagraph.device.refusals.first_refusal import refuse
from lightning_cudagraph.device.sentry.compiled import is_held, is_left_out
from lightning_cudagraph.errors import CaptureError, UnsupportedError
from lightning_cudagraph.optim.compiled import is_in_compiled_code
from lightning_cudagraph.optim.prepared_optimizer import PreparedOptimizer
from lightning_cudagraph.optim.scaler import PreparedScaler
from lightning_cudagraph.optim.supported_optimizers import HostSide
from lightning_cudagraph.tensors.host_values import HostValue, held, value_of


class _SharedOptimizer:
    """One prepared optimizer, shared by all steps that use it, and restored when the last one closes."""

    def __init__(self, optimizer: Optimizer, device: torch.device):
        self.prepared = PreparedOptimizer(optimizer, device, self._loaded)
        self.users: WeakSet[OptimizerSteps] = WeakSet()

    def _loaded(self, reason: str) -> None:
        for user in self.users:
            user.on_load(reason)

    def leave(self, user: OptimizerSteps) -> None:
        self.users.discard(user)
        if not self.users:
            _SHARED.pop(id(self.prepared.optimizer), None)
            self.prepared.restore()


# By id of the optimizer, which the value holds.
_SHARED: WeakValueDictionary[int, _SharedOptimizer] = WeakValueDictionary()


class OptimizerSteps:
    """The optimizers that a function steps, prepared for capture; `close` restores them."""

    def __init__(
        self,
        optimizers: Mapping[str, Optimizer],
        scaler: GradScaler | None,
        device: torch.device,
        on_load: Callable[[str], None],
    ) -> None:
        self.on_load = on_load
        self._shared: dict[str, _SharedOptimizer] = {}
        self.scaler = None if scaler is None else PreparedScaler(scaler, device, self._device_state)
        # Optimizers that compiled code steps although a graph has to change them.
        self._in_compiled_code: list[Optimizer] = []
        with ExitStack() as stack:
            stack.callback(self.close)
            for name, optimizer in optimizers.items():
                shared = _SHARED.get(id(optimizer))
                if shared is None:
                    shared = _SharedOptimizer(optimizer, device)
                    _SHARED[id(optimizer)] = shared
                shared.users.add(self)
                self._shared[name] = shared
            stack.pop_all()

    @property
    def _prepared(self) -> list[PreparedOptimizer]:
        return [shared.prepared for shared in self._shared.values()]

    def stepped(self) -> list[Optimizer]:
        return [prepared.optimizer for prepared in self._prepared]

    def parameters(self) -> dict[str, nn.Parameter]:
        return {
            self._named(label, name): parameter
            for name, shared in self._shared.items()
            for label, parameter in shared.prepared.named_parameters().items()
        }

    def _named(self, label: str, name: str) -> str:
        """A label, with the optimizer's name if there are several."""
        return label if len(self._shared) == 1 else f"{label} ({name})"

    def _labelled(self, values: Callable[[PreparedOptimizer], dict[str, Any]]) -> dict[str, Any]:
        return {
            self._named(label, name): value
            for name, shared in self._shared.items()
            for label, value in values(shared.prepared).items()
        }

    def hyperparameters(self) -> dict[str, Any]:
        """The options of the optimizers that a capture freezes, labelled for the user."""
        found = self._labelled(PreparedOptimizer.hyperparameters)
        return found if self.scaler is None else {**found, **self.scaler.frozen()}

    def frozen_values(self) -> tuple[Any, ...]:
        """The values of `hyperparameters` without labels, compared before every replay."""
        values = tuple(prepared.frozen_values() for prepared in self._prepared)
        return values if self.scaler is None else (*values, *self.scaler.frozen().values())

    def _options(self) -> tuple[Any, ...]:
        values = tuple(prepared.options() for prepared in self._prepared)
        return values if self.scaler is None else (*values, *self.scaler.frozen().values())

    def places(self) -> list[Collection[Any]]:
        """Lists and dictionary views with members that a capture freezes."""
        return [place for prepared in self._prepared for place in prepared.places()]

    def read(self) -> list[Root]:
        """Roots for what the function can read of the optimizers."""
        return [root for prepared in self._prepared for root in prepared.read()]

    def learning_rates(self) -> tuple[Any, ...]:
        return tuple(rate for prepared in self._prepared for rate in prepared.learning_rates())

    def addresses(self) -> dict[str, Any]:
        return self._labelled(PreparedOptimizer.addresses)

    def state_tensors(self) -> dict[str, Tensor]:
        found = self._states()
        return found if self.scaler is None else {**self.scaler.tensors(), **found}

    def _states(self) -> dict[str, Tensor]:
        return self._labelled(PreparedOptimizer.state_tensors)

    def _device_state(self) -> list[Tensor]:
        return [tensor for prepared in self._prepared for tensor in prepared.device_state()]

    def is_settled(self) -> bool:
        """True if each stepped optimizer has made its state: a scaler can skip the first steps."""
        return self.scaler is None or not self.scaler.waits

    def note_moves(self) -> None:
        """Find out which options schedulers move in every step."""
        for prepared in self._prepared:
            prepared.note_moves()

    def bring_state(self) -> None:
        """Move the state that steps read on the host there, before a capture."""
        for prepared in self._prepared:
            prepared.bring_state()

    def check(self) -> None:
        """Raise an `UnsupportedError` if the optimizers cannot be captured as they are now."""
        if self._in_compiled_code:
            raise _in_compiled_code(self._in_compiled_code[0])
        for prepared in self._prepared:
            prepared.check_state()
        counters = [place for prepared in self._prepared for place in prepared.counters()]
        if len({*counters}) < len(counters):
            raise CaptureError(
                "Two optimizers of the step count in one tensor: `load_state_dict` keeps the tensors"
                " that it is given.",
                "Load a deep copy: `optimizer.load_state_dict(copy.deepcopy(state))`.",
                in_optimizer=True,
            )

    @contextmanager
    def running(self, capturing: bool) -> Iterator[None]:
        """Prepare the optimizers for the enclosed user function that steps them.

        Raises:
            CaptureError: in a capture, if the function changes a learning rate, an option, or a value
                that it keeps on an optimizer, or leaves the scaler in the middle of a step.
        """
        settings, rates = self._options(), self.learning_rates()
        sides = [HostSide(prepared.optimizer) for prepared in self._prepared] if capturing else []
        moved = True  # unless the function returns, and shows otherwise
        groups = [g for prepared in self._prepared for g in prepared.optimizer.param_groups]
        options = [dict(group) for group in groups]
        ours = {id(prepared.optimizer): prepared for prepared in self._prepared}
        stepping: set[int] = set()

        def notice(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if (prepared := ours.get(id(optimizer))) is None:
                raise _unknown(optimizer)
            if not prepared.is_left_alone and id(optimizer) not in stepping:
                raise _unpatched(optimizer)

        with ExitStack() as stack:
            # Such hooks are part of compiled code, which a new hook would make recompile. Its Python is
            # audited in the capture that leaves `torch.compile` out.
            if capturing and not is_held():
                stack.callback(register_optimizer_step_pre_hook(notice).remove)
            if self.scaler is not None:
                optimizers = [prepared.optimizer for prepared in self._prepared]
                stack.enter_context(self.scaler.step_arithmetic(optimizers, capturing))
            for prepared in self._prepared:
                if not prepared.is_left_alone:
                    stack.enter_context(
                        _steps_like_a_graph(prepared, capturing, stepping, self._in_compiled_code)
                    )
                elif capturing:
                    stack.enter_context(prepared.step_arithmetic(capturing))
            try:
                yield
                moved = self.learning_rates() != rates or self._options() != settings
                moved = moved or any(side.changed() for side in sides)
                if moved and capturing:
                    self._refuse_options(options)
            finally:
                if capturing:
                    for group, before in zip(groups, options, strict=True):
                        group.update(before)
                for side in sides:
                    if moved:
                        side.restore()
                    side.release()
        if not capturing:
            return
        if moved:
            raise CaptureError(
                "The step sets an option of an optimizer, or a value that it keeps there, while it runs,"
                " which a replay would not do.",
                "Set it before or after the call of the step; call schedulers there too.",
            )
        if self.scaler is not None and self.scaler.pending():
            raise CaptureError(
                "The step unscales gradients (`scaler.unscale_`, `scaler.step`) and does not call"
                " `scaler.update()`, so that the scaler would wait for it on the host.",
                "Call `scaler.step(optimizer)` and `scaler.update()` in the step, or all three outside.",
            )

    def _refuse_options(self, before: list[dict[str, Any]]) -> None:
        """Refuse a step that has set an option, such as a learning rate, with its name."""
        groups = [
            (prepared, index, group)
            for prepared in self._prepared
            for index, group in enumerate(prepared.optimizer.param_groups)
        ]
        for (prepared, index, group), options in zip(groups, before, strict=False):
            for name in (n for n, was in options.items() if not same(was, group.get(n))):
                of = f"the optimizer `{type(prepared.optimizer).__qualname__}`"
                raise option_error(f"param_groups[{index}]['{name}']", of)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undo the effects of the enclosed capture on the scaler's host state."""
        if self.scaler is None:
            yield
            return
        with self.scaler.undone():
            yield

    def close(self) -> None:
        """Restore the optimizers as the user made them, with their present state."""
        all_shared, self._shared = self._shared, {}
        with ExitStack() as stack:
            for shared in all_shared.values():
                stack.callback(shared.leave, self)


def _unknown(optimizer: Optimizer) -> UnsupportedError:
    return UnsupportedError(
        f"The step calls `{type(optimizer).__qualname__}.step()` of an optimizer that it was not"
        " given: a graph would freeze its learning rate and all its values on the host.",
        "Pass all optimizers: `GraphedStep(step, modules=..., optimizers=[...])`.",
    )


def _in_compiled_code(optimizer: Optimizer) -> UnsupportedError:
    name = type(optimizer).__qualname__
    return UnsupportedError(
        f"Compiled code calls `{name}.step()`, and something of the `{name}` is changed in a graph: a"
        " learning rate that is a float, `capturable=False`, or an op that takes the learning rate as a"
        " number.",
        "Pass `lr=torch.tensor(..., device=...)`, and `capturable=True` where there is that option, and"
        " compile the step itself, `optimizer.step = torch.compile(optimizer.step)`; or call"
        " `optimizer.step()` outside of compiled code.",
    )


def _unpatched(optimizer: Optimizer) -> UnsupportedError:
    return UnsupportedError(
        f"The step calls `{type(optimizer).__qualname__}.step` as it was before"
        " (`torch.compile(optimizer.step)`, or the method in a variable): a graph would freeze its"
        " learning rate.",
        "Call `optimizer.step()` itself; or assign the compiled step, `optimizer.step ="
        " torch.compile(optimizer.step)`.",
    )


def _refuse_numbers_of_steps(optimizer: Optimizer) -> None:
    """Refuse learning rates that the step has computed from a number such as `batch_idx`."""
    for index, group in enumerate(optimizer.param_groups):
        if isinstance(rate := group["lr"], HostValue):
            value_of(rate)
            if not rate.refuses_reads:  # else it was set by a scheduler, which is told by now
                of = f"the optimizer `{type(optimizer).__qualname__}`"
                refuse((error := option_error(f"param_groups[{index}]['lr']", of)), error.subject)
            group["lr"] = held(rate)


@contextmanager
def _steps_like_a_graph(
    prepared: PreparedOptimizer, capturing: bool, stepping: set[int], in_compiled_code: list[Optimizer]
) -> Iterator[None]:
    """Patch `step` of an optimizer to run in a form that can be captured."""
    optimizer = prepared.optimizer
    own: Any = optimizer.step

    def in_floats(closure: Any) -> Any:
        if not callable(closure):
            return closure

        @functools.wraps(closure)
        def called(*args: Any, **kwargs: Any) -> Any:
            with prepared.floats_inside(capturing):
                return closure(*args, **kwargs)

        return called

    # The scaler reads the signature of `step`, and schedulers read attributes that they have set on it.
    @functools.wraps(own)
    def step(*args: Any, **kwargs: Any) -> Any:
        if args:
            args = (in_floats(args[0]), *args[1:])
        if "closure" in kwargs:
            kwargs["closure"] = in_floats(kwargs["closure"])
        if not capturing and is_in_compiled_code() and not is_left_out():
            in_compiled_code.append(optimizer)
        stepping.add(id(optimizer))
        if capturing:
            _refuse_numbers_of_steps(optimizer)
        try:
            with prepared.step_arithmetic(capturing):
                return own(*args, **kwargs)
        finally:
            stepping.discard(id(optimizer))

    with bound([(vars(optimizer), "step", torch.compiler.disable(step))]):
        yield
