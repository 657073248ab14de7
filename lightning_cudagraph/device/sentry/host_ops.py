"""Ops on the host that each replay repeats: random draws, and what is computed from them.

A graph holds launches alone. What a step draws on the host, as in `torch.randn(n).type_as(x)`, is
another value in each step. Draws, and ops on what comes from them, are recorded, and run again before
each launch, in their order. They draw from the same generators, and so the numbers that the step would
draw. What the step copies to the device is sent to a static input, which the captured copy reads.

A number that the host itself takes of them (`.item()`, a branch, an operand of an op on the device) is
in the captured step. Then the audit sees the draws of the step, and refuses them.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_cudagraph.compat.attributes import do_nothing
from lightning_cudagraph.compat.frames import frames, module_of
from lightning_cudagraph.device.generators import Generators, HostDraws
from lightning_cudagraph.device.host_work import HostInput, HostWork, work_under_capture
from lightning_cudagraph.device.lines.user_lines import user_location
from lightning_cudagraph.device.refusals.first_refusal import forbid
from lightning_cudagraph.device.refusals.forbidden_ops import refusal_of_op
from lightning_cudagraph.device.sentry.collectives import is_collective
from lightning_cudagraph.device.taped_op import TapedOp, address, addressed
from lightning_cudagraph.errors import Location
from lightning_cudagraph.tensors.batch import copied_leaf
from lightning_cudagraph.tensors.local import local
from lightning_cudagraph.tensors.writes import storage_id, tensors_in, whole, written_by

# One for all graphs of a backend, and none if no step needs it.
INPUT_BYTES = 4 << 20
_ALIGNMENT_BYTES = 64
_ON_THE_DEVICE = "Draw them on the device (`torch.randn(..., device=x.device)`)"
_TOO_LARGE = (
    f"more than {INPUT_BYTES >> 20} MiB that the host draws in each step for the device",
    f"{_ON_THE_DEVICE}, or pass them with the batch.",
)
_SET_INSIDE = (
    (
        "draws on the host in a step that also sets their generator, as `torch.random.fork_rng` and"
        " activation checkpointing do"
    ),
    f"{_ON_THE_DEVICE}; or pass `preserve_rng_state=False` if what is computed twice draws nothing.",
)


def aligned(used_bytes: int) -> int:
    """The place of the next tensor in memory for several, of which so much is in use."""
    return -(-used_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class HostOps:
    """The ops of one capture on tensors in host memory.

    Args:
        static: what replays send to the device; None if the step runs for real, and is no capture.
    """

    def __init__(self, static: HostInput | None) -> None:
        self.draws = HostDraws()
        self._static = static
        # Made inside the step, by storage; kept alive, so that no address is used twice.
        self._made: dict[int, Tensor] = {}
        self._drawn: set[int] = set()  # storages with what comes from draws
        self._recorded: list[tuple[HostWork, TapedOp]] = []  # with the part of the graph
        self._first_draw: Location | None = None
        self._staged = torch.empty(INPUT_BYTES, dtype=torch.uint8, device="cpu")
        self.staged_bytes = 0

    def is_made_inside(self, tensor: Tensor) -> bool:
        return storage_id(tensor) in self._made

    def is_drawn(self, tensor: Tensor) -> bool:
        """True for a tensor in host memory that comes from a draw."""
        return _is_on_host(tensor) and storage_id(tensor) in self._drawn

    def take(self, tensors: Iterable[Tensor]) -> None:
        """Show the draws to the audit if the host, or an op on the device, takes what comes from one."""
        self.draws.are_shown |= any(map(self.is_drawn, tensors))

    def run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]
    ) -> Any:
        """Run an op that has tensors in host memory alone, and record it if it is to be repeated."""
        inputs = tensors_in(args, kwargs)
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if not draws and not any(map(self.is_drawn, inputs)):
            # `lift_fresh` returns what `torch.tensor` has just made, for which there is no op.
            return self._made_by(run(), [] if func._schema.name == "aten::lift_fresh" else inputs)
        if is_collective(func) or refusal_of_op(func, func._schema.name, args, kwargs) is not None:
            self.draws.are_shown = True
            return self._made_by(run(), inputs)
        written = written_by(func, args, kwargs)
        for each in written:
            if not self.is_made_inside(each):  # the memory of other code, which may read it unseen
                self.draws.are_shown = True
            elif not self.is_drawn(each):
                memory = whole(each)
                self._record_copy(memory, memory.clone())
        self._drawn.update(map(storage_id, written))
        known: dict[int, Tensor] = {}
        own_args = addressed(args, known, self._operand)
        own_kwargs = {name: addressed(value, known, self._operand) for name, value in kwargs.items()}
        if draws:
            self._first_draw = self._first_draw or user_location()
            self.draws.are_shown |= _is_in_compiled_code()
            given = (each for each in (*args, *kwargs.values()) if isinstance(each, torch.Generator))
            with self.draws.noted(next(given, torch.default_generator)):
                result = run()
        else:
            result = run()
        op = TapedOp(func, own_args, own_kwargs, inputs, tensors_in(result))
        if draws or written or any(target is not None for target in op.results):  # not only a view
            self._record(op)
        self._drawn.update(map(storage_id, tensors_in(result)))
        return self._made_by(result, inputs)

    def staged(self, source: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """The tensor that a captured copy of what comes from a draw reads, of this dtype and shape."""
        value = source.detach().to(dtype).expand(shape)
        start = aligned(self.staged_bytes)
        end = self.staged_bytes = start + value.nbytes
        if end > INPUT_BYTES:
            forbid(*_TOO_LARGE, user_location())
        if self._static is None or end > INPUT_BYTES:
            return value.pin_memory()
        stride = torch.empty_like(value).stride()
        on_host, on_device = (
            memory[start:end].view(dtype).as_strided(shape, stride)
            for memory in (self._staged, self._static.memory)
        )
        self._record_copy(on_host, address(source))
        return on_device

    def end(self) -> None:
        """Refuse a step, at its end, that sets a generator which it draws from."""
        self.draws.look()
        if self.draws.are_moved and self.staged_bytes:
            forbid(*_SET_INSIDE, self._first_draw)

    def register(self, generators: Generators) -> HostInput | None:
        """Repeat the ops before each launch, from now on, of the part that they are in.

        Returns:
            What the graph reads; None if it reads nothing.
        """
        parts: defaultdict[HostWork, list[TapedOp]] = defaultdict(list)
        if not self.draws.are_moved:
            for generator in self.draws.generators:
                generators.add_on_host(generator)
            for part, op in self._recorded:
                parts[part].append(op)
        for part, ops in parts.items():
            part.add(partial(self._repeat, ops), do_nothing)
        self._made.clear()
        return self._static if self.staged_bytes else None

    def _repeat(self, ops: list[TapedOp]) -> None:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for op in ops:
                op.run()
        if self.staged_bytes and self._static is not None:
            with self._static.filled(self.staged_bytes) as source:
                source.copy_(self._staged[: self.staged_bytes])

    def _operand(self, tensor: Tensor) -> Tensor:
        """An operand of a recorded op: the memory itself, or what a constant in it holds now."""
        is_constant = self.is_made_inside(tensor) and not self.is_drawn(tensor)
        return copied_leaf(tensor.detach()) if is_constant else address(tensor)

    def _record_copy(self, target: Tensor, source: Tensor) -> None:
        self._record(TapedOp(torch.ops.aten.copy_.default, (target, source), {}, [target], [target]))

    def _record(self, op: TapedOp) -> None:
        if self._static is not None:
            self._recorded.append((work_under_capture(), op))

    def _made_by(self, result: Any, inputs: list[Tensor]) -> Any:
        there = {*map(storage_id, inputs)}
        made = [each for each in tensors_in(result) if _is_on_host(each)]
        self._made |= {storage_id(each): each for each in made if storage_id(each) not in there}
        return result


def _is_on_host(tensor: Tensor) -> bool:
    """True for a plain tensor with memory of the host: a fake tensor has none."""
    own = local(tensor)
    return own.layout is torch.strided and own.untyped_storage().device.type == "cpu"


def _is_in_compiled_code() -> bool:
    """True in code of Inductor, whose kernels for the CPU are no ops."""
    callers = frames(sys._getframe(1))
    return any(module_of(f).startswith("torch._inductor") for f in callers)
