"""A replay held against an eager step from the same state, on the same batch.

What a capture freezes without anybody noticing shows here: the eager step runs the user's Python
again, and if it comes to other numbers than the replay, the graph is not the step any more. The first
replay checks the capture itself; a later one, with another batch and wherever a scheduler is at work
another learning rate, catches what was baked in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_cudagraph.capture.backend import Backend
from lightning_cudagraph.errors import VerificationError

__all__ = ["Verifier"]

_Values = dict[str, Tensor]

# Kernels with atomics differ from run to run. A replay passes then if it is no further from an eager
# step than this many times the distance between two eager steps.
_SPREAD = 100.0


@dataclass
class _Outcome:
    """What one way of doing the step came to."""

    values: _Values
    rng_state: bytes


def _differing(one: _Values, other: _Values) -> list[str]:
    """Names of what is not the same bit for bit, in the order of the step; a NaN is like a NaN."""
    with torch.no_grad():
        same = {
            name: ((value == other[name]) | ((value != value) & (other[name] != other[name]))).all()
            for name, value in one.items()
        }
        flags = torch.stack(list(same.values())).tolist()  # one synchronisation for all of them
    return [name for name, is_same in zip(same, flags, strict=True) if not is_same]


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max())


@dataclass
class Verifier:
    """Decides which replays are checked, and checks them.

    Attributes:
        backend: where steps run.
        state: all tensors that a step changes, by name, in the order of the step.
        replays: how many of the first replays of a graph are checked.
        every_n_steps: beyond those, check one replay in so many; None for none.
        checked: replays that were checked.
        notes: what the user should know of the checks.
    """

    backend: Backend
    state: Callable[[], _Values]
    replays: int
    every_n_steps: int | None
    checked: int = 0
    notes: list[str] = field(default_factory=list)

    def due(self, replay_idx: int) -> bool:
        """Whether a replay is to be checked.

        Args:
            replay_idx: how many replays of this graph came before it.
        """
        if replay_idx < self.replays:
            return True
        return self.every_n_steps is not None and replay_idx % self.every_n_steps == 0

    def has_room(self) -> bool:
        """Whether there is memory for a check: three copies of the state."""
        needed_bytes = 3 * sum(tensor.nbytes for tensor in self.state().values())
        if needed_bytes < self.backend.free_bytes():
            return True
        note = f"not verified: a check needs {needed_bytes / 2**20:.0f} MiB, which are not free"
        if note not in self.notes:
            self.notes.append(note)
        return False

    def check(
        self,
        eagerly: Callable[[], _Values],
        replay: Callable[[], tuple[Any, _Values]],
    ) -> Any:
        """Do a step both ways from the same state, and keep what the replay came to.

        Args:
            eagerly: the step without a graph and without a trace on the host; returns its outputs.
            replay: the step by replay; returns what the caller wants back, and its outputs.

        Returns:
            The first of what `replay` returned. The state is that after the replay.

        Raises:
            VerificationError: if the replay differs. The state is that before the step.
        """
        live = self.state()
        before = {name: tensor.detach().clone() for name, tensor in live.items()}
        rng_before = self.backend.rng_state()

        def back_to_before() -> None:
            with torch.no_grad():
                for name, tensor in live.items():
                    tensor.copy_(before[name])
            self.backend.set_rng_state(rng_before)

        def outcome(outputs: _Values) -> _Outcome:
            values = {**outputs, **live}
            copies = {name: value.detach().clone() for name, value in values.items()}
            return _Outcome(copies, self.backend.rng_state().numpy().tobytes())

        try:
            expected = outcome(eagerly())
            back_to_before()
            result, outputs = replay()
            found = outcome(outputs)
        except BaseException:
            back_to_before()
            raise
        self.checked += 1
        differing = _differing(expected.values, found.values)
        if not differing and expected.rng_state == found.rng_state:
            return result
        back_to_before()
        again = outcome(eagerly())
        if self._within_spread(expected, again, found):
            # The state is to be that of the replay, whose outputs the caller hands on.
            back_to_before()
            with torch.no_grad():
                for name, tensor in live.items():
                    tensor.copy_(found.values[name])
            self.backend.set_rng_state(torch.frombuffer(bytearray(found.rng_state), dtype=torch.uint8))
            return result
        back_to_before()
        self._raise(differing, expected, found)
        raise AssertionError("unreachable")

    def _within_spread(self, expected: _Outcome, again: _Outcome, found: _Outcome) -> bool:
        """Whether eager steps differ from one another about as much as from the replay."""
        if expected.rng_state != found.rng_state:
            return False
        unsteady = _differing(expected.values, again.values)
        if not unsteady:
            return False
        for name in _differing(expected.values, found.values):
            one, other, replayed = (o.values[name] for o in (expected, again, found))
            if _distance(one, replayed) > _SPREAD * max(_distance(one, other), 1e-30):
                return False
        note = (
            f"two eager steps from one state differ (first in {unsteady[0]}), so that replays could not"
            " be verified bit for bit"
        )
        if note not in self.notes:
            self.notes.append(note)
        return True

    def _raise(self, differing: list[str], expected: _Outcome, found: _Outcome) -> None:
        if not differing:
            raise VerificationError(
                "A replay of the captured step draws other random numbers than the eager step: the"
                " state of the generator differs after it.",
                "Look for random ops that depend on Python values.",
            )
        name = differing[0]
        one, other = expected.values[name], found.values[name]
        at = int((one != other).flatten().nonzero()[0])
        raise VerificationError(
            f"A replay of the captured step comes to other numbers than the eager step from the same"
            f" state, on the same batch: first in {name}, expected {float(one.flatten()[at]):.9g}, found"
            f" {float(other.flatten()[at]):.9g} ({len(differing)} tensors differ).",
            "Something that the step reads on the host has changed since the capture, such as a global"
            " or an attribute of another object: pass it with the batch, or keep it in a buffer.",
        )
