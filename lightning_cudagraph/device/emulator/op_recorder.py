"""The recording of the ops of a step for the emulator, and the undoing of their effects."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_cudagraph.compat.names.torch_names import is_traceable_wrapper_subclass
from lightning_cudagraph.device.emulator.emulated_graph import EmulatedGraph, Resize
from lightning_cudagraph.device.generators import Generators
from lightning_cudagraph.device.lines.user_lines import user_location
from lightning_cudagraph.device.refusals.first_refusal import forbid
from lightning_cudagraph.device.refusals.forbidden_ops import STORAGE
from lightning_cudagraph.device.saved_memory import SavedMemory
from lightning_cudagraph.device.sentry.collectives import is_collective, only_wraps, returned_unrun
from lightning_cudagraph.device.sentry.sentry import Sentry
from lightning_cudagraph.device.streams.accesses import is_fake
from lightning_cudagraph.device.taped_op import TapedOp, addressed
from lightning_cudagraph.errors import AskedFor
from lightning_cudagraph.tensors.writes import tensors_in, written_by


class Undo(SavedMemory):
    """The contents of memory before the capture, to restore them."""

    def __init__(self, generators: Generators) -> None:
        super().__init__()
        self._generators = generators
        self._rng_state = generators.state(torch.get_rng_state())
        self._sizes: list[Resize] = []

    def before_resize(self, storage: torch.UntypedStorage) -> None:
        key = int(storage._cdata)
        if not storage.nbytes():
            self.made_inside.add(key)  # it is empty: there is nothing to restore
        elif key not in self.made_inside:
            forbid(*STORAGE, user_location())
        self._sizes.append(Resize(storage, storage.nbytes()))

    def roll_back(self) -> None:
        for size in reversed(self._sizes):
            size.run()
        self.put_back()
        torch.set_rng_state(self._generators.set_extra_states(self._rng_state))


_WRAPPER = ("which consists of other tensors, on the CPU emulator", "Use plain tensors on a CPU.")


class OpRecorder(Sentry):
    """Mode that records ops below autograd and autocast: the kernels that a GPU would launch."""

    def __init__(self, graph: EmulatedGraph, undo: Undo, generators: Generators) -> None:
        super().__init__("cpu", generators)
        self._graph = graph
        self._undo = undo
        self._rng_state = torch.get_rng_state()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check_generator(func)
        # A profiler's ranges are not part of a graph.
        if func.namespace == "profiler" or only_wraps(func):
            return func(*args, **kwargs)
        collective = is_collective(func)
        inputs = tensors_in(args, kwargs)
        wrappers: list[Any] = [*inputs]
        for kind in {type(tensor) for tensor in wrappers if is_traceable_wrapper_subclass(tensor)}:
            forbid(f"a `{kind.__qualname__}`, {_WRAPPER[0]}", _WRAPPER[1], user_location())
        placed = self._graph.tape.place(func, args, kwargs)
        fake = any(map(is_fake, inputs))
        if not fake:
            self._undo.before(inputs)
        known: dict[int, Tensor] = {}
        frozen_args = addressed(args, known)
        frozen_kwargs = {name: addressed(value, known) for name, value in kwargs.items()}
        result = returned_unrun(func, args) if collective else func(*args, **kwargs)
        outputs = tensors_in(result)
        if fake or any(map(is_fake, outputs)):
            if placed is not None:
                self._graph.tape.add(None, placed)
            return result
        self._undo.after(outputs)
        op = TapedOp(func, frozen_args, frozen_kwargs, inputs, outputs)
        writes = func._schema.is_mutable or written_by(func, args, kwargs)
        is_only_a_view = outputs and not writes and all(target is None for target in op.results)
        if not is_only_a_view:
            self._graph.add(op, placed, result, inputs)
        elif placed is not None:
            self._graph.tape.add(None, placed)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._rng_state = torch.get_rng_state()
        return result

    def _check_generator(self, func: Any) -> None:
        """Refuse a generator whose state was set: a GPU's capture can hold that, a tape cannot."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return
        if not torch.equal(torch.get_rng_state(), self._rng_state):
            forbid(
                "a generator whose state is set inside the step, as activation checkpointing does with"
                " `preserve_rng_state`, on the CPU emulator",
                "On a GPU this can be captured. On a CPU, leave checkpointing out; or, if what is"
                " computed twice draws no random numbers (no dropout), pass `preserve_rng_state=False`.",
                user_location(),
                AskedFor("checkpoint"),
            )

    def resized(self, storage: torch.UntypedStorage, size_bytes: int) -> None:
        """Record a resize of a storage."""
        self._undo.before_resize(storage)
        self._graph.add_resize(storage, size_bytes)
        if self.flow is not None:
            self.flow.bar()
