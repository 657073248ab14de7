"""The modes of captures, which refuse ops and functions that a CUDA graph cannot hold.

A CUDA graph holds launches and nothing else: an op that needs a value on the host, or has a size that
depends on values, cannot be in it. CUDA's own error comes too late, when the capture is lost and the
random generator is in a state from which the process does not recover. So every op is checked *before*
it runs, and a forbidden one raises in Python: a Python exception ends a capture without harm.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_cudagraph.compat.names.torch_names import tree_iter
from lightning_cudagraph.device.generators import Generators
from lightning_cudagraph.device.lines.user_lines import user_location
from lightning_cudagraph.device.refusals.finite_checks import FiniteChecks
from lightning_cudagraph.device.refusals.first_refusal import (
    first_refusal_kept,
    forbid,
    one_finding,
    refuse,
)
from lightning_cudagraph.device.refusals.forbidden_ops import (
    ADDRESSES,
    EMULATOR_ONLY,
    GENERATOR,
    HOST_VALUE,
    LAYOUT,
    MAKE_SPARSE,
    TAKE_FROM_HOST,
    copy_between_devices,
    refusal_of_function,
    refusal_of_op,
    works_on,
)
from lightning_cudagraph.device.refusals.host_reads import (
    SKIP,
    TorchCall,
    of_host_read,
    of_library,
    of_loop,
    of_nan_check,
    of_use,
)
from lightning_cudagraph.device.sentry.autocast import reaching
from lightning_cudagraph.device.sentry.collective_hooks import run_collective
from lightning_cudagraph.device.sentry.host_checks import DRAWS, HostChecks
from lightning_cudagraph.device.sentry.known import READS, KnownValues
from lightning_cudagraph.device.sentry.own_modes import OwnDispatchMode, OwnFunctionMode
from lightning_cudagraph.device.sentry.tables import is_on_tables
from lightning_cudagraph.device.streams.recorded_flow import RecordedFlow
from lightning_cudagraph.errors import CaptureError
from lightning_cudagraph.tensors.local import is_around_another
from lightning_cudagraph.tensors.static import refuse_writes
from lightning_cudagraph.tensors.writes import Writes, tensors_in, written_by


def check(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str) -> None:
    """Refuse an op that a CUDA graph cannot hold, in the user's words."""
    name: str = func._schema.name
    layouts = {leaf.layout for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)}
    if name.startswith(MAKE_SPARSE):
        layouts.add(torch.sparse_csr if "_cs" in name else torch.sparse_coo)
    for layout in layouts - {torch.strided}:
        forbid(LAYOUT[0].format(layout), LAYOUT[1], user_location())
    if (copies := copy_between_devices(name, args, kwargs)) is not None:
        forbid(*copies, user_location())
    if name in EMULATOR_ONLY and device_type != "cpu":
        return
    refusal = refusal_of_op(func, name, args, kwargs)
    if refusal is not None and works_on(device_type, args, kwargs):
        where = user_location()
        if refusal == HOST_VALUE and any(one.finite_checks.knows(args[0]) for one in _active):
            refusal = of_nan_check(where)
        what, remedy = refusal
        if remedy == HOST_VALUE[1]:
            what, remedy = of_use(_calls[-1] if _calls else None, where, (what, remedy))
        if remedy == HOST_VALUE[1]:
            what, remedy = of_host_read(where, (what, remedy))
        if "unique" in name:
            what, remedy = of_loop(where, (what, remedy))
        forbid(what, of_library(where, remedy), where, subject=SKIP if remedy == SKIP else None)


def _refuse_write(error: CaptureError) -> None:
    error.location = user_location()
    refuse(error, error.subject)


def _refuse_unknown(name: str) -> None:
    forbid(
        f"the op `{name}`, called by the Python of another one under autocast, which may be off there",
        "Call it outside of the other, or switch autocast off around both.",
        user_location(),
    )


