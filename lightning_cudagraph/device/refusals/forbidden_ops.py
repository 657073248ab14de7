"""Ops and functions of torch that a CUDA graph cannot hold, in the user's words, with a remedy.

GPU and emulator have the same rules. Sources: the op tags of
``torch/_ops.py`` (`data_dependent_output`, `dynamic_output_shape`), and for ops that synchronise
without such a tag the CUDA implementations named beside each rule.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_cudagraph.compat.names.torch_names import tree_iter
from lightning_cudagraph.device.refusals.hidden_reads import in_op, of_function
from lightning_cudagraph.device.refusals.host_reads import PACKED, Words
from lightning_cudagraph.errors import see

HOST_VALUE = (
    "`.item()`, `float(tensor)`, `int(tensor)`, `bool(tensor)` or a Python branch on a tensor",
    (
        "Keep the value on the device: use the tensor itself, to compute (`.detach()` of it) and in"
        " `self.log`; and `torch.where` instead of `if`." + see("item_and_print")
    ),
)
_MASK = (
    "indexing with a boolean mask (`x[mask]`)",
    "Use a form with a fixed size, such as `torch.where(mask, x, 0)` or `x * mask` before a sum, and"
    " -inf in place of 0 before a softmax, `logsumexp` or `max`." + see("masks"),
)
_DYNAMIC_SIZE = (
    "an op whose result has a size that depends on values",
    (
        "Use a form with a fixed size, or compute it in the dataloader and pass it with the batch."
        + see("masks")
    ),
)
_COUNT = "Count with a fixed size: `F.one_hot(x, num_classes=10).sum(0)`." + see("masks")
_FROM_HOST = (
    "a copy between host memory and the GPU",
    (
        "Make the tensor on the device (`torch.zeros(..., device=x.device)`), keep constants in"
        " buffers (`register_buffer`), or pass the values with the batch."
    ),
)
# `.cpu()`, `.numpy()`, `numpy.asarray`: to look at it, or for a library.
_ON_THE_HOST = (
    "Compute with torch, on the device. To look at a value, return it from the step, and take it from"
    " the outputs in `on_train_batch_end`. What only a library on the host computes, such as SciPy, is"
    " in no graph: do it in the dataloader if it needs the batch alone; else pass"
    ' `on_unsupported="eager"`.' + see("item_and_print")
)
_TO_HOST = ("a copy from the GPU to host memory, such as `.cpu()`", _ON_THE_HOST)
# Harmless on a GPU (cuDNN's RNN uses them); a tape of ops cannot hold them.
STORAGE = (
    "an op that gives a tensor another storage or size, on the CPU emulator",
    "Allocate the tensor with its final size, and write into it with `copy_`.",
)
EMULATOR_ONLY = frozenset({"aten::set_", "aten::resize_"})
_DEEP_COPY = (
    "`copy.deepcopy` of a tensor, on the CPU emulator",
    "Use `clone`: `x.clone()`, or `x.detach().clone()` for a copy without gradients.",
)
GENERATOR = (
    "a random op with a generator that no step has drawn from in warm-up",
    "Draw from it in every step, or use the default generator of the device.",
)
_NESTED = (
    "nested tensors, which `nn.TransformerEncoder` makes of what is not padded in evaluation mode",
    "Pass it `enable_nested_tensor=False`; what it returns for padded places is then not zero.",
)

STRIDED = (
    "a strided one; instead of a sparse one, its indices and values, with `index_select` and"
    " `index_add`."
)
LAYOUT = (
    "a tensor of the layout `{}`",
    f"Use {STRIDED}",
)
MAKE_SPARSE = tuple(
    f"aten::{name}" for name in ("to_sparse", "_to_sparse", "sparse_co", "_sparse_co", "sparse_cs")
)

# The user's names of ops, with a remedy.
_WORDS: dict[str, Words] = {
    "aten::_local_scalar_dense": HOST_VALUE,
    "aten::item": HOST_VALUE,
    "aten::is_nonzero": HOST_VALUE,
    "aten::equal": ("`torch.equal`", HOST_VALUE[1]),
    "aten::allclose": ("`torch.allclose`", HOST_VALUE[1]),
    "aten::nonzero": ("`nonzero`, `torch.where(condition)` or a boolean mask", _MASK[1]),
    "aten::masked_select": ("`masked_select` or a boolean mask", _MASK[1]),
    "aten::bincount": ("`torch.bincount`", _COUNT),
    "aten::_unique2": ("`torch.unique`", _COUNT),
    "aten::set_": STORAGE,
    "aten::resize_": STORAGE,
    # aten/src/ATen/native/cuda/Embedding.cu: `embedding_renorm_cuda_` reads the count of unique rows.
    "aten::embedding_renorm_": ("`nn.Embedding(max_norm=...)`", "Leave `max_norm` out."),
    # aten/src/ATen/native/PackedSequence.cpp works on lengths in host memory.
    "aten::_pack_padded_sequence": PACKED,
    # aten/src/ATen/native/nested/NestedTensorMath.cpp: both count what is not padded, on the host.
    "aten::_nested_tensor_from_mask": _NESTED,
    "aten::_nested_tensor_from_mask_left_aligned": _NESTED,
    # aten/src/ATen/native/LossCTC.cpp and cuda/LossCTC.cu read the lengths, of input and targets.
    "aten::_ctc_loss": (
        "`ctc_loss`, for which torch reads the lengths on the host",
        (
            'torch has no form of it that a graph can hold. Pass `scope="modules", modules=["encoder"]`'
            ' with your names, which captures these alone; or `on_unsupported="eager"`.'
        ),
    ),
    # aten/src/ATen/native/BatchLinearAlgebra.cpp reads the error code on the host.
    "aten::_linalg_check_errors": (
        "a `torch.linalg` function that checks for errors on the host",
        "Use its `_ex` form, such as `torch.linalg.cholesky_ex`.",
    ),
}
_HOST_READS = {
    Tensor.tolist: ("`.tolist()`", HOST_VALUE[1]),
    Tensor.numpy: ("`.numpy()`", _ON_THE_HOST),
    Tensor.__array__: ("`numpy.asarray(tensor)`", _ON_THE_HOST),
    Tensor.__repr__: ("`print(tensor)` or `str(tensor)`", HOST_VALUE[1]),
}
# They return the address of a tensor, for code that torch does not see.
ADDRESSES = frozenset({Tensor.data_ptr, Tensor.__dlpack__, Tensor.__cuda_array_interface__.__get__})
# They read a list of tensors value by value, on a CPU without dispatching an op.
_FROM_LISTS = (torch.tensor, torch.as_tensor, torch.asarray)
# They take a number from memory of the host, some of them without dispatching an op.
_NUMBERS = frozenset(
    {Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.__bool__, Tensor.__complex__}
)
TAKE_FROM_HOST = ADDRESSES | _NUMBERS | {*_HOST_READS, *_FROM_LISTS}
_LIST_OF_TENSORS = (
    "`torch.tensor` of a list of tensors",
    "Use `torch.stack`, which keeps the values on the device.",
)
_ALWAYS_FORBIDDEN = frozenset(
    name for name in _WORDS if name not in {"aten::nonzero", "aten::masked_select", "aten::bincount"}
)


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def copy_between_devices(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Words | None:
    """A description for the user and a remedy, if the op copies between host and device, and waits."""
    if name == "aten::copy_":
        target, source = args[0], args[1]
        if target.device.type == source.device.type:
            return None
        non_blocking = bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking", False))
        host = source if source.device.type == "cpu" else target
    elif name == "aten::_to_copy":
        source = args[0]
        device = kwargs.get("device")
        if device is None or torch.device(device).type == source.device.type:
            return None
        non_blocking = bool(kwargs.get("non_blocking", False))
        if source.device.type != "cpu":
            return _TO_HOST  # into fresh pageable memory
        host = source
    else:
        return None
    if non_blocking and host.is_pinned():
        return None
    return _FROM_HOST if host is source else _TO_HOST


def works_on(device_type: str, args: Any, kwargs: Any) -> bool:
    """True if an op has a tensor on the device; host arithmetic is allowed in a capture."""
    return any(
        leaf.device.type == device_type for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)
    )


def refusal_of_op(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Words | None:
    """A description for the user and a remedy, if the op synchronises or has no fixed size."""
    if name in _ALWAYS_FORBIDDEN:
        return _WORDS[name]
    if name in ("aten::index", "aten::index_put_", "aten::_index_put_impl_"):
        # A mask with one value from the host is a fill: aten/src/ATen/native/IndexingUtils.h,
        # canDispatchToMaskedFill.
        fills = (
            name != "aten::index"
            and isinstance(args[2], Tensor)
            and args[2].numel() == 1
            and not args[2].is_cuda
        )
        return _MASK if any(map(_is_mask, args[1])) and not fills else None
    if name == "aten::repeat_interleave" and kwargs.get("output_size") is not None:
        return None
    if (hidden := in_op(name, args)) is not None:
        return hidden
    if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
        return _WORDS.get(name, (f"`{name.removeprefix('aten::')}`", _DYNAMIC_SIZE[1]))
    return None


def refusal_of_function(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str
) -> Words | None:
    """A description for the user and a remedy, if a function reads the memory of a tensor."""
    if func in _HOST_READS and args[0].device.type == device_type:
        return _HOST_READS[func]
    if func is Tensor.__deepcopy__ and device_type == args[0].device.type == "cpu":
        return _DEEP_COPY
    if (
        func in _FROM_LISTS
        and isinstance(args[0] if args else None, (list, tuple))
        and works_on(device_type, args[:1], {})
    ):
        return _LIST_OF_TENSORS
    return of_function(func, args, kwargs)
