"""Modes of this package's own, under which torch's modules and Dynamo do as they do without.

Under any function mode `torch.overrides.has_torch_function` says that tensors override functions, and
attention then takes another path than without one (torch/nn/modules/transformer.py, activation.py): in
evaluation mode `nn.TransformerEncoder` leaves what is padded at zero on the one, and not on the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from torch import Tensor, nn, overrides
from torch.overrides import TorchFunctionMode

from lightning_cudagraph.compat.names.torch_names import (
    TorchDispatchMode,
    TorchInGraphFunctionVariable,
    eval_frame,
)

__all__ = ["OwnDispatchMode", "OwnFunctionMode", "not_compiled", "unpatched"]

# What classes have that override nothing.
_DOES_NOT: Any = nn.Parameter.__torch_function__

# How many modes are entered, in all threads; and torch's own function, which is there while none is.
_lock = threading.Lock()
_entered = 0
_asked_torch: Any = overrides.has_torch_function


def not_compiled(function: Callable[..., Any], with_what_it_calls: bool = False) -> None:
    """Have Dynamo leave a function alone where it comes to it in the course of compiled code.

    It compiles what a frame calls that it has given up, and it does not know torch's own functions from
    those of this package that stand in for them. What it compiles may have the function in it, unless it
    is asked to compile just that.

    Args:
        function: of this package.
        with_what_it_calls: and what that calls.
    """
    frames: Any = eval_frame
    with suppress(AttributeError):  # of names that are gone: then captures are refused
        skip, default = frames.FrameAction.SKIP, frames.FrameAction.DEFAULT
        strategy = frames.FrameExecStrategy(skip, skip if with_what_it_calls else default)
        frames.set_code_exec_strategy(function.__code__, strategy)


def _known_to_dynamo() -> None:
    """Let Dynamo find torch's functions while they are in their places.

    It has a table by the functions themselves, for the life of the process, and makes it when it traces
    for the first time. With this package's in the place of `has_torch_function`, all that torch calls
    through its own would be left out of graphs from then on.
    """
    with suppress(AttributeError):  # of a name that is gone: then captures are refused
        TorchInGraphFunctionVariable._get_handlers()  # kept by torch


class OwnFunctionMode(TorchFunctionMode):
    """A function mode that watches a step, and that the step does not see.

    Where Dynamo gives up a frame (at a `with` block that it cannot trace, say), it compiles the
    functions that it calls. What it makes of that of a mode (torch 2.13) then calls another function of
    torch's than it was asked for. So it is to leave these alone.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        not_compiled(cls.__torch_function__, with_what_it_calls=True)

    def __enter__(self) -> Any:
        global _entered, _asked_torch
        with _lock:
            if not _entered:
                _known_to_dynamo()
                _asked_torch = overrides.has_torch_function
                overrides.has_torch_function = _has_torch_function  # type: ignore[assignment]
            _entered += 1
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        global _entered
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        with _lock:
            _entered -= 1
            if not _entered:
                overrides.has_torch_function = _asked_torch


class OwnDispatchMode(TorchDispatchMode):
    """A dispatch mode that sees the ops of compiled code, and that Dynamo does not see.

    Ops of compiled code may call a mode from Python, and what is called there Dynamo would compile.
    """

    def __init_subclass__(cls) -> None:
        if (own := vars(cls).get("__torch_dispatch__")) is not None:
            not_compiled(own, with_what_it_calls=True)  # before torch wraps it
        super().__init_subclass__()  # type: ignore[no-untyped-call]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Without this, Dynamo would run compiled frames eagerly while the mode is on."""
        return True


def unpatched() -> Callable[[], None]:
    """Have torch's own function in its place until what this returns is called, if no mode is left.

    For compiled code, from which the modes of captures are taken off: Dynamo asks whether it is the
    function that there was when it was compiled.
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
