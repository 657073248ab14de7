"""The family of errors: one base class, all exported, all on one page."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import lightning_cudagraph
from lightning_cudagraph import errors
from lightning_cudagraph.device.streams.branches import SentBackError
from lightning_cudagraph.graphed_step.gradients import MixedWarmUpError
from lightning_cudagraph.tensors.host_values import in_words

PAGE = Path(__file__).parents[1] / "docs" / "errors.md"
# Sent from a capture on several streams to the one on one stream that follows it: no user meets it.
INTERNAL = {SentBackError, MixedWarmUpError}

EXPORTED = {name for name in errors.__all__ if name.endswith("Error")}  # beside the words of messages


def _raised_by_the_package() -> set[type[BaseException]]:
    """The classes of exceptions that are defined anywhere in the package, without private ones."""
    package = lightning_cudagraph.__name__
    names = [found.name for found in pkgutil.walk_packages(lightning_cudagraph.__path__, f"{package}.")]
    return {
        cls
        for name in names
        for cls in vars(importlib.import_module(name)).values()
        if inspect.isclass(cls)
        and issubclass(cls, BaseException)
        and cls.__module__.partition(".")[0] == package
        and not cls.__name__.startswith("_")
    }


def test_all_that_a_user_can_meet_are_of_one_family_and_exported() -> None:
    found = _raised_by_the_package()
    assert found >= INTERNAL
    family = found - INTERNAL
    assert len(family) >= 10
    assert [cls for cls in family if not issubclass(cls, errors.CUDAGraphError)] == []
    assert [cls for cls in family if getattr(lightning_cudagraph, cls.__name__, None) is not cls] == []
    assert {cls.__name__ for cls in family} == EXPORTED


def test_the_page_lists_each_with_what_it_is_derived_from() -> None:
    rows = dict(re.findall(r"^\| `(\w+Error)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE))
    assert {*rows} == EXPORTED
    for name, text in rows.items():
        base = getattr(errors, name).__bases__[0]
        if base not in (errors.CUDAGraphError, RuntimeError):
            assert f"`{base.__name__}`" in text, name


def test_no_message_has_an_address_of_memory() -> None:
    shown = repr(object())
    assert " at 0x" in shown
    error = errors.CaptureError(f"The step holds {shown}.", f"Leave {shown} out.")
    error.add_findings([], f"ValueError: {shown}")
    assert "0x" not in str(error)
    assert "The step holds <object object>." in str(error)
    assert in_words(f"TypeError: {shown} is no number") == "TypeError: <object object> is no number"
