"""An optimizer of a captured step as a graph sees it: unchanged, stepping eagerly after each replay."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cudagraph.checks.walk.scope import Root
from lightning_cudagraph.optim.outcomes import Outcomes


class EagerOptimizer:
    """An unchanged optimizer, which steps eagerly after the replay."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.outcomes = Outcomes(lambda _: None)

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
        """The options that a capture freezes, labelled for the user: all but learning rates' values."""
        return {}

    def options(self) -> tuple[Any, ...]:
        """The values of `hyperparameters` that the user can set, without labels."""
        return self.frozen_values()

    def frozen_values(self) -> tuple[Any, ...]:
        """The values of `hyperparameters` without labels, compared before every replay."""
        # Also for an eager optimizer: the graph makes gradients of these parameters alone.
        groups = self.optimizer.param_groups
        return tuple((id(group), id(group["params"]), len(group["params"])) for group in groups)

    def places(self) -> list[Collection[Any]]:
        """Lists and dictionary views with members that a capture freezes."""
        groups = self.optimizer.param_groups
        return [groups, *(group["params"] for group in groups)]

    @property
    def is_inspected(self) -> bool:
        """True if the step in the graph is of an unknown class: all that it can read is compared."""
        return False

    def read(self) -> list[Root]:
        """Roots for what a captured step can read of the optimizer, besides `places` and options."""
        return []

    def learning_rates(self) -> tuple[Any, ...]:
        """The learning rates, which user code in a captured step can read too."""
        return tuple([group["lr"] for group in self.optimizer.param_groups])

    def state_tensors(self) -> dict[str, Tensor]:
        """The state tensors that a captured step changes, by name."""
        return {}

    def device_state(self) -> list[Tensor]:
        return []

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of all groups, by the names that messages give them."""
        return {
            f"parameter {index} in param group {group_idx} of the optimizer": parameter
            for group_idx, group in enumerate(self.optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
        }

    def addresses(self) -> dict[str, Any]:
        """The identity of the tensors that the optimizer works on, by name."""
        return {name: id(parameter) for name, parameter in self.named_parameters().items()}

    def bring_state(self) -> None:
        """Move the state that the step reads on the host there, before a capture."""

    def check_state(self) -> None:
        """Prepare the state for a capture, or raise an `UnsupportedError`."""

    def note_moves(self) -> None:
        """Find out which options a scheduler moves in every step."""

    @contextmanager
    def step_arithmetic(self, capturing: bool = False) -> Iterator[None]:
        """Give the enclosed `step` the form that can be captured, in a capture."""
        yield

    @contextmanager
    def floats_inside(self, capturing: bool = False) -> Iterator[None]:
        """Restore the user's options for enclosed user code within `step_arithmetic`."""
        yield

    def restore(self) -> None:
        """Restore the optimizer as the user made it, with its present state."""
