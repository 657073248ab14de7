"""Base classes of this package's function and dispatch modes, hidden from torch's modules and Dynamo.

Under any function mode `torch.overrides.has_torch_function` is true, and attention then takes another
path (torch/nn/modules/transformer.py, activation.py): in evaluation mode `nn.TransformerEncoder` leaves
padded places at zero on the one path, and not on the other.
"""

from __future__ import annotations

import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn, overrides
from torch.overrides import TorchFunctionMode

from lightning_cudagraph.compat.names.torch_names import (
    TorchDispatchMode,
    TorchInGraphFunctionVariable,
    eval_frame,
)
from lightning_cudagraph.device.lines import warned_lines
from lightning_cudagraph.device.lines.user_lines import TORCH_DIR
from lightning_cudagraph.device.refusals.first_refusal import refused
from lightning_cudagraph.errors import CaptureError
from lightning_cudagraph.tensors.local import is_around_another
from lightning_cudagraph.tensors.writes import has_memory, storage_id, tensors_in

# The value in classes that override nothing.
_DOES_NOT: Any = nn.Parameter.__torch_function__

# The number of entered modes in all threads, and torch's own function, unpatched while that is 0.
_lock = threading.Lock()
_entered = 0
_asked_torch: Any = overrides.has_torch_function


def not_compiled(function: Callable[..., Any], with_what_it_calls: bool = False) -> None:
    """Have Dynamo skip a function of this package.

    Where Dynamo gives up a frame, it compiles the functions that the frame calls, and it does not tell
    torch's functions from this package's patches of them. A function can still be inlined into compiled
    code; only compiling it by itself is skipped.
    """
    frames: Any = eval_frame
    with suppress(AttributeError):  # names are gone: captures are refused then
        skip, default = frames.FrameAction.SKIP, frames.FrameAction.DEFAULT
        strategy = frames.FrameExecStrategy(skip, skip if with_what_it_calls else default)
        frames.set_code_exec_strategy(function.__code__, strategy)


def _known_to_dynamo() -> None:
    """Let Dynamo build its table of torch's functions before any of them is patched.

    Dynamo builds the table, keyed by the functions themselves, at its first trace, for the life of the
    process. With `has_torch_function` patched by then, torch's own would be missing from the table, and
    calls of it would break graphs from then on.
    """
    with suppress(AttributeError):  # a name is gone: captures are refused then
        TorchInGraphFunctionVariable._get_handlers()  # torch caches it


_HANDLE = overrides.handle_torch_function.__code__
_OF_C = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, type)
_OF_PROPERTIES = ("__get__", "__set__", "__delete__")
# Where functions of C look for the name that they hand to modes, with what C has put there: no code can
# set a method of the class in C below `Tensor`, and the members of modules are as at import.
_C_NAMES: list[tuple[Any, Mapping[str, Any]]] = [
    (Tensor, vars(Tensor.__base__)),
    (torch, dict(vars(torch._C))),  # `torch.device`
    *((module, dict(vars(module))) for module in vars(torch._C).values() if inspect.ismodule(module)),
]


def _torchs_own(func: Any) -> Any:
    """The function that hands `func` to a mode: torch's own, even if user code wraps it.

    torch's functions hand over what is bound to their name. If that is a wrapper, calling it in a mode
    would run it inside of itself, and do twice what it adds.
    """
    descriptor = getattr(func, "__self__", None)  # of a property's `__get__`
    if isinstance(func, _OF_C) or isinstance(descriptor, types.GetSetDescriptorType):
        return func
    handle = sys._getframe(2)  # behind `__torch_function__`
    if handle.f_code is _HANDLE and handle.f_back is not None:
        return _asking(handle.f_back, func)
    if type(func).__module__.startswith("torch."):  # an op, or a function of TorchScript
        return func
    name = getattr(func, "__name__", "")
    return getattr(_of_c(descriptor), name) if name in _OF_PROPERTIES else _of_c(func)


def _is_of_user_code(func: Any) -> bool:
    """True if a function, or one that it wraps, is not of torch."""
    while func is not None:
        code = getattr(func, "__code__", None)
        if code is None or not code.co_filename.startswith(TORCH_DIR):
            return True
        func = getattr(func, "__wrapped__", None)
    return False


def _asking(frame: types.FrameType, func: Any) -> Any:
    """The function of Python that runs in this frame, with its arguments as defaults."""
    code = frame.f_code
    if not _is_of_user_code(func):  # `_unique_impl` asks for `torch.unique`, say
        return func
    values = frame.f_locals
    n_positional = code.co_argcount
    defaults = tuple(values[name] for name in code.co_varnames[:n_positional])
    cells = tuple(types.CellType(values[name]) for name in code.co_freevars)
    asking = types.FunctionType(code, frame.f_globals, code.co_name, defaults, cells)
    of_keywords = code.co_varnames[n_positional : n_positional + code.co_kwonlyargcount]
    asking.__kwdefaults__ = {name: values[name] for name in of_keywords}
    return asking


