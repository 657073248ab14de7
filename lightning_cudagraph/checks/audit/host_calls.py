"""Host calls of a step, seen by the interpreter's profiling hook; those that a replay would lose.

The clock, files and terminals lie outside of Python's memory, where the walk over objects sees no
change. So a call with a result that moves from step to step, or with an effect that a replay would not
repeat, is refused before it happens, if user code makes it. The hook sees the thread of the training
loop, in which backward passes run too.
"""

from __future__ import annotations

import gc
import io
import logging
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import date, datetime
from enum import Enum
from random import Random
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch

from lightning_cudagraph.checks.audit.handed_out import is_of_optimizers, note_handed_out
from lightning_cudagraph.checks.audit.host_draws import SEEDED, generator_state, holds_iterator, seeds
from lightning_cudagraph.checks.audit.host_lines import (
    CHANGES,
    NUMPYS_OWN,
    first_line,
    line_that_sets,
    stores,
)
from lightning_cudagraph.checks.audit.mentions import MentionedNames
from lightning_cudagraph.checks.audit.parts import Moved
from lightning_cudagraph.checks.audit.read_remedies import (
    AFTERWARDS,
    OF_CLOCKS,
    Remedy,
    remedy_of_read,
)
from lightning_cudagraph.checks.audit.walker import Namespace, Root, Walk
from lightning_cudagraph.compat.attributes import setting
from lightning_cudagraph.compat.names.torch_names import _BaseDataLoaderIter
from lightning_cudagraph.device.sentry.first_refusal import refuse
from lightning_cudagraph.device.sentry.sentry import forbid, is_installed, is_users, user_frame
from lightning_cudagraph.errors import CaptureError, Location, see

_NEXT = "__next__"
_CLOCKS: dict[Any, str] = {
    **{
        getattr(time, name): f"time.{name}()"
        for clock in ("time", "monotonic", "perf_counter", "process_time", "thread_time")
        for name in (clock, f"{clock}_ns")
    },
    datetime.now: "datetime.now()",
    datetime.utcnow: "datetime.utcnow()",
    date.today: "date.today()",
}
_READS_IN_C: dict[Any, str] = {input: "input()"}
_EFFECTS_IN_C: dict[Any, str] = {print: "print", open: "open", warnings.warn: "warnings.warn"}
# Python's modules in C that call the operating system, by their public names.
_SYSTEM = {
    **{"posix": "os", "nt": "os", "socket": "socket", "_socket": "socket", "_sqlite3": "sqlite3"},
    **{name: name for name in ("select", "fcntl", "resource", "sqlite3")},
}
# Functions of these modules with one result for the same arguments in one process.
_FIXED = frozenset({"fspath", "getpid", "getcwd", "cpu_count", "strerror", "get_terminal_size"})
_IMPORTS = "importlib."
_SEEDS_ITSELF = ("manual_seed", "seed")
_READS_OF_FILES = frozenset({"read", "readline", "readlines", "readinto"})
_WRITES_TO_FILES = frozenset({"write", "writelines"})
_READS: dict[CodeType, str] = {torch.load.__code__: "torch.load"}
if _NEXT in vars(_BaseDataLoaderIter):  # else captures are refused
    _READS[vars(_BaseDataLoaderIter)[_NEXT].__code__] = "next(DataLoader)"
_EFFECTS: dict[CodeType, str] = {
    subprocess.Popen.__init__.__code__: "subprocess",
    torch.save.__code__: "torch.save",
}
if "_log" in vars(logging.Logger):  # else captures are refused
    _EFFECTS[logging.Logger._log.__code__] = "logging"  # called for enabled levels only
