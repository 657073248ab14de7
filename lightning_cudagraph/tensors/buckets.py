"""Buckets: the few lengths to which batches are padded, so that a few graphs serve them all."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from lightning_cudagraph.errors import ConfigurationError, wrong_argument
from lightning_cudagraph.tensors.batch import flatten_batch, map_leaves

# More than any sum of padded lengths.
_NEVER = 2**60
_wrong = partial(wrong_argument, "Buckets")


@dataclass(frozen=True)
class Buckets:
    """The few lengths to which tensors of a batch are padded, so that a few graphs serve them all.

    The padding is at the end of a dimension, and on the host, before the batch goes to the device. A
    batch that is longer than the longest bucket is left as it is: it runs eagerly until its shape has
    earned a graph of its own. Other tensors of the batch, and other objects in it, are left alone.

    The loss is that of a step on such padding, made by hand: mask it, or let the loss ignore it.

    Args:
        lengths: the lengths to pad to.
        values: the tensors that are padded, with the value to pad with. They are named by their key or
            index in the batch, or by their path as the report gives it, ``batch['image'][0]``. All of
            them have the same length in a batch; others need `Buckets` of their own.
        dim: the dimension to pad, from 0.
        length_key: the key under which the length before the padding is added to a batch, which is a
            dictionary then, as a tensor of one integer. None to leave it out.

    Raises:
        ConfigurationError: if an argument is invalid, or does not fit to a batch.

    Example::

        buckets = Buckets([32, 64, 128], {"input_ids": 0, "attention_mask": 0, "labels": -100})

        Trainer(callbacks=[CUDAGraphCallback(pad_to=buckets)])  # pads the batches of a trainer
        DataLoader(data, collate_fn=buckets.collate(collate))  # or those of a loader, in its workers
    """

    lengths: Sequence[int]
    values: Mapping[str | int, float]
    dim: int = field(default=1, kw_only=True)
    length_key: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        lengths = _whole_numbers(self.lengths)
        object.__setattr__(self, "lengths", tuple(sorted(set(lengths))))
        if not isinstance(self.values, Mapping) or not self.values:
            expected = 'a dictionary of tensors and the values to pad with, such as `{"input_ids": 0}`'
            raise _wrong("values", self.values, expected)
        for key, value in self.values.items():
            if not isinstance(key, (str, int)):
                raise wrong_argument(
                    "Buckets", "values", self.values, f"keys, indices or paths; found {key!r}"
                )
            if not isinstance(value, (bool, int, float)):
                raise wrong_argument(
                    "Buckets", "values", self.values, f"a number for {key!r}; found {value!r}"
                )
        if type(self.dim) is not int or self.dim < 0:
            expected = "an int of at least 0: count the dimensions of a tensor from the first"
            raise _wrong("dim", self.dim, expected)
        if not isinstance(self.length_key, str | None):
            raise _wrong("length_key", self.length_key, "a string, or None")

    @classmethod
    def from_sample(
        cls,
        lengths: Iterable[int],
        max_buckets: int = 8,
        *,
        values: Mapping[str | int, float],
        dim: int = 1,
        length_key: str | None = None,
    ) -> Buckets:
        """Choose the buckets with the least padding for a sample of lengths.

        No other choice of at most `max_buckets` lengths has a smaller sum of padded lengths over the
        sample.

        Args:
            lengths: the lengths of batches, such as those of one epoch. If a batch is padded to the
                longest of its sequences, its length is theirs.
            max_buckets: how many lengths at most; up to `CUDAGraphCallback(max_graphs=16)` have graphs.
            values: as for the class.
            dim: as for the class.
            length_key: as for the class.

        Example::

            buckets = Buckets.from_sample(lengths, 8, values={"input_ids": 0, "labels": -100})
        """
        sample = _whole_numbers(lengths, "Buckets.from_sample")
        if type(max_buckets) is not int or max_buckets < 1:
            raise wrong_argument(
                "Buckets.from_sample", "max_buckets", max_buckets, "an int of at least 1"
            )
        chosen = best_lengths(Counter(sample), max_buckets)
        return cls(chosen, values, dim=dim, length_key=length_key)

    def collate(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Make a collate function that pads the batches of another one.

        Args:
            collate_fn: makes a batch of a list of samples, and pads them to the longest of these.

        Returns:
            The function for `DataLoader(collate_fn=...)`. A loader with workers pads in them.
        """
        return partial(_collated, self, collate_fn)

    def pad(self, batch: Any) -> Any:
        """Return a padded copy of a batch."""
        leaves = flatten_batch(batch)
        tensors = {path: leaf for path, leaf in leaves if isinstance(leaf, Tensor)}
        values = {_path(key): value for key, value in self.values.items()}
        lengths = {path: self._length(path, tensors, value) for path, value in values.items()}
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{length} in `{path}`" for path, length in lengths.items())
            raise _not_to_pad(
                f"expected tensors of one length in dimension {self.dim}, found {found}",
                "Give each length `Buckets` of its own: `pad_to` takes a list of them.",
            )
        length = next(iter(lengths.values()))
        at = bisect_left(self.lengths, length)
        if at < len(self.lengths):
            # Also copies what needs no padding, so that all batches of a bucket have the same strides.
            for path, value in values.items():
                tensors[path] = _padded(tensors[path], self.dim, self.lengths[at], value)
        members = iter([tensors.get(path, leaf) for path, leaf in leaves])
        padded = map_leaves(batch, lambda _: next(members))
        if self.length_key is not None:
            if not isinstance(padded, MutableMapping) or self.length_key in padded:
                raise _not_to_pad(
                    f"`length_key={self.length_key!r}` is added to a dictionary without this key, and"
                    f" the batch is a `{type(batch).__qualname__}`",
                    "Let the collate function return such a dictionary, or leave `length_key` out.",
                )
            padded[self.length_key] = torch.tensor(length, device=tensors[next(iter(values))].device)
        return padded

    def _length(self, path: str, tensors: Mapping[str, Tensor], value: float) -> int:
        """The length of a tensor to be padded, if it can be."""
        if (tensor := tensors.get(path)) is None:
            raise _not_to_pad(
                f"the batch has no tensor `{path}`; it has {', '.join(map('`{}`'.format, tensors))}",
                "Correct the keys of `values`.",
            )
        if tensor.dim() <= self.dim:
            raise _not_to_pad(
                f"`{path}` has the shape {tuple(tensor.shape)}, and no dimension {self.dim}",
                "Correct `dim`, or leave the tensor out of `values`.",
            )
        if not _holds(tensor.dtype, value):
            raise _not_to_pad(
                f"`{path}` is of {tensor.dtype}, which cannot hold the value {value!r}",
                "Give a value of that type.",
            )
        return tensor.shape[self.dim]


