"""Gradient scaling in fp16 without a host synchronisation.

`GradScaler` scales, unscales and updates its scale on the device, but it reads the overflow flag back to
the host, to skip the optimizer. Fused optimizers read the flag in their kernels. All others step behind
a `Gate`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_cudagraph.compat.attributes import bound
from lightning_cudagraph.compat.features import FP16
from lightning_cudagraph.compat.names.torch_names import _refresh_per_optimizer_state
from lightning_cudagraph.compat.tables import require
from lightning_cudagraph.device.host_work import work_under_capture
from lightning_cudagraph.optim.compiled import is_compiled, is_in_compiled_code
from lightning_cudagraph.optim.gate import Gate
from lightning_cudagraph.optim.supported_optimizers import is_of_torch


class PreparedScaler:
    """A gradient scaler prepared for capture.

    Attributes:
        skipped_steps: number of steps skipped for an overflow, on the device.
        last_was_skipped: by the id of an optimizer, true on the device if its last step was skipped.
    """

    def __init__(
        self, scaler: GradScaler, device: torch.device, device_state: Callable[[], list[Tensor]]
    ) -> None:
        require(FP16)
        self.scaler = scaler
        self._device_state = device_state
        self.skipped_steps = torch.zeros((), dtype=torch.float32, device=device)
        self._device = device
        self.last_was_skipped: dict[int, Tensor] = {}
        self._stepped: set[int] = set()
        self._applied: set[int] = set()  # those that have made their state (and compiled their steps)
        self._applied_steps: Counter[int] = Counter()

    def tensors(self) -> dict[str, Tensor]:
        found = {"the number of skipped steps": self.skipped_steps}
        for index, flag in enumerate(self.last_was_skipped.values()):
            found[f"the flag of a skipped step of optimizer {index}"] = flag
        if self.scaler._scale is not None:
            found["the scale of the gradient scaler"] = self.scaler._scale
        if self.scaler._growth_tracker is not None:
            found["the growth tracker of the gradient scaler"] = self.scaler._growth_tracker
        return found

    def frozen(self) -> dict[str, Any]:
        """The options of the scaler that a capture freezes, labelled for the user."""
        scaler = self.scaler
        return {
            "`growth_factor` of the gradient scaler": scaler._growth_factor,
            "`backoff_factor` of the gradient scaler": scaler._backoff_factor,
            "`growth_interval` of the gradient scaler": scaler._growth_interval,
            "`enabled` of the gradient scaler": scaler.is_enabled(),
        }

    @property
    def applied(self) -> bool:
        """True once every stepped optimizer has taken enough steps that were not skipped."""
        return bool(self._stepped) and not self.waits

    @property
    def waits(self) -> bool:
        """True if a stepped optimizer may have no state yet, because its steps were skipped."""
        return not self._stepped <= self._applied

    @contextmanager
    def step_arithmetic(self, optimizers: Collection[Optimizer], capturing: bool) -> Iterator[None]:
        """Patch the scaler to step `optimizers` without a read on the host, if `capturing`.

        Otherwise torch's own code runs. Skipped steps are counted in both cases.
        """
        scaler = self.scaler
        own_update = scaler.update

        for optimizer in optimizers:
            if id(optimizer) not in self.last_was_skipped:
                flag = torch.zeros((), dtype=torch.bool, device=self._device)
                self.last_was_skipped[id(optimizer)] = flag

        def gated(optimizer: Optimizer, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            gate = Gate(_overflowed(state), self.last_was_skipped[id(optimizer)])
            work_under_capture().gates[id(optimizer)] = gate
            # Compiled code guards on active modes.
            is_compiled_code = is_compiled(optimizer.step) or is_in_compiled_code()
            if is_compiled_code or not is_of_torch(optimizer):
                # Its kernels may be no ops.
                every = (p for group in optimizer.param_groups for p in group["params"])
                gate.save([*(p for p in every if p.grad is not None), *self._device_state()])
            with nullcontext() if is_compiled_code else gate:
                optimizer.step(*args, **kwargs)
            gate.restore()

        def counting(*args: Any, **kwargs: Any) -> None:
            for optimizer in optimizers:
                state = scaler._per_optimizer_states.get(id(optimizer))
                if state is not None and state["found_inf_per_device"]:
                    self._count(optimizer, _overflowed(state), capturing)
            own_update(*args, **kwargs)

        patches = {"update": counting, **({"_maybe_opt_step": gated} if capturing else {})}
        with bound((vars(scaler), *patch) for patch in patches.items()):
            yield

    def _count(self, optimizer: Optimizer, overflowed: Tensor, capturing: bool) -> None:
        self.skipped_steps.add_(overflowed)
        self.last_was_skipped[id(optimizer)].copy_(overflowed)
        if capturing or id(optimizer) in self._applied:
            return
        self._stepped.add(id(optimizer))
        if not bool(overflowed):
            self._applied_steps[id(optimizer)] += 1
            # Dynamo compiles two steps: the one that makes the state, and the one that finds it.
            needed_steps = 2 if is_compiled(optimizer.step) else 1
            if self._applied_steps[id(optimizer)] >= needed_steps:
                self._applied.add(id(optimizer))

    def pending(self) -> bool:
        """True if gradients have been unscaled since the last update of the scaler."""
        return any(state["found_inf_per_device"] for state in self.scaler._per_optimizer_states.values())

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Restore the scaler's record of each optimizer's stage after the enclosed capture."""
        before = {key: dict(state) for key, state in self.scaler._per_optimizer_states.items()}
        try:
            yield
        finally:
            self.scaler._per_optimizer_states = defaultdict(_refresh_per_optimizer_state, before)


def _overflowed(state: dict[str, Any]) -> Tensor:
    # One device, so one flag: 0 or 1.
    return next(iter(state["found_inf_per_device"].values()))  # type: ignore[no-any-return]
