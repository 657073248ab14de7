"""Python that a capture would freeze.

Host code in a captured step runs once, at the capture, and never again. A value that it read stays
what it was; an attribute that it set is not set again; a random number that it drew is drawn for
good. Found here: any use of the index of the batch, reads of the trainer's counters and of clocks,
attributes and buffers of the model that the step rebinds or lets grow, and draws from the generators
of `random`, NumPy and the CPU.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_cudagraph.capture.reads import MentionedNames
from lightning_cudagraph.capture.sentry import Location, forbid, user_frame, user_location
from lightning_cudagraph.errors import CaptureError

__all__ = ["FrozenIndex", "frozen_python_audit"]

_HOST_HOOK = (
    "Do it in a hook that runs on the host at every step, such as `on_train_batch_start`, and hand the"
    " result to the step in a registered buffer, written with `copy_` or `fill_`"
)


_CLOCKS = frozenset({time.time, time.time_ns, time.perf_counter, time.perf_counter_ns, time.monotonic})


def _refuse(name: str) -> Any:
    def used(self: FrozenIndex, *args: Any) -> Any:
        forbid(
            f"a use of the value of `{self._name}`, which would stay what it is in this step",
            f"{_HOST_HOOK}, or pass the number with the batch, as a tensor.",
            user_location(),
        )

    used.__name__ = name
    return used


class FrozenIndex:
    """Stands for an integer, and may be handed on, but not looked at.

    Not a subclass of `int`: C code, such as that of torch, would read its value without asking.

    Args:
        name: what the user knows it as.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return int

    __hash__ = object.__hash__


_OPERATIONS = """
    abs add and bool ceil divmod eq float floor floordiv format ge gt index int invert le lshift lt
    mod mul ne neg or pos pow radd rand rdivmod repr rfloordiv rlshift rmod rmul ror round rpow
    rrshift rshift rsub rtruediv rxor str sub truediv trunc xor
"""
for _name in _OPERATIONS.split():
    setattr(FrozenIndex, f"__{_name}__", _refuse(f"__{_name}__"))


def _contents(value: Any) -> Any:
    """What a container holds, so that growth is seen; the containers of a module are all built-in."""
    if type(value) in (list, set):
        return tuple(value)
    if isinstance(value, dict):
        return tuple(value.items())
    return None


