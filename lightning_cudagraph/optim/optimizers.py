"""An optimizer made fit for capture, and the way back.

`forms.py` says what keeps an optimizer from being captured. Here its flags are changed while it steps
(in `PreparedGroup`), its checkpoints kept as the user has them, and its arithmetic made that of a graph.

Every step of a run that has graphs goes through the same arithmetic, eager or replayed, so that it does
not matter which steps are replayed. Against a run without this package: the fused forms, and SGD in all
its forms on 32 and 64 bit parameters, are the same bit for bit; the other classes compute their bias
corrections on the device instead of the host, which moves a parameter by about one unit in the last
place a step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cudagraph.capture.compiled import is_left_out
from lightning_cudagraph.capture.local import address_of
from lightning_cudagraph.capture.stand_ins import OwnHook
from lightning_cudagraph.compat.features import CAPTURABLE_ON_CPU
from lightning_cudagraph.compat.tables import require
from lightning_cudagraph.errors import CaptureError, UnsupportedError
from lightning_cudagraph.optim.alpha import TensorAlphaMode
from lightning_cudagraph.optim.compiled import is_compiled, left_alone, refuse_changes
from lightning_cudagraph.optim.forms import (
    HostSide,
    form_of,
    host_state_of,
    moving_values,
    refuse_step_hooks,
    step_hooks,
)
from lightning_cudagraph.optim.groups import PreparedGroup, check_group

__all__ = ["EagerOptimizer", "PreparedOptimizer"]


class EagerOptimizer:
    """An optimizer that is left as it is, because it steps eagerly behind the graph.

    Args:
        optimizer: the optimizer.

    Attributes:
        optimizer: the optimizer.
        notes: what was changed, in words for the report.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.notes: list[str] = []

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that the optimizer steps and that have gradients."""
        return [
            parameter
            for group in self.optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]

    def hyperparameters(self) -> dict[str, Any]:
        """All options of all param groups but the values of learning rates: a capture freezes them."""
        return {}

    def frozen_values(self) -> tuple[Any, ...]:
        """The values of `hyperparameters`, without the words: compared before every replay."""
        # Also behind a graph, which makes the gradients of these parameters and of no others.
        groups = self.optimizer.param_groups
        return tuple((id(group), id(group["params"]), len(group["params"])) for group in groups)

    def places(self) -> list[Collection[Any]]:
        """Lists, and views of dictionaries, whose members a capture freezes."""
        groups = self.optimizer.param_groups
        return [groups, *(group["params"] for group in groups)]

    def learning_rates(self) -> tuple[Any, ...]:
        """The learning rates, which a captured step can read, be it in the user's code."""
        return tuple(group["lr"] for group in self.optimizer.param_groups)

    def state_tensors(self) -> dict[str, Tensor]:
        """All tensors of the optimizer's state that a captured step changes, by name."""
        return {}

    def addresses(self) -> dict[str, Any]:
        """What else of the optimizer a capture freezes: which tensors it works on, by name."""
        return {
            f"parameter {index} in param group {group_idx} of the optimizer": id(parameter)
            for group_idx, group in enumerate(self.optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
        }

    def check_state(self) -> None:
        """Refuse to be captured with state that is not on the device."""

    def refresh(self) -> None:
        """Bring the mirrors up to date with the learning rates, on the current stream."""

    @contextmanager
    def step_arithmetic(self, capturing: bool = False) -> Iterator[None]:
        """Inside, the optimizer computes as it does in a graph, whether one is captured or not."""
        yield

    @contextmanager
    def floats_inside(self, capturing: bool = False) -> Iterator[None]:
        """Inside, user code that runs within `step_arithmetic` finds the learning rates it knows."""
        yield

    def restore(self) -> None:
        """Give the optimizer back as the user made it, with the state that it has reached."""


class PreparedOptimizer(EagerOptimizer):
    """An optimizer made fit for capture, and the way back.

    Args:
        optimizer: the optimizer; between steps its param groups are as the user has them.
        device: where its parameters are.
        lr_dtype: dtype of the learning rate's mirrors.
        on_load: called with a reason after `optimizer.load_state_dict`, which puts other tensors in
            the place of those that a graph knows.
        scaled: a gradient scaler can skip its steps.

    Raises:
        UnsupportedError: if this optimizer has no form that a graph can hold.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        device: torch.device,
        lr_dtype: torch.dtype,
        on_load: Callable[[str], None],
        scaled: bool = False,
    ) -> None:
        super().__init__(optimizer)
        self._form = form_of(optimizer, scaled)
        self._is_compiled = is_compiled(optimizer.step)
        if self._is_compiled:
            refuse_changes(optimizer, self._form, device)
        self._device = device
        self._lr_dtype = lr_dtype
        self._on_load = on_load
        self._groups: list[PreparedGroup] = []
        self._restored = False
        self._restore = ExitStack()
        self._prepare_groups()
        self._allow_cpu()
        self._hooks = [
            optimizer.register_state_dict_post_hook(OwnHook(self._as_the_user_has_it)),
            optimizer.register_load_state_dict_post_hook(OwnHook(self._after_load)),
        ]

    def _allow_cpu(self) -> None:
        """Put the CPU on the list of devices that torch lets `capturable` run on, until `restore`.

        The emulator stands in for such a device.
        """
        if self._device.type != "cpu" or not self._form.capturable:
            return
        require(CAPTURABLE_ON_CPU)
        name = "_get_capturable_supported_devices"
        for cls in type(self.optimizer).__mro__:
            module = sys.modules[cls.__module__]
            if cls is not Optimizer and hasattr(module, name):
                self._restore.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, _and_cpu(getattr(module, name)))
                return
        raise UnsupportedError(
            f"There is no `{name}` beside `{type(self.optimizer).__qualname__}`, and the CPU emulator"
            " needs it to run capturable optimizers.",
            "Leave `capturable` out, or use an optimizer of `torch.optim`.",
        )

    def _prepare_groups(self) -> None:
        """Prepare every group that is not prepared yet: all, one that was added, or a loaded one."""
        form = left_alone(self._form) if self._is_compiled else self._form
        known = {id(prepared.group): prepared for prepared in self._groups}
        groups: list[PreparedGroup] = []
        for index, group in enumerate(self.optimizer.param_groups):
            prepared = known.get(id(group))
            if prepared is None or not prepared.fits(group):
                check_group(self.optimizer, index, self._device)
                prepared = PreparedGroup(form, self.optimizer, index, self._device, self._lr_dtype)
            groups.append(prepared)
        self._groups = groups
        self.notes = self._describe()

    def _sync_groups(self) -> None:
        current = self.optimizer.param_groups
        if (compiled := is_compiled(self.optimizer.step)) != self._is_compiled:
            self._is_compiled = compiled
            self._groups = []
        if len(current) != len(self._groups) or not all(
            prepared.fits(group) for prepared, group in zip(self._groups, current, strict=True)
        ):
            self._prepare_groups()

    def _describe(self) -> list[str]:
        changed = sorted({name for prepared in self._groups for name in prepared.flags})
        if not changed:
            return []
        text = f"{type(self.optimizer).__qualname__} runs with " + ", ".join(
            f"{n}=True" for n in changed
        )
        if all(prepared.group.get("fused") for prepared in self._groups):
            return [f"{text}, which changes no number of its fused form"]
        remedy = ""
        if type(self.optimizer) in (torch.optim.Adam, torch.optim.AdamW):
            remedy = "; with fused=True it is bit-equal to a run without graphs, and faster"
        reason = (
            f"{text}: bias corrections are computed on the device, which rounds differently from the"
            f" host (about one unit in the last place a step){remedy}"
        )
        return [reason]

    def _as_the_user_has_it(self, optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """A `state_dict` as it would be without us, so that it loads anywhere."""
        self._sync_groups()
        on_host: set[int] = set()
        for group, prepared in zip(saved["param_groups"], self._groups, strict=True):
            if prepared.keeps_host_state:
                on_host.update(group["params"])
        states = {
            index: {
                name: value.cpu().clone() if name in self._form.host_state else value
                for name, value in state.items()
            }
            if index in on_host
            else state
            for index, state in saved["state"].items()
        }
        return {**saved, "state": states}

    def _after_load(self, optimizer: Optimizer) -> None:
        self._prepare_groups()
        self._on_load("a state was loaded into the optimizer")

    def hyperparameters(self) -> dict[str, Any]:
        self._sync_groups()
        found: dict[str, Any] = {
            "the number of param groups of the optimizer": len(self._groups),
            "whether the optimizer's step is compiled": is_compiled(self.optimizer.step),
        }
        for prepared in self._groups:
            found.update(prepared.frozen())
        if self._form.inspected:
            found.update(moving_values(self.optimizer))
        return found

    def frozen_values(self) -> tuple[Any, ...]:
        values: list[Any] = [prepared.frozen_values() for prepared in self._groups]
        values.append(tuple(map(id, self.optimizer.param_groups)))  # added, or replaced
        values.append((id(self.optimizer.state), len(self.optimizer.state)))
        values.append(is_compiled(self.optimizer.step))
        if self._form.inspected:
            values.append(tuple(moving_values(self.optimizer).values()))
        return tuple(values)

    def places(self) -> list[Collection[Any]]:
        states = [state.values() for state in self.optimizer.state.values() if isinstance(state, dict)]
        return [*super().places(), self.optimizer.state.values(), *states]

    @property
    def is_left_alone(self) -> bool:
        """Whether it steps in a graph just as the user has made it."""
        return (self._is_compiled or not self._form.alpha) and all(
            prepared.is_left_alone for prepared in self._groups
        )

    def check_state(self) -> None:
        # Since the form was found, the step may have been compiled, and hooks registered.
        compiled = is_compiled(self.optimizer.step)
        if compiled:
            refuse_changes(self.optimizer, self._form, self._device)
        self._sync_groups()
        refuse_step_hooks(self.optimizer)
        reason = host_state_of(self.optimizer, self._device)
        if reason is not None:
            raise UnsupportedError(
                f"{reason[0].upper()}{reason[1:]}, where a replay would not change it.",
                "Use one of torch's own optimizers to have its step in the graph too.",
                in_optimizer=True,
            )

    def state_tensors(self) -> dict[str, Tensor]:
        return {
            f"`{name}` of parameter {index} in param group {group_idx} of the optimizer": value
            for group_idx, group in enumerate(self.optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
            for name, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }

    def addresses(self) -> dict[str, Any]:
        found = super().addresses()
        for name, tensor in self.state_tensors().items():
            found[f"the address of {name}"] = address_of(tensor)
        found["the number of hooks around the step of the optimizer"] = step_hooks(self.optimizer)
        return found

    def refresh(self) -> None:
        for prepared in self._groups:
            prepared.refresh()

    @contextmanager
    def step_arithmetic(self, capturing: bool = False) -> Iterator[None]:
        """Inside, the optimizer computes as it does in a graph, whether one is captured or not.

        The mirrors must be up to date: filling them is no part of the step, since a capture would
        freeze the value. An optimizer of which nothing is known finds its mirrors in captures only.

        Args:
            capturing: a capture is under way.

        Raises:
            CaptureError: if the step sets a learning rate while a capture is under way.
        """
        if self._form.inspected and not capturing:
            yield
            return
        with ExitStack() as stack:
            if capturing:
                stack.enter_context(self._host_side_unchanged())
            if self._form.alpha and (not self._is_compiled or is_left_out()):
                stack.enter_context(TensorAlphaMode())
            for prepared in self._groups:
                prepared.swap_in(capturing)
            try:
                yield
            finally:
                was_set = [prepared.swap_out() for prepared in self._groups]
            if capturing and any(was_set):
                raise _lr_set_inside()

    @contextmanager
    def _host_side_unchanged(self) -> Iterator[None]:
        """Refuse a step that leaves traces on the host; if it is refused, they are undone."""
        host_side, before = HostSide(self.optimizer), self.addresses()
        try:
            yield
            if self._form.inspected and (change := host_side.changed()) is not None:
                raise CaptureError(
                    f"The step of the optimizer sets or changes {change} on the host, which a replay"
                    " would not do.",
                    "Use one of torch's own optimizers to have its step in the graph too.",
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
        if self._form.inspected and not capturing:
            yield
            return
        for prepared in self._groups:
            prepared.swap_out()
        try:
            yield
        finally:
            moved = any(prepared.lr_moved() for prepared in self._groups)
            if not capturing:
                self.refresh()
            for prepared in self._groups:
                prepared.swap_in(capturing)
        if capturing and moved:
            raise _lr_set_inside()

    def restore(self) -> None:
        if self._restored:
            return
        self._restored = True
        with self._restore as stack:
            for hook in self._hooks:
                stack.callback(hook.remove)
            for prepared in self._groups:
                stack.callback(prepared.restore)


def _and_cpu(devices: Callable[..., list[str]]) -> Callable[..., list[str]]:
    return lambda *args, **kwargs: [*devices(*args, **kwargs), "cpu"]


def _lr_set_inside() -> CaptureError:
    return CaptureError(
        "The training step sets a learning rate while it runs, which a replay would not do.",
        "Set it in `on_train_batch_start` or in `optimizer_step`, or use a scheduler.",
    )