# Packages that print and write for their callers.
_RECORDERS = frozenset(
    (
        *("wandb", "comet_ml", "mlflow", "clearml", "aim", "neptune", "swanlab", "dvclive"),
        *("tensorboardX", "tensorboard", "loguru"),
    )
)
_WRITERS = _RECORDERS | {"numpy", "tqdm", "rich"}
# The beginnings of the names of methods that write.
RECORDING = ("add_", "log", "write", "save", "track", "report_", "append", "upload", "record")
_STDLIB_DIR = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_SITE = "-packages" + os.sep
_DYNAMO = ("torch._compile", "torch._dynamo")
_PACKAGE = __name__.partition(".")[0] + "."


class _Origin(Enum):
    """The owner of a piece of code."""

    USERS = "the user's"
    FRAMEWORKS = "of torch, Lightning, or this package"
    PASSES_ON = "of Python's library or a writer package, which acts for its caller"


_FRAMEWORKS = _Origin.FRAMEWORKS


@dataclass(frozen=True)
class HostRules:
    """The meaning of a training framework's functions for the audit.

    Attributes:
        moving: getters of values that move from step to step, with their public names.
        seldom: getters of values that move seldom, with their public names and a function to read them.
        effects: functions that print or write, with their public names.
        passing_on: files with functions that act for their callers.
        records: True for an object that writes records, as a logger does.
        stays_on_host: True for a module that is only called on the host, such as a metric.
        harmless: names that the user allows to be frozen or not repeated.
        hands_out: True for a framework object with getters of values that move seldom.
        refused: functions with effects that a replay would not repeat, with their public names and a
            remedy.
        other_in_captures: C functions that give another result during a capture; likewise.
        stops: classes that are not entered, because the framework changes their objects in every step.
        remedies: what to do instead of a read, with the page of docs/recipes, by its public name, where
            there is better advice than for all.
        noted: public names of getters with reads that are noted elsewhere.
    """

    moving: Mapping[CodeType, str] = field(default_factory=dict)
    seldom: Mapping[CodeType, tuple[str, Callable[[], Any]]] = field(default_factory=dict)
    effects: Mapping[CodeType, str] = field(default_factory=dict)
    passing_on: frozenset[str] = frozenset()
    records: Callable[[Any], bool] = lambda value: False
    stays_on_host: Callable[[Any], bool] = lambda module: False
    harmless: frozenset[str] = frozenset()
    hands_out: Callable[[Any], bool] = lambda value: False
    refused: Mapping[CodeType, tuple[str, str]] = field(default_factory=dict)
    other_in_captures: Mapping[Any, tuple[str, str]] = field(default_factory=dict)
    stops: tuple[type, ...] = ()
    remedies: Mapping[str, Remedy] = field(default_factory=dict)
    noted: frozenset[str] = frozenset()


def allowance(name: str) -> str:
    """The end of a remedy: the argument that allows `name`."""
    return (
        " If nothing depends on it, no hook or callback either, allow it:"
        f' `CUDAGraphCallback(harmless=["{name}"])`.'
    )


def frozen_read(name: str, where: Location | None, remedy: Remedy, computed: str = "") -> CaptureError:
    """The error for a read of a value that would be frozen, or of a number computed from it."""
    what = f"`{computed}`, computed from `{name}`" if computed else f"`{name}`"
    return CaptureError(
        f"A CUDA graph cannot hold a read of {what}, which would stay what it is in this step.",
        remedy.text + allowance(_short(name)) * remedy.may_be_allowed + see(remedy.recipe),
        location=where,
    )


def _lost_effect(name: str, where: Location | None, remedy: str, recipe: str = "") -> CaptureError:
    return CaptureError(
        f"A CUDA graph cannot hold a use of `{name}`, which a replay would not repeat.",
        remedy + allowance(name) + (recipe and see(recipe)),
        location=where,
    )


def _short(name: str) -> str:
    return name.removeprefix("self.").removeprefix("trainer.")


class _OfThread(threading.local):
    receivers: Mapping[int, Any] = {}


_here = _OfThread()


def uses_refused(receivers: Mapping[int, Any]) -> AbstractContextManager[None]:
    """Let the audits of captures in this thread refuse calls of C methods of these objects, by id.

    No walk sees their state, such as that of a database connection.
    """
    return setting(_here, receivers=receivers)


