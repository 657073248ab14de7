"""What hangs on other people's objects during a run, and must not get into copies of them.

A copy or a pickle of the object works like the object without us: it knows no graph, stream or event,
and a file with it can be read where this package is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

__all__ = ["OwnHook", "StandIn", "in_place", "no_hook", "replace_method"]


class StandIn:
    """In the place of a method of an object. In a copy of the object, it is that method of the copy.

    Args:
        owner: the object.
        name: the name of the method.
        call: what is called instead.
    """

    def __init__(self, owner: object, name: str, call: Callable[..., Any]) -> None:
        self._owner = owner
        self._name = name
        self._call = call
        # Who asks whether the method is overridden, or for its arguments, asks for what was there.
        self.__wrapped__ = getattr(owner, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The copy of the owner has nothing in its place yet when this is called.
        return getattr, (self._owner, self._name)


def replace_method(
    owner: object,
    name: str,
    call: Callable[..., Any],
    patches: ExitStack,
    kind: type[StandIn] = StandIn,
) -> None:
    """Put something in the place of a method of an object.

    Args:
        owner: the object.
        name: the name of the method.
        call: what is called instead.
        patches: puts the method back when it is closed.
        kind: what to put there.
    """
    stand_in = kind(owner, name, call)
    if name in vars(owner):
        patches.callback(vars(owner).__setitem__, name, vars(owner)[name])
    else:
        patches.callback(vars(owner).pop, name)
    vars(owner)[name] = stand_in


@contextmanager
def in_place(owner: object, name: str, call: Callable[..., Any]) -> Iterator[None]:
    """Put something in the place of a method of an object, during one step."""
    with ExitStack() as patches:
        replace_method(owner, name, call, patches)
        yield


def no_hook() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What an object is reduced to that is a hook which does nothing, in copies and in pickles."""
    return getattr, (nullcontext(), "__exit__")  # it takes any arguments, and returns None


class OwnHook:
    """A hook that is registered with an object. In a copy of the object, it is one that does nothing.

    Args:
        call: what the hook does.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return no_hook()