class _ModuleState:
    """The attributes of one module, to be compared and put back."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._attributes = dict(module.__dict__)
        self._held = {
            name: _contents(value)
            for name, value in self._attributes.items()
            if _contents(value) is not None
        }

    def changed(self) -> str | None:
        """The name of the first attribute that is another object, or holds others, or None."""
        now = self._module.__dict__
        for name, value in now.items():
            if name not in self._attributes or self._attributes[name] is not value:
                return name
        for name, held in self._held.items():
            holds = _contents(self._attributes[name])
            if len(holds) != len(held) or any(not _same(a, b) for a, b in zip(holds, held, strict=True)):
                if name in ("_buffers", "_parameters", "_modules"):
                    return next(
                        (b[0] for a, b in zip(held, holds, strict=False) if not _same(a, b)), name
                    )
                return name
        return next((name for name in self._attributes if name not in now), None)

    def restore(self) -> None:
        self._module.__dict__.clear()
        self._module.__dict__.update(self._attributes)
        for name, held in self._held.items():
            value = self._attributes[name]
            value.clear()
            if isinstance(value, list):
                value.extend(held)
            else:
                value.update(held)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b) == 2:
        return a[0] == b[0] and a[1] is b[1]
    return a is b


class _HostGenerators:
    """The states of the random generators on the host, to be compared and put back."""

    def __init__(self, device: torch.device) -> None:
        self._python = random.getstate()
        self._numpy: Any = np.random.get_state(legacy=True)
        # On a CPU this is the generator of the device, which draws afresh in every replay.
        self._torch = torch.get_rng_state() if device.type != "cpu" else None
        self._torch_bytes = _bytes_of(self._torch)

    def drawn_from(self) -> str | None:
        """The first generator that has been drawn from, or None."""
        if random.getstate() != self._python:
            return "`random`"
        numpy_now: Any = np.random.get_state(legacy=True)
        if any(map(np.any, map(np.not_equal, numpy_now[1:], self._numpy[1:]))):
            return "`numpy.random`"
        if self._torch is not None and _bytes_of(torch.get_rng_state()) != self._torch_bytes:
            return "the CPU generator of torch"
        return None

    def restore(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        if self._torch is not None:
            torch.set_rng_state(self._torch)


def _bytes_of(state: torch.Tensor | None) -> bytes:
    # Not `torch.equal`: a capture is under way when this is compared.
    return b"" if state is None else state.numpy().tobytes()


class _Reads:
    """Notes what the step mentions, and its reads of values that move from step to step.

    Properties are seen as calls of their getters, by the interpreter's profiling hook. It sees the
    thread of the training loop, not those of autograd.
    """

    def __init__(self, moving: Mapping[CodeType, str]) -> None:
        # By identity: the code objects of compiled frames do not hash.
        self._moving = {id(code): name for code, name in moving.items()}
        self._before: Any = None
        self._seen: dict[int, CodeType] = {}  # keeps the code objects, so that no number comes twice
        self.found: tuple[str, Location] | None = None
        self.mentioned = MentionedNames()

    def __enter__(self) -> _Reads:
        self._before = sys.getprofile()
        if self._before is not None and not callable(self._before):
            self._before.disable()  # a profiler written in C (cProfile) cannot be set again as it was
        sys.setprofile(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        if self._before is None:
            return
        if callable(self._before):
            sys.setprofile(self._before)
        else:
            self._before.enable()

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            if id(code) not in self._seen:
                self._seen[id(code)] = code
                self._mention(frame)
            if id(code) in self._moving:
                self._found(self._moving[id(code)], frame.f_back)
        elif event == "c_call" and argument in _CLOCKS:
            self._found(f"{argument.__module__}.{argument.__name__}()", frame)

    def _found(self, name: str, caller: FrameType | None) -> None:
        if self.found is None and (where := user_frame(caller)) is not None:
            self.found = (name, where)

    def _mention(self, frame: FrameType) -> None:
        names = frame.f_code.co_names
        self.mentioned.names.update(names)
        if user_frame(frame) is not None:
            namespace = frame.f_globals
            self.mentioned.user_globals += [(namespace, name) for name in names if name in namespace]


@contextmanager
def frozen_python_audit(
    model: nn.Module, device: torch.device, moving: Mapping[CodeType, str]
) -> Iterator[MentionedNames]:
    """Refuse a step that leaves traces on the host which a replay would not leave.

    If it is refused, or fails otherwise, the model's attributes and the generators are put back as
    they were.

    Args:
        model: the model whose modules are watched.
        device: where the step runs; the generator of that device is the graph's own.
        moving: getters of values that move from step to step, with the names the user knows them by.

    Yields:
        What the step mentions, filled by the time that this is left.

    Raises:
        CaptureError: naming the attribute, the value that was read with the user's line, or the
            generator that was drawn from.
    """
    states = {name: _ModuleState(module) for name, module in model.named_modules()}
    storages = {
        f"`{name}`": (tensor, tensor.detach(), tensor.data_ptr())
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    generators = _HostGenerators(device)
    try:
        with _Reads(moving) as reads:
            yield reads.mentioned
        if reads.found is not None:
            name, where = reads.found
            forbid(
                f"a read of `{name}`, which would stay what it is in this step",
                f"{_HOST_HOOK}, or pass the number with the batch, as a tensor.",
                where,
            )
        for path, state in states.items():
            if (changed := state.changed()) is not None:
                of = f"`{path}`" if path else f"the `{type(model).__qualname__}`"
                raise CaptureError(
                    f"The training step sets or changes `{changed}` of {of}, which a replay would not"
                    " do: it would keep what this one step left there.",
                    f"{_HOST_HOOK}.",
                )
        for name, (tensor, _, address) in storages.items():
            if tensor.data_ptr() != address:
                raise CaptureError(
                    f"The training step gives {name} another storage (`.data = ...`), which a replay"
                    " would not do.",
                    "Write into it: `copy_`, `mul_`, under `torch.no_grad()`.",
                )
        if (drawn := generators.drawn_from()) is not None:
            raise CaptureError(
                f"The training step draws from {drawn}, on the host: every replay would use the"
                " numbers of this one step.",
                "Draw on the device (`torch.rand(..., device=x.device)`), or in the dataloader.",
            )
    except BaseException:
        for state in states.values():
            state.restore()
        for tensor, as_it_was, address in storages.values():
            if tensor.data_ptr() != address:
                tensor.data = as_it_was
        generators.restore()
        raise
