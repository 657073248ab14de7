"""The `DistributedDataParallel`s that a captured function works on, and what they keep on the host.

What a forward pass does depends on two switches of the wrapper, whether gradients are averaged
(`no_sync`) and whether the pass before has left buffers to be broadcast, and on communication hooks.
Calls that find others are calls in another mode, with graphs of their own; and after a replay they are
left as an eager call leaves them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_cudagraph.capture.processes.wrappers import (
    check_wrapper,
    hooks_of,
    is_unfinished,
    take_times,
)
from lightning_cudagraph.errors import ConfigurationError, UnsupportedError

__all__ = ["OWN_ATTRIBUTES", "StepReplicas", "Switches"]

# Attributes of a wrapper: the switches, which are part of a call's mode; what the first iterations make;
# and lists of the module's buffers, which it makes anew for each broadcast.
OWN_ATTRIBUTES = frozenset(
    {
        *("require_forward_param_sync", "require_backward_grad_sync"),
        *("_has_rebuilt_buckets", "_lazy_init_ran", "modules_buffers", "named_module_buffers"),
    }
)
# The reducer takes times of its first ten iterations; in the eleventh it reads those of the tenth
# (torch/csrc/distributed/c10d/logger.cpp).
_TIMED = 10
# After so many iterations, buckets that were left in the middle are sorted anew.
_SORTED_AFTER = 2
Switches = tuple[tuple[bool, bool, tuple[str, ...]], ...]


class StepReplicas:
    """The wrappers of a step.

    Args:
        model: all modules that the step works on.

    Raises:
        UnsupportedError: if one of them does in a step what no graph can hold.
    """

    def __init__(self, model: nn.Module) -> None:
        self._wrappers = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, DistributedDataParallel)
        }
        self._broken: list[DistributedDataParallel] = []
        self._averaged_since_mended = _SORTED_AFTER
        self._check()
        for ddp in self._wrappers.values():
            take_times(ddp, False)

    def _check(self) -> None:
        for name, ddp in self._wrappers.items():
            whose = f"`{name}`" if name else "the step's"
            check_wrapper(f"{whose} `DistributedDataParallel`", ddp)

    def own_gradients(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether the gradients of all these are parts of the wrappers' buckets.

        An eager call writes where the call before has left them, and so does a graph: who keeps one
        finds the next one in it. Where some are, and others are not, copies of these alone would have to
        be given out.

        Raises:
            UnsupportedError: if some are, and others are not.
        """
        views = [ddp for ddp in self._wrappers.values() if ddp.gradient_as_bucket_view]
        inside = {id(p) for ddp in views for p in ddp.parameters() if p.requires_grad}
        ignored = any(getattr(ddp, "parameters_to_ignore", None) for ddp in views)
        outside = any(p.requires_grad and id(p) not in inside for p in parameters)
        if views and (outside or ignored):
            raise UnsupportedError(
                "Of the parameters that the step works on, some have gradients in the buckets of a"
                " `DistributedDataParallel(gradient_as_bucket_view=True)`, and others do not.",
                "Leave `gradient_as_bucket_view` out.",
            )
        return bool(views)

    def __bool__(self) -> bool:
        return bool(self._wrappers)

    def switches(self) -> Switches:
        """What a forward pass would find now.

        Raises:
            ConfigurationError: inside of `join()`, where processes call the step as often as they like.
        """
        if any(ddp._join_config.enable for ddp in self._wrappers.values()):
            raise ConfigurationError(
                "The step is called inside of `DistributedDataParallel.join()`, where some processes"
                " call it less often than others; all decide together what becomes of each call. Give"
                " all of them the same number of batches (a `DistributedSampler` does)."
            )
        return tuple(
            (ddp.require_backward_grad_sync, ddp.will_sync_module_buffers(), hooks_of(ddp))
            for ddp in self._wrappers.values()
        )

    def is_settled(self) -> bool:
        """Whether the reducers have had the iterations that no capture can hold."""
        wrappers = self._wrappers.values()
        iterations = [ddp._get_ddp_logging_data().get("iteration", 0) for ddp in wrappers]
        # One that averages nothing (a teacher under `no_grad`) has none.
        averaging = [number for number in iterations if number > 0] or iterations
        return self._averaged_since_mended >= _SORTED_AFTER and min(averaging, default=_TIMED) >= _TIMED

    def ran(self) -> None:
        """An eager call went through."""
        self._averaged_since_mended += all(
            ddp.require_forward_param_sync for ddp in self._wrappers.values()
        )

    def left(self) -> tuple[bool, ...]:
        """What a call has left for the next one."""
        return tuple(ddp.require_forward_param_sync for ddp in self._wrappers.values())

    def leave(self, left: tuple[bool, ...]) -> None:
        """Leave what an eager call leaves."""
        for ddp, value in zip(self._wrappers.values(), left, strict=True):
            ddp.require_forward_param_sync = value

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undo what a call does to the wrappers on the host.

        Raises:
            UnsupportedError: if one of them does by now what no graph can hold.
        """
        self._check()  # hooks may have been added since
        before = self.left()
        try:
            yield
        except BaseException:
            self._broken = [ddp for ddp in self._wrappers.values() if is_unfinished(ddp)]
            raise
        finally:
            self.leave(before)

    def is_broken(self) -> bool:
        """Whether a call was left in the middle of its backward pass: gradients are waited for."""
        return bool(self._broken)

    def mend(self) -> None:
        """Wait for none any more. In all processes at once: buckets are sorted anew."""
        self._broken = []
        self._averaged_since_mended = 0
        for ddp in self._wrappers.values():
            ddp.reducer._reset_state()

    def close(self) -> None:
        """Let them take times of their own again."""
        for ddp in self._wrappers.values():
            take_times(ddp, True)
