"""Optimizers as other packages write them."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor

O = torch.optim  # noqa: E741


class Own(O.Optimizer):
    """An optimizer with decay and a signed momentum."""

    def __init__(self, params: Any, lr: float = 1e-2, decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, self.state[p], group)
        return loss

    def update(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(p)
        p.mul_(1 - group["lr"] * group["decay"])
        state["momentum"].lerp_(p.grad, 0.1)
        p.add_(state["momentum"].sign(), alpha=-group["lr"])


class CountsInState(Own):
    def update(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        p.add_(p.grad, alpha=-group["lr"] / state["step"])


class CountsOnItself(Own):
    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps = self.steps + 1
        return super().step(closure)

    def update(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.add_(p.grad, alpha=-group["lr"] * (2.0 if self.steps % 3 == 0 else 1.0))


class CountsInGroup(Own):
    def update(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        group["k"] = group.get("k", 0) + 1
        p.add_(p.grad, alpha=-group["lr"] / group["k"])


class ReadsBack(Own):
    def update(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.add_(p.grad, alpha=-group["lr"] / (1.0 + p.grad.norm().item()))


class BranchesOnTheDevice(Own):
    def update(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if p.grad.norm().item() > 0.1:
            p.add_(p.grad, alpha=-group["lr"])


class WantsAFloat(Own):
    def update(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not isinstance(group["lr"], float):
            raise TypeError("lr must be a float")
        p.add_(p.grad, alpha=-group["lr"])


class Lamb(Own):
    """Scales the update by a ratio of norms, which are tensors of one number."""

    def update(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        update = p.grad + group["decay"] * p
        p.sub_(update * (group["lr"] * (p.norm() / (update.norm() + 1e-6))))


class Adan(Own):
    """Divides by a number that the learning rate is in, and averages by one."""

    def update(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        average = state.setdefault("average", torch.zeros_like(p))
        average.lerp_(p.grad, 1 - group["lr"])
        p.add_(-group["lr"] * average).div_(1 + group["lr"] * group["decay"])


class Chooses(Own):
    def update(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(p.grad * torch.where(p.grad > 0, group["lr"], group["lr"] / 2))


class TakesARoot(Own):
    """A function in C reads the memory of a float."""

    def update(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.add_(p.grad, alpha=-math.sqrt(group["lr"]))


class TakesARootInABranch(Own):
    def update(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.add_(p.grad, alpha=-group["lr"] if math.sqrt(group["lr"]) < 0.09 else -0.01)


class TakesTheRealPart(Own):
    """An attribute in C."""

    def update(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.add_(p.grad, alpha=-group["lr"].real)


class MultipliesByTheRealPart(Own):
    def update(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.add_(p.grad, alpha=-group["lr"] * group["lr"].real)


class TakesARootByNumPy(Own):
    """It computes with what it has got, NaN."""

    def update(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.add_(p.grad, alpha=-group["lr"] * float(np.sqrt(1 - group["lr"])))


class CallsTwice(Own):
    """Sharpness-aware: ascends first, and steps with the gradient found there."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            closure()
        climbed = [(p, p.grad.sign() * 0.01) for g in self.param_groups for p in g["params"]]
        for p, by in climbed:
            p.add_(by)
        with torch.enable_grad():
            loss = closure()
        for p, by in climbed:
            p.sub_(by)
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])
        return loss


class Wraps(O.Optimizer):
    """Steps one of torch's own, which has param groups of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__([*params], {"lr": 1.0})
        self.inner = O.SGD(self.param_groups[0]["params"], lr=0.1, momentum=0.9)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class SharesGroups(O.Optimizer):
    """Steps one of torch's own, with its param groups and state; the base class has not begun it."""

    def __init__(self, params: Any) -> None:
        self.inner = O.RAdam([*params], lr=1e-2)
        self.defaults, self.state = self.inner.defaults, self.inner.state
        self.param_groups = self.inner.param_groups
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        self.steps += 1
        if self.steps % 3 == 0:
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter.mul_(0.99)
        return loss

    def state_dict(self) -> Any:
        return self.inner.state_dict()


class FusedAndDecayed(O.AdamW):
    """A fused step, and arithmetic of its own with the learning rate."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-2, fused=True)

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(1 - group["lr"] * 0.01)
        return loss