class FunctionSentry(OwnFunctionMode):
    """A function mode that refuses calls that read a tensor's memory without dispatching an op."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if (read := refusal_of_function(func, args, kwargs, self._device_type)) is not None:
            where = user_location()
            what, remedy = of_host_read(where, read) if func is Tensor.__array__ else read
            if func in (Tensor.tolist, Tensor.__repr__):
                what, remedy = of_use(TorchCall(func, args, kwargs), where, read)
            forbid(what, of_library(where, remedy), where)
            with one_finding():  # the ops that it consists of
                return func(*args, **kwargs)
        if func in ADDRESSES:
            for sentry in _active:
                sentry.known.give_out(args[0])
        if func in TAKE_FROM_HOST:
            for sentry in _active:
                sentry.take(tensors_in(args))
        _calls.append(TorchCall(func, args, kwargs))
        try:
            result = func(*args, **kwargs)
        finally:
            _calls.pop()
        for sentry in _active:
            sentry.finite_checks.note(func, args, kwargs, result)
        return result


_active: list[Sentry] = []
_calls: list[TorchCall] = []  # of torch's functions, the innermost last


def is_capturing() -> bool:
    """True during a capture."""
    return bool(_active)


class Sentry(OwnDispatchMode):
    """A dispatch mode that checks every op of a capture before it runs, and passes it to `flow`."""

    def __init__(self, device_type: str, generators: Generators) -> None:
        super().__init__()
        self._device_type = device_type
        self._generators = generators
        self.writes = Writes()
        self.known = KnownValues()
        self.finite_checks = FiniteChecks()
        self.host_checks = HostChecks(None)
        self.flow: RecordedFlow | None = None

    def __enter__(self) -> Sentry:
        _active.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        _active.remove(self)
        super().__exit__(*error)

    @contextmanager
    def watching(self, mode: OwnFunctionMode) -> Iterator[None]:
        """Run a step in the `with` block under this mode, a `FunctionSentry`, and one of the device."""
        with FunctionSentry(self._device_type), mode, self, first_refusal_kept():
            yield
            self.end()

    def end(self) -> None:
        """Examine what is known at the end of the step."""
        self.host_checks.end()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(map(is_around_another, types)):
            return NotImplemented  # comes again, as ops on the inner tensors
        kwargs = kwargs or {}
        if self._device_type == "cpu" and is_on_tables(func, args, kwargs):
            return func(*args, **kwargs)  # on the host, where a graph of a GPU has none of it
        generator = kwargs.get("generator")
        if (
            generator is not None
            and generator.device.type == self._device_type
            and not self._generators.knows(generator)
        ):
            forbid(*GENERATOR, user_location())
        if (known := self.known.read(func, args)) is not None:
            return known
        is_read = func._schema.name in READS and works_on(self._device_type, args, {})
        if is_read and (passing := self.host_checks.passes(func, args, self._run_too)) is not None:
            return passing
        is_draw = func in DRAWS and works_on(self._device_type, args[1:], {})
        if is_draw and (drawn := self.host_checks.draw(args, kwargs, self._run_too)) is not None:
            return drawn
        check(func, args, kwargs, self._device_type)
        refuse_writes(written_by(func, args, kwargs), _refuse_write)
        run = self.run if self.flow is None else partial(self.flow.run, run=self.run)
        if func.namespace == "c10d":
            result = run_collective(func, args, lambda: run(func, args, kwargs))
        else:
            with reaching(func, self._device_type, _refuse_unknown):
                result = run(func, args, kwargs)
        self.writes.note(func, args, kwargs, result)
        self.known.note(func, args, kwargs, result)
        self.host_checks.note(func, result)
        return result

    def _run_too(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op that the step does not have as if it had."""
        return Sentry.__torch_dispatch__(self, func, (), args, kwargs)

    def take(self, tensors: list[Tensor]) -> None:
        """Note that Python reads the memory of tensors."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op that has passed the check."""
        return func(*args, **kwargs)
