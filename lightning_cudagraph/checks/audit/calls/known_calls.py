"""Functions of Python and torch that read or change something outside of Python's memory, by name."""

from __future__ import annotations

import linecache
import logging
import re
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from datetime import date, datetime
from inspect import unwrap
from itertools import takewhile
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch

from lightning_cudagraph.compat.frames import frames, module_of
from lightning_cudagraph.compat.names.torch_names import _BaseDataLoaderIter
from lightning_cudagraph.errors import see

_NEXT = "__next__"
CLOCKS: dict[Any, str] = {
    **{
        getattr(time, name): f"time.{name}()"
        for clock in ("time", "monotonic", "perf_counter", "process_time", "thread_time")
        for name in (clock, f"{clock}_ns")
    },
    datetime.now: "datetime.now()",
    datetime.utcnow: "datetime.utcnow()",
    date.today: "date.today()",
}
READS_IN_C: dict[Any, str] = {input: "input()"}
EFFECTS_IN_C: dict[Any, str] = {print: "print", open: "open", warnings.warn: "warnings.warn"}
# Python's modules in C that call the operating system, by their public names.
_SYSTEM = {
    **{"posix": "os", "nt": "os", "socket": "socket", "_socket": "socket", "_sqlite3": "sqlite3"},
    **{name: name for name in ("select", "fcntl", "resource", "sqlite3")},
}
# Functions of these modules that change nothing. Of those without arguments, the result is compared.
FIXED_RESULTS = frozenset({"fspath", "getpid", "getcwd", "cpu_count", "strerror", "get_terminal_size"})
_IMPORTS = "importlib."
SEEDS_ITSELF = ("manual_seed", "seed")
READS_OF_FILES = frozenset({"read", "readline", "readlines", "readinto"})
WRITES_TO_FILES = frozenset({"write", "writelines"})
READS: dict[CodeType, str] = {torch.load.__code__: "torch.load"}
if _NEXT in vars(_BaseDataLoaderIter):  # else captures are refused
    READS[vars(_BaseDataLoaderIter)[_NEXT].__code__] = "next(DataLoader)"
# Getters of values that move seldom, with a function to read them.
SELDOM: dict[CodeType, tuple[str, Callable[[], Any]]] = {
    torch.initial_seed.__code__: ("torch.initial_seed()", torch.initial_seed)
}
EFFECTS: dict[CodeType, str] = {
    subprocess.Popen.__init__.__code__: "subprocess",
    torch.save.__code__: "torch.save",
}
if "_log" in vars(logging.Logger):  # else captures are refused
    EFFECTS[logging.Logger._log.__code__] = "logging"  # called for enabled levels only
# Other threads run outside of the capture, and no check of a step sees what they do. Python's library
# starts them with the first, and waits for them with the others.
_THREADS: dict[Any, str] = {
    threading.Thread.start: "threading.Thread.start",
    threading.Condition.wait: "threading.Condition.wait",
    Future.result: "concurrent.futures.Future.result",
}
_IN_ONE_THREAD = (
    "Call in the step itself what another thread does there: a graph gains nothing by it. What is for"
    " the host alone can go to a thread in `on_train_batch_end`."
)
# Functions of torch that seed or set the generators of a step.
SEEDED = (
    "Set it in `on_train_batch_start`. Or leave it out: draw numbers that shall be the same in each step"
    " before `fit`, and keep them in a buffer (`register_buffer`)." + see("host_random")
)
_SET_ON_CPU = (
    "On a GPU this can be captured. On a CPU, leave it out: the step then draws with the numbers of its"
    " own generator, others in each replay." + see("host_random")
)
_SEEDS: dict[Any, str] = {
    torch.manual_seed: "torch.manual_seed",
    torch.seed: "torch.seed",
    torch.cuda.manual_seed: "torch.cuda.manual_seed",
    torch.cuda.manual_seed_all: "torch.cuda.manual_seed_all",
    torch.cuda.seed: "torch.cuda.seed",
    torch.cuda.seed_all: "torch.cuda.seed_all",
}
_SETTERS: dict[Any, str] = {
    torch.set_rng_state: "torch.set_rng_state",
    torch.random.fork_rng: "torch.random.fork_rng",
}


def _refused(functions: dict[Any, str], remedy: str) -> dict[CodeType, tuple[str, str]]:
    return {unwrap(function).__code__: (name, remedy) for function, name in functions.items()}


REFUSED = {**_refused(_THREADS, _IN_ONE_THREAD), **_refused(_SEEDS, SEEDED)}
# A graph of a GPU can set back a state that it has read, a tape of the emulator cannot.
REFUSED_ON_CPU = _refused(_SETTERS, _SET_ON_CPU)
# Packages that print and write for their callers.
RECORDERS = frozenset(
    (
        *("wandb", "comet_ml", "mlflow", "clearml", "aim", "neptune", "swanlab", "dvclive"),
        *("tensorboardX", "tensorboard", "loguru"),
    )
)
# The beginnings of the names of methods that write.
RECORDING = ("add_", "log", "write", "save", "track", "report_", "append", "upload", "record")


def system_module(function: Any, receiver: Any) -> str:
    """The public name of the module in C of a function or of its receiver, if it calls the system."""
    if receiver is not None and not isinstance(receiver, ModuleType):
        names = [base.__module__ for base in type(receiver).__mro__]
        return next((_SYSTEM[name] for name in names if name in _SYSTEM), "")
    return _SYSTEM.get(getattr(function, "__module__", None) or "", "")


def is_import(frame: FrameType | None, user_caller: FrameType) -> bool:
    """True for a call by Python's own code that finds and loads modules."""
    inside = takewhile(lambda caller: caller is not user_caller, frames(frame))
    return any(module_of(caller).startswith(_IMPORTS) for caller in inside)


def opens_to_read(frame: FrameType) -> bool:
    """True for a line that calls `open` with a mode to read, or without one."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    if (named := re.search(r"""\bopen\(.*[,=]\s*["']([rwaxbt+]+)["']""", line)) is not None:
        return not set(named[1]) & set("wax+")
    if re.search(r"\bopen\([^,]*,\s*mode\b", line) is not None:
        return str(frame.f_locals.get("mode")).strip("bt") == "r"
    return re.search(r"\bopen\([^,]*(\)|,\s*encoding\b)", line) is not None


def name_of_file(file: Any, method: str) -> str:
    """The public name of a file's method."""
    if file is sys.stdout or file is sys.stderr:
        return f"sys.{'stdout' if file is sys.stdout else 'stderr'}.{method}"
    return f"file.{method}"
