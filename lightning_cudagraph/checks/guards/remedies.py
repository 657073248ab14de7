"""Remedies for changes that invalidate a graph: one for each kind of change, by its words."""

from __future__ import annotations

import re

from lightning_cudagraph.errors import see

CHOOSE = (
    "Branch on `batch_idx`, on `global_step` or on a whole number in the batch in its place: each path"
    " has a graph." + see("paths")
)
HAND_OVER = (
    "Hand it to the step in a registered buffer, written with `copy_` or `fill_` in a hook that runs on"
    " the host at every step, such as `on_train_batch_start`; or keep it constant. If the step itself"
    " sets it, let it keep the tensor: `self.last = loss.detach()`." + see("changing_numbers")
)

_OF_KINDS = (
    (r"^the number of param groups ", ""),
    (
        r"^the (address|shape|strides) of ",
        "Write into the tensor (`copy_`, `lerp_`) instead of giving it other memory (`.data = ...`).",
    ),
    (
        r"^`requires_grad` of ",
        "Leave it, and stop the gradient in the step: `h = layer(x)`, and `if batch_idx % 2: h ="
        " h.detach()`. Each path has a graph." + see("paths"),
    ),
    (
        r"hooks` of |^the hooks (of|inside) |`_global_\w+` of ",
        "Register the hook once, before training, and let it compute with a registered buffer, written"
        " with `copy_` or `fill_`. So too with the mask of a pruned layer, `layer.weight_mask`."
        + see("changing_numbers"),
    ),
    (
        r"^`(?:\w+\.)*current_epoch`",
        "Compare it in `on_train_epoch_start`, and keep the result, `self.is_late = self.current_epoch"
        " >= 2`: the graph is captured again only if that changes. To compute with it, write it into a"
        " registered buffer there, with `fill_`." + see("changing_numbers"),
    ),
    (
        r"^`p` of ",
        "With a probability that changes, draw the mask yourself: `x * (torch.rand_like(x) >= self.p) /"
        " (1 - self.p)`, with `self.p` a registered buffer, written with `fill_` in"
        " `on_train_batch_start`." + see("changing_numbers"),
    ),
    (
        r"^`\w+` of param group ",
        'Keep it constant, or pass `scope="forward_backward"`, with which the optimizer steps eagerly.',
    ),
    (r"^(`training`|the class) of |^the (module|parameter) |^the captured step comes to ", CHOOSE),
    (r" changed$| got another argument", HAND_OVER),
)
_VALUES = (
    (re.compile(r" changed from .*", re.DOTALL), " changed"),
    (
        re.compile(r" had .* in the captured step, has .* now(?= at |$)", re.DOTALL),
        " got another argument",
    ),
)


def kind_of(change: str) -> str:
    """Leave the values out of the words for a change, so that all changes of one thing have the same."""
    for values, words in _VALUES:
        change = values.sub(words, change)
    return change


def remedy_of(kind: str) -> str:
    """Return one thing to do about what changes between steps; empty if nothing is known."""
    return next((remedy for words, remedy in _OF_KINDS if re.search(words, kind)), "")
