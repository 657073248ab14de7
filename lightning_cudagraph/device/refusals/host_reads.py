"""Remedies for reads of the device, by what is read, the use of it, and the library that reads it."""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_cudagraph.device.lines.user_lines import TORCH_DIR, is_installed, is_user_code
from lightning_cudagraph.device.refusals.branches import (
    ASKS_MASK,
    CHOOSES,
    LACKS,
    RAISES,
    SKIPS,
    STOPS,
    TELLS,
    branch,
)
from lightning_cudagraph.device.refusals.consumers import (
    BRANCH,
    LOOP,
    START,
    STOP,
    WINDOW,
    consumers,
    has_window,
    reads_host_draw,
    recurs,
)
from lightning_cudagraph.device.refusals.instead import instead_of, of_draw, of_item
from lightning_cudagraph.errors import Location, see

_IN_A_LIBRARY = (
    "A library does this on the host. If the call needs the batch alone, as an augmentation does, make"
    " it in `on_after_batch_transfer`, which runs between two steps, or in the dataset. If it checks an"
    " argument, or draws within a model, switch that off by an option of the library; or use your own"
    " version of its `{}`, in a subclass if it is a method."
)
_MASK_OF_A_LIBRARY = (
    "A library leaves a mask out by its values. If no batch has padding, pass none. Else override its"
    " `{}` in a subclass of yours, with the same code but for this branch: each step uses the mask."
    + see("attention_masks")
)
# A gradient of zero times infinity is not a number.
_BOTH_FINITE = (
    " Gradients come from both, so both must be finite: `n.clamp(min=1)` below a fraction bar."
)
_CHECK = (
    "Raise the error in a branch on the value itself, outside of a `try`, and keep no value: then the"
    " check is captured. Or count in a buffer how often it fails, `self.bad += (x > 9).detach()`, and"
    " read the count now and then in `on_train_batch_end`, which runs on the host after every step."
    + see("nan_checks")
)
# In place of a step that returns None behind a branch.
SKIP = (
    "Return the loss of every batch, and let a fused Adam or AdamW skip its update where its `found_inf`"
    " is 1, a registered buffer: `optimizer.found_inf = self.skip`, and `self.skip.copy_(loss.detach() >"
    " 9)` in the step, or `fill_` in `on_train_batch_start` if the batch's number decides."
    + see("nan_checks")
)

# In place of what a distribution computes.
_OUT = "Write it out in tensors: `validate_args=False` does not leave out this read."

Words = tuple[str, str]  # the description for the user, and the remedy

PACKED: Words = (
    "`pack_padded_sequence`",
    "Run an RNN of one direction on the padded batch, and take the output at the last step of each"
    " sequence, `output[torch.arange(len(output)), lengths - 1]`; for two directions, in each layer a"
    " second RNN on each sequence backwards." + see("packed_sequences"),
)
# In a line: those of `math` and `numpy`, which read the value before they ask.
_FINITE_CHECK = re.compile(r"\bis(nan|inf|finite)\(|([\w.]+) != \2\b")


@dataclass(frozen=True)
class _Reader:
    """Functions of a library that read the device, and what to do about it.

    Attributes:
        folder: the folder of its files, from the package on.
        reads: returns True for the names of its functions and files that do so.
    """

    folder: str
    reads: Callable[[str, str], bool]
    remedy: str