class HostCalls:
    """Profiling hook that watches calls while a step runs.

    Args:
        state: the walk, which gets the user's globals and closures before code that mentions them runs.
        after_backward: True if the backward pass has ended. From then on, learning rates that the step
            reads are on the device, and returned optimizers are not recorded.
        device_type: that of the device of the step.
    """

    def __init__(
        self,
        rules: HostRules,
        state: Walk,
        after_backward: Callable[[], bool] = lambda: False,
        device_type: str = "",
    ) -> None:
        self._after_backward = after_backward
        self._rules = rules
        self._state = state
        # By identity: the code objects of compiled frames do not hash.
        self._moving = {id(code): name for code, name in {**_READS, **rules.moving}.items()}
        self._seldom = {id(code): value for code, value in rules.seldom.items()}
        self._refused = {id(code): value for code, value in rules.refused.items()}
        self._seeds = {id(code): value for code, value in seeds(device_type).items()}
        self._effects = {id(code): name for code, name in {**_EFFECTS, **rules.effects}.items()}
        self._before: Any = None
        self._seen: dict[int, CodeType] = {}  # by id; holds the code objects, so that no id is reused
        self._origins: dict[str, _Origin] = {}  # by file
        self._touched: dict[int, Location] = {}
        self._numpys: dict[int, Any] = {}  # by frame of a package's function that the user's code calls
        self._allowed_code: set[int] = set()
        self._globals: set[tuple[int, str]] = set()
        self._refused_uses = _here.receivers
        self.mentioned = MentionedNames()

    def __enter__(self) -> HostCalls:
        self._before = sys.getprofile()
        if self._before is not None and not callable(self._before):
            self._before.disable()  # a profiler written in C (cProfile) cannot be set again as it was
        sys.setprofile(self._note)
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        taken_away = sys.getprofile() != self._note
        sys.setprofile(None)
        if callable(self._before):
            sys.setprofile(self._before)
        elif self._before is not None:
            self._before.enable()
        if taken_away and error is None:
            raise CaptureError(
                "The training step switches on a profiler of the interpreter (`cProfile`,"
                " `sys.setprofile`), which replaces the hook that looks for host code in the step.",
                "Leave it out of the step, or start it before `fit`.",
            )

    def where(self, change: Moved) -> Location | None:
        """The user's line that made a change: from the call, or else found in the code that ran."""
        return self._touched.get(id(change.holder)) or line_that_sets(change, self.mentioned.users_code)

    def line_of(self, name: str) -> Location | None:
        """The first line of user code that sets an attribute of this name."""
        return first_line(name, False, self.mentioned.users_code)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        # Runs for every call in the step. So calls by framework code leave early, and the origin of a
        # known file is read from the dictionary without a function call.
        if event == "call":
            code = frame.f_code
            if id(code) not in self._seen:
                self._seen[id(code)] = code
                self._first_sight(frame)
            if id(code) in self._seeds:
                self._refuse_seed(self._seeds[id(code)], frame.f_back)
            caller = frame.f_back
            if (
                caller is not None
                and (self._origins.get(caller.f_code.co_filename) or self._origin_of(caller))
                is not _FRAMEWORKS
            ):
                self._python_call(frame, caller)
        elif event == "return":
            caller = frame.f_back
            if (
                argument is not None
                and caller is not None
                and (self._origins.get(caller.f_code.co_filename) or self._origin_of(caller))
                is not _FRAMEWORKS
            ):
                self._return(frame, caller, argument)
        elif (
            event == "c_call"
            and (self._origins.get(frame.f_code.co_filename) or self._origin_of(frame))
            is not _FRAMEWORKS
        ):
            self._c_call(frame, argument)

    def _python_call(self, frame: FrameType, caller: FrameType) -> None:
        code = frame.f_code
        key = id(code)
        if self._enters_a_package(frame, caller):
            self._numpys[id(frame)] = _numpys_state()
        asker = self._asker(caller)
        if asker is None:
            return
        if key in self._moving:
            self._refuse_read(self._moving[key], asker)
        elif key in self._seldom:
            name, read = self._seldom[key]
            if name not in self._rules.harmless:
                self.mentioned.reads[f"`{name}`"] = read
        elif key in self._refused:
            name, remedy = self._refused[key]
            if not self._allows(name):
                refuse(_lost_effect(name, user_frame(asker), remedy))
        elif key in self._effects:
            self._refuse_effect(self._effects[key], asker, frame, is_python=True)
        elif code.co_name.startswith(RECORDING):
            self._record_call(frame, asker)

    def _enters_a_package(self, frame: FrameType, caller: FrameType) -> bool:
        """True for a call by the user's code of a package that may draw: NumPy's own calls go unseen."""
        return (
            is_installed(frame.f_code.co_filename)
            and not is_installed(caller.f_code.co_filename)
            and self._users(frame)
        )

    def _return(self, frame: FrameType, caller: FrameType, value: Any) -> None:
        code = frame.f_code
        before = self._numpys.pop(id(frame), None)
        if before is not None and before != _numpys_state() and id(NUMPYS_OWN) not in self._touched:
            self._touch(NUMPYS_OWN, caller)
        if self._origin_of(caller) is _Origin.FRAMEWORKS or not code.co_argcount:
            return
        if self._origin_of(frame) is not _Origin.FRAMEWORKS or self._asker(caller) is None:
            return
        if id(code) in self._moving or id(code) in self._seldom or code.co_name in self._rules.harmless:
            return
        if self._rules.hands_out(frame.f_locals.get(code.co_varnames[0])):
            behind = self._after_backward()
            note_handed_out(
                frame, value, self.mentioned, lambda found: behind and is_of_optimizers(found)
            )

    def _record_call(self, frame: FrameType, asker: FrameType) -> None:
        """Refuse a call of a method that writes records, by its name and its package."""
        code = frame.f_code
        receiver = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if code.co_name in _WRITES_TO_FILES and issubclass(type(receiver), io.IOBase):
            self._refuse_effect(_name_of_file(receiver, code.co_name), asker, frame, is_python=True)
        if _is_property(type(receiver), code.co_name):  # `save_dir`
            return
        package = str(frame.f_globals.get("__name__", ""))
        if self._rules.records(receiver) or (
            package.partition(".")[0] in _RECORDERS or package.startswith("torch.utils.tensorboard")
        ):
            of = type(receiver).__qualname__ if receiver is not None else package.partition(".")[0]
            self._refuse_effect(f"{of}.{code.co_name}", asker, frame, is_python=True)

    def _c_call(self, frame: FrameType, function: Any) -> None:
        receiver = getattr(function, "__self__", None)
        name = function.__name__
        if id(receiver) in self._refused_uses:
            if (asker := self._asker(frame)) is not None:
                self._refuse_effect(f"{type(receiver).__qualname__}.{name}", asker, frame)
        elif name in CHANGES or isinstance(receiver, Random):
            if id(receiver) not in self._touched and self._state.watches(receiver):
                self._touch(receiver, frame)
        elif function in _CLOCKS:
            if self._users(frame):  # Python's library reads clocks for purposes of its own
                self._refuse_read(_CLOCKS[function], frame)
        elif function in _READS_IN_C:
            if (asker := self._asker(frame)) is not None:
                self._refuse_read(_READS_IN_C[function], asker)
        elif (module := _of_system(function, receiver)) and not name.startswith("__"):
            self._system_call(f"{module}.{name}", frame)
        elif name in _SEEDS_ITSELF and isinstance(receiver, torch.Generator):
            self._refuse_seed((f"torch.Generator.{name}", *SEEDED), frame)
        elif function in self._rules.other_in_captures:
            if (asker := self._asker(frame)) is not None:
                self._refuse_other(*self._rules.other_in_captures[function], asker)
        elif function in _EFFECTS_IN_C:
            if (asker := self._asker(frame)) is not None:
                self._refuse_effect(_EFFECTS_IN_C[function], asker, frame)
        elif name in _WRITES_TO_FILES or name in _READS_OF_FILES:
            is_file = issubclass(type(receiver), io.IOBase) and (
                not issubclass(type(receiver), (io.StringIO, io.BytesIO))
                or receiver in (sys.stdout, sys.stderr)
            )
            if is_file and (asker := self._asker(frame)) is not None:
                label = _name_of_file(receiver, name)
                if name in _WRITES_TO_FILES:
                    self._refuse_effect(label, asker, frame)
                else:
                    self._refuse_read(label, asker)

    def _system_call(self, name: str, frame: FrameType) -> None:
        """Refuse a call of the operating system, but for those with a fixed result and of imports."""
        function = name.partition(".")[2]
        if function in _FIXED or function.startswith("_"):  # `_path_normpath` only computes
            return
        asker = self._asker(frame)
        if asker is None or self._allows(name) or _imports(frame, asker):
            return
        if self._is_inside_allowed(frame):
            return
        refuse(
            CaptureError(
                f"A CUDA graph cannot hold a call of `{name}`: a replay would not repeat it, and its"
                " result would stay what it is in this step.",
                "Call it in a hook that runs on the host at every step, such as `on_train_batch_start`,"
                " and hand its result to the step in a registered buffer, written with `copy_` or"
                " `fill_`." + allowance(name),
                location=user_frame(asker),
            )
        )

    def _touch(self, receiver: Any, frame: FrameType) -> None:
        if (where := user_frame(self._asker(frame))) is not None:
            self._touched[id(receiver)] = where

    def _refuse_read(self, name: str, asker: FrameType) -> None:
        if name not in self._rules.noted and not self._allows(name):
            where = user_frame(asker)
            known = OF_CLOCKS if name in _CLOCKS.values() else self._rules.remedies.get(name)
            refuse(frozen_read(name, where, known or remedy_of_read(where)))

    def _refuse_other(self, name: str, remedy: str, asker: FrameType) -> None:
        if not self._allows(name):
            where = user_frame(asker)
            refuse(
                CaptureError(
                    f"`{name}` would say another thing in the captured step than without it.",
                    remedy + allowance(name),
                    location=where,
                )
            )

    def _refuse_seed(self, seed: tuple[str, str, str], caller: FrameType | None) -> None:
        name, words, remedy = seed
        while caller is not None and str(caller.f_globals.get("__name__")).startswith(_DYNAMO):
            caller = caller.f_back  # it wraps `torch.manual_seed`
        if (asker := self._asker(caller)) is not None and not self._allows(name):
            forbid(f"`{name}` {words}", remedy, user_frame(asker))

    def _refuse_effect(
        self, name: str, asker: FrameType, inside: FrameType, is_python: bool = False
    ) -> None:
        if self._allows(name):
            if is_python:  # with the calls that it makes: a message to `logging` is written to a file
                self._allowed_code.add(id(inside.f_code))
            return
        if self._is_inside_allowed(inside):
            return
        refuse(_lost_effect(name, user_frame(asker), AFTERWARDS, "item_and_print"))

    def _is_inside_allowed(self, frame: FrameType | None) -> bool:
        """True for a call by a function that the user allows."""
        while self._allowed_code and frame is not None:
            if id(frame.f_code) in self._allowed_code:
                return True
            frame = frame.f_back
        return False

    def _allows(self, name: str) -> bool:
        return bool({name, _short(name), name.removesuffix("()")} & self._rules.harmless)

    def _origin_of(self, frame: FrameType) -> _Origin:
        file = frame.f_code.co_filename
        if file.startswith("<"):  # several modules can share such a name
            return _Origin.USERS if is_users(frame.f_code, frame.f_globals) else _Origin.PASSES_ON
        origin = self._origins.get(file)
        if origin is None:
            if (
                file in self._rules.passing_on
                or (file.startswith(_STDLIB_DIR) and _SITE not in file)
                or file.partition(_SITE)[2].partition(os.sep)[0] in _WRITERS
            ):
                origin = _Origin.PASSES_ON
            else:
                is_theirs = is_users(frame.f_code, frame.f_globals)
                origin = _Origin.USERS if is_theirs else _Origin.FRAMEWORKS
            self._origins[file] = origin
        return origin

    def _users(self, frame: FrameType) -> bool:
        return self._origin_of(frame) is _Origin.USERS

    def _asker(self, frame: FrameType | None) -> FrameType | None:
        """The frame of user code that made a call, past code that acts for its caller; or None."""
        while frame is not None and self._origin_of(frame) is _Origin.PASSES_ON:
            frame = frame.f_back
        return frame if frame is not None and self._users(frame) else None

    def _first_sight(self, frame: FrameType) -> None:
        """Record the names of a piece of code before it runs for the first time."""
        code = frame.f_code
        if str(frame.f_globals.get("__name__", "")).startswith(_PACKAGE):
            return  # this package's code around the step is no part of it
        if not self._users(frame):
            self.mentioned.names.update(code.co_names)
            return
        known = len(self.mentioned.user_globals), len(self.mentioned.closures)
        self.mentioned.note(frame)
        for namespace, name in self.mentioned.user_globals[known[0] :]:
            if (id(namespace), name) not in self._globals:
                self._globals.add((id(namespace), name))
                of = f"`{namespace.get('__name__', 'a module')}`"
                self._state.add(Root(Namespace(namespace), "", of, reads=frozenset({name})))
        if len(self.mentioned.closures) > known[1]:
            self._watch_closure(frame)

    def _watch_closure(self, frame: FrameType) -> None:
        """Watch the closure variables of a function that was made before the step."""
        code = frame.f_code
        values = {name: frame.f_locals[name] for name in code.co_freevars if name in frame.f_locals}
        of = f"the closure of `{code.co_name}`"
        sets = any(name in code.co_freevars for name, _ in stores(code))
        if sets or any(map(holds_iterator, values.values())):
            # The frame has the values only; functions with this code have the cells.
            for function in gc.get_referrers(code):
                if isinstance(function, FunctionType) and function.__closure__:
                    for name, cell in zip(code.co_freevars, function.__closure__, strict=True):
                        if name in values and cell.cell_contents is values[name]:
                            self._state.add(Root(cell, name, of))
        self._state.add(*(Root(value, name, of) for name, value in values.items()))


def _is_property(kind: type, name: str) -> bool:
    return any(isinstance(vars(base).get(name), property) for base in kind.__mro__)


def _numpys_state() -> Any:
    return generator_state(NUMPYS_OWN)[0]()  # type: ignore[index]


def _of_system(function: Any, receiver: Any) -> str:
    """The public name of the module in C of a function or of its receiver, if it calls the system."""
    if receiver is not None and not isinstance(receiver, ModuleType):
        names = [base.__module__ for base in type(receiver).__mro__]
        return next((_SYSTEM[name] for name in names if name in _SYSTEM), "")
    return _SYSTEM.get(getattr(function, "__module__", None) or "", "")


def _imports(frame: FrameType | None, asker: FrameType) -> bool:
    """True for a call by Python's own code that finds and loads modules."""
    while frame is not None and frame is not asker:
        if str(frame.f_globals.get("__name__", "")).startswith(_IMPORTS):
            return True
        frame = frame.f_back
    return False


def _name_of_file(file: Any, method: str) -> str:
    if file is sys.stdout or file is sys.stderr:
        return f"sys.{'stdout' if file is sys.stdout else 'stderr'}.{method}"
    return f"file.{method}"
