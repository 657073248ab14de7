"""The first refusal in a step, raised at its end even if the step's own code catches it.

A step may catch exceptions and go on, or raise others instead. The refused op has then not run, and a
graph without it would be another step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lightning_cudagraph.errors import CaptureError

__all__ = ["FirstRefusal", "first_refusal_kept", "refused"]


@dataclass
class FirstRefusal:
    """The first refusal in the step that is running."""

    first: CaptureError | None = None


_under_way: list[FirstRefusal] = []


def refused(error: CaptureError) -> CaptureError:
    """Record an error that is about to be raised, if it is the innermost step's first."""
    if _under_way and _under_way[-1].first is None:
        _under_way[-1].first = error
    return error


@contextmanager
def first_refusal_kept() -> Iterator[FirstRefusal]:
    """Record refusals inside the `with` block.

    Raises:
        CaptureError: the first refusal, at the end, if the code inside has caught it.
    """
    noted = FirstRefusal()
    _under_way.append(noted)
    try:
        yield noted
    except Exception as error:
        first, noted.first = noted.first, None  # its traceback refers to frames that refer to `noted`
        if first is not None and first is not error:
            raise first from error
        raise
    finally:
        _under_way.pop()
    if noted.first is not None:
        raise noted.first