_READERS = (
    _Reader(
        "torch/distributions/",
        lambda function, file: (function, file) == ("__init__", "multivariate_normal.py"),
        "Pass `validate_args=False`, and instead of the covariance"
        " `scale_tril=torch.linalg.cholesky_ex(covariance)[0]`." + see("distributions"),
    ),
    _Reader(
        "torch/distributions/",
        lambda function, file: function in ("_precision_to_scale_tril", "_batch_capacitance_tril"),
        "Use `MultivariateNormal(loc, scale_tril=torch.linalg.cholesky_ex(covariance)[0],"
        " validate_args=False)`. The covariance is `torch.linalg.inv_ex(precision)[0]`; of low rank,"
        " `factor @ factor.mT + torch.diag_embed(diagonal)`." + see("distributions"),
    ),
    _Reader("torch/distributions/", lambda function, file: file == "wishart.py", _OUT + see("wishart")),
    _Reader(
        "torch/distributions/",
        # This file reads for checks alone; torch 2.15 has a function for that.
        lambda function, file: function in ("__init__", "_validate_sample") or file == "distribution.py",
        "Pass `validate_args=False` to the distribution: its checks read all arguments on the host."
        + see("distributions"),
    ),
    _Reader(
        "torch/distributions/",
        lambda function, file: function in ("entropy", "enumerate_support"),
        _OUT + see("distribution_entropies"),
    ),
    _Reader("torch/distributions/", lambda function, file: True, _OUT + see("distribution_samples")),
    _Reader(
        "torch/nn/",
        lambda function, file: (function, file) == ("dropout", "functional.py"),
        "Draw the mask with the probability as a tensor: `x * (torch.rand_like(x) >= p) / (1 - p)`, with"
        " `p` a registered buffer, written with `fill_` in `on_train_batch_start`. The masks are other"
        " random ones." + see("changing_numbers"),
    ),
    _Reader(
        "torch/nn/modules/",
        lambda function, file: file == "transformer.py",
        "Pass `is_causal=True` beside a causal mask, `is_causal=False` beside another one: without it,"
        " torch compares the mask's values." + see("attention_masks"),
    ),
    _Reader(
        "torch/nn/modules/",
        lambda function, file: file == "batchnorm.py",
        "Pass a number as `momentum`, such as 0.1: with None, torch reads how many batches there were,"
        " for the running mean and variance. What is trained does not depend on them."
        + see("item_and_print"),
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
        "utilities/",
        lambda function, file: (function, file) == ("grad_norm", "grads.py"),
        "Compute the norms in the hook itself: `norms = {name: p.grad.norm() for name, p in"
        " self.named_parameters() if p.grad is not None}`, and of all of them,"
        " `torch.stack([*norms.values()]).norm()`." + see("hooks"),
    ),
    _Reader(
        "transformers/",
        lambda function, file: "no_attention_mask" in function,
        "Set `model.config.pad_token_id = None` if no batch has padding; or pass a mask of four"
        " dimensions." + see("attention_masks"),
    ),
    _Reader(
        "transformers/",
        lambda function, file: "mask" in function or "mask" in file,
        "Leave `attention_mask` out if no batch has padding; or pass one of four dimensions, which is"
        " taken as it is, without a look at its values: a decoder's has to be causal too."
        + see("attention_masks"),
    ),
)


