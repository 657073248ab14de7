"""Modules with checks that raise, outside of the test files, where pytest rewrites what is asserted."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

from lightning_cudagraph import GraphedStep
from tests.harness import Net

LIMIT = 1e3


class Checks(Net):
    """A net whose features are checked."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.check(out)
        return out

    def check(self, x: Tensor) -> None:
        raise NotImplementedError


class Asserts(Checks):
    def check(self, x: Tensor) -> None:
        assert not torch.isnan(x).any()


class Raises(Checks):
    def check(self, x: Tensor) -> None:
        if not torch.isfinite(x).all():
            raise ValueError(f"not finite: {x}")


class ReadsANumber(Checks):
    def check(self, x: Tensor) -> None:
        with torch.no_grad():
            if not x.abs().max().item() < LIMIT:
                raise RuntimeError("too large")


class ReadsALimit(Checks):
    limit = LIMIT

    def check(self, x: Tensor) -> None:
        if not x.detach().abs().max().item() < self.limit:
            raise RuntimeError("too large")


class AsksMath(Checks):
    def check(self, x: Tensor) -> None:
        if not math.isfinite(x.detach().mean()):
            raise OverflowError


class Distributes(Checks):
    def check(self, x: Tensor) -> None:
        Normal(x.mean(), torch.ones_like(x.mean()), validate_args=True)


class ChoosesAnAction(Checks):
    def check(self, x: Tensor) -> None:
        actions = Categorical(logits=x, validate_args=True)
        self.log("chosen", actions.log_prob(x.argmax(1)).mean())


class Draws(Checks):
    def check(self, x: Tensor) -> None:
        x = x.detach()
        self.log("drawn", torch.normal(x, x.abs()).mean())


class ChecksEach(Checks):
    def check(self, x: Tensor) -> None:
        for parameter in self.parameters():
            assert torch.isfinite(parameter).all() and parameter.abs().max() < LIMIT  # noqa: PT018
        if x.isnan().any() or (x > LIMIT).any():
            raise ValueError


class ChecksGradients(Checks):
    def check(self, x: Tensor) -> None:
        if x.requires_grad:
            x.register_hook(self.look_at)

    def look_at(self, gradient: Tensor) -> None:
        assert torch.isfinite(gradient).all()


class Clips(Checks):
    def check(self, x: Tensor) -> None:
        pass

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 1.0, error_if_nonfinite=True)


class Manual(Checks):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def check(self, x: Tensor) -> None:
        if x.isnan().any():
            raise ValueError

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        loss = super().training_step(batch, batch_idx)["loss"]
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Evaluates(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        assert x.isfinite().all()
        self.log("val_loss", nn.functional.cross_entropy(self(x), y))


class Inner(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        assert x.isfinite().all()
        return super().forward(x)


class Outer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.inner(x))


def checked_step(device: str) -> GraphedStep[[Tensor], Tensor]:
    model = nn.Linear(12, 4).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        assert torch.isfinite(loss)
        loss.backward()
        optimizer.step()
        return loss

    return GraphedStep(step, model, optimizer)


class Keeps(Checks):
    def check(self, x: Tensor) -> None:
        is_right = torch.isfinite(x).all().item()
        if not is_right:
            raise ValueError
        self.log("right", float(is_right))


class Catches(Checks):
    def check(self, x: Tensor) -> None:
        try:
            self.look_at(x)
        except ValueError:
            self.bad = True

    def look_at(self, x: Tensor) -> None:
        if x.isnan().any():
            raise ValueError


class Suppresses(Checks):
    def check(self, x: Tensor) -> None:
        with contextlib.suppress(ValueError):
            Categorical(logits=x, validate_args=True)


class SuppressesOfADraw(Checks):
    def check(self, x: Tensor) -> None:
        with contextlib.suppress(RuntimeError):
            torch.normal(0.0, x.detach().abs())


class Skips(Checks):
    def check(self, x: Tensor) -> None:
        pass

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        if torch.isnan(outputs["loss"]):
            return None
        return outputs


class Generates(Checks):
    def check(self, x: Tensor) -> None:
        list(self.each(x))

    def each(self, x: Tensor) -> Any:
        for part in x:
            assert part.isfinite().all()
            yield part
