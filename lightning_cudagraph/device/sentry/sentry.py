"""The guard that stands by during a capture.

A CUDA graph holds launches and nothing else: whatever needs a value on the host, or a size that
depends on values, cannot be in it. CUDA notices too late, when the capture is already lost and the
random generator left in a state from which the process does not recover. So every op is looked at
*before* it runs, and a forbidden one raises in Python; a Python exception ends a capture without harm.

The rules are the same for a GPU and for the emulator. Sources: the op tags of
``torch/_ops.py`` (`data_dependent_output`, `dynamic_output_shape`), and for ops that synchronise
without such a tag the CUDA implementations named beside each rule.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_cudagraph.compat.installed import PACKAGE_DIR
from lightning_cudagraph.compat.names.torch_names import tree_iter
from lightning_cudagraph.device.generators import Generators
from lightning_cudagraph.device.sentry.autocast import reaching
from lightning_cudagraph.device.sentry.collective_hooks import run_collective
from lightning_cudagraph.device.sentry.hidden_reads import in_op, of_function
from lightning_cudagraph.device.sentry.known import KnownValues
from lightning_cudagraph.device.sentry.noted import refused
from lightning_cudagraph.device.sentry.own_modes import OwnDispatchMode, OwnFunctionMode
from lightning_cudagraph.errors import CaptureError
from lightning_cudagraph.tensors.local import is_around_another
from lightning_cudagraph.tensors.writes import Writes

_STDLIB_DIR = sysconfig.get_paths()["stdlib"] + os.sep
# What code is called that has no file because tools have made it: Python itself, torch.fx, attrs, numpy.
_MADE_BY_TOOLS = (
    *("<frozen ", "<eval_with_key>", "<torch_package", "<attrs ", "<decorator-gen"),
    "<__array_function__",
)
_LIBRARIES = (
    "torch",
    "lightning",
    "lightning_fabric",
    "lightning_utilities",
    "pytorch_lightning",
    "torchmetrics",
)

_HOST_VALUE = (
    "`.item()`, `float(tensor)`, `int(tensor)`, `bool(tensor)` or a Python branch on a tensor",
    "Keep the value on the device: log the tensor itself, and use `torch.where` instead of `if`.",
)
_MASK = (
    "indexing with a boolean mask (`x[mask]`)",
    "Use a form with a fixed size, such as `torch.where(mask, x, 0)` or `x * mask`.",
)
_DYNAMIC_SIZE = (
    "an op whose result has a size that depends on values",
    "Use a form with a fixed size, or compute it in the dataloader and pass it with the batch.",
)
_CROSS_DEVICE = (
    "a copy between host memory and the GPU",
    (
        "Make the tensor on the device (`torch.zeros(..., device=x.device)`), keep constants in"
        " buffers (`register_buffer`), or pass the values with the batch."
    ),
)
# On a GPU these are harmless (cuDNN's RNN uses them on its own); a tape of ops cannot hold them.
STORAGE = (
    "an op that gives a tensor another storage or size, on the CPU emulator",
    "Allocate the tensor with its final size, and write into it with `copy_`.",
)
_EMULATOR_ONLY = frozenset({"aten::set_", "aten::resize_"})
_GENERATOR = (
    "a random op with a generator that no step has drawn from in warm-up",
    "Draw from it in every step, or use the default generator of the device.",
)
_NESTED = (
    "nested tensors, which `nn.TransformerEncoder` makes of what is not padded in evaluation mode",
    "Pass it `enable_nested_tensor=False`; what it returns for padded places is then not zero.",
)

_LAYOUT = (
    "a tensor of the layout `{}`",
    (
        "Use a strided one; in the place of a sparse one, its indices and values, with `index_select`"
        " and `index_add`."
    ),
)
_MAKE_SPARSE = tuple(
    f"aten::{name}" for name in ("to_sparse", "_to_sparse", "sparse_co", "_sparse_co", "sparse_cs")
)

# User's words for ops whose aten name nobody ever typed.
_WORDS: dict[str, tuple[str, str]] = {
    "aten::_local_scalar_dense": _HOST_VALUE,
    "aten::item": _HOST_VALUE,
    "aten::is_nonzero": _HOST_VALUE,
    "aten::equal": ("`torch.equal`", _HOST_VALUE[1]),
    "aten::allclose": ("`torch.allclose`", _HOST_VALUE[1]),
    "aten::nonzero": ("`nonzero`, `torch.where(condition)` or a boolean mask", _MASK[1]),
    "aten::masked_select": ("`masked_select` or a boolean mask", _MASK[1]),
    "aten::bincount": ("`torch.bincount`", _DYNAMIC_SIZE[1]),
    "aten::set_": STORAGE,
    "aten::resize_": STORAGE,
    # aten/src/ATen/native/cuda/Embedding.cu: `embedding_renorm_cuda_` reads the count of unique rows.
    "aten::embedding_renorm_": ("`nn.Embedding(max_norm=...)`", "Leave `max_norm` out."),
    # aten/src/ATen/native/PackedSequence.cpp works on lengths in host memory.
    "aten::_pack_padded_sequence": (
        "`pack_padded_sequence`",
        "Run the RNN on the padded batch, and mask the outputs.",
    ),
    # aten/src/ATen/native/nested/NestedTensorMath.cpp: both count what is not padded, on the host.
    "aten::_nested_tensor_from_mask": _NESTED,
    "aten::_nested_tensor_from_mask_left_aligned": _NESTED,
    # aten/src/ATen/native/BatchLinearAlgebra.cpp reads the error code on the host.
    "aten::_linalg_check_errors": (
        "a `torch.linalg` function that checks for errors on the host",
        "Use its `_ex` form, such as `torch.linalg.cholesky_ex`.",
    ),
}
_HOST_READS = {
    Tensor.tolist: "`.tolist()`",
    Tensor.numpy: "`.numpy()`",
    Tensor.__array__: "`numpy.asarray(tensor)`",
    Tensor.__repr__: "`print(tensor)` or `str(tensor)`",
}
# They tell where a tensor lies, for code that torch does not see.
_ADDRESSES = frozenset({Tensor.data_ptr, Tensor.__dlpack__, Tensor.__cuda_array_interface__.__get__})
# Given a list of tensors, they read the values one by one, on a CPU without dispatching an op.
_FROM_LISTS = (torch.tensor, torch.as_tensor, torch.asarray)
_LIST_OF_TENSORS = (
    "`torch.tensor` of a list of tensors",
    "Use `torch.stack`, which keeps the values on the device.",
)
_ALWAYS_FORBIDDEN = frozenset(
    name for name in _WORDS if name not in {"aten::nonzero", "aten::masked_select", "aten::bincount"}
)


# Torch's files that are between any call and its op, and say nothing of it.
_IN_BETWEEN = (
    *("_compile.py", "_dynamo", "_functorch", "_inductor", "_ops.py", "_tensor.py"),
    *("autograd", "overrides.py", "utils"),
)


@dataclass(frozen=True)
class Location:
    """A line of somebody's source, and the line of a library that it has called, if it has."""

    path: str
    line: int
    source: str
    called: Location | None = None

    def __str__(self) -> str:
        text = f"{self.path}:{self.line}" + (f" (`{self.source}`)" if self.source else "")
        return text if self.called is None else f"{text}, which comes to {self.called}"


