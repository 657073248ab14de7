"""Remedies for reads of the device, by what is read and by the library that reads it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from lightning_cudagraph.errors import Location, see

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep

Words = tuple[str, str]  # the description for the user, and the remedy

PACKED: Words = (
    "`pack_padded_sequence`",
    "Run an RNN of one direction on the padded batch, and take the output at the last step of each"
    " sequence, `output[torch.arange(len(output)), lengths - 1]`; for two directions, in each layer a"
    " second RNN on each sequence backwards." + see("packed_sequences"),
)
_ASK_IF_FINITE = frozenset(
    getattr(owner, name)
    for owner in (torch, Tensor)
    for name in ("isnan", "isinf", "isfinite", "isposinf", "isneginf")
)


@dataclass(frozen=True)
class _Reader:
    """Functions of a library that read the device, and what to do about it.

    Attributes:
        folder: the folder of its files, from the package on.
        reads: returns True for the names of its functions and files that do so.
        remedy: one thing to do.
    """

    folder: str
    reads: Callable[[str, str], bool]
    remedy: str


_READERS = (
    _Reader(
        "torch/distributions/",
        # The base class's file reads for checks alone; torch 2.15 has a function for that there.
        lambda function, file: function in ("__init__", "_validate_sample") or file == "distribution.py",
        "Pass `validate_args=False` to the distribution: its checks read all arguments on the host."
        + see("distributions"),
    ),
    # With padded batches it reads nothing.
    _Reader("torch/nn/modules/", lambda function, file: file == "rnn.py", PACKED[1]),
    _Reader(
        "torch/nn/utils/",
        lambda function, file: file == "clip_grad.py",
        "Leave `error_if_nonfinite` out, and count the steps that are not finite in a buffer."
        + see("nan_checks"),
    ),
    _Reader(
        "transformers/",
        lambda function, file: "mask" in function or "mask" in file,
        "Leave `attention_mask` out if no batch has padding; or pass one of four dimensions, which is"
        " taken as it is, without a look at its values." + see("attention_masks"),
    ),
)


def of_library(where: Location | None, remedy: str) -> str:
    """The remedy for a read of the device by a library that is known; else the given one."""
    while where is not None:
        path = where.path.replace(os.sep, "/")
        file = path.rpartition("/")[2]
        for reader in _READERS:
            if f"/{reader.folder}" in path and reader.reads(where.function, file):
                return reader.remedy
        where = where.called
    return remedy


def of_host_read(where: Location | None, remedy: str) -> str:
    """The remedy for a read of a value by an assertion or by torch's own code; else the given one."""
    if where is None:
        return remedy
    if where.called is None and re.search(r"\bassert[ (]", where.source):
        return (
            "Leave the assertion out of the step; or count in a buffer how often it fails, and read the"
            " count now and then in `on_train_batch_end`, which runs on the host after every step."
            + see("nan_checks")
        )
    while where.called is not None:
        where = where.called
    if not where.path.startswith(_TORCH):
        return remedy
    is_named = where.function != "forward" and not where.function.startswith(("_", "<"))
    name = f"`{where.function}`" if is_named else "A function"
    return (
        f"{name} of torch reads the value in its own code: compute the same with other functions, or"
        " outside of the step." + see("item_and_print")
    )


def of_nan_check() -> Words:
    """The words for a branch on whether numbers are finite."""
    return (
        "a Python branch on whether numbers are finite (`torch.isnan`, `torch.isfinite`)",
        "Count in a buffer, `self.bad += ~torch.isfinite(loss.detach())`, and read the count now and"
        " then in `on_train_batch_end`, which runs on the host after every step. To leave such a batch"
        " out, let a fused Adam or AdamW skip its update (`found_inf`)." + see("nan_checks"),
    )


class FiniteChecks:
    """The tensors of one capture that say whether numbers are finite."""

    def __init__(self) -> None:
        # By id, which another tensor may have once this one is gone.
        self._known: dict[int, ref[Tensor]] = {}

    def note(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Record a function of torch that has run: a check, or one that combines checks."""
        if not isinstance(result, Tensor) or result.is_floating_point():
            return
        if func in _ASK_IF_FINITE or any(map(self.knows, (*args, *kwargs.values()))):
            self._known[id(result)] = ref(result)

    def knows(self, value: Any) -> bool:
        """True for a result of a check, or of a combination of checks."""
        found = self._known.get(id(value))
        return found is not None and found() is value
