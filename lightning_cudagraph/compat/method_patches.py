"""Method patches and hooks on the user's objects during a run; copies of the objects are without them.

A copy or a pickle of such an object behaves as if it had never been patched: it refers to no graph,
stream or event, and a file with it can be read where this package is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any


class MethodPatch:
    """A patch of an object's method. A copy of the object has its own, unpatched method instead."""

    def __init__(self, owner: object, name: str, call: Callable[..., Any]) -> None:
        self._owner = owner
        self._name = name
        self._call = call
        # Code that asks if the method is overridden, or for its signature, sees the original.
        self.__wrapped__ = getattr(owner, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # At this point the copy of the owner has no patch yet, so this is its own method.
        return getattr, (self._owner, self._name)


class Original:
    """The method of an object below a patch, looked up on its class at each call.

    Code that replaces the method of the class has it called from then on.
    """

    def __init__(self, owner: object, name: str) -> None:
        self._owner = owner
        self._name = name
        self._own = vars(owner).get(name)
        self._bound = getattr(owner, name)

    @property
    def now(self) -> Callable[..., Any]:
        """The method as it is now."""
        if self._own is not None:
            return self._own  # type: ignore[no-any-return]
        owner, kind = self._owner, type(self._owner)
        for base in kind.__mro__:
            if (found := vars(base).get(self._name)) is not None:
                bind = getattr(type(found), "__get__", None)
                return found if bind is None else bind(found, owner, kind)  # type: ignore[no-any-return]
        return self._bound  # type: ignore[no-any-return]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.now(*args, **kwargs)


def patch_method(
    owner: object,
    name: str,
    call: Callable[..., Any],
    patches: ExitStack,
    kind: type[MethodPatch] = MethodPatch,
) -> None:
    """Patch a method of an object."""
    stand_in = kind(owner, name, call)
    if name in vars(owner):
        patches.callback(vars(owner).__setitem__, name, vars(owner)[name])
    else:
        patches.callback(vars(owner).pop, name)
    vars(owner)[name] = stand_in


@contextmanager
def in_place(owner: object, name: str, call: Callable[..., Any]) -> Iterator[None]:
    """Patch a method of an object inside the `with` block."""
    with ExitStack() as patches:
        patch_method(owner, name, call, patches)
        yield


def no_hook() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The `__reduce__` value for a hook that does nothing, used in copies and pickles."""
    return getattr, (nullcontext(), "__exit__")  # it takes any arguments, and returns None


class OwnHook:
    """A hook registered with an object. In a copy of the object, it is a hook that does nothing."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return no_hook()
