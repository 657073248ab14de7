"""The console command: LightningCLI with this project's defaults, and the doctor."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from argparse import ArgumentError, ArgumentParser
from contextlib import redirect_stdout
from importlib import import_module
from inspect import isfunction
from io import TextIOWrapper
from typing import Any, TextIO

import lightning.pytorch as pl
from lightning.pytorch.cli import ArgsType, LightningCLI
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.imports import RequirementCache

from lightning_cudagraph.compat.attributes import setting
from lightning_cudagraph.device.lines.shown_frames import shows_all_frames
from lightning_cudagraph.device.lines.user_lines import location_of
from lightning_cudagraph.errors import ConfigurationError
from lightning_cudagraph.trainer.callbacks.cuda_graph_callback import CUDAGraphCallback
from lightning_cudagraph.trainer.config.support import callbacks_of

_CLI_REQUIREMENT = RequirementCache("jsonargparse[signatures]>=4.39")
# A module, its data and a trainer.
_Made = tuple[Any, Any, Any]
_DOCTOR = "doctor"
_JSON = "--json"
_PART_OF_CONFIG = (
    "A config names each class by its `class_path`. One that names none goes over one that does, such as"
    " `--config configs/digits.yaml --config configs/digits_cpu.yaml`."
)
_OF_CONFIG = (
    f"Mend them. {_PART_OF_CONFIG} For that of your own `LightningCLI(Model, Data)`, which names none,"
    " give the doctor a function: `lightning-cudagraph doctor my_script:make`. See docs/doctor.md."
)
_NAMES_SHOWN = 8
_BY_MODULE = "Call the doctor where the script is; `my_script:make` is `make` of `my_script.py`."
_EXPECTED = "a `LightningModule`, or a tuple of it, its data and a `Trainer`"
_USAGE = """usage: lightning-cudagraph doctor [--json] --config FILE ...
       lightning-cudagraph doctor [--json] MODULE:FUNCTION

Run a few training steps, and list all that keeps them from being captured. Arguments such as
--config are those of `lightning-cudagraph fit`. A function returns a LightningModule, or a tuple of
it, its dataloader or datamodule, and a Trainer. The exit status is 0 if the step was captured, 1
if not, 2 if it could not be examined, and 130 or 143 if Ctrl-C or a SIGTERM interrupted that."""


def main(args: ArgsType = None) -> None:
    """Run `lightning-cudagraph fit|validate|test|predict|doctor --config some.yaml`.

    Args:
        args: arguments to parse; those of the command line by default.

    Raises:
        ModuleNotFoundError: if `jsonargparse`, which LightningCLI needs, is missing or too old.
        SystemExit: from `doctor`, with status 1 if the step was not captured, 2 if it could not be
            examined: for wrong arguments, no batches, or an exception of the script; 130 or 143 if
            Ctrl-C or a SIGTERM interrupted the examination.
    """
    # A console script starts with its own folder first on the path, not with the user's project.
    sys.path.insert(0, os.getcwd())
    given = sys.argv[1:] if args is None else args
    if isinstance(given, list) and given[:1] == [_DOCTOR]:
        sys.exit(_doctor(given[1:]))
    _require_cli()
    try:
        LightningCLI(
            args=args,
            parser_kwargs={
                "epilog": "`lightning-cudagraph doctor --help`: what keeps a step from being captured."
            },
            seed_everything_default=1,
            # Runs without a logger share a folder, where the second finds the config.yaml of the first.
            save_config_kwargs={"overwrite": True},
        )
    except SystemExit as ended:
        is_of_config = isinstance(given, list) and any(arg.startswith("--config") for arg in given)
        if ended.code == 2 and is_of_config:
            print(f"note: {_PART_OF_CONFIG}", file=sys.stderr)
        raise


def _require_cli() -> None:
    if not _CLI_REQUIREMENT:
        raise ModuleNotFoundError(
            f"The command line needs `{_CLI_REQUIREMENT.requirement}`. "
            f'Install it with: pip install "{_CLI_REQUIREMENT.requirement}"'
        )


def _doctor(args: list[str]) -> int:
    """Check a training step; print what was found, and return the exit status."""
    as_json = _JSON in args
    args = [arg for arg in args if arg != _JSON]
    if not args or args[0] in ("-h", "--help"):
        _show(_USAGE)
        return 0 if args else 2
    if not args[0].startswith("-") and (len(args) > 1 or ":" not in args[0]):
        wrong = "Examined is one function" if len(args) > 1 else f"`{args[0]}` names no function"
        print(f"{_USAGE}\n\n{wrong}: `{args[0].partition(':')[0]}:make`, say.", file=sys.stderr)
        return 2
    remedy = "Make module, data and trainer without the doctor, and mend what is raised there."
    try:
        with redirect_stdout(_as_stdout(sys.stderr)):  # what the steps print is not part of the report
            module, data, trainer = (
                _of_config(args) if args[0].startswith("-") else _of_function(args[0])
            )
            remedy = "Mend it where a `fit` without the callback raises it too; else please report it."
            found = [] if trainer is None else callbacks_of(trainer)
            ours = (callback for callback in found if isinstance(callback, CUDAGraphCallback))
            report = (next(ours, None) or CUDAGraphCallback()).check(module, data, trainer)
    except (KeyboardInterrupt, SIGTERMException) as error:
        print("The examination was interrupted: there is no report.", file=sys.stderr)
        return 128 + (signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
    except (Exception, SystemExit) as error:
        # Python would end with status 1, which says that the step was examined; or with the script's.
        if _is_of_parser(error):
            raise  # it has printed what it was asked for, as by `--print_config`
        location = location_of(error)
        where: object = location
        if isinstance(error, (ArgumentError, _WrongFunction)):
            where = f"the arguments `{' '.join(args)}`"
            remedy = error.remedy if isinstance(error, _WrongFunction) else _OF_CONFIG
        elif isinstance(error, ConfigurationError):
            where = location or f"the arguments `{' '.join(args)}`"
            remedy = "Pass what is expected."
        print("\n".join(_lines_of(error, where, remedy)), file=sys.stderr)
        if shows_all_frames():
            traceback.print_exc()
        return 2
    _show(json.dumps(report.to_dict(), indent=2) if as_json else str(report))
    return 0 if report.is_captured else 1


def _is_of_parser(error: BaseException) -> bool:
    """True for an exit of an argument parser, and not of the script."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return isinstance(error, SystemExit) and frame.f_code is ArgumentParser.exit.__code__


