"""Captures of steps that call code compiled by `torch.compile`.

The code is compiled in warm-up as usual, and captured unchanged. Three problems have to be solved:

* A capture is watched by function modes and a profiling hook, and Dynamo recompiles under modes that it
  has not seen. So they are removed while compiled code runs.
* Dynamo evaluates its guards at each call; a replay does not.
* Compiled code hides its Python from the audit: host reads, random draws and changes were traced when it
  was compiled.

For the last two, a step with compiled code is first captured with torch.compile switched off, and that
graph is thrown away. So its Python runs under the audit like any other, the objects that it reads are
guarded at every replay, and the tensors that it writes into are known. Dynamo's guards then add nothing:
they are on objects that the same Python can read, and on what any graph bakes in (shapes, modes,
`requires_grad`, global switches).
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, overrides

from lightning_cudagraph.compat.attributes import do_nothing, setting
from lightning_cudagraph.device.refusals.hidden_reads import reads_permitted
from lightning_cudagraph.device.sentry.inductor import wants_graphs
from lightning_cudagraph.device.sentry.own_modes import OwnFunctionMode, unpatched
from lightning_cudagraph.errors import CaptureError

# The beginning of torch's error (torch/_dynamo/eval_frame.py, `_callback_from_stance`).
_RECOMPILE = "Detected recompile when torch.compile stance is"
# Under these stances nothing is compiled, or calls that would need it run eagerly or fail.
_KEPT_STANCES = ("force_eager", "eager_on_recompile", "fail_on_recompile")
_MAX_REASON = 600

T = TypeVar("T")

# Called with the backend before compiled code runs; the returned function is called after it.
_Enter = Callable[[Any], Callable[[], None]]

# Cache of `_contexts`: references to the class of contexts, number of compilations; the contexts.
_looked_at = (-1, -1)
_seen: list[weakref.ref[Any]] = []

# Threads with a capture that runs compiled code.
_held: set[int] = set()


def compilations() -> int:
    """The number of graphs that Dynamo has compiled in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def is_held() -> bool:
    """True if this thread is in a capture that runs compiled code."""
    return threading.get_ident() in _held


def is_left_out() -> bool:
    """True if compiled functions run as plain Python."""
    dynamo: Any = torch._dynamo
    return bool(dynamo.eval_frame._stance.stance == "force_eager" or dynamo.config.disable)


def _contexts() -> list[Any]:
    """The live contexts that `torch.compile` has made, which hold the hooks around compiled calls.

    A search through all Python objects takes 50 ms and more. So the last result is used again unless
    one of its contexts is gone, something has been compiled, or the number of references to the class,
    of which each context has one, has changed.
    """
    global _looked_at, _seen
    kind = torch._dynamo.eval_frame.OptimizeContext
    now = (sys.getrefcount(kind), compilations())
    found = [context for seen in _seen if (context := seen()) is not None]
    if now != _looked_at or len(found) < len(_seen):
        found = [other for other in gc.get_referrers(kind) if isinstance(other, kind)]
        _looked_at, _seen = now, [weakref.ref(context) for context in found]
    # A private attribute. Without it calls are not noticed, and Dynamo raises its own error.
    return [context for context in found if isinstance(getattr(context, "enter_exit_hooks", None), list)]


def _backend_of(context: Any) -> Any:
    found = getattr(context, "callback", None)
    while (inner := getattr(found, "_torchdynamo_orig_backend", None)) is not None:
        found = inner
    return found


@contextmanager
def _around_calls(contexts: list[Any], enter: _Enter) -> Iterator[None]:
    added = [(context, partial(enter, _backend_of(context))) for context in contexts]
    for context, hook in added:
        context.enter_exit_hooks.append(hook)
    try:
        yield
    finally:
        for context, hook in added:
            context.enter_exit_hooks.remove(hook)


def _unwatched(backend: Any) -> Callable[[], None]:
    """Remove this package's function modes and profiling hook while compiled code runs.

    Dynamo guards on the stack of function modes, and would compile the profiling hook.
    """
    stack = overrides._get_current_function_mode_stack()
    kept = [mode for mode in stack if not isinstance(mode, OwnFunctionMode)]
    _exchange(len(stack), kept)
    patch = unpatched()
    watcher = sys.getprofile()
    if callable(watcher):  # a profiler written in C (cProfile) is not
        sys.setprofile(None)

    def put_back() -> None:
        if callable(watcher):
            sys.setprofile(watcher)
        patch()
        _exchange(len(kept), stack)

    return put_back


