"""The first refusal in a step, which stands whatever the step's own code does with the exception.

A step may catch exceptions and go on, or raise others in their place. What was refused has then not
happened, and a graph without it would be another step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lightning_cudagraph.errors import CaptureError

__all__ = ["Noted", "noted_refusals", "refused"]


@dataclass
class Noted:
    """The refusals of a step under way.

    Attributes:
        first: the first of them.
    """

    first: CaptureError | None = None


_under_way: list[Noted] = []


def refused(error: CaptureError) -> CaptureError:
    """Note an error that is about to be raised, for the innermost step under way."""
    if _under_way and _under_way[-1].first is None:
        _under_way[-1].first = error
    return error


@contextmanager
def noted_refusals() -> Iterator[Noted]:
    """Inside, refusals are noted.

    Yields:
        What is noted.

    Raises:
        CaptureError: the first refusal, at the end, if the code inside has caught it.
    """
    noted = Noted()
    _under_way.append(noted)
    try:
        yield noted
    except Exception as error:
        first, noted.first = noted.first, None  # it has the frames of the step, and they have `noted`
        if first is not None and first is not error:
            raise first from error
        raise
    finally:
        _under_way.pop()
    if noted.first is not None:
        raise noted.first