def _path(key: str | int) -> str:
    """The path of a member of the batch; one that is given as a path is one already."""
    is_path = isinstance(key, str) and (key == "batch" or key.startswith(("batch[", "batch.")))
    return str(key) if is_path else f"batch[{key!r}]"


def _holds(dtype: torch.dtype, value: float) -> bool:
    if dtype.is_floating_point or dtype.is_complex:
        return True
    if dtype is torch.bool:
        return value in (0, 1)
    limits = torch.iinfo(dtype)
    return float(value).is_integer() and limits.min <= value <= limits.max


def _padded(tensor: Tensor, dim: int, length: int, value: float) -> Tensor:
    """A copy of this length, pinned if the tensor is."""
    # In a worker of a loader nothing is pinned yet, and a question for it could initialize CUDA.
    is_pinned = tensor.device.type == "cpu" and get_worker_info() is None and tensor.is_pinned()
    shape = [*tensor.shape]
    shape[dim] = length
    padded = torch.empty(shape, dtype=tensor.dtype, device=tensor.device, pin_memory=is_pinned)
    there = tensor.shape[dim]
    padded.narrow(dim, 0, there).copy_(tensor)
    padded.narrow(dim, there, length - there).fill_(value)
    return padded


def _collated(buckets: Buckets, collate_fn: Callable[[Any], Any], samples: Any) -> Any:
    """A padded batch of samples. No nested function, which no loader could send to its workers."""
    return buckets.pad(collate_fn(samples))


def best_lengths(counts: Mapping[int, int], most: int) -> tuple[int, ...]:
    """Choose lengths to pad to, with the smallest sum of padded lengths.

    Dynamic programming over the sorted lengths: the first j of them in k buckets are the first i of them
    in k - 1, and the others in one. The best i grows with j, so the middle j halves the search.

    Args:
        counts: how often each length comes.
        most: how many lengths to choose at most.

    Returns:
        The chosen lengths, from the shortest; the longest is that of `counts`.
    """
    sizes = np.array(sorted(counts), dtype=np.int64)
    up_to = np.cumsum([0, *(counts[size] for size in sizes.tolist())], dtype=np.int64)
    sums = np.full(len(sizes) + 1, _NEVER, dtype=np.int64)
    sums[0] = 0
    splits: list[list[int]] = []
    for _ in range(min(most, len(sizes))):
        before, sums, split = sums, np.zeros_like(sums), [0] * len(sums)
        pending = [(1, len(sizes), 0, len(sizes))]
        while pending:
            first, last, low, high = pending.pop()
            if first > last:
                continue
            j = (first + last) // 2
            tried = slice(low, min(j, high + 1))
            found = before[tried] + sizes[j - 1] * (up_to[j] - up_to[tried])
            split[j] = best = low + int(found.argmin())
            sums[j] = found[best - low]
            pending += [(first, j - 1, low, best), (j + 1, last, best, high)]
        splits.append(split)
    chosen, j = [], len(sizes)
    for split in reversed(splits):
        if j:
            chosen.append(int(sizes[j - 1]))
            j = split[j]
    return tuple(reversed(chosen))


def _whole_numbers(value: Any, owner: str = "Buckets") -> list[int]:
    try:
        found = [length.__index__() for length in value]
    except (AttributeError, TypeError):
        found = []
    if not found or min(found) < 1:
        is_short = isinstance(value, (int, float, str, list, tuple)) and len(str(value)) < 100
        shown = value if is_short else type(value).__qualname__
        raise wrong_argument(owner, "lengths", shown, "ints of at least 1, and at least one of them")
    return found


def _not_to_pad(what: str, remedy: str) -> ConfigurationError:
    return ConfigurationError(f"`Buckets` do not fit to the batch: {what}. {remedy}")