def _of_c(bound: Any) -> Any:
    """The function or property of C under whose name user code has bound another one."""
    found = [
        own[name]
        for owner, own in _C_NAMES
        for name in vars(owner)
        if name in own and getattr(owner, name) is bound
    ]
    if len(found) != 1 or found[0] is bound:
        name = getattr(bound, "__qualname__", type(bound).__qualname__)
        what = f"torch hands over `{name}`, bound to {len(found) or 'no'} names of its functions in C"
        raise refused(CaptureError(f"{what}.", "Bind a function of its own to each name."))
    return found[0]


class OwnFunctionMode(TorchFunctionMode):
    """A function mode that watches a step without changing its path through torch.

    The `__torch_function__` of a subclass always gets a dictionary as `kwargs`.

    Where Dynamo gives up a frame (at a `with` block that it cannot trace, say), it compiles the
    functions that the frame calls. Of a mode's `__torch_function__` it makes code that calls another
    function of torch's (torch 2.13). So Dynamo skips these.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if (own := vars(cls).get("__torch_function__")) is not None:

            def __torch_function__(
                self: Any, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Any = None
            ) -> Any:
                if not torch.compiler.is_compiling():  # Dynamo traces modes too
                    func = _torchs_own(func)
                return own(self, func, kinds, args, kwargs or {})

            cls.__torch_function__ = __torch_function__  # type: ignore[method-assign]
            not_compiled(own, with_what_it_calls=True)
        not_compiled(cls.__torch_function__, with_what_it_calls=True)

    def __enter__(self) -> Any:
        global _entered, _asked_torch
        with _lock:
            if not _entered:
                _known_to_dynamo()
                _asked_torch = overrides.has_torch_function
                overrides.has_torch_function = _has_torch_function  # type: ignore[assignment]
            _entered += 1
        warned_lines.begin()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        global _entered
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        warned_lines.end()
        with _lock:
            _entered -= 1
            if not _entered:
                overrides.has_torch_function = _asked_torch


class OwnDispatchMode(TorchDispatchMode):
    """A dispatch mode that sees the ops of compiled code, and that Dynamo skips.

    Ops of compiled code may call a mode from Python, and Dynamo would compile that call.
    """

    def __init_subclass__(cls) -> None:
        if (own := vars(cls).get("__torch_dispatch__")) is not None:
            not_compiled(own, with_what_it_calls=True)  # before torch wraps it
        super().__init_subclass__()  # type: ignore[no-untyped-call]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __enter__(self) -> Any:
        warned_lines.begin()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        warned_lines.end()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True, or Dynamo would run compiled frames eagerly under the mode."""
        return True


class InputsMode(OwnDispatchMode):
    """Base class of dispatch modes that look at the tensors that ops take.

    They tell older memory from that which ops have made under the mode.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: set[int] = set()  # storages

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(map(is_around_another, types)):
            return NotImplemented  # the wrapper subclass dispatches its inner ops again
        kwargs = kwargs or {}
        inputs = list(filter(has_memory, tensors_in(args, kwargs)))
        self.look(func, args, kwargs, inputs)
        with self.around(func):
            result = func(*args, **kwargs)  # in this function: a user's line is looked for behind it
        given = set(map(storage_id, inputs))
        self.made |= set(map(storage_id, filter(has_memory, tensors_in(result)))) - given
        return result

    def look(self, func: Any, args: Any, kwargs: dict[str, Any], inputs: list[Tensor]) -> None:
        """Look at an op that is about to run, and at the tensors with memory that it takes."""
        raise NotImplementedError

    def around(self, func: Any) -> AbstractContextManager[Any]:
        """The context of an op."""
        return nullcontext()


def unpatched() -> Callable[[], None]:
    """Restore torch's own function if no mode is left; the returned function undoes that.

    For compiled code, which runs without the modes of captures: Dynamo guards on the identity of the
    function.
    """
    before: Any = overrides.has_torch_function
    if not any(map(_is_own, overrides._get_current_function_mode_stack())):
        overrides.has_torch_function = _asked_torch

    def put_back() -> None:
        overrides.has_torch_function = before

    return put_back


def _is_own(mode: TorchFunctionMode) -> bool:
    return isinstance(mode, OwnFunctionMode)


def _has_torch_function(relevant_args: Iterable[Any]) -> bool:
    modes = overrides._get_current_function_mode_stack()
    if all(map(_is_own, modes)):
        return any(_overrides(type(argument)) for argument in relevant_args)
    return bool(_asked_torch(relevant_args))


def _overrides(kind: type) -> bool:
    return kind is not Tensor and getattr(kind, "__torch_function__", _DOES_NOT) is not _DOES_NOT


not_compiled(_has_torch_function, with_what_it_calls=True)