def _library_dirs() -> tuple[str, ...]:
    return _dirs_of(*[getattr(sys.modules.get(name), "__file__", None) for name in _LIBRARIES])


@lru_cache(maxsize=8)  # asked for at each read that an audit hears of, and few are imported later
def _dirs_of(*files: str | None) -> tuple[str, ...]:
    return tuple(os.path.dirname(os.path.abspath(file)) + os.sep for file in files if file)


_Frame = tuple[CodeType, dict[str, Any], int]  # the code, its globals, the line


def _frames_outwards(frame: FrameType | None) -> Iterator[_Frame]:
    while frame is not None:
        yield frame.f_code, frame.f_globals, frame.f_lineno
        frame = frame.f_back


def _is_library(path: str) -> bool:
    if path.startswith(_library_dirs()):
        return True
    # Python's own modules, among which the installed packages usually lie.
    return path.startswith(_STDLIB_DIR) and "-packages" + os.sep not in path


def is_user_code(path: str) -> bool:
    """Whether a source file is neither Python's, torch's, Lightning's nor this package's."""
    return not path.startswith(("<", PACKAGE_DIR)) and not _is_library(path)


def is_users(code: CodeType, namespace: Mapping[str, Any]) -> bool:
    """Whether code with these globals is the user's.

    Code without a file was typed in (a prompt, a notebook, `python -c`, a script on the standard input),
    or made by a program, such as the methods of dataclasses: it is whose the module is that it belongs
    to. What belongs to none is taken for a program's, such as what launches Triton's kernels.
    """
    file = code.co_filename
    if not file.startswith("<"):
        return is_user_code(os.path.abspath(file))
    name = str(namespace.get("__name__", ""))
    if file.startswith(_MADE_BY_TOOLS) or not name or name.startswith("namedtuple_"):
        return False
    origin = getattr(sys.modules.get(name), "__file__", None)
    return origin is None or is_user_code(os.path.abspath(origin))