def _exchange(there: int, modes: list[Any]) -> None:
    for _ in range(there):
        overrides._pop_mode()
    for mode in modes:
        overrides._push_mode(mode)


def recompilation(error: BaseException) -> CaptureError | None:
    """Translate Dynamo's refusal to compile in a capture; None for any other error."""
    if isinstance(error, CaptureError) or _RECOMPILE not in str(error):
        return None
    said = " ".join(str(error).split())
    what = said.partition("filename: ")[2] or said
    place, _, reasons = what.partition("triggered by the following guard failure(s): ")
    return _recompiled(place.strip(), reasons[:_MAX_REASON])


def _recompiled(where: str, guards: str) -> CaptureError:
    why = f" Guards that failed: {guards}" if guards else ""
    return CaptureError(
        f"Compiled code would be recompiled in the capture, which no capture can hold: {where}.{why}",
        "Keep what the guards name the same in all steps, or raise `warmup_steps`, so that everything is"
        " compiled before the capture; or leave out `torch.compile`.",
    )


class CompiledCode:
    """The compiled code that the steps of one run call.

    Attributes:
        written: tensors older than the step that it writes into; None until the capture without
            torch.compile has shown them.
    """

    def __init__(self) -> None:
        self.is_called = False
        self.written: list[Tensor] | None = None
        self._older = compilations() > 0  # compiled before this object was made
        self._contexts: list[Any] | None = None

    @contextmanager
    def one_look(self) -> Iterator[None]:
        """Let the captures of one step share one capture without torch.compile."""
        before, self._contexts = self._contexts or [], _contexts()
        # This step may be the first to call functions compiled since warm-up began.
        self.is_called |= any(all(new is not old for old in before) for new in self._contexts)
        with setting(self, written=None):
            yield

    @property
    def notes(self) -> list[str]:
        if not self.is_called:
            return []
        return ["the step runs compiled code; a capture without torch.compile showed the Python in it"]

    @contextmanager
    def noticed(self) -> Iterator[None]:
        """Record if the `with` block calls compiled code.

        Code that was compiled with CUDA graphs of its own before the first step is recompiled without
        them in the next step.
        """
        has_own_graphs = False

        def enter(backend: Any) -> Callable[[], None]:
            nonlocal has_own_graphs
            self.is_called = True
            has_own_graphs = has_own_graphs or wants_graphs(backend)
            return do_nothing

        if self._contexts is None:
            self._contexts = _contexts()
        with _around_calls(self._contexts, enter):
            yield
        if has_own_graphs and self._older:
            torch.compiler.reset()
        self._older = False

    def held(self, body: Callable[[], T]) -> T:
        """Run `body` in a capture with its compiled code, and refuse recompilation."""
        if not self.is_called:
            return body()
        dynamo: Any = torch._dynamo
        if getattr(dynamo.config, "compiled_autograd", False):
            raise CaptureError(
                "`torch._dynamo.config.compiled_autograd` is on: backward passes are compiled as they"
                " run, which no capture can hold.",
                "Leave it off.",
            )
        stance = dynamo.eval_frame._stance
        before = compilations()
        with ExitStack() as stack:
            stack.enter_context(_around_calls(self._contexts or [], _unwatched))
            # A stance with a backend of its own cannot be combined with another.
            if (
                stance.stance not in _KEPT_STANCES
                and stance.backend is None
                and not dynamo.config.disable
            ):
                stack.enter_context(torch.compiler.set_stance("fail_on_recompile"))
            thread = threading.get_ident()
            _held.add(thread)
            try:
                result = body()
            except Exception as error:
                if (refused := recompilation(error)) is None:
                    raise
                raise refused from error
            finally:
                _held.discard(thread)
        if compilations() != before:
            raise _recompiled("found afterwards; `TORCH_LOGS=recompiles` shows the reason", "")
        return result

    def left_out(self, body: Callable[[], T]) -> T:
        """Run `body` with plain Python instead of its compiled code."""
        try:
            with torch.compiler.set_stance("force_eager"), reads_permitted():
                return body()
        except torch.OutOfMemoryError as error:
            raise CaptureError(
                "A step that calls compiled code is captured once without torch.compile, to audit its"
                f" Python; that ran out of memory: {str(error).partition(chr(10))[0]}",
                "Use smaller batches, or leave out `torch.compile`.",
            ) from error