class _AsStdout(TextIOWrapper):
    """A stream of its own that writes to where another does, and leaves that open."""

    def close(self) -> None:
        self.flush()


def _as_stdout(stream: TextIO) -> TextIO:
    """A stream in place of `sys.stdout`: findings tell it from the standard error, as in a fit."""
    if not hasattr(stream, "buffer"):  # that of a notebook
        return stream
    return _AsStdout(
        stream.buffer, stream.encoding, stream.errors, line_buffering=True, write_through=True
    )


def _show(text: str) -> None:
    """Print a text, as much of it as its reader wants: `| head` closes the pipe."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more


class _WrongFunction(Exception):
    """`MODULE:FUNCTION` that is not there, or returns something else than what can be examined."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.remedy = remedy


def _lines_of(error: BaseException, where: object, remedy: str) -> list[str]:
    """An error of the user's code: what, where, and what to do."""
    what = str(error) if isinstance(error, _WrongFunction) else f"{type(error).__name__}: {error}"
    return [
        f"The step could not be examined. {' '.join(what.split())}",
        f"  found at {where or 'no line of yours'}",
        f"  Remedy: {remedy}",
    ]


def _of_config(args: list[str]) -> _Made:
    _require_cli()
    # LightningCLI warns of arguments that are passed to it besides these.
    with setting(sys, argv=[sys.argv[0], *args]):
        cli = LightningCLI(
            run=False,
            save_config_callback=None,
            seed_everything_default=1,
            parser_kwargs={"exit_on_error": False},
        )
    return cli.model, cli.datamodule, cli.trainer


def _of_function(name: str) -> _Made:
    path, _, function = name.partition(":")
    with setting(sys, argv=sys.argv[:1]):  # a LightningCLI of the user warns of others than its own
        made: Any = _find(path, function)()
    parts = made if isinstance(made, tuple) else (made,)
    has_parts = 1 <= len(parts) <= 3
    if not (has_parts and isinstance(parts[0], pl.LightningModule)):
        found = f"`{type(parts[0]).__qualname__}`" if has_parts else f"tuple of {len(parts)}"
        raise _WrongFunction(
            f"`{name}` returned a {found}; expected {_EXPECTED}.",
            f"Let `{function}` return {_EXPECTED}.",
        )
    module, data, trainer = (*parts, None, None)[:3]
    if not isinstance(trainer, (pl.Trainer, type(None))):
        kind = type(trainer)
        raise _WrongFunction(
            f"The third item that `{name}` returned is a `{kind.__module__}.{kind.__qualname__}`;"
            " expected a `lightning.pytorch.Trainer`.",
            f"Let `{function}` return module, data and a `Trainer` with the arguments of the run; or"
            " module and data alone, which are examined with Lightning's default one.",
        )
    return module, data, trainer


def _find(path: str, function: str) -> Any:
    """Import a module, which may be given as a file of the current directory, and find its function."""
    name = (os.path.relpath(path) if os.sep in path else path).removesuffix(".py").replace(os.sep, ".")
    if not name:
        raise _WrongFunction(f"`{path}:{function}` names no module.", _BY_MODULE)
    try:
        # A file outside of it would be a relative import.
        module = None if name.startswith(".") else import_module(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise  # of an import in the script
        module = None
    if module is None:
        raise _WrongFunction(
            f"There is no module `{path if name.startswith('.') else name}` in the current directory,"
            f" `{os.getcwd()}`, nor an installed one.",
            _BY_MODULE,
        )
    found = getattr(module, function, None)
    if callable(found):
        return found
    public = [
        key for key, value in vars(module).items() if isfunction(value) and not key.startswith("_")
    ]
    there = [f"`{key}`" for key in public if vars(module)[key].__module__ == name]
    shown = ", ".join(there[:_NAMES_SHOWN]) + ", ..." * (len(there) > _NAMES_SHOWN)
    raise _WrongFunction(
        f"`{name}` has no function `{function}`, it has {shown or 'no public one'}.",
        f"Name one that returns {_EXPECTED}.",
    )
