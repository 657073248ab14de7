"""Getters of settings that are called again before each replay, told by their names and parameters."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType

import pytest

from lightning_cudagraph.checks.audit.calls.settings_read import asked_in_python


def get_setting() -> FrameType:
    return sys._getframe()


def isenabled() -> FrameType:
    return sys._getframe()


def issue_number() -> FrameType:
    return sys._getframe()


def area() -> FrameType:
    return sys._getframe()


def get_item_of(name: str) -> FrameType:
    return sys._getframe()


def are_on(one: int = 1, *, two: object = None) -> FrameType:
    return sys._getframe()


@pytest.mark.parametrize("getter", [get_setting, isenabled, are_on])
def test_getters(getter: Callable[[], FrameType]) -> None:
    asks = asked_in_python(getter())
    assert asks is not None
    assert asks() is None  # a frame is no value


@pytest.mark.parametrize(
    "other", [issue_number, area, partial(get_item_of, "a"), partial(are_on, 2), partial(are_on, two=1)]
)
def test_no_getters(other: Callable[[], FrameType]) -> None:
    assert asked_in_python(other()) is None
