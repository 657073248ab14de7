"""Values that the framework's getters return to user code in a step.

Learning rates, schedulers, callbacks and dataloaders are framework objects, and reads of their
attributes are not seen. Calls of the getters that return them are: a returned object becomes a root of
the walk over names that user code mentions (`walker.py`), and a property is read again before every
replay.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cudagraph.checks.audit.mentions import MentionedNames
from lightning_cudagraph.checks.walk.host_objects import VALUES, lineage, namespace_of
from lightning_cudagraph.compat.frames import module_of, receiver_of

_NUMBERS = (int, float, bool)
_NO_OBJECTS = (Tensor, nn.Module, type, FunctionType, MethodType, ModuleType)


def note_framework_read(
    frame: FrameType, value: Any, mentioned: MentionedNames, leaves_out: Callable[[Any], bool]
) -> None:
    """Record the value that a framework function returns to user code."""
    code = frame.f_code
    receiver = receiver_of(frame)
    kind = type(receiver)
    name = code.co_name
    if name == "__getattr__":
        name = str(frame.f_locals.get(code.co_varnames[1]))
    of = f"the `{_known_class(receiver).__qualname__}`"
    label = f"`{name}` of {of}"
    if issubclass(kind, nn.Module) and module_of(frame).startswith("torch."):
        return  # the output of a layer
    is_number = type(value) in _NUMBERS
    if not is_number and (type(value) in VALUES or not _is_object(value) or leaves_out(value)):
        return
    getter = _getter(kind, code)
    # Properties of Lightning's modules do not move, or are known to move (`HostRules.moving`).
    if getter is not None and not issubclass(kind, nn.Module):
        read = partial(getter, receiver)
        known = mentioned.reads.get(label)
        if isinstance(known, partial) and known.args and known.args[0] is not receiver:
            label = f"{label} ({len(mentioned.reads)})"
        mentioned.reads[label] = read
    if not is_number and all(value is not root for root, _, _ in mentioned.roots):
        mentioned.roots.append((value, name, of))


def _known_class(receiver: Any) -> type:
    """The class that the user knows: Lightning makes one for its wrapper of an optimizer."""
    is_wrapper = isinstance(receiver, Optimizer) and "_optimizer" in vars(receiver)
    return type(vars(receiver)["_optimizer"] if is_wrapper else receiver)


def is_of_optimizers(value: Any) -> bool:
    """True for an optimizer, a list of them, or param groups."""
    if isinstance(value, (list, tuple)):
        return any(map(is_of_optimizers, value))
    return isinstance(value, Optimizer) or (type(value) is dict and "params" in value)


def _is_object(value: Any) -> bool:
    """True for an object to walk from. Objects with tensors of the step are not kept."""
    if issubclass(type(value), _NO_OBJECTS):
        return False
    return not _holds_tensors(value, 2)


def _holds_tensors(value: Any, depth: int) -> bool:
    members: Any = ()
    if isinstance(value, dict):
        members = [*dict.values(value)]  # a copy: another thread may write meanwhile
    elif type(value) in (list, tuple):
        members = value
    return any(
        isinstance(member, Tensor) or (depth > 1 and _holds_tensors(member, depth - 1))
        for member in members
    )


def _getter(kind: type, code: CodeType) -> Callable[[Any], Any] | None:
    """The getter of the property with this code; None if it is no property's."""
    for base in lineage(kind):
        found = namespace_of(base).get(code.co_name)
        if type(found) is property and getattr(found.fget, "__code__", None) is code:
            return found.fget
    return None
