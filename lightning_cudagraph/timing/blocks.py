"""Blocks of code that can be timed: context managers and decorators."""

from __future__ import annotations

import asyncio
import functools
import inspect
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

import torch

from lightning_cudagraph.errors import TimerError
from lightning_cudagraph.timing.stretches import Stretch

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["TimedBlock", "name_of"]

P = ParamSpec("P")
R = TypeVar("R")


class TimedBlock:
    """What can be entered, nested and repeatedly, in any thread, and put on functions.

    `_entered` and `_left` say what becomes of each stretch. A copy, or what a pickle is loaded as, is a
    block that has not been entered; `__reduce__` says with what it is made.
    """

    def __init__(self) -> None:
        self._open: dict[int, list[Stretch | None]] = {}  # by thread, from the outside

    def _entered(self) -> Stretch | None:
        """Make the stretch that begins now; None for nothing to be timed."""
        raise NotImplementedError

    def _left(self, stretch: Stretch, failed: bool) -> None:
        """A stretch has been left; by an exception, or one of its events could not be recorded."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        if torch.compiler.is_compiling():
            return self  # compiled code has no blocks; with them, Dynamo would leave the function alone
        stretch = self._entered()
        stack = self._open.setdefault(get_ident(), [])
        stack.append(stretch)
        if stretch is not None:
            try:
                stretch.begin()
            except BaseException:
                stack.pop()
                self._left(stretch, True)
                raise
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if torch.compiler.is_compiling():
            return
        thread = get_ident()
        stack = self._open.get(thread)
        if not stack:
            raise TimerError(
                "A block was left that has not been entered in this thread.",
                "Enter and leave it in one thread, best by `with`.",
            )
        stretch = stack.pop()
        if not stack:
            del self._open[thread]
        if stretch is None:
            return
        failed = error is not None
        try:
            if not failed:
                stretch.end()
        except BaseException:
            failed = True
            raise
        finally:
            self._left(stretch, failed)

    def __del__(self) -> None:
        # Nobody can leave it any more.
        stacks = getattr(self, "_open", {}).values()  # Dynamo makes objects without `__init__`
        for stretch in (held for stack in stacks for held in stack if held is not None):
            self._left(stretch, True)
            if not stretch.is_told:
                warnings.warn(
                    f"{stretch} was entered and never left: it has no time.", RuntimeWarning, 2
                )

    @overload
    def __call__(self) -> Self: ...

    @overload
    def __call__(self, function: Callable[P, R]) -> Callable[P, R]: ...

    def __call__(self, function: Callable[P, R] | None = None) -> Self | Callable[P, R]:
        """Time all calls of a function; without one, the same as the object itself.

        Args:
            function: the function, which returns when its work has been issued: no generator, no
                coroutine.

        Returns:
            The function that is timed, or `self`.

        Raises:
            TimerError: if it is given anything else; of what a decorator hides, when it is called.
        """
        if function is None:
            return self
        if not callable(function):
            raise TimerError(
                "A timed block was called: expected no argument, or the function to be timed, found an"
                f" object of type `{type(function).__qualname__}`.",
                "Put a `with` block without an argument around the work, or `@` and the block on a"
                " function; names are given to `TimerRegistry.time`.",
            )
        if _returns_early(function):
            raise _no_time(function)
        # A decorator below this one may run what it wraps to its end, or hand it on.
        may_return_early = _returns_early(_innermost(function))

        @functools.wraps(function)
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                result = function(*args, **kwargs)
                if may_return_early and isinstance(result, _NOT_BEGUN):
                    if isinstance(result, Coroutine):
                        result.close()
                    raise _no_time(function)
                return result

        return timed


def _innermost(function: Callable[..., Any]) -> Callable[..., Any]:
    """What decorators and `functools.partial` hide."""
    inside: Callable[..., Any] = inspect.unwrap(_without_partial(function))
    return function if inside is function else _innermost(inside)


@contextmanager
def _around() -> Iterator[None]:
    yield


@asynccontextmanager
async def _later_around() -> AsyncIterator[None]:
    yield


# What a function returns whose work is still to come.
_NOT_BEGUN = (
    *(Coroutine, Generator, AsyncGenerator, asyncio.Future),
    *(type(_around()), type(_later_around())),
)


def _no_time(function: Callable[..., Any]) -> TimerError:
    return TimerError(
        f"`{name_of(function)}` returns before its work begins, so that calls of it have no time.",
        "Put a `with` block around the work inside of it.",
    )


def name_of(function: Callable[..., Any]) -> str:
    """What to call it in a message; objects that can be called are named as their class."""
    called = _without_partial(function)
    return getattr(called, "__qualname__", type(called).__qualname__)


def _without_partial(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _returns_early(function: Callable[..., Any]) -> bool:
    called = _without_partial(function)
    kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    # Of an object that can be called, it is the method of its class that says so.
    return any(is_kind(code) for is_kind in kinds for code in (called, type(called).__call__))
