"""What the code of a step mentions: names, globals, and variables of closures."""

from __future__ import annotations

import builtins
import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CellType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from lightning_cudagraph.device.sentry.sentry import is_user_code

__all__ = ["MentionedNames"]

# Functions that find an attribute by a text.
_BY_TEXT = frozenset({"getattr", "hasattr", "attrgetter", "getattr_static", "vars", "__dict__"})
_MAX_CELLS = 500
# What Python itself has among its names.
_OF_PYTHON = (type, BuiltinFunctionType, bool, type(None))


@dataclass
class MentionedNames:
    """What the code of a step mentions.

    Attributes:
        names: of attributes and globals.
        users: those of them that the user's code mentions.
        texts: constants of the user's code that can be the name of an attribute, by file.
        finds_by_text: files whose code finds attributes by a text.
        user_globals: the global namespaces of the user's code among it, with the names from each.
        closures: the user's code that has variables of functions around it, which were left before.
        roots: objects of a framework that were handed to the user's code, each with the name of what
            it was asked for, and of whom.
        reads: values that move seldom and were read, by what the user knows them as, with a way to read
            them again.
        attributes: of objects that the host keeps, which were read: the namespace, the name in it, and
            whose it is.
        users_code: the user's code, in the order of its first runs.
    """

    names: set[str] = field(default_factory=set)
    users: set[str] = field(default_factory=set)
    texts: dict[str, set[str]] = field(default_factory=dict)
    finds_by_text: set[str] = field(default_factory=set)
    user_globals: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    closures: list[CodeType] = field(default_factory=list)
    roots: list[tuple[Any, str, str]] = field(default_factory=list)
    reads: dict[str, Callable[[], Any]] = field(default_factory=dict)
    attributes: list[tuple[dict[str, Any], str, str]] = field(default_factory=list)
    users_code: list[CodeType] = field(default_factory=list)
    _made_inside: set[int] = field(default_factory=set)

    @classmethod
    def union(cls, parts: Iterable[MentionedNames]) -> MentionedNames:
        """What several steps mention together."""
        whole = cls()
        for part in parts:
            whole.names |= part.names
            whole.users |= part.users
            whole.finds_by_text |= part.finds_by_text
            for file, texts in part.texts.items():
                whole.texts.setdefault(file, set()).update(texts)
            whole.user_globals += part.user_globals
            whole.closures += part.closures
            whole.roots += part.roots
            whole.reads |= part.reads
            whole.attributes += part.attributes
            whole.users_code += part.users_code
        return whole

    def note(self, frame: FrameType) -> None:
        """Note what a piece of the user's code mentions, when it runs for the first time."""
        code, namespace = frame.f_code, frame.f_globals
        self.names.update(code.co_names)
        self._add_users_code(code)
        for name in code.co_names:
            if name not in namespace:
                if type(vars(builtins).get(name, print)) not in _OF_PYTHON:
                    self.user_globals.append((vars(builtins), name))
                continue
            self.user_globals.append((namespace, name))
            self._note_module(namespace[name], code)
        for name in {*code.co_names, *_texts(code.co_consts)} & sys.modules.keys():
            self._note_module(sys.modules[name], code)  # imported in the step
        if code.co_freevars and id(code) not in self._made_inside:
            self.closures.append(code)
        self._made_inside |= {id(inner) for inner in code.co_consts if isinstance(inner, CodeType)}

    def _note_module(self, module: Any, code: CodeType) -> None:
        """Note which names of a module of the user's a piece of code can read."""
        if isinstance(module, ModuleType) and is_user_code(getattr(module, "__file__", None) or "<"):
            inner = vars(module)
            self.user_globals += [(inner, name) for name in code.co_names if name in inner]

    def _add_users_code(self, code: CodeType) -> None:
        """Note the names and the texts of a piece of the user's code."""
        self.users_code.append(code)
        self.users.update(code.co_names)
        texts = self.texts.setdefault(code.co_filename, set())
        texts.update(filter(str.isidentifier, _texts(code.co_consts)))
        if not _BY_TEXT.isdisjoint(code.co_names):
            self.finds_by_text.add(code.co_filename)

    def of_users_objects(self) -> set[str]:
        """The names under which the user's code can have read an attribute.

        Texts count in files that find attributes by text (`getattr(self, "scale")`); elsewhere they are
        what things are logged as.
        """
        return self.users.union(*(self.texts[file] for file in self.finds_by_text))

    def all_texts(self) -> set[str]:
        """Texts in the user's code."""
        return set().union(*self.texts.values())

    def cells(self) -> Iterator[tuple[CellType, str, str]]:
        """The variables of closures, with their names and those of the functions."""
        # A frame knows the values only; the cells are known by the functions with its code.
        codes = {id(code): code for code in self.closures}
        seen: set[int] = set()
        for function in gc.get_referrers(*codes.values()) if codes else ():
            if type(function) is not FunctionType or id(function.__code__) not in codes:
                continue
            code = function.__code__
            for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
                if id(cell) not in seen and len(seen) < _MAX_CELLS:
                    seen.add(id(cell))
                    yield cell, name, code.co_name


def _texts(constants: Iterable[Any]) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, (tuple, frozenset)):
            yield from _texts(constant)
