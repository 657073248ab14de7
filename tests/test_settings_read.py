"""Getters of settings that are called again before each replay, told by their names and parameters."""

from __future__ import annotations

import sys
from collections.abc import Callable
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


def get_item_of(name: str = "") -> FrameType:
    return sys._getframe()


@pytest.mark.parametrize("getter", [get_setting, isenabled])
def test_getters(getter: Callable[[], FrameType]) -> None:
    asks = asked_in_python(getter())
    assert asks is not None
    assert asks() is None  # a frame is no value


@pytest.mark.parametrize("other", [issue_number, area, get_item_of])
def test_no_getters(other: Callable[[], FrameType]) -> None:
    assert asked_in_python(other()) is None
