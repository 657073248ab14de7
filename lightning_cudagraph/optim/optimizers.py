"""Which optimizers a graph can hold, and what has to change so that it holds them rightly.

Three things make an optimizer unfit for a graph as it stands:

* its step counter lives on the host (``capturable=False``), so a replay would go on with the count of
  the capture. All classes listed here have a ``capturable`` form that keeps it on the device; SGD has
  no counter.
* the learning rate is a Python float, which a capture freezes. The float stays where it is, so that
  schedulers, loggers, checkpoints and user code find what they expect; around a step a device tensor
  (the *mirror*) takes its place, and is filled before a replay whenever the float has moved.
* an op takes the learning rate as a `Scalar` argument, and would read the mirror back to the host.
  `TensorAlphaMode` rewrites the one form that SGD uses; where torch has a form without it
  (``foreach=True`` of RMSprop and Adadelta), that form is chosen.

Every step of a run that has graphs goes through the same arithmetic, eager or replayed, so that it does
not matter which steps are replayed. Against a run without this package: the fused forms, and SGD in all
its forms on 32 and 64 bit parameters, are the same bit for bit; the other classes compute their bias
corrections on the device instead of the host, which moves a parameter by about one unit in the last
place a step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cudagraph.errors import CaptureError, UnsupportedError
from lightning_cudagraph.optim.alpha import TensorAlphaMode
from lightning_cudagraph.optim.groups import Form, PreparedGroup, check_group

__all__ = ["PreparedOptimizer"]


_FORMS: dict[type[Optimizer], Form] = {
    torch.optim.Adam: Form(),
    torch.optim.AdamW: Form(),
    torch.optim.NAdam: Form(host_state=("step", "mu_product")),
    torch.optim.RAdam: Form(),
    torch.optim.Adamax: Form(),
    torch.optim.RMSprop: Form(foreach=True),
    torch.optim.Adadelta: Form(foreach=True),
    torch.optim.ASGD: Form(),
    # Reads the learning rate only when it makes its state, in the first warm-up step.
    torch.optim.Rprop: Form(mirror=False),
    torch.optim.SGD: Form(capturable=False, alpha=True, host_state=()),
}


def _name(optimizer: Optimizer) -> str:
    return type(optimizer).__qualname__


def _form_of(optimizer: Optimizer) -> Form:
    form = _FORMS.get(type(optimizer))
    if form is None:
        names = ", ".join(cls.__name__ for cls in _FORMS)
        raise UnsupportedError(
            f"The optimizer is a `{type(optimizer).__module__}.{_name(optimizer)}`; known to give the"
            f" same numbers in a graph are torch's own {names}.",
            "Use one of these.",
        )
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    if any(hooks):
        raise UnsupportedError(
            f"`{_name(optimizer)}` has hooks registered with `register_step_pre_hook` or"
            " `register_step_post_hook`: host code that a replay would not run.",
            "Do the same in `on_train_batch_start` or `on_train_batch_end`.",
        )
    return form


class PreparedOptimizer:
    """An optimizer made fit for capture, and the way back.

    Args:
        optimizer: the optimizer; its param groups are changed in place until `restore`.
        device: where its parameters are.
        lr_dtype: dtype of the learning rate's mirrors.
        on_load: called with a reason after `optimizer.load_state_dict`, which puts other tensors in
            the place of those that a graph knows.

    Attributes:
        optimizer: the optimizer.
        notes: what was changed, in words for the report.

    Raises:
        UnsupportedError: if this optimizer is not known to be right in a graph.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        device: torch.device,
        lr_dtype: torch.dtype,
        on_load: Callable[[str], None],
    ) -> None:
        self.optimizer = optimizer
        self._form = _form_of(optimizer)
        self._device = device
        self._lr_dtype = lr_dtype
        self._on_load = on_load
        self.notes: list[str] = []
        self._groups: list[PreparedGroup] = []
        self._restored = False
        self._allow_cpu = self._cpu_switch()
        self._prepare_groups()
        self._hooks = [
            optimizer.register_state_dict_post_hook(self._as_the_user_has_it),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]

    def _cpu_switch(self) -> tuple[Any, str] | None:
        """Where torch keeps the list of devices that it lets `capturable` run on.

        The emulator stands in for such a device, so while a step runs its device is on the list.
        """
        if self._device.type != "cpu" or not self._form.capturable:
            return None
        name = "_get_capturable_supported_devices"
        for cls in type(self.optimizer).__mro__:
            module = sys.modules[cls.__module__]
            if cls is not Optimizer and hasattr(module, name):
                return module, name
        raise UnsupportedError(
            f"torch {torch.__version__} has no `{name}` beside `{_name(self.optimizer)}`, and the CPU"
            " emulator needs it to run capturable optimizers.",
            "Use a version of torch that this package names as supported.",
        )

    def _prepare_groups(self) -> None:
        """Prepare every group that is not prepared yet: all, one that was added, or a loaded one."""
        known = {id(prepared.group): prepared for prepared in self._groups}
        groups: list[PreparedGroup] = []
        for index, group in enumerate(self.optimizer.param_groups):
            prepared = known.get(id(group))
            if prepared is None or not prepared.fits(group):
                check_group(self.optimizer, index, self._device)
                flags = prepared.flags if prepared is not None else None
                prepared = PreparedGroup(self._form, self.optimizer, index, self._device, self._lr_dtype)
                if flags:
                    prepared.flags = flags
            groups.append(prepared)
        self._groups = groups
        self.notes = self._describe()

    def _sync_groups(self) -> None:
        current = self.optimizer.param_groups
        if len(current) != len(self._groups) or not all(
            prepared.fits(group) for prepared, group in zip(self._groups, current, strict=True)
        ):
            self._prepare_groups()

    def _describe(self) -> list[str]:
        changed = sorted({name for prepared in self._groups for name in prepared.flags})
        if not changed:
            return []
        text = f"{_name(self.optimizer)} runs with " + ", ".join(f"{n}=True" for n in changed)
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
            group.update(prepared.flags)
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
        if self._restored:
            return {}
        self._sync_groups()
        return {label: value for prepared in self._groups for label, value in prepared.frozen().items()}

    def state_tensors(self) -> dict[str, Tensor]:
        """All tensors of the optimizer's state, by name."""
        return {
            f"`{name}` of parameter {index} in param group {group_idx} of the optimizer": value
            for group_idx, group in enumerate(self.optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
            for name, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }

    def addresses(self) -> dict[str, Any]:
        """What else of the optimizer a capture freezes: which tensors it works on, by name."""
        found: dict[str, Any] = {
            f"parameter {index} in param group {group_idx} of the optimizer": id(parameter)
            for group_idx, group in enumerate(self.optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
        }
        for name, tensor in self.state_tensors().items():
            found[f"the address of {name}"] = tensor.data_ptr()
        return found

    def refresh(self) -> None:
        """Bring the mirrors up to date with the learning rates, on the current stream."""
        for prepared in self._groups:
            prepared.refresh()

    @contextmanager
    def step_arithmetic(self, recording: bool = False) -> Iterator[None]:
        """Inside, the optimizer computes as it does in a graph, whether one is captured or not.

        The mirrors must be up to date: filling them is no part of the step, since a capture would
        freeze the value.

        Args:
            recording: a capture is under way.

        Raises:
            CaptureError: if the step sets a learning rate while a capture is under way.
        """
        if self._restored:
            yield
            return
        with ExitStack() as stack:
            if self._allow_cpu is not None:
                module, name = self._allow_cpu
                devices = getattr(module, name)
                setattr(module, name, lambda *args, **kwargs: [*devices(*args, **kwargs), "cpu"])
                stack.callback(setattr, module, name, devices)
            if self._form.alpha:
                stack.enter_context(TensorAlphaMode())
            for prepared in self._groups:
                prepared.swap_in()
            try:
                yield
            finally:
                was_set = [prepared.swap_out() for prepared in self._groups]
            if recording and any(was_set):
                raise _lr_set_inside()

    @contextmanager
    def floats_inside(self, recording: bool = False) -> Iterator[None]:
        """Inside, user code that runs within `step_arithmetic` finds the learning rates it knows."""
        if self._restored:
            yield
            return
        for prepared in self._groups:
            prepared.swap_out()
        try:
            yield
        finally:
            moved = any(prepared.lr_moved() for prepared in self._groups)
            if not recording:
                self.refresh()
            for prepared in self._groups:
                prepared.swap_in()
        if recording and moved:
            raise _lr_set_inside()

    def restore(self) -> None:
        """Give the optimizer back as the user made it, with the state that it has reached."""
        if self._restored:
            return
        self._restored = True
        with ExitStack() as stack:
            for hook in self._hooks:
                stack.callback(hook.remove)
            for prepared in self._groups:
                stack.callback(prepared.restore)


def _lr_set_inside() -> CaptureError:
    return CaptureError(
        "The training step sets a learning rate while it runs, which a replay would not do.",
        "Set it in `on_train_batch_start` or in `optimizer_step`, or use a scheduler.",
    )
