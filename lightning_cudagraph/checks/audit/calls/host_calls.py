"""Host calls of a step, seen by the interpreter's profiling hook; those that a replay would lose.

The clock, files and terminals lie outside of Python's memory, where the walk over objects sees no
change. So a call with a result that moves from step to step, or with an effect that a replay would not
repeat, is refused before it happens, if user code makes it. The hook sees the thread of the training
loop, in which backward passes run too.
"""

from __future__ import annotations

import gc
import io
import sys
from collections.abc import Callable, Collection, Hashable, Iterable
from contextlib import AbstractContextManager
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from random import Random
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch

from lightning_cudagraph.checks.audit.calls.framework_reads import is_of_optimizers, note_framework_read
from lightning_cudagraph.checks.audit.calls.known_calls import (
    CLOCKS,
    EFFECTS,
    EFFECTS_IN_C,
    FIXED_RESULTS,
    READS,
    READS_IN_C,
    READS_OF_FILES,
    RECORDERS,
    RECORDING,
    REFUSED,
    REFUSED_ON_CPU,
    SEEDED,
    SEEDS_ITSELF,
    SELDOM,
    WRITES_TO_FILES,
    is_import,
    name_of_file,
    opens_to_read,
    system_module,
)
from lightning_cudagraph.checks.audit.calls.origins import Origin, Origins
from lightning_cudagraph.checks.audit.calls.rules import (
    HostRules,
    allowance,
    frozen_read,
    lost_effect,
    short_name,
)
from lightning_cudagraph.checks.audit.calls.settings_read import asked_in_c, asked_in_python
from lightning_cudagraph.checks.audit.host_lines import (
    CHANGES,
    NUMPYS_OWN,
    RANDOM_OF_NUMPY,
    inside_library,
    line_that_sets,
    lines_that_draw,
    stores,
)
from lightning_cudagraph.checks.audit.mentions import MentionedNames
from lightning_cudagraph.checks.audit.read_remedies import OF_CLOCKS, afterwards, remedy_of_read
from lightning_cudagraph.checks.walk.held_iterators import holds_iterator
from lightning_cudagraph.checks.walk.host_generators import generator_state
from lightning_cudagraph.checks.walk.parts import Moved
from lightning_cudagraph.checks.walk.scope import Namespace, Root
from lightning_cudagraph.checks.walk.walker import Walk
from lightning_cudagraph.compat.attributes import OfThread, setting
from lightning_cudagraph.compat.frames import frames, module_of, receiver_of
from lightning_cudagraph.device.lines.user_lines import DYNAMO, is_installed, user_frame
from lightning_cudagraph.device.refusals.first_refusal import note_receiver, refuse
from lightning_cudagraph.errors import CaptureError, Location

_FRAMEWORKS = Origin.FRAMEWORKS

_hides_use: OfThread[Callable[[Any], bool]] = OfThread(lambda receiver: False)
_known_code: OfThread[Collection[Hashable] | None] = OfThread(None)


def other_code_refused(known: Iterable[CodeType]) -> AbstractContextManager[None]:
    """Let audits in this thread refuse user code that is none of `known`.

    A function that first runs after the capture may have effects on objects that no walk knows by then.
    """
    return setting(_known_code, value=frozenset(map(_place_of, known)))


def _place_of(code: CodeType) -> Hashable:
    """The place of code in its file. A function that the step defines is another object each time."""
    return code.co_filename, code.co_firstlineno, code.co_name


def uses_refused(hides_use: Callable[[Any], bool]) -> AbstractContextManager[None]:
    """Let audits in this thread refuse calls of C methods of objects for which `hides_use` is true.

    No walk sees their state, such as that of a database connection.
    """
    return setting(_hides_use, value=hides_use)


