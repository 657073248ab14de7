"""The code to write instead, by what takes a value that a graph needs fixed."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cache

import torch

from lightning_cudagraph.compat.names.torch_names import OpOverloadPacket
from lightning_cudagraph.device.refusals.consumers import BRANCH, KEY, PLACE, START, STOP, WINDOW
from lightning_cudagraph.errors import AS_NUMBER, see

# By what takes a tensor, or a number that changes, where a graph needs a fixed number.
_INSTEAD = {
    WINDOW: "Index with a tensor of places: `places = (pointer + torch.arange(n, device=pointer.device))"
    " % len(queue)`, and `queue[places] = ...`." + see("indices_and_lengths"),
    "roll": "Roll by an index, with `size = x.size(1)` and the shift as a tensor:"
    " `x.index_select(1, (torch.arange(size, device=x.device) - shift) % size)`."
    + see("indices_and_lengths"),
    "range": "Loop as often as is needed at most, and leave out what is beyond,"
    " `x = torch.where(i < n, new, x)`." + see("loops_that_end"),
    START: "Keep the full length, and choose by a mask: `at = torch.arange(len(x), device=x.device)`,"
    " `inside = (at >= start) & (at < stop)`, and `torch.where(inside, new, x)`, with tensors as `start`"
    " and `stop`; of two dimensions, `rows[:, None] & columns`." + see("indices_and_lengths"),
    STOP: "Keep the full length, and leave the rest out by a mask,"
    " `torch.arange(len(x), device=x.device) < length`; of columns, `x.size(1)` in place of `len(x)`."
    " The length is a tensor: `y.max().clamp(max=9)` for `min(int(y.max()), 9)`."
    + see("indices_and_lengths"),
}
_AUGMENTATION = (
    "Move an augmentation, which needs the batch alone, as it is to `on_after_batch_transfer`, which"
    " runs between two steps, under `if self.trainer.training:`; a number that the step needs of it goes"
    " with the batch, as a tensor on its device."
)
_SIZE = (
    "Use a size that is the same in every step, the largest one, and leave the rest out by a mask,"
    " `torch.arange(size, device=x.device) < length`. Or count it in the collate function, and pass"
    " it with the batch as a whole number: each has a graph." + see("indices_and_lengths")
)
_OF_ITEMS = {
    KEY: 'Make the table a tensor, `self.register_buffer("table", torch.tensor([...]))`, and index it'
    " with the tensor itself, without a loop: `self.table[y]`." + see("loops"),
    PLACE: "Make it a registered buffer, and add at all places at once, without a loop:"
    " `self.counts.index_put_((x, y), self.counts.new_ones(len(x)), accumulate=True)`." + see("loops"),
}


def instead_of(consumers: Iterable[str]) -> str:
    """The remedy where these take a tensor, or a number that changes; empty for others."""
    consumers = [*consumers]
    last = _SIZE if any(map(_takes_a_size, consumers)) else of_item(consumers)
    return next((remedy for consumer, remedy in _INSTEAD.items() if consumer in consumers), last)


def of_item(consumers: Collection[str]) -> str:
    """The remedy where these index one item; empty for others."""
    return next((remedy for consumer, remedy in _OF_ITEMS.items() if consumer in consumers), "")


def of_place(consumers: Collection[str], index: str) -> str:
    """The remedy for a number that the step changes, where it is an index or an end of a slice."""
    if ends := {WINDOW, START, STOP} & {*consumers}:
        return instead_of(ends)
    if {KEY, PLACE} & {*consumers}:
        return (
            f"As an index, give it a dimension: `x[{index}.view(1)] = y`, and `x[{index}.view(1)][0]` to"
            " read." + see("indices_and_lengths")
        )
    return ""


def of_draw(consumers: Collection[str], allowance: str) -> str:
    """The remedy for a random number of the host that these take.

    Args:
        allowance: the end of the remedy for a number that nothing may depend on.
    """
    if BRANCH in consumers:
        return (
            f"{_AUGMENTATION} Else choose on the device: `x = torch.where(torch.rand((),"
            " device=x.device) < p, f(x), x)`. Or draw in `on_train_batch_start` into a registered"
            " buffer, and choose by that."
        )
    if {WINDOW, START, STOP} & {*consumers}:
        return (
            f"{_AUGMENTATION} Else draw in `on_train_batch_start`, and keep what the slice selects in a"
            " registered buffer: places, `self.places.copy_(start + torch.arange(n))`, for"
            " `x[self.places]`; or a mask, `self.mask.zero_()` and `self.mask[start:stop] ="
            " True`, for `torch.where(self.mask, new, x)`."
        )
    return (
        "Draw on the device (`torch.rand(..., device=x.device)`), or in `on_train_batch_start` into a"
        f" registered buffer ({AS_NUMBER}). {_AUGMENTATION}{allowance}"
    )


@cache
def _takes_a_size(name: str) -> bool:
    """True for a function of torch with an argument that sizes are passed as."""
    packet = getattr(torch.ops.aten, name, None)
    names = packet.overloads() if isinstance(packet, OpOverloadPacket) else ()
    schemas = [str(getattr(packet, each)._schema) for each in names]
    return name == "arange" or any("SymInt" in schema for schema in schemas)