def location_in(code: CodeType, line: int) -> Location:
    """A line of some code."""
    file = code.co_filename
    path = file if file.startswith("<") else os.path.abspath(file)
    return Location(path, line, linecache.getline(path, line).strip())


def user_frame(frame: FrameType | None) -> Location | None:
    """The line that `frame` is at, if it is the user's."""
    if frame is None or not is_users(frame.f_code, frame.f_globals):
        return None
    return location_in(frame.f_code, frame.f_lineno)


def _locate(frames: Iterable[_Frame]) -> Location | None:
    """The innermost of `frames` that belongs to neither torch, Lightning nor this package.

    With a file, if there is one: what a dataclass makes says less than the line that called it. The
    search ends at the first frame of this package that has other code inside it: that is where
    the captured step was called from, and what lies further out is the script that called `fit`.
    Modes do not count: torch calls them in the middle of everything.
    """
    left_own_frames = False
    called: Location | None = None
    without_file: Location | None = None
    for code, namespace, line in frames:
        if code.co_name in ("__torch_dispatch__", "__torch_function__"):
            continue
        if code.co_filename.startswith("<"):
            if without_file is None and is_users(code, namespace):
                without_file = location_in(code, line)
                left_own_frames = True
            continue
        path = os.path.abspath(code.co_filename)
        if path.startswith(PACKAGE_DIR):
            if left_own_frames:
                break
            continue
        left_own_frames = True
        if not _is_library(path):
            return replace(location_in(code, line), called=called)
        if called is None and not _is_in_between(path):
            called = location_in(code, line)
            if "handle_torch_function" in called.source:  # asks the modes, and does nothing yet
                called = None
    return without_file


def _is_in_between(path: str) -> bool:
    torchs = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
    return path.startswith(tuple(torchs + name for name in _IN_BETWEEN))


def user_location() -> Location | None:
    """Where in the user's code the op now being dispatched was called, or None if nowhere there."""
    return _locate(_frames_outwards(sys._getframe(1)))


def location_of(error: BaseException) -> Location | None:
    """Where in the user's code `error` was raised, or None if nowhere there."""
    frames: list[_Frame] = []
    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        frames.append((frame.f_code, frame.f_globals, traceback.tb_lineno))
        traceback = traceback.tb_next
    return _locate(reversed(frames))


def forbid(what: str, remedy: str, location: Location | None) -> NoReturn:
    """Raise the error for something in a captured step that a CUDA graph cannot hold, and note it."""
    where = f"at {location}" if location else "in code called by torch, with no line of yours in it"
    raise refused(CaptureError(f"A CUDA graph cannot hold {what}: found {where}.", remedy))


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _crosses_devices(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name == "aten::copy_":
        target, source = args[0], args[1]
        if target.device.type == source.device.type:
            return False
        non_blocking = bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking", False))
        host = source if source.device.type == "cpu" else target
    elif name == "aten::_to_copy":
        source = args[0]
        device = kwargs.get("device")
        if device is None or torch.device(device).type == source.device.type:
            return False
        non_blocking = bool(kwargs.get("non_blocking", False))
        if source.device.type != "cpu":
            return True  # into fresh pageable memory
        host = source
    else:
        return False
    return not (non_blocking and host.is_pinned())


def _works_on(device_type: str, args: Any, kwargs: Any) -> bool:
    """Whether an op has a tensor on the device; host arithmetic may go on during a capture."""
    return any(
        leaf.device.type == device_type for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)
    )


