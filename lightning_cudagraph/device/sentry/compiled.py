"""Code that torch.compile has compiled, in a step that is captured.

It is compiled in warm-up, as ever, and captured as it is. Three things are in the way. What watches a
capture are function modes and a profiling hook, and Dynamo compiles anew under modes that it has not
seen: so they are taken off while compiled code runs. Dynamo asks its guards with each call, and a replay
asks nobody. And compiled code hides Python from the audit: what it reads, draws and changes on the host
was looked at when it was compiled.

So a step with compiled code in it is first captured with torch.compile switched off, and that graph is
thrown away: its Python runs under the audit like any other, what it mentions is compared before every
replay, and what it writes into is known. Of Dynamo's guards nothing is left to ask then: they are on
what the same Python can read, and on what a graph has baked in anyway (shapes, modes, `requires_grad`,
global switches).
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

from lightning_cudagraph.device.sentry.hidden_reads import let_go
from lightning_cudagraph.device.sentry.inductor import wants_graphs
from lightning_cudagraph.device.sentry.own_modes import OwnFunctionMode, unpatched
from lightning_cudagraph.errors import CaptureError

__all__ = ["CompiledCode", "compilations", "is_held", "is_left_out", "recompilation"]

# How torch's error begins (torch/_dynamo/eval_frame.py, `_callback_from_stance`).
_RECOMPILE = "Detected recompile when torch.compile stance is"
# In these, nothing is compiled in any case, or calls of what is not compiled run as they are.
_KEPT_STANCES = ("force_eager", "eager_on_recompile", "fail_on_recompile")
_MAX_REASON = 600

T = TypeVar("T")

# Called with the backend of compiled code that is about to be called; what it returns, afterwards.
_Enter = Callable[[Any], Callable[[], None]]

# At the last look: references to the class of contexts, and what had been compiled; and the contexts.
_looked_at = (-1, -1)
_seen: list[weakref.ref[Any]] = []

# The threads in which a capture is under way that runs compiled code as it is.
_held: set[int] = set()


def compilations() -> int:
    """How often Dynamo has compiled something in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def is_held() -> bool:
    """Whether a capture is under way in this thread that runs compiled code as it is."""
    return threading.get_ident() in _held


def is_left_out() -> bool:
    """Whether the Python that was compiled runs in the place of compiled code."""
    dynamo: Any = torch._dynamo
    return bool(dynamo.eval_frame._stance.stance == "force_eager" or dynamo.config.disable)


def _contexts() -> list[Any]:
    """What `torch.compile` has returned, as far as it is alive: each has the hooks of its calls.

    To look through all objects of Python takes 50 ms and more. So it is done only if there may be
    others than the last time: one of those has gone, the class has another number of references, of
    which each object has one, or something has been compiled.
    """
    global _looked_at, _seen
    kind = torch._dynamo.eval_frame.OptimizeContext
    now = (sys.getrefcount(kind), compilations())
    found = [context for seen in _seen if (context := seen()) is not None]
    if now != _looked_at or len(found) < len(_seen):
        found = [other for other in gc.get_referrers(kind) if isinstance(other, kind)]
        _looked_at, _seen = now, [weakref.ref(context) for context in found]
    # A private name. Without it, calls are not noticed, and Dynamo's own error says what it misses.
    return [context for context in found if isinstance(getattr(context, "enter_exit_hooks", None), list)]


def _backend_of(context: Any) -> Any:
    """What a context compiles with."""
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


def _nothing() -> None:
    pass


def _unwatched(backend: Any) -> Callable[[], None]:
    """Take off what watches the calls and the Python of a capture, until compiled code has run.

    Dynamo asks which function modes there are, and would compile the profiling hook of the interpreter.
    """
    stack = overrides._get_current_function_mode_stack()
    kept = [mode for mode in stack if not isinstance(mode, OwnFunctionMode)]
    _exchange(len(stack), kept)
    patch = unpatched()
    watcher = sys.getprofile()
    if callable(watcher):  # not one that is written in C (cProfile)
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
    """What a refusal of Dynamo's to compile in a capture means, or None for any other error."""
    if isinstance(error, CaptureError) or _RECOMPILE not in str(error):
        return None
    said = " ".join(str(error).split())
    what = said.partition("filename: ")[2] or said
    place, _, reasons = what.partition("triggered by the following guard failure(s): ")
    return _compiled_anew(place.strip(), reasons[:_MAX_REASON])


def _compiled_anew(where: str, guards: str) -> CaptureError:
    why = f" Guards that failed: {guards}" if guards else ""
    return CaptureError(
        f"Compiled code would be compiled anew in the capture, which no capture can hold: {where}.{why}",
        "Let what the guards name be the same in all steps from the first one on, or raise"
        " `warmup_steps`, so that all is compiled before the capture; or leave out `torch.compile`.",
    )


class CompiledCode:
    """The compiled code that the steps of one run call.

    Attributes:
        is_called: some step has called compiled code.
        written: tensors older than the step that it writes into, once its Python has been looked at for
            the captures under way.
    """

    def __init__(self) -> None:
        self.is_called = False
        self.written: list[Tensor] | None = None
        self._older = compilations() > 0  # something has been compiled without our knowledge
        self._contexts: list[Any] | None = None

    @contextmanager
    def one_look(self) -> Iterator[None]:
        """Around captures of one step: its Python is looked at once for all of them."""
        self.written = None
        before, self._contexts = self._contexts or [], _contexts()
        # In case that it is the first step to call what has been made since warm-up began.
        self.is_called |= any(all(new is not old for old in before) for new in self._contexts)
        try:
            yield
        finally:
            self.written = None

    @property
    def notes(self) -> list[str]:
        """What the user should know."""
        if not self.is_called:
            return []
        return ["the step runs compiled code; a capture without torch.compile showed the Python in it"]

    @contextmanager
    def noticed(self) -> Iterator[None]:
        """Notice whether what is inside calls compiled code.

        What had been compiled with CUDA graphs of its own before the first step is compiled anew in the
        next one, without.
        """
        has_own_graphs = False

        def enter(backend: Any) -> Callable[[], None]:
            nonlocal has_own_graphs
            self.is_called = True
            has_own_graphs = has_own_graphs or wants_graphs(backend)
            return _nothing

        if self._contexts is None:
            self._contexts = _contexts()
        with _around_calls(self._contexts, enter):
            yield
        if has_own_graphs and self._older:
            torch.compiler.reset()
        self._older = False

    def held(self, body: Callable[[], T]) -> T:
        """In a capture: run compiled code as it is, and compile nothing.

        Args:
            body: calls it.

        Raises:
            CaptureError: if something would be compiled anew, with the guards that say so.
        """
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
            # With a backend of its own, a stance cannot be another one too.
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
            raise _compiled_anew("found afterwards, with `TORCH_LOGS=recompiles` in its own words", "")
        return result

    def left_out(self, body: Callable[[], T]) -> T:
        """Run the Python that was compiled in the place of the compiled code.

        Args:
            body: calls it.

        Raises:
            CaptureError: if there is no memory for it.
        """
        try:
            with torch.compiler.set_stance("force_eager"), let_go():
                return body()
        except torch.OutOfMemoryError as error:
            raise CaptureError(
                "A step that calls compiled code is captured once without torch.compile, to look at its"
                f" Python; that ran out of memory: {str(error).partition(chr(10))[0]}",
                "Use smaller batches, or leave out `torch.compile`.",
            ) from error
