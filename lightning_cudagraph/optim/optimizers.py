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

Every step of a run goes through the same arithmetic, eager or replayed, so that it does not matter
which steps are replayed. Against a run without this package: the fused forms, and SGD in all forms,
are the same bit for bit; the other classes compute their bias corrections on the device instead of
the host, which moves a parameter by about one unit in the last place a step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_cudagraph.errors import UnsupportedError
from lightning_cudagraph.optim.alpha import TensorAlphaMode

__all__ = ["PreparedOptimizer"]


@dataclass(frozen=True)
class _Form:
    """How an optimizer class is captured.

    Attributes:
        capturable: it has a ``capturable`` option, which must be on.
        foreach: only its foreach form takes a tensor learning rate without reading it back.
        mirror: its step reads the learning rate.
        alpha: its step passes the learning rate as ``alpha``.
        host_state: names of the state tensors that are kept on the host when not capturable.
    """

    capturable: bool = True
    foreach: bool = False
    mirror: bool = True
    alpha: bool = False
    host_state: tuple[str, ...] = ("step",)


_FORMS: dict[type[Optimizer], _Form] = {
    torch.optim.Adam: _Form(),
    torch.optim.AdamW: _Form(),
    torch.optim.NAdam: _Form(host_state=("step", "mu_product")),
    torch.optim.RAdam: _Form(),
    torch.optim.Adamax: _Form(),
    torch.optim.RMSprop: _Form(foreach=True),
    torch.optim.Adadelta: _Form(foreach=True),
    torch.optim.ASGD: _Form(),
    # Reads the learning rate only when it makes its state, in the first warm-up step.
    torch.optim.Rprop: _Form(mirror=False),
    torch.optim.SGD: _Form(capturable=False, alpha=True, host_state=()),
}


def _name(optimizer: Optimizer) -> str:
    return type(optimizer).__qualname__


