"""Goals of the comparison: bounds for ratios of two peers' step times."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.peers import BY_HAND, COMPILED, DATA_FLOW, EAGER, ONE_STREAM, REDUCE_OVERHEAD, REPLAYS

__all__ = ["RATIOS", "Ratio", "goal_of"]

# A step that is shorter has a host to wait for.
LONG_STEP_US = 400.0


@dataclass(frozen=True)
class Ratio:
    """The step time of one peer over that of another.

    Attributes:
        upper: the peer in the numerator.
        lower: the peer in the denominator.
        goals: upper bounds by the beginning of a model's name; lower bounds if `large`.
        large: larger is better.
    """

    upper: str
    lower: str
    goals: dict[str, float]
    large: bool = False

    @property
    def name(self) -> str:
        return f"{self.upper} ÷ {self.lower}"

    def is_met(self, value: float, goal: float) -> bool:
        return value >= goal if self.large else value <= goal


RATIOS = (
    Ratio(
        DATA_FLOW,
        ONE_STREAM,
        {"DLRM": 0.55, "two critics": 0.55, "MLP": 0.80, "BERT-base": 0.80, "GPT": 0.87, "": 1.00},
    ),
    Ratio(COMPILED, REDUCE_OVERHEAD, {"ViT-tiny": 0.60, "GPT": 0.75}),
    Ratio(ONE_STREAM, BY_HAND, {"": 1.02}),
    Ratio(DATA_FLOW, BY_HAND, {}),
    Ratio(REPLAYS, ONE_STREAM, {"": 0.97}),
    Ratio(
        EAGER,
        ONE_STREAM,
        {
            "MLP": 6.0,
            "GPT": 3.5,
            "ResNet-18": 4.0,
            "ViT-tiny": 5.0,
            "DLRM": 5.0,
            "two critics": 12.0,
        },
        large=True,
    ),
    Ratio(EAGER, DATA_FLOW, {}, large=True),
)


def goal_of(ratio: Ratio, model: str, lower_us: float) -> float | None:
    """The bound of a ratio for a model, or None; `lower_us` is the step time in the denominator."""
    matching = [start for start in ratio.goals if model.startswith(start)]
    if not matching:
        return None
    goal = ratio.goals[max(matching, key=len)]
    if lower_us < LONG_STEP_US:
        if (ratio.upper, ratio.lower) == (ONE_STREAM, BY_HAND):
            return 1.10
        if ratio.upper == REPLAYS:
            return None
    return goal
