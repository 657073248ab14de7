"""The state on the host of what communicates in a step: DDP wrappers and sharded weights.

A replay does not run their Python. So the state that an eager step leaves is recorded at the capture,
and set after each replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_cudagraph.compat.attributes import do_nothing
from lightning_cudagraph.device.sentry.tables import table_of_a_wrapper
from lightning_cudagraph.processes.ddp import is_stateless
from lightning_cudagraph.processes.shards import Shards
from lightning_cudagraph.processes.unused_parameters import (
    IS_ACCUMULATED,
    UnusedParameters,
    UsedParameters,
    table_of,
)

# The reducer times its first ten iterations, and one in so many later, with events that no capture can
# hold (torch/csrc/distributed/c10d/reducer.hpp, `kDDPRuntimeLoggingSampleRate`). What it logs as
# its `iteration` leaves out the last step, so eleven have averaged gradients then.
_TIMED = 10
_SAMPLE_RATE = 100
_NEVER = 2**30
# Iterations until buckets have been rebuilt after an aborted backward pass.
_SORTED_AFTER = 2


class CollectiveState:
    """The state of wrappers and sharded weights on the host, which a replay does not change.

    Attributes:
        is_broken: a backward pass was aborted, so that a reducer waits for gradients.
    """

    def __init__(
        self,
        wrappers: Iterable[DistributedDataParallel] = (),
        check: Callable[[], None] = do_nothing,
        sharded: nn.Module | None = None,
    ) -> None:
        self.wrappers = [*wrappers]
        self.shards = Shards(sharded)
        self._check = check
        self._unused = [UnusedParameters(ddp) for ddp in self.wrappers if ddp.find_unused_parameters]
        self.is_broken = False
        self._averaged_steps = _SORTED_AFTER  # since a backward pass was aborted

    def record_times(self, does: bool) -> None:
        """Switch the reducers' own timing after the first ten iterations on or off."""
        for ddp in self.wrappers:
            ddp._set_ddp_runtime_logging_sample_rate(_SAMPLE_RATE if does else _NEVER)

    def is_settled(self) -> bool:
        """True if the reducers are past the iterations that no capture can hold."""
        iterations = [ddp._get_ddp_logging_data().get("iteration", 0) for ddp in self.wrappers]
        # A wrapper that averages nothing (a teacher under `no_grad`) has no iterations.
        averaging = [number for number in iterations if number > 0] or iterations
        return self._averaged_steps >= _SORTED_AFTER and min(averaging, default=_TIMED) >= _TIMED

    @property
    def own_hooks(self) -> list[tuple[Any, Any]]:
        """The communication hooks of the user's own, each with its state."""
        return [
            (hook, state)
            for ddp in self.wrappers
            for hook, state in ddp._comm_hooks
            if not is_stateless(hook)
        ]

    def ran(self) -> None:
        """Note that an eager step has run."""
        self._averaged_steps += all(self.left())
        self.shards.ran()

    def left(self) -> tuple[bool, ...]:
        """One flag for each wrapper: the last step has averaged, so the next one syncs buffers."""
        return tuple(ddp.require_forward_param_sync for ddp in self.wrappers)

    def leave(self, left: tuple[bool, ...]) -> None:
        for ddp, value in zip(self.wrappers, left, strict=True):
            ddp.require_forward_param_sync = value

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undo the changes of a step; refuse a wrapper that cannot be captured any more."""
        if self.wrappers:
            self._check()  # hooks may have been added since
        before = self.left()
        try:
            with self.shards.undone():
                yield
        except BaseException:
            self.is_broken = any(map(_is_unfinished, self.wrappers))
            raise
        finally:
            self.leave(before)

    @contextmanager
    def tables_known(self) -> Iterator[None]:
        """Tell the wrappers' tables of used parameters from tensors of the step."""
        with ExitStack() as stack:
            for ddp in self.wrappers:
                if ddp.find_unused_parameters or ddp.static_graph:
                    stack.enter_context(table_of_a_wrapper(table_of(ddp).numel()))
            yield

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        """Let all parameters take part in the enclosed capture, where a wrapper looks for the others."""
        with ExitStack() as stack:
            stack.enter_context(self.tables_known())
            for unused in self._unused:
                stack.enter_context(unused.taking_part())
            yield

    @property
    def used(self) -> list[list[UsedParameters]]:
        """The parameters that the last capture has used, for each wrapper that looks for the others."""
        return [unused.passes for unused in self._unused]

    def tables(self) -> list[Tensor]:
        """The tensors of wrappers on the device that steps write, and that wrappers alone read."""
        return [table_of(ddp) for ddp in self.wrappers if ddp.find_unused_parameters]

    def settle_used(self, of_ranks: Sequence[list[list[UsedParameters]]]) -> bool:
        """Note what all processes have used; return True if they have to capture again, with that."""
        by_wrapper = zip(*of_ranks, strict=True)
        are_wrong = [u.settle(each) for u, each in zip(self._unused, by_wrapper, strict=True)]
        return any(are_wrong)

    def is_marked(self, averages: bool) -> str:
        """The reason why the next step sets or finds marks of used parameters; empty if it does not."""
        is_marked = any(not averages or unused.is_accumulating for unused in self._unused)
        return IS_ACCUMULATED if is_marked else ""

    def reset(self) -> None:
        """Reset the reducers after an aborted backward pass, in all processes: buckets are rebuilt."""
        self.is_broken = False
        self._averaged_steps = 0
        for ddp in self.wrappers:
            ddp.reducer._reset_state()


def _is_unfinished(ddp: DistributedDataParallel) -> bool:
    try:
        ddp.reducer._check_reducer_finalized()
    except RuntimeError:
        return True
    return False
