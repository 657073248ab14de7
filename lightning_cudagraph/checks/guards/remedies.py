"""Remedies for changes that invalidate a graph: by the values that changed, or else by the words."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from torch import Tensor

from lightning_cudagraph.checks.audit.read_remedies import DRAW_THE_MASK, is_dropout
from lightning_cudagraph.checks.walk.host_objects import UNSET
from lightning_cudagraph.checks.walk.parts import Moved
from lightning_cudagraph.device.refusals.consumers import BRANCH, consumers
from lightning_cudagraph.device.refusals.instead import instead_of
from lightning_cudagraph.errors import AS_NUMBER, Location, see

_BUFFER = "Hand it to the step in a registered buffer, written with `fill_` in `on_train_batch_start`. "
_FLAG = (
    "Keep it in a registered buffer, `self.{0}.fill_(...)`, and choose by that:"
    " `torch.where(self.{0}, a, b)`. Or pass it with the batch, as a whole number, from"
    " `on_after_batch_transfer` or the collate function: each path has a graph." + see("paths")
)
_CHOOSE = (
    "Branch on `batch_idx`, on `global_step` or on a whole number in the batch in its place: each path"
    " has a graph." + see("paths")
)
_COMPARE = (
    "If it counts the steps, compare `self.global_step` with plain numbers in its place, as in `if"
    " self.global_step > 25`: each outcome has a graph. Else keep it in a registered buffer, and choose"
    " by that with `torch.where`." + see("changing_numbers")
)
_HAND_OVER = (
    "Hand it to the step in a registered buffer, written with `copy_` or `fill_` in a hook that runs on"
    f" the host at every step, such as `on_train_batch_start` ({AS_NUMBER}); or keep it constant. If the"
    " step itself sets it, let it keep the tensor: `self.last = loss.detach()`."
    + see("changing_numbers")
)
_APPENDED = (
    "If the step appends it, return it in its place, and take it from the outputs in"
    " `on_train_batch_end`. Else hand" + _HAND_OVER.removeprefix("Hand")
)
_WRITE_INTO_IT = (
    "Keep the tensor, best as a registered buffer, and write into it with `copy_` or `fill_`."
    + see("changing_numbers")
)
_RATE = (
    "Write what the step needs of it into a registered buffer, with `fill_` in `on_train_batch_start`:"
    " the learning rate there is this step's. To log it, use `LearningRateMonitor`."
    + see("changing_numbers")
)
_NUMBERS = (int, float, complex, np.ndarray, np.generic, list, tuple, dict, set, frozenset)

_OF_KINDS = (
    (r"^the number of param groups ", ""),
    (
        r"^`\w+` of parameter \d+ in param group \d+ of the optimizer ",
        "Write into the tensors of the state (`zero_`, `copy_`) instead of removing or replacing them.",
    ),
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
        r"^`\w+` of param group ",
        'Keep it constant, or pass `scope="forward_backward"`, with which the optimizer steps eagerly.',
    ),
    (r"^(`training`|the class) of |^the (module|parameter) |^the captured step comes to ", _CHOOSE),
    (r"^`?torch\.", "Set it once, before training."),
    (r"^`.*` (of .* )?changed|^a tensor in host memory| got another argument", _HAND_OVER),
)
_VALUES = (
    (re.compile(r" changed from .*", re.DOTALL), " changed"),
    (
        re.compile(r" had .* in the captured step, has .* now(?= at |$)", re.DOTALL),
        " got another argument",
    ),
    (re.compile(r"\[\d+\](` of .* was set).*", re.DOTALL), r"[...]\1"),  # a list that grows
)


def remedy_of_value(now: Any) -> str:
    """Return one thing to do about a value that changes between steps."""
    if isinstance(now, Tensor):
        return _WRITE_INTO_IT
    return _HAND_OVER if isinstance(now, _NUMBERS) else _CHOOSE


def remedy_of_part(moved: Moved, where: Location | None) -> str:
    """Return one thing to do about a part of an object that changes between steps, and is read there."""
    holder = moved.holder
    if isinstance(holder, dict) and "params" in holder:  # a param group, of which the step reads this
        return _RATE
    if moved.label == "p" and is_dropout(holder):
        return DRAW_THE_MASK + see("changing_numbers")
    if moved.label == "":  # the contents of a buffer, compared as bytes
        return _HAND_OVER
    if moved.was is UNSET and isinstance(holder, list):
        return _APPENDED
    value = moved.was if moved.now is UNSET else moved.now
    if isinstance(value, bool):
        return _FLAG.format(moved.attribute)
    if where is not None and isinstance(value, (int, float)):
        names = consumers(where, moved.attribute)
        if "dropout" in names:
            return DRAW_THE_MASK + see("changing_numbers")
        if isinstance(value, int) and BRANCH in names:
            return _COMPARE
        if isinstance(value, int) and (instead := instead_of(names)):
            return _BUFFER + instead
    return remedy_of_value(value)


def kind_of(change: str) -> str:
    """Leave the values out of the words for a change, so that all changes of one thing have the same."""
    for values, words in _VALUES:
        change = values.sub(words, change)
    return change


def remedy_of(kind: str) -> str:
    """Return one thing to do about what changes between steps; empty if nothing is known."""
    return next((remedy for words, remedy in _OF_KINDS if re.search(words, kind)), "")
