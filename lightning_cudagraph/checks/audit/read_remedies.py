"""Remedies for reads that a capture would freeze: one for each, by what is read and what it is for."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from torch import nn

from lightning_cudagraph.errors import AS_NUMBER, Location

DRAW_THE_MASK = (
    "With a probability that changes, draw the mask yourself: `x * (torch.rand_like(x) >= self.p) /"
    " (1 - self.p)`, with `self.p` a registered buffer, written with `fill_` in `on_train_batch_start`."
    " The masks are other random ones."
)

IN_A_HOST_HOOK = (
    "in a hook that runs on the host at every step, such as `on_train_batch_start`, and hand the result"
    " to the step in a registered buffer, written with `copy_` or `fill_`"
)
_AFTERWARDS = "Do it in `on_train_batch_end`, which runs on the host after every step"

# What the user's line does.
_LOGS = re.compile(r"\bself\.log\(|\.log_dict\(")
_PRINTS = re.compile(r"\bprint\(|\blog(ger|ging)?\.")
_RATES = re.compile(r"\blr\b|get_last_lr|param_groups|lr_schedulers")
_BRANCHES = re.compile(r"^(if|elif|while|assert|match)\b|\bif\b.*\belse\b")


class Remedy(NamedTuple):
    """One thing to do about a read.

    Attributes:
        recipe: the page of docs/recipes that shows it.
        may_be_allowed: it is possible that nothing depends on the value.
    """

    text: str
    recipe: str
    may_be_allowed: bool = True


OF_CLOCKS = Remedy(
    "Read the clock in `on_train_batch_end`, which runs on the host after every step, and log or compare"
    " it there; take the start of a duration in `on_train_batch_start`.",
    "logged_values",
)
_LOG = Remedy("Log it in `on_train_batch_start`: the value there is that of this step.", "logged_values")
_COMPUTE = Remedy(f"Compute with it {IN_A_HOST_HOOK} ({AS_NUMBER}).", "changing_numbers")
_CHOOSE = Remedy(f"{_COMPUTE.text} Use `torch.where` instead of `if`.", _COMPUTE.recipe)


def afterwards(where: Location | None) -> str:
    """The remedy for what a line does for the user alone."""
    source = "" if where is None else where.source
    if _RATES.search(source):
        return "Do it in `on_train_batch_start`: learning rate and `global_step` there are this step's."
    counts = "; there, `global_step` counts this step too" if "global_step" in source else ""
    return f"{_AFTERWARDS}{counts}."


def remedy_of_read(where: Location | None) -> Remedy:
    """The remedy for a read of something that is another in each step."""
    if (found := _for_the_user(where)) is not None:
        return found
    return _CHOOSE if _branches(where) else _COMPUTE


def remedy_of_number(name: str, where: Location | None, returned: str) -> Remedy:
    """The remedy for a read of a whole number that a step may compare, such as `batch_idx`.

    Args:
        returned: where the step returns it.
    """
    if returned:
        text = (
            f"The step returns it under `{returned}`: leave it out, and take it in `on_train_batch_end`"
            " (`global_step` in `on_train_batch_start`: it is one more at the end)."
        )
        return Remedy(text, "paths", may_be_allowed=False)
    if (found := _for_the_user(where)) is not None:
        return found
    text = _COMPUTE.text
    if _branches(where):
        text = (
            f"Compare it with plain numbers, as in `{name} % 4 == 0` or `{name} < 1000`: each outcome"
            " has a graph."
        )
    return Remedy(text, "paths", may_be_allowed=False)


def is_logged(where: Location | None) -> bool:
    """True for a line that logs: a logged number that changes is refused, whatever is allowed."""
    return where is not None and _LOGS.search(where.source) is not None


def _branches(where: Location | None) -> bool:
    return where is not None and _BRANCHES.search(where.source) is not None


def _for_the_user(where: Location | None) -> Remedy | None:
    """The remedy if the line only logs or prints."""
    if is_logged(where):
        return _LOG
    if where is None or not _PRINTS.search(where.source):
        return None
    return Remedy(afterwards(where), "item_and_print")


def is_dropout(module: Any) -> bool:
    """True for a dropout module of torch, or of a class made of one."""
    return any(of.__module__ == nn.Dropout.__module__ for of in type(module).__mro__)
