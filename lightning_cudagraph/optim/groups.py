"""One param group of an optimizer, made fit for capture."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_cudagraph.errors import UnsupportedError
from lightning_cudagraph.optim.forms import Form

__all__ = ["PreparedGroup", "check_group"]


class PreparedGroup:
    """The flags, the mirror of the learning rate, and the host state of one param group.

    Args:
        form: how the optimizer is captured.
        optimizer: the optimizer.
        index: which of its groups this is.
        device: where its parameters are.
        lr_dtype: dtype of the mirror, unless the parameters ask for more.

    Attributes:
        group: the optimizer's own dictionary, as the user has it but inside a step.
        flags: what takes the place of the user's options inside a step.
        options: name of each option that a capture freezes, with the user's words for it.
    """

    def __init__(
        self,
        form: Form,
        optimizer: Optimizer,
        index: int,
        device: torch.device,
        lr_dtype: torch.dtype,
    ) -> None:
        self._form = form
        self._optimizer = optimizer
        self._device = device
        self.group: dict[str, Any] = optimizer.param_groups[index]
        capturable = form.capturable and not self.group["capturable"]
        self.flags: dict[str, Any] = {"capturable": True} if capturable else {}
        self._own_flags = {name: self.group[name] for name in self.flags}
        # What schedulers keep in a group (`initial_lr`) is not read by the step.
        self.options = [
            (name, f"`{name}` of param group {index}") for name in optimizer.defaults if name != "lr"
        ]
        self._names = [name for name, _ in self.options]
        self._lr_label = f"`lr` of param group {index}"
        self._mirror = self._new_mirror(lr_dtype)
        self._inside: Tensor | None = None  # what is in the place of the learning rate
        self._mirrored: float | None = None
        self._lr: Any = None
        self.move_host_state(device)

    def _new_mirror(self, lr_dtype: torch.dtype) -> Tensor | None:
        if not self._form.mirror or isinstance(self.group["lr"], Tensor):
            return None
        wide = self._form.exact or any(p.dtype is torch.float64 for p in self.group["params"])
        dtype = torch.float64 if wide and not self.group.get("fused") else lr_dtype
        return torch.zeros((), dtype=dtype, device=self._device)

    def fits(self, group: dict[str, Any]) -> bool:
        """Whether this is still the right preparation of `group`."""
        if not self._form.mirror:
            return group is self.group
        return group is self.group and isinstance(group["lr"], Tensor) == (self._mirror is None)

    def frozen(self) -> dict[str, Any]:
        """All that a capture freezes of the group's options, by the user's words."""
        values = {label: self.group.get(name) for name, label in self.options}
        lr = self.group["lr"]
        values[self._lr_label] = f"a tensor at {lr.data_ptr()}" if isinstance(lr, Tensor) else "a float"
        return values

    def frozen_values(self) -> tuple[Any, ...]:
        """The values of `frozen`, and which parameters these are, in a form that is quick to compare."""
        group = self.group
        lr, parameters = group["lr"], group["params"]
        # The type first: `isinstance` of a Tensor is slow for everything that is none.
        is_tensor = type(lr) is not float and isinstance(lr, Tensor)
        lr_address = lr.data_ptr() if is_tensor else None
        return (*map(group.get, self._names), lr_address, id(parameters), len(parameters))

    def refresh(self) -> None:
        """Bring the mirror up to date with the learning rate, on the current stream."""
        if self._mirror is not None and self.group["lr"] != self._mirrored:
            self._mirrored = self.group["lr"]
            self._mirror.fill_(self.group["lr"])

    def swap_in(self, capturing: bool) -> None:
        """Put the mirror in the place of the learning rate, and the flags in that of the user's.

        An eager step gets a mirror of its own, so that a replay whose mirror is stale differs from it.
        """
        self.group.update(self.flags)
        if self._mirror is not None:
            self._lr = self.group["lr"]
            self._inside = self._mirror if capturing else torch.full_like(self._mirror, self._lr)
            self.group["lr"] = self._inside

    def swap_out(self) -> bool:
        """Put both back; tells whether somebody has set another learning rate in between."""
        self.group.update(self._own_flags)
        if self._mirror is None:
            return False
        if self.group["lr"] is not self._inside:
            return True
        self.group["lr"] = self._lr
        return False

    def lr_moved(self) -> bool:
        """Whether the learning rate is another than the mirror's."""
        return self._mirror is not None and self.group["lr"] != self._mirrored

    def restore(self) -> None:
        """Give the group back as the user made it."""
        self.move_host_state(torch.device("cpu"))

    @property
    def is_left_alone(self) -> bool:
        """Whether nothing of the group is changed inside a step."""
        return not self.flags and self._mirror is None

    @property
    def keeps_host_state(self) -> bool:
        """Whether the user's form of this group keeps state on the host that is on the device now."""
        # Dynamo switches `capturable` on for good where it compiles a step that has no state yet.
        is_on_host = "capturable" in self.flags and not self.group["capturable"]
        return is_on_host and not self.group.get("fused")

    def move_host_state(self, device: torch.device) -> None:
        """Move the state that depends on `capturable` to where it belongs."""
        if not self.keeps_host_state:
            return
        for parameter in self.group["params"]:
            state = self._optimizer.state.get(parameter, {})
            for name in self._form.host_state:
                if isinstance(state.get(name), Tensor):
                    state[name] = state[name].to(device)


def check_group(optimizer: Optimizer, index: int, device: torch.device) -> None:
    """Refuse a group with options that have no form that can be captured.

    Raises:
        UnsupportedError: naming the option.
    """
    group, name = optimizer.param_groups[index], type(optimizer).__qualname__
    if group.get("differentiable"):
        raise UnsupportedError(
            f"Param group {index} of `{name}` has `differentiable=True`, which has no capturable form.",
            "Leave it out.",
            in_optimizer=True,
        )
    for option in optimizer.defaults:
        if isinstance(group.get(option), Tensor) and option != "lr":
            raise UnsupportedError(
                f"`{option}` of param group {index} of `{name}` is a tensor; only `lr` may be one.",
                f"Pass `{option}` as a float.",
                in_optimizer=True,
            )
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.device.type != device.type:
        raise UnsupportedError(
            f"`lr` of param group {index} of `{name}` is a tensor on {lr.device}; expected a float, or a"
            f" tensor on {device}.",
            "Pass a float: it is mirrored on the device.",
            in_optimizer=True,
        )
