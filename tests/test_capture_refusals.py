"""What is made of errors that CUDA raises because a capture is under way."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import graph
from torch.nn.parallel import distributed

from lightning_cudagraph import CaptureError
from lightning_cudagraph.device.cuda.capture_errors import meaning_of

# As torch 2.11 said them on an H200.
_NOT_PERMITTED = "CUDA error: operation not permitted when stream is capturing\nSearch for it."
_LEGACY = "CUDA error: operation would make the legacy stream depend on a capturing blocking stream"


def _raised(said: str, raiser: Callable[[str], None]) -> BaseException:
    try:
        raiser(said)
    except RuntimeError as error:
        return meaning_of(error)
    raise AssertionError


def _here(said: str) -> None:
    raise RuntimeError(said)


def _in_file_of(module: Any, line: str, inner: Any = None) -> Callable[[str], None]:
    """A function with one line, which tracebacks place in the file of a module."""
    names: dict[str, Any] = {"inner": inner}
    exec(compile(f"def forward(said):\n    {line}", module.__file__, "exec"), names)
    function: Callable[[str], None] = names["forward"]
    return function


def _in_a_wrapper(said: str) -> None:
    """As `DistributedDataParallel.forward`, as far as a traceback shows it."""
    _in_file_of(distributed, "raise RuntimeError(said)")(said)


def _in_the_wrapped_module(said: str) -> None:
    _in_file_of(distributed, "inner(said)", _here)(said)


def _in_a_backward_pass(said: str) -> None:
    _in_file_of(graph, "raise RuntimeError(said)")(said)


_LINE = r"capture the training step: CUDA error: .*: found at .*refusals\.py:\d+ \(.*\)\.$"
_MADE = r"where .*`DistributedDataParallel`, was made: CUDA"


@pytest.mark.parametrize(
    ("said", "raiser", "reason", "remedy"),
    [
        (
            _NOT_PERMITTED,
            _here,
            r" capturing: found at .*refusals\.py:\d+ \(`raise ",
            "constants",
        ),
        (_NOT_PERMITTED, _in_a_wrapper, "inside of a `DistributedDataParallel`: CUDA", "modules="),
        (_NOT_PERMITTED, _in_the_wrapped_module, _LINE, "constants"),
        (_LEGACY, _in_a_backward_pass, _MADE, "stream("),
        (_LEGACY, _here, _LINE, "constants"),
    ],
    ids=["anywhere", "in a wrapper", "in a module in it", "in a backward pass", "not in one"],
)
def test_errors_of_captures(said: str, raiser: Callable[[str], None], reason: str, remedy: str) -> None:
    error = _raised(said, raiser)
    assert isinstance(error, CaptureError)
    assert re.search(reason, error.reason), error.reason
    assert remedy in error.remedy


def test_memory_that_ran_out_without_a_word() -> None:
    assert "ran out of memory: no details" in str(meaning_of(torch.OutOfMemoryError("")))


def test_other_errors_are_left_as_they_are() -> None:
    error = _raised("shapes do not fit", _here)
    assert type(error) is RuntimeError
    own = CaptureError("what a capture cannot hold", "remedy")
    assert meaning_of(own) is own