def check(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str) -> None:
    """Raise `CaptureError` if a CUDA graph cannot hold this op.

    Args:
        func: the op overload that is about to run.
        args: its positional arguments.
        kwargs: its keyword arguments.
        device_type: the type of the device that is captured.

    Raises:
        CaptureError: naming the user's line, the op in the user's words, and a remedy.
    """
    name: str = func._schema.name
    layouts = {leaf.layout for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)}
    if name.startswith(_MAKE_SPARSE):
        layouts.add(torch.sparse_csr if "_cs" in name else torch.sparse_coo)
    for layout in layouts - {torch.strided}:
        forbid(_LAYOUT[0].format(layout), _LAYOUT[1], user_location())
    if _crosses_devices(name, args, kwargs):
        forbid(*_CROSS_DEVICE, user_location())
    if name in _EMULATOR_ONLY and device_type != "cpu":
        return
    refusal = _refusal(func, name, args, kwargs)
    if refusal is not None and _works_on(device_type, args, kwargs):
        forbid(*refusal, user_location())


def _refusal(
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, str] | None:
    """What the op is to the user, and the remedy, if it synchronises or has no fixed size."""
    if name in _ALWAYS_FORBIDDEN:
        return _WORDS[name]
    if name in ("aten::index", "aten::index_put_", "aten::_index_put_impl_"):
        # aten/src/ATen/native/IndexingUtils.h, canDispatchToMaskedFill: a mask with one value from the
        # host is a fill.
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


def _refuse_unknown(name: str) -> None:
    forbid(
        f"the op `{name}`, called by the Python of another one under autocast, which may be off there",
        "Call it outside of the other, or switch autocast off around both.",
        user_location(),
    )


class HostReads(OwnFunctionMode):
    """Refuses the calls that read a tensor's memory without dispatching an op.

    Args:
        device_type: the type of the device that is captured.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _HOST_READS and args[0].device.type == self._device_type:
            forbid(_HOST_READS[func], _HOST_VALUE[1], user_location())
        if (
            func in _FROM_LISTS
            and isinstance(args[0] if args else None, (list, tuple))
            and _works_on(self._device_type, args[:1], {})
        ):
            forbid(*_LIST_OF_TENSORS, user_location())
        if (hidden := of_function(func, args, kwargs or {})) is not None:
            forbid(*hidden, user_location())
        if func in _ADDRESSES:
            for sentry in _standing:
                sentry.known.give_out(args[0])
        return func(*args, **(kwargs or {}))


_standing: list[Sentry] = []


def is_capturing() -> bool:
    """Whether a capture is under way."""
    return bool(_standing)


class Sentry(OwnDispatchMode):
    """Checks every op of a capture before it runs.

    Args:
        device_type: the type of the device that is captured.
        generators: those that the graph may draw from.
    """

    def __init__(self, device_type: str, generators: Generators) -> None:
        super().__init__()
        self._device_type = device_type
        self._generators = generators
        self.writes = Writes()
        self.known = KnownValues()

    def __enter__(self) -> Sentry:
        _standing.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        _standing.remove(self)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(map(is_around_another, types)):
            return NotImplemented  # comes again, as ops on what it is around
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        if (
            generator is not None
            and generator.device.type == self._device_type
            and not self._generators.knows(generator)
        ):
            forbid(*_GENERATOR, user_location())
        if (known := self.known.read(func, args)) is not None:
            return known
        check(func, args, kwargs, self._device_type)
        if func.namespace == "c10d":
            result = run_collective(func, args, lambda: self.run(func, args, kwargs))
        else:
            with reaching(func, self._device_type, _refuse_unknown):
                result = self.run(func, args, kwargs)
        self.writes.note(func, args, kwargs, result)
        self.known.note(func, args, kwargs, result)
        return result

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op that has passed the check."""
        return func(*args, **kwargs)