def _form_of(optimizer: Optimizer) -> _Form:
    form = _FORMS.get(type(optimizer))
    names = ", ".join(cls.__name__ for cls in _FORMS)
    if form is None:
        raise UnsupportedError(
            f"The optimizer is a `{type(optimizer).__module__}.{_name(optimizer)}`; known to give the"
            f" same numbers in a graph are torch's own {names}.",
            "Use one of these.",
        )
    for index, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise UnsupportedError(
                f"Param group {index} of `{_name(optimizer)}` has `differentiable=True`, which has no"
                " capturable form.",
                "Leave it out.",
            )
        for name, value in group.items():
            if isinstance(value, Tensor) and name != "lr":
                raise UnsupportedError(
                    f"`{name}` of param group {index} of `{_name(optimizer)}` is a tensor; only `lr`"
                    " may be one.",
                    f"Pass `{name}` as a float.",
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
        self._form = _form_of(optimizer)
        self._optimizer = optimizer
        self._device = device
        self._lr_dtype = lr_dtype
        self._on_load = on_load
        self.notes: list[str] = []
        self._users_flags: list[dict[str, Any]] = []
        self._mirrors: list[Tensor | None] = []
        self._mirrored: list[float | None] = []
        self._labels: list[list[tuple[str, str]]] = []
        self._check_lr()
        self._allow_cpu = self._cpu_switch()
        self._apply()
        self._hooks = [
            optimizer.register_state_dict_post_hook(self._as_the_user_has_it),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]

    def _check_lr(self) -> None:
        for index, group in enumerate(self._optimizer.param_groups):
            lr = group["lr"]
            if isinstance(lr, Tensor) and lr.device.type != self._device.type:
                raise UnsupportedError(
                    f"`lr` of param group {index} of `{_name(self._optimizer)}` is a tensor on"
                    f" {lr.device}; expected a float, or a tensor on {self._device}.",
                    "Pass a float: it is mirrored on the device.",
                )

    def _cpu_switch(self) -> tuple[Any, str] | None:
        """Where torch keeps the list of devices that it lets `capturable` run on.

        The emulator stands in for such a device, so while a step runs its device is on the list.
        """
        if self._device.type != "cpu" or not self._form.capturable:
            return None
        name = "_get_capturable_supported_devices"
        for cls in type(self._optimizer).__mro__:
            module = sys.modules[cls.__module__]
            if cls is not Optimizer and hasattr(module, name):
                return module, name
        raise UnsupportedError(
            f"torch {torch.__version__} has no `{name}` beside `{_name(self._optimizer)}`, and the CPU"
            " emulator needs it to run capturable optimizers.",
            "Use a version of torch that this package names as supported.",
        )

    def _apply(self) -> None:
        """Set the flags that a capture needs, and remember the user's."""
        form, optimizer = self._form, self._optimizer
        self._users_flags = []
        for group in optimizer.param_groups:
            wanted: dict[str, Any] = {}
            if form.capturable and not group["capturable"]:
                wanted["capturable"] = True
            if form.foreach and not group["foreach"]:
                wanted["foreach"] = True
            self._users_flags.append({name: group[name] for name in wanted})
            group.update(wanted)
        self._mirrors = [self._new_mirror(group) for group in optimizer.param_groups]
        self._mirrored = [None] * len(self._mirrors)
        self._labels = [
            [
                (name, f"`{name}` of param group {index}")
                for name in group
                if name not in ("params", "lr")
            ]
            for index, group in enumerate(optimizer.param_groups)
        ]
        self._move_host_state(self._device)
        self.notes = self._describe()

    def _describe(self) -> list[str]:
        changed = sorted({name for flags in self._users_flags for name in flags})
        if not changed:
            return []
        text = f"{_name(self._optimizer)} runs with " + ", ".join(f"{n}=True" for n in changed)
        fused = all(group.get("fused") for group in self._optimizer.param_groups)
        if fused:
            return [f"{text}, which changes no number of its fused form"]
        remedy = ""
        if type(self._optimizer) in (torch.optim.Adam, torch.optim.AdamW):
            remedy = "; with fused=True it is bit-equal to a run without graphs, and faster"
        return [
            (
                f"{text}: bias corrections are computed on the device, which rounds differently from"
                f" the host (about one unit in the last place a step){remedy}"
            )
        ]

    def _new_mirror(self, group: dict[str, Any]) -> Tensor | None:
        if not self._form.mirror or isinstance(group["lr"], Tensor):
            return None
        return torch.zeros((), dtype=self._lr_dtype, device=self._device)

    def _move_host_state(self, device: torch.device) -> None:
        for group, flags in zip(self._optimizer.param_groups, self._users_flags, strict=True):
            if "capturable" not in flags or group.get("fused"):
                continue
            for parameter in group["params"]:
                state = self._optimizer.state.get(parameter, {})
                for name in self._form.host_state:
                    if isinstance(state.get(name), Tensor):
                        state[name] = state[name].to(device)

    def _as_the_user_has_it(self, optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """A `state_dict` as it would be without us, so that it loads anywhere."""
        on_host: set[int] = set()
        for group, flags in zip(saved["param_groups"], self._users_flags, strict=True):
            group.update(flags)
            if "capturable" in flags and not group.get("fused"):
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
        self._apply()
        self._on_load("a state was loaded into the optimizer")

    def hyperparameters(self) -> dict[str, Any]:
        """All options of all param groups but the learning rates: a capture freezes them."""
        return {
            label: group[name]
            for group, labels in zip(self._optimizer.param_groups, self._labels, strict=True)
            for name, label in labels
        }

    def state_tensors(self) -> dict[str, Tensor]:
        """All tensors of the optimizer's state, by name."""
        return {
            f"`{name}` of parameter {index} in param group {group_idx} of the optimizer": value
            for group_idx, group in enumerate(self._optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
            for name, value in self._optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }

    def addresses(self) -> dict[str, Any]:
        """What else of the optimizer a capture freezes: which tensors it works on."""
        return {
            "the parameters in the optimizer's groups": tuple(
                tuple(id(parameter) for parameter in group["params"])
                for group in self._optimizer.param_groups
            ),
            "the learning rates that are tensors": tuple(
                group["lr"].data_ptr() if isinstance(group["lr"], Tensor) else None
                for group in self._optimizer.param_groups
            ),
            "the addresses of the optimizer's state": tuple(
                value.data_ptr()
                for state in self._optimizer.state.values()
                for value in state.values()
                if isinstance(value, Tensor)
            ),
        }

    def refresh(self) -> None:
        """Bring the mirrors up to date with the learning rates, on the current stream."""
        for i, (group, mirror) in enumerate(
            zip(self._optimizer.param_groups, self._mirrors, strict=True)
        ):
            if mirror is not None and group["lr"] != self._mirrored[i]:
                self._mirrored[i] = group["lr"]
                mirror.fill_(group["lr"])

    @contextmanager
    def step_arithmetic(self) -> Iterator[None]:
        """Inside, the optimizer computes as it does in a graph, whether one is captured or not.

        The mirrors must be up to date: filling them is no part of the step, since a capture would
        freeze the value.
        """
        groups = list(self._optimizer.param_groups)
        floats = [group["lr"] for group in groups]
        with ExitStack() as stack:
            for group, mirror, lr in zip(groups, self._mirrors, floats, strict=True):
                if mirror is not None:
                    group["lr"] = mirror
                    stack.callback(group.__setitem__, "lr", lr)
            if self._allow_cpu is not None:
                module, name = self._allow_cpu
                devices = getattr(module, name)
                setattr(module, name, lambda *args, **kwargs: [*devices(*args, **kwargs), "cpu"])
                stack.callback(setattr, module, name, devices)
            if self._form.alpha:
                stack.enter_context(TensorAlphaMode())
            yield

    def restore(self) -> None:
        """Give the optimizer back as the user made it, with the state that it has reached."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._move_host_state(torch.device("cpu"))
        for group, flags in zip(self._optimizer.param_groups, self._users_flags, strict=True):
            group.update(flags)
        self._users_flags = []