class HostCalls:
    """Profiling hook that watches calls while a step runs.

    Args:
        state: the walk, which gets the user's globals and closures before code that mentions them runs.
        after_backward: True if the backward pass has ended. From then on, learning rates that the step
            reads are on the device, and returned optimizers are not recorded.
    """

    def __init__(
        self,
        rules: HostRules,
        state: Walk,
        after_backward: Callable[[], bool],
        device_type: str,
    ) -> None:
        self._after_backward = after_backward
        self._rules = rules
        self._state = state
        # By identity: the code objects of compiled frames do not hash.
        self._moving = {id(code): name for code, name in {**READS, **rules.moving}.items()}
        self._seldom = {id(code): value for code, value in {**SELDOM, **rules.seldom}.items()}
        refused = {**REFUSED, **(REFUSED_ON_CPU if device_type == "cpu" else {}), **rules.refused}
        self._refused = {id(code): value for code, value in refused.items()}
        self._effects = {id(code): name for code, name in {**EFFECTS, **rules.effects}.items()}
        self._before: Any = None
        self._seen: dict[int, CodeType] = {}  # by id; holds the code objects, so that no id is reused
        self._origins = Origins(rules.passing_on)
        self._known_origins = self._origins.by_file
        self._touched: dict[int, Location] = {}
        self._numpys: dict[int, Any] = {}  # by frame of a package's function that the user's code calls
        self._allowed_code: set[int] = set()
        self._globals: set[tuple[int, str]] = set()
        self._hides_use = _hides_use.value
        self._known_code = _known_code.value
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

    def other_draws(self, change: Moved, where: Location | None) -> tuple[int, ...]:
        """The other lines of the same file that name a random generator which has been drawn from."""
        named = change.holder is NUMPYS_OWN or change.attribute != "random"
        if not change.draws or where is None or not named:
            return ()
        found = lines_that_draw(change, self.mentioned.users_code)
        return tuple(sorted({at.line for at in found if at.path == where.path} - {where.line}))

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        # Runs for every call in the step. So calls by framework code leave early, and the origin of a
        # known file is read from the dictionary without a function call.
        if event == "call":
            code = frame.f_code
            if id(code) not in self._seen:
                self._seen[id(code)] = code
                self._note_names(frame)
            if id(code) in self._refused:
                receiver = frame.f_locals.get(next(iter(code.co_varnames), ""))
                self._refuse_call(*self._refused[id(code)], frame.f_back, receiver)
            caller = frame.f_back
            if (
                caller is not None
                and (self._known_origins.get(caller.f_code.co_filename) or self._origins.of(caller))
                is not _FRAMEWORKS
            ):
                self._python_call(frame, caller)
        elif event == "return":
            caller = frame.f_back
            if (
                argument is not None
                and caller is not None
                and (self._known_origins.get(caller.f_code.co_filename) or self._origins.of(caller))
                is not _FRAMEWORKS
            ):
                self._return(frame, caller, argument)
        elif (
            event == "c_call"
            and (self._known_origins.get(frame.f_code.co_filename) or self._origins.of(frame))
            is not _FRAMEWORKS
        ):
            self._c_call(frame, argument)

    def _python_call(self, frame: FrameType, caller: FrameType) -> None:
        code = frame.f_code
        key = id(code)
        if self._enters_a_package(frame, caller):
            self._numpys[id(frame)] = _numpys_state()
        user_caller = self._origins.user_caller(caller)
        if user_caller is None:
            return
        if key in self._moving:
            self._refuse_read(self._moving[key], user_caller)
        elif key in self._seldom:
            name, read = self._seldom[key]
            if name not in self._rules.harmless:
                self.mentioned.reads[f"`{name}`"] = read
        elif key in self._effects:
            self._refuse_effect(self._effects[key], user_caller, frame, is_python=True)
        elif code.co_name.startswith(RECORDING):
            self._record_call(frame, user_caller)
        elif (asks := asked_in_python(frame)) is not None and (
            is_installed(code.co_filename) or not self._origins.is_users(frame)
        ):
            self._note_setting(f"{module_of(frame)}.{code.co_name}()", asks)

    def _enters_a_package(self, frame: FrameType, caller: FrameType) -> bool:
        """True for a call by the user's code of a package that may draw: NumPy's own calls go unseen."""
        return (
            is_installed(frame.f_code.co_filename)
            and not is_installed(caller.f_code.co_filename)
            and self._origins.is_users(frame)
        )

    def _return(self, frame: FrameType, caller: FrameType, value: Any) -> None:
        code = frame.f_code
        before = self._numpys.pop(id(frame), None)
        if before is not None and before != _numpys_state() and id(NUMPYS_OWN) not in self._touched:
            self._touch(NUMPYS_OWN, caller)
            where = self._touched.get(id(NUMPYS_OWN))
            # What returns numbers for the step draws for the user; what works on tensors, for itself.
            if where and any(isinstance(each, torch.Tensor) for each in frame.f_locals.values()):
                self._touched[id(NUMPYS_OWN)] = inside_library(where, RANDOM_OF_NUMPY, True, [code])
        if self._origins.of(caller) is Origin.FRAMEWORKS or not code.co_argcount:
            return
        if self._origins.of(frame) is not Origin.FRAMEWORKS or self._origins.user_caller(caller) is None:
            return
        if id(code) in self._moving or id(code) in self._seldom or code.co_name in self._rules.harmless:
            return
        if self._rules.hands_out(receiver_of(frame)):
            behind = self._after_backward()
            note_framework_read(
                frame, value, self.mentioned, lambda found: behind and is_of_optimizers(found)
            )

    def _record_call(self, frame: FrameType, user_caller: FrameType) -> None:
        """Refuse a call of a method that writes records, by its name and its package."""
        code = frame.f_code
        receiver = receiver_of(frame)
        if code.co_name in WRITES_TO_FILES and issubclass(type(receiver), io.IOBase):
            self._refuse_effect(name_of_file(receiver, code.co_name), user_caller, frame, is_python=True)
        if _is_property(type(receiver), code.co_name):  # `save_dir`
            return
        package = module_of(frame)
        if self._rules.records(receiver) or (
            package.partition(".")[0] in RECORDERS or package.startswith("torch.utils.tensorboard")
        ):
            of = type(receiver).__qualname__ if receiver is not None else package.partition(".")[0]
            self._refuse_effect(f"{of}.{code.co_name}", user_caller, frame, is_python=True)

    def _c_call(self, frame: FrameType, function: Any) -> None:
        receiver = getattr(function, "__self__", None)
        name = function.__name__
        if receiver is not None and self._hides_use(receiver):
            if (user_caller := self._origins.user_caller(frame)) is not None:
                self._refuse_effect(f"{type(receiver).__qualname__}.{name}", user_caller, frame)
        elif name in CHANGES or isinstance(receiver, Random):
            if id(receiver) not in self._touched and self._state.watches(receiver):
                self._touch(receiver, frame)
        elif function in CLOCKS:
            if self._origins.is_users(frame):  # Python's library reads clocks for purposes of its own
                self._refuse_read(CLOCKS[function], frame)
        elif function in READS_IN_C:
            if (user_caller := self._origins.user_caller(frame)) is not None:
                self._refuse_read(READS_IN_C[function], user_caller)
        elif (module := system_module(function, receiver)) and not name.startswith("__"):
            self._system_call(f"{module}.{name}", frame, function)
        elif name in SEEDS_ITSELF and isinstance(receiver, torch.Generator):
            self._refuse_call(f"torch.Generator.{name}", SEEDED, frame, receiver)
        elif function in self._rules.other_in_captures:
            if (user_caller := self._origins.user_caller(frame)) is not None:
                self._refuse_other(*self._rules.other_in_captures[function], user_caller)
        elif function in EFFECTS_IN_C:
            if (user_caller := self._origins.user_caller(frame)) is None or self._allows(name):
                return
            if self._is_inside_allowed(frame):
                return
            if function is open and opens_to_read(frame):
                self._refuse_read(name_of_file(None, "read"), user_caller)
            else:
                self._refuse_effect(EFFECTS_IN_C[function], user_caller, frame)
        elif name in WRITES_TO_FILES or name in READS_OF_FILES:
            is_file = issubclass(type(receiver), io.IOBase) and (
                not issubclass(type(receiver), (io.StringIO, io.BytesIO))
                or receiver in (sys.stdout, sys.stderr)
            )
            if is_file and (user_caller := self._origins.user_caller(frame)) is not None:
                label = name_of_file(receiver, name)
                if name in WRITES_TO_FILES:
                    self._refuse_effect(label, user_caller, frame)
                else:
                    self._refuse_read(label, user_caller)
        elif (asks := asked_in_c(frame, function)) is not None:
            self._note_setting(f"{function.__module__}.{name}()", asks)

    def _note_setting(self, name: str, asks: Callable[[], Any]) -> None:
        if not self._allows(name):
            self.mentioned.reads[f"`{name}`"] = asks

    def _system_call(self, name: str, frame: FrameType, function: Any) -> None:
        """Refuse a call of the operating system that may change something, but for those of imports."""
        if function.__name__.startswith("_"):  # `_path_normpath` only computes
            return
        user_caller = self._origins.user_caller(frame)
        if user_caller is None or self._allows(name) or is_import(frame, user_caller):
            return
        if self._is_inside_allowed(frame):
            return
        if function.__name__ in FIXED_RESULTS:
            if (asks := asked_in_c(frame, function)) is not None:
                self._note_setting(f"{name}()", asks)
            return
        refuse(
            CaptureError(
                f"A CUDA graph cannot hold a call of `{name}`: a replay would not repeat it, and its"
                " result would stay what it is in this step.",
                "Call it in a hook that runs on the host at every step, such as `on_train_batch_start`,"
                " and hand its result to the step in a registered buffer, written with `copy_` or"
                " `fill_`." + allowance(name),
                location=user_frame(user_caller),
            )
        )

    def _touch(self, receiver: Any, frame: FrameType) -> None:
        if (where := user_frame(self._origins.user_caller(frame))) is not None:
            self._touched[id(receiver)] = where

    def _refuse_read(self, name: str, user_caller: FrameType) -> None:
        if name not in self._rules.noted and not self._allows(name):
            where = user_frame(user_caller)
            known = OF_CLOCKS if name in CLOCKS.values() else self._rules.remedies.get(name)
            refuse(frozen_read(name, where, known or remedy_of_read(where)))

    def _refuse_other(self, name: str, remedy: str, user_caller: FrameType) -> None:
        if not self._allows(name):
            where = user_frame(user_caller)
            refuse(
                CaptureError(
                    f"`{name}` would say another thing in the captured step than without it.",
                    remedy + allowance(name),
                    location=where,
                )
            )

    def _refuse_call(self, name: str, remedy: str, caller: FrameType | None, receiver: object) -> None:
        # Dynamo wraps `torch.manual_seed`.
        callers = (f for f in frames(caller) if not module_of(f).startswith(DYNAMO))
        user_caller = self._origins.user_caller(next(callers, None))
        if user_caller is not None and not self._allows(name):
            refuse(lost_effect(name, user_frame(user_caller), remedy))
            note_receiver(receiver)

    def _refuse_effect(
        self, name: str, user_caller: FrameType, inside: FrameType, is_python: bool = False
    ) -> None:
        if self._allows(name):
            if is_python:  # with the calls that it makes: a message to `logging` is written to a file
                self._allowed_code.add(id(inside.f_code))
            return
        if self._is_inside_allowed(inside):
            return
        where = user_frame(user_caller)
        refuse(lost_effect(name, where, afterwards(where), "item_and_print"))

    def _is_inside_allowed(self, frame: FrameType) -> bool:
        allowed = self._allowed_code
        return bool(allowed) and any(id(caller.f_code) in allowed for caller in frames(frame))

    def _allows(self, name: str) -> bool:
        return bool({name, short_name(name), name.removesuffix("()")} & self._rules.harmless)

    def _note_names(self, frame: FrameType) -> None:
        """Record the names of a piece of code before it runs for the first time."""
        code = frame.f_code
        if module_of(frame).startswith("lightning_cudagraph."):
            return  # this package's code around the step is no part of it
        if not self._origins.is_users(frame):
            self._refuse_mock(frame)
            self.mentioned.names.update(code.co_names)
            return
        # The garbage collector closes generators of others in any step.
        is_generator = code.co_flags & (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR)
        if self._known_code is not None and not is_generator and _place_of(code) not in self._known_code:
            where = user_frame(self._origins.user_caller(frame.f_back)) or user_frame(frame)
            what = f"The step calls `{code.co_name}`, which the captured step did not call."
            refuse(CaptureError(what, "", location=where))
        known = len(self.mentioned.user_globals), len(self.mentioned.closures)
        self.mentioned.note(frame)
        for namespace, name in self.mentioned.user_globals[known[0] :]:
            if (id(namespace), name) not in self._globals:
                self._globals.add((id(namespace), name))
                of = f"`{namespace.get('__name__', 'a module')}`"
                self._state.add(Root(Namespace(namespace), "", of, reads=frozenset({name})))
        if len(self.mentioned.closures) > known[1]:
            self._watch_closure(frame)

    def _refuse_mock(self, frame: FrameType) -> None:
        """Refuse the call of a mock: no walk sees its counts if only framework code reaches it."""
        mocks: Any = sys.modules.get("unittest.mock")
        if mocks is None or frame.f_code is not mocks.Mock.__call__.__code__:
            return
        name = type(receiver_of(frame)).__qualname__
        if not self._allows(name):
            error = CaptureError(
                f"The training step calls a `{name}` object of `unittest.mock`; a replay would not"
                " repeat its effects on the host. Expected a function or a method.",
                f"Put a plain function there.{allowance(name)}",
                location=user_frame(frame),
            )
            refuse(error)

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
