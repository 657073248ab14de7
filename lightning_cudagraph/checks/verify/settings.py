"""The user's choice of replays that are verified against eager steps."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_cudagraph.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The replays that are verified, bit for bit, against an eager step from the same state.

    Each check costs about four eager steps, and memory for copies of parameters and optimizer state, on
    the host if the device has no room.

    Args:
        replays: how many of the first replays of a graph are checked, and one more where the learning
            rate moves only later. A single one is the second replay, the first on another batch than
            that of the capture. 0 for none, and none later but for `every_n_steps`.
        every_n_steps: beyond those, check one replay in so many; None for none.
        budget: the share of the run's time, from 0 to 1, that other later checks may take: those after
            pauses in which code of yours can run (an epoch's start, a validation, a checkpoint; the
            first three are followed by one in any case), and those at growing distances.

    Raises:
        ConfigurationError: if one of them is not what it should be.

    Example::

        CUDAGraphCallback(verify=Verification(every_n_steps=1000))
    """

    replays: int = 2
    every_n_steps: int | None = None
    budget: float = 0.01

    def __post_init__(self) -> None:
        if type(self.replays) is not int or self.replays < 0:
            raise _wrong("replays", self.replays, "an int of at least 0")
        every = self.every_n_steps
        if every is not None and (type(every) is not int or every < 1):
            raise _wrong("every_n_steps", every, "an int of at least 1, or None")
        is_number = isinstance(self.budget, (int, float)) and not isinstance(self.budget, bool)
        if not (is_number and 0 <= self.budget <= 1):
            expected = "a number from 0 to 1, the share of the run's time that later checks may take"
            raise _wrong("budget", self.budget, expected)


def _wrong(name: str, value: object, expected: str) -> ConfigurationError:
    return ConfigurationError(f"`Verification({name}={value!r})`: expected {expected}.")


DEFAULT_CHECKS, NO_CHECKS = Verification(), Verification(replays=0)