@dataclass(frozen=True)
class TorchCall:
    """A call of a function of torch."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def name(self) -> str:
        return getattr(self.func, "__name__", "")


@dataclass(frozen=True)
class _Use:
    """A use of a value for which the host reads it.

    Attributes:
        fits: returns True for a call that reads, and the user's line.
        what: the description for the user; empty for that of any read.
    """

    fits: Callable[[TorchCall, Location], bool]
    remedy: str
    what: str = ""


def _is_slice(call: TorchCall, part: str) -> bool:
    """True if a tensor is the `start` or the `stop` of a slice in an index."""
    return any(isinstance(i, slice) and isinstance(getattr(i, part), Tensor) for i in _indices(call))


def _indices(call: TorchCall) -> tuple[Any, ...]:
    """The indices of a call that reads or writes items; empty for another."""
    if call.name not in ("__getitem__", "__setitem__"):
        return ()
    return call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)


def _lines_below(where: Location) -> str:
    """The lines of a function below a line, as far as they are indented as much."""
    first, *lines = linecache.getlines(where.path)[where.line - 1 :] or [""]
    indent = len(first) - len(first.lstrip())
    ends = (n for n, line in enumerate(lines) if line.strip() and line[:indent].strip())
    return "".join(lines[: next(ends, len(lines))])


def _consumers_of(call: TorchCall, where: Location) -> Iterable[str]:
    """The consumers of what a call reads; or the call itself, and the part of a slice that it reads."""
    if call.name in _READS:
        return consumers(where)
    start = WINDOW if has_window(where) else START
    parts = (mark for mark, part in ((start, "start"), (STOP, "stop")) if _is_slice(call, part))
    return (call.name, *parts)


def _decides_on_steps(where: Location) -> bool:
    return re.search(r"\.step\(|manual_backward\(", _block(where)) is not None


def _block(where: Location) -> str:
    """The lines inside a branch that begins at a line; empty for another line."""
    if not where.source.startswith(("if ", "elif ", "while ")):
        return ""
    indent = len(linecache.getline(where.path, where.line)) - len(where.source) - 1
    block = re.match(rf"(?:\s*\n| {{{indent + 1},}}.*\n?)*", _lines_below(where))
    return where.source + "\n" + (block[0] if block else "")


def _breaks(where: Location) -> bool:
    return re.search(r"\bbreak\b", _block(where)) is not None


def _ends_a_loop_of_steps(where: Location) -> bool:
    """True for a branch that breaks a loop with steps of optimizers in it."""
    *above, line = linecache.getlines(where.path)[: where.line] or [""]
    indent = len(line) - len(line.lstrip())
    heads = [
        n for n, text in enumerate(above) if re.match(rf" {{0,{max(indent - 1, 0)}}}(for|while) ", text)
    ]
    if not (_breaks(where) and heads):
        return False
    return ".step(" in _lines_below(replace(where, line=heads[-1] + 1))


def _keeps_best(where: Location) -> bool:
    """True for a branch, or a `min` or `max`, that leads to another value of an attribute."""
    if re.match(r"self\.\w+ = (min|max)\(", where.source):
        return True
    if where.source.startswith("while "):
        return False
    return re.search(r"(^|:)\s*self\.\w+ = (?!None)", _block(where), re.MULTILINE) is not None


_READS_ONE = ("__int__", "__index__", "__float__", "item")
_READS = (*_READS_ONE, "tolist")
_BRANCHES = ("__bool__", "__contains__")
_ON_THE_HOST = {"print", "append", "write", "debug", "info", "warning", "set_postfix"}
_OF_INDEX = "an index by a tensor without dimensions, which reads it on the host"
_ARGUMENTS = (
    _Use(
        lambda call, where: call.name == "one_hot",
        "Pass it: `one_hot(labels, num_classes=10)`." + see("indices_and_lengths"),
        "`one_hot` without `num_classes`, which reads the largest label",
    ),
    _Use(
        lambda call, where: any(
            isinstance(call.kwargs.get(name), Tensor) for name in ("alpha", "beta", "value")
        ),
        "Multiply instead: `x.add_(factor * y)` for `x.add_(y, alpha=factor)`."
        + see("indices_and_lengths"),
        "a tensor as `alpha`, `beta` or `value` of a function that takes a number",
    ),
)
_USES = (
    _Use(
        lambda call, where: call.name == "__bool__" and _decides_on_steps(where),
        "Capture what comes before the branch and what is in it with one `GraphedStep` each, without the"
        " callback, and branch on the host between their calls." + see("parts"),
    ),
    _Use(
        lambda call, where: _reads_index(call) and _writes_item(call, where),
        "Give it one: `x[index.view(1)] = y`." + see("indices_and_lengths"),
        _OF_INDEX,
    ),
    _Use(
        lambda call, where: _reads_index(call),
        "Give it one: `x[index.view(1)][0]`." + see("indices_and_lengths"),
        _OF_INDEX,
    ),
    _Use(
        lambda call, where: call.name in ("__bool__", *_READS_ONE) and _keeps_best(where),
        "Keep it in a registered buffer, and write that in every step:"
        " `self.best.copy_(torch.where(loss < self.best, loss.detach(), self.best))`."
        + see("item_and_print"),
    ),
    _Use(
        lambda call, where: call.name == "__bool__" and _ends_a_loop_of_steps(where),
        "A replay takes all steps of the loop. Return the tensor, and compare it between batches, in"
        " `on_train_batch_end`; or keep the outcome in the `found_inf` of a fused Adam or AdamW, which"
        " skips the updates that follow." + see("nan_checks"),
    ),
    _Use(
        lambda call, where: (
            where.source.startswith("while ")
            or (call.name == "__bool__" and (_breaks(where) or recurs(where)))
        ),
        "Loop as often as is needed at most, and keep what has ended, `x = torch.where(ended, x, new)`."
        + see("loops_that_end"),
    ),
    _Use(
        lambda call, where: call.name in ("__bool__", *_READS_ONE) and _compares(where),
        "Compare on the device: `x.clamp(min=1)` for `max(1, x)`, `x.clamp(max=9)` for `min(x, 9)`,"
        " `torch.maximum(x, y)` for two tensors, and `x.max()` for `max(x)`." + see("item_and_print"),
    ),
)
_OF_HOOK = (
    "Return the tensor from the step, and do it in `on_train_batch_end`, which runs on the host"
    " after every step." + see("item_and_print")
)
# By the kind of a branch.
_OF_BRANCH = {
    RAISES: _CHECK,
    SKIPS: SKIP,
    STOPS: 'Do it in `on_train_batch_end`, which runs on the host after every step: `if outputs["loss"]'
    " < 0.1: self.trainer.should_stop = True`." + see("item_and_print"),
    TELLS: _OF_HOOK,
    ASKS_MASK: "Always pass the mask; or leave it out if no batch has padding. To choose something else"
    " by it: `torch.where(mask.any(), a, b)`." + see("attention_masks"),
    LACKS: "Return a tensor in each case, one that changes nothing in place of None, such as zero for a"
    f" term: `torch.where(condition, 0, x)`.{_BOTH_FINITE}" + see("item_and_print"),
    CHOOSES: "Compute both, and choose with `torch.where`: `torch.where(condition, a, b)`."
    f"{_BOTH_FINITE}" + see("item_and_print"),
}


def _is_shown(call: TorchCall, where: Location) -> bool:
    """True for a line that prints, keeps or logs what it reads."""
    return re.search(r"\bprint\(|\.append\(", where.source) is not None or (
        call.name in _READS and bool(_ON_THE_HOST & consumers(where))
    )


def _compares(where: Location) -> bool:
    """True for a `max` or `min` of Python."""
    return re.search(r"(?<![\w.])(max|min)\(", where.source) is not None


def _decides(call: TorchCall, where: Location) -> bool:
    """True for a branch, also on a variable that a line binds to what it reads; not one in a library."""
    if where.called is not None:
        return False
    return call.name in _BRANCHES or (call.name in _READS and BRANCH in consumers(where))


def _reads_index(call: TorchCall) -> bool:
    """True for an index that is a whole number on the device."""
    return any(isinstance(i, Tensor) and not i.dim() and i.dtype != torch.bool for i in _indices(call))


def _writes_item(call: TorchCall, where: Location) -> bool:
    return (
        call.name == "__setitem__" or re.match(r"[^=]*\]\s*[-+*/%@|&^]{1,2}=", where.source) is not None
    )


def of_use(call: TorchCall | None, where: Location | None, words: Words) -> Words:
    """The words for a read by what the value is read for, if that is known; else the given ones."""
    if call is None or where is None:
        return words
    if call.name == "__bool__" and _FINITE_CHECK.search(where.source):
        return of_nan_check(where)
    for use in _ARGUMENTS:
        if use.fits(call, where):
            return use.what, use.remedy
    if call.name == "tolist" and (of_each := of_loop(where, words)) != words:
        return of_each
    is_read = call.name in (*_BRANCHES, *_READS) and where.called is None
    if is_read and reads_host_draw(where):
        by = {BRANCH} if call.name in _BRANCHES else consumers(where)
        return words[0], of_draw(by, "") + see("host_random")
    if instead := instead_of(_consumers_of(call, where)):
        return words[0], instead
    for use in _USES:
        if use.fits(call, where):
            return use.what or words[0], use.remedy
    if _decides(call, where) and (remedy := _OF_BRANCH.get(branch(where))):
        return words[0], remedy
    return (words[0], _OF_HOOK) if _is_shown(call, where) else words


def of_loop(where: Location | None, words: Words) -> Words:
    """The words for values over which a line loops, or their list does; else the given ones."""
    if where is None or LOOP not in (found := consumers(where)):
        return words
    if re.search(r"unique|\bset\(", where.source):
        return words[0], (
            "Loop over all that can come, `for c in range(num_classes)`, with a mask,"
            " `torch.where(labels == c, x, 0)`." + see("masks")
        )
    if BRANCH in found:
        return words[0], (
            "Python that decides by values is in no graph. If they are the batch's, decide in the"
            " collate function or in `on_after_batch_transfer`, and pass tensors of indices, padded to"
            " one length, with the batch. Else decide by a mask, `torch.where`."
            + see("indices_and_lengths")
        )
    instead = instead_of(found)
    if instead and instead == of_item(found):  # of all at once
        return words[0], instead
    over = "Loop over the tensor itself, `for each in x`."
    return words[0], f"{over} {instead}" if instead else over + see("loops")


def of_library(where: Location | None, remedy: str, allowance: str = "") -> str:
    """The remedy for what a library does: by who reads, or for any installed one; else the given one.

    Args:
        allowance: the end of the remedy for any installed one.
    """
    while where is not None:
        path = where.path.replace(os.sep, "/")
        file = path.rpartition("/")[2]
        for reader in _READERS:
            if f"/{reader.folder}" in path and reader.reads(where.function, file):
                return reader.remedy
        if is_installed(where.path) and is_user_code(where.path):
            asks_mask = branch(where) == ASKS_MASK
            text = _MASK_OF_A_LIBRARY if asks_mask else _IN_A_LIBRARY + allowance + see("host_random")
            remedy = text.replace("{}", where.function)
        where = where.called
    return remedy


def of_host_read(where: Location | None, words: Words) -> Words:
    """The words for a read by a check, an assertion or torch's own code; else the given ones."""
    if where is None:
        return words
    if _FINITE_CHECK.search(where.source):
        return of_nan_check(where)
    what = words[0]
    if where.called is None and re.search(r"\bassert[ (]", where.source):
        return what, _CHECK
    while where.called is not None:
        where = where.called
    if not where.path.startswith(TORCH_DIR):
        return words
    is_named = where.function != "forward" and not where.function.startswith(("_", "<"))
    name = f"`{where.function}`" if is_named else "A function"
    return what, (
        f"{name} of torch reads the value in its own code: compute the same with other functions, or"
        " outside of the step." + see("item_and_print")
    )


def of_nan_check(where: Location | None) -> Words:
    """The words for a branch on whether numbers are finite."""
    what = "a Python branch on whether numbers are finite (`isnan`, `isfinite`)"
    if where is not None and "nan_to_num" in _block(where):
        return what, "Do it in every step: finite numbers stay as they are." + see("nan_checks")
    if where is not None and "zero_(" in _block(where):
        return what, (
            "Clear them without a branch:"
            " `p.grad.copy_(torch.where(p.grad.isfinite().all(), p.grad, 0))`." + see("nan_checks")
        )
    return (
        what,
        "Count in a buffer, `self.bad += ~torch.isfinite(loss.detach())`, and read the count now and"
        " then in `on_train_batch_end`, which runs on the host after every step. To leave such a batch"
        " out, let a fused Adam or AdamW skip its update (`found_inf`)." + see("nan_checks"),
    )
