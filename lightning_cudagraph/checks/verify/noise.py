"""Numbers of kernels with atomics, which differ from run to run: replays compared with each other."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from lightning_cudagraph.checks.verify.compare import Values, distance, names_that_differ, rounding, size
from lightning_cudagraph.tensors.batch import OF_THE_HOST

# Kernels with atomics differ from run to run. A replay then passes if its distance from an eager step is
# at most this many times the distance between two replays.
_SPREAD = 10.0
# No eager step may be further from the replays than this many times the distance between two replays,
# and than this part of the size of a tensor.
_FAR, _FAR_AT_MOST = 1000.0, 1e-2


@dataclass
class ComparedReplays:
    """Replays of a step from one state, compared with an eager step from it.

    `spread` is the largest distance between replays, of each value that differed between any.
    """

    before: Values
    expected: Values
    outputs: set[str]
    first: Values
    spread: dict[str, float] = field(default_factory=dict)

    def add(self, found: Values) -> None:
        for name in names_that_differ(found, self.first):
            apart = distance(self.first[name], found[name])
            self.spread[name] = max(self.spread.get(name, 0.0), apart)

    def are_unsteady(self, differing: list[str]) -> bool:
        """True if replays differ from each other in all outputs in which the eager step does.

        Gradients and weights that follow from these may still be equal in all replays, if other atomics
        collided there than in the eager step.
        """
        return bool(self.spread) and all(
            name in self.spread
            for name in differing
            if name in self.outputs and not self._is_decided(name)
        )

    def _is_decided(self, name: str) -> bool:
        """True for a discrete output (class, mask, count), which a change in a last place can flip."""
        value = self.expected[name]
        is_exact = not (value.is_floating_point() or value.is_complex())
        return is_exact and name in self.outputs and not name.endswith(OF_THE_HOST)

    def may_be_unsteady(self, differing: list[str], found: Values) -> bool:
        """True if more replays could still show that the step is unsteady."""
        # If they are further off than they are from each other, it may be a race of the graph: only
        # further eager steps can tell.
        return bool(differing) and not self.are_unsteady(differing) and self.allow(differing, found)

    def agree_with(self, eager: Values) -> bool:
        """True if these are the numbers of another eager step from the same state."""
        if not self.spread or eager.keys() != self.first.keys():
            return False
        differing = names_that_differ(eager, self.first)
        others = replace(self, expected=eager)
        return others.are_unsteady(differing) and others.allow(differing, self.first)

    def are_near(self, eager: Values) -> bool:
        """True if atomics could explain how far an eager step is from the replays."""
        if not self.spread or eager.keys() != self.first.keys():
            return False
        noise = max(apart / (size(self.first[name]) or 1.0) for name, apart in self.spread.items())
        far = min(_FAR * noise, _FAR_AT_MOST)
        return all(
            distance(eager[name], self.first[name]) <= far * size(self.first[name])
            for name in names_that_differ(eager, self.first)
            if self.first[name].is_floating_point() or self.first[name].is_complex()
        )

    def allow(self, differing: list[str], found: Values) -> bool:
        """True if all differences are in the last places, or like those between replays."""
        # A discrete output may differ together with numbers that decide it, and not alone.
        measured = [name for name in differing if not self._is_decided(name)]
        if differing and not measured:
            return False
        for name in differing:
            one, other = self.expected[name], found[name]
            if one.shape != other.shape or one.dtype != other.dtype:
                return False
            if name not in measured:
                continue
            allowed = rounding(one, self.before.get(name))
            if name in self.spread:
                allowed = max(allowed, _SPREAD * self.spread[name])
            if not distance(one, other) <= allowed:  # also if the distance is NaN
                return False
        return True


def unsteady_note(steps: str, name: str) -> str:
    """Say in the report that steps from one state differ, first in the value `name`."""
    return (
        f"two {steps} from one state differ (first in {name}), so that they could not be verified bit"
        " for bit"
    )
