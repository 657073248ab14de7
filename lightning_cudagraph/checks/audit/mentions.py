"""Names that the code of a step mentions: attributes, globals, and closure variables."""

from __future__ import annotations

import builtins
import gc
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CellType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from lightning_cudagraph.checks.audit.calls_without_tensors import CallsWithoutTensors
from lightning_cudagraph.device.lines.user_lines import is_user_code

# Functions that find an attribute by a string.
_BY_TEXT = frozenset({"getattr", "hasattr", "attrgetter", "getattr_static", "vars", "__dict__"})
# Names by which code comes to the namespace of its own module.
_OWN_NAMESPACE = frozenset({"globals", "__globals__"})
_MAX_CELLS = 500
# Types of builtins, which are not compared.
_OF_PYTHON = (type, BuiltinFunctionType, bool, type(None))


@dataclass
class MentionedNames:
    """Names that the code of a step mentions.

    Attributes:
        users: those of `names` that user code mentions, and the names of its functions that ran.
        texts: string constants of user code that can name an attribute, by file.
        finds_by_text: files with code that finds attributes by a string.
        user_globals: global namespaces of user code, each with a name that is read from it.
        closures: user code with closure variables of functions that had returned before.
        roots: framework objects that getters returned to user code, each with the getter's name and
            its owner, in words.
        reads: functions that read again a seldom-changing value that the step has read, by its label.
        attributes: attributes of host objects that were read: namespace, name, and owner, in words.
        users_code: user code, in the order of its first runs.
        calls_without_tensors: the calls without tensors that user code runs in.
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
    calls_without_tensors: CallsWithoutTensors = field(default_factory=CallsWithoutTensors)
    _made_inside: set[int] = field(default_factory=set)

    @classmethod
    def union(cls, parts: Iterable[MentionedNames]) -> MentionedNames:
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
            whole.calls_without_tensors.add(part.calls_without_tensors)
        return whole

    def note(self, frame: FrameType) -> None:
        """Add the names of a piece of user code, when it runs for the first time."""
        code, namespace = frame.f_code, frame.f_globals
        self.names.update(code.co_names)
        self._add_users_code(code)
        self.calls_without_tensors.note(frame)
        for name in code.co_names:
            if name not in namespace:
                if type(vars(builtins).get(name, print)) not in _OF_PYTHON:
                    self.user_globals.append((vars(builtins), name))
                continue
            self.user_globals.append((namespace, name))
            self._note_module(namespace[name], code)
        for name in {*code.co_names, *_texts(code.co_consts)} & sys.modules.keys():
            self.attributes.append((sys.modules, name, "`sys.modules`"))  # imported in the step
            self._note_module(sys.modules[name], code)
        takes_modules = "sys" in code.co_names and "modules" in code.co_names
        if takes_modules or not _OWN_NAMESPACE.isdisjoint(code.co_names):
            self.user_globals += [(namespace, name) for name in _readable(namespace)]
        if code.co_freevars and id(code) not in self._made_inside:
            self.closures.append(code)
        self._made_inside |= {id(inner) for inner in code.co_consts if isinstance(inner, CodeType)}

    def _note_module(self, module: Any, code: CodeType) -> None:
        """Add the names of a user module that a piece of code can read."""
        if isinstance(module, ModuleType) and is_user_code(getattr(module, "__file__", None) or "<"):
            inner = vars(module)
            by_text = not _BY_TEXT.isdisjoint(code.co_names)
            names = _readable(inner) if by_text else [name for name in code.co_names if name in inner]
            self.user_globals += [(inner, name) for name in names]

    def _add_users_code(self, code: CodeType) -> None:
        self.users_code.append(code)
        self.users.update((*code.co_names, code.co_name))  # torch calls `forward`
        texts = self.texts.setdefault(code.co_filename, set())
        texts.update(filter(str.isidentifier, _texts(code.co_consts)))
        if not _BY_TEXT.isdisjoint(code.co_names):
            self.finds_by_text.add(code.co_filename)

    def of_users_objects(self) -> set[str]:
        """The names under which user code can have read an attribute.

        String constants count in files that find attributes by string (`getattr(self, "scale")`);
        elsewhere they are labels, such as names of logged values.
        """
        return self.users.union(*(self.texts[file] for file in self.finds_by_text))

    def in_code(self, codes: Iterable[CodeType]) -> frozenset[str]:
        """The names under which some of the user's code can have read something."""
        found: set[str] = set()
        for code in codes:
            found.update(code.co_names, code.co_freevars, (code.co_name,))
            if code.co_filename in self.finds_by_text:
                found |= self.texts[code.co_filename]
        return frozenset(found)

    def cells(self, left_out: Collection[int] = ()) -> Iterator[tuple[CellType, str, str]]:
        """The cells of closure variables, with the names of variable and function.

        Args:
            left_out: ids of functions that have roots of their own.
        """
        # A frame has the values only; functions with its code have the cells.
        codes = {id(code): code for code in self.closures}
        seen: set[int] = set()
        for function in gc.get_referrers(*codes.values()) if codes else ():
            if type(function) is not FunctionType or id(function.__code__) not in codes:
                continue
            if id(function) in left_out:
                continue
            code = function.__code__
            for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
                if id(cell) not in seen and len(seen) < _MAX_CELLS:
                    seen.add(id(cell))
                    yield cell, name, code.co_name


def _readable(namespace: dict[str, Any]) -> list[str]:
    """The names of a module's namespace under which code can find a value by a text made at run time."""
    others = (ModuleType, FunctionType, BuiltinFunctionType, type)
    return [
        name
        for name, value in [*namespace.items()]  # another thread may add to it
        if not name.startswith("__") and not isinstance(value, others)
    ]


def _texts(constants: Iterable[Any]) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, (tuple, frozenset)):
            yield from _texts(constant)
