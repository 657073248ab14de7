"""What is made of errors that CUDA raises because a capture is under way."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from torch.nn.parallel import distributed

from lightning_cudagraph import CaptureError
from lightning_cudagraph.capture.refusals import meaning_of

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


def _in_a_wrapper(said: str) -> None:
    """As `DistributedDataParallel.forward`, as far as a traceback shows it."""
    names: dict[str, Callable[[str], None]] = {}
    source = "def forward(said):\n    raise RuntimeError(said)"
    exec(compile(source, distributed.__file__, "exec"), names)
    names["forward"](said)


@pytest.mark.parametrize(
    ("said", "raiser", "reason", "remedy"),
    [
        (
            _NOT_PERMITTED,
            _here,
            r"at .*refusals\.py:\d+ \(.*\): CUDA error: .* capturing\.$",
            "constants",
        ),
        (_NOT_PERMITTED, _in_a_wrapper, r"inside of a `DistributedDataParallel`: CUDA", "modules="),
        (
            _LEGACY,
            _here,
            r"the default stream, where .*`DistributedDataParallel`, was made: CUDA",
            "stream(",
        ),
    ],
    ids=["anywhere", "in a wrapper", "the default stream"],
)
def test_errors_of_captures(said: str, raiser: Callable[[str], None], reason: str, remedy: str) -> None:
    error = _raised(said, raiser)
    assert isinstance(error, CaptureError)
    assert re.search(reason, error.reason), error.reason
    assert remedy in error.remedy


def test_other_errors_are_left_as_they_are() -> None:
    error = _raised("shapes do not fit", _here)
    assert type(error) is RuntimeError
    own = CaptureError("what a capture cannot hold", "remedy")
    assert meaning_of(own) is own
