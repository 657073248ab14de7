"""All ops that torch has samples for, under the modes of a capture and without: torch asks for modes.

On a GPU alone: on a CPU torch asks at other places, and reads on the host at others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map

from lightning_cudagraph import CaptureError
from lightning_cudagraph.device.cuda.cuda_backend import CudaBackend
from lightning_cudagraph.device.refusals import hidden_reads
from lightning_cudagraph.device.sentry import sentry
from lightning_cudagraph.device.sentry.op_rewrites import Constants, HostMemory
from tests.checked import samples_of_ops

pytestmark = pytest.mark.filterwarnings("ignore")  # of a thousand samples, not one of them ours

_SAMPLES = 4
_SYNCHRONIZES = "called a synchronizing CUDA operation"

Call = Callable[[], list[Tensor | None]]


@pytest.fixture
def backend() -> CudaBackend:
    return CudaBackend(torch.device("cuda", 0))


@pytest.fixture(autouse=True)
def _switches() -> Iterator[None]:
    """Ops are the same each time, also in memory that nobody has written; and waits are no errors."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.cuda.set_sync_debug_mode("default")


def _calls(dtype: torch.dtype | None) -> Iterator[tuple[str, Call]]:
    """Each op with its name, forwards and backwards, under autocast to a dtype."""
    for form, sample, grad in samples_of_ops("cuda", _SAMPLES):

        def call(form: Any = form, sample: Any = sample, grad: bool = grad) -> list[Tensor | None]:
            given = tree_map(_fresh, (sample.input, sample.args, sample.kwargs))
            torch.manual_seed(0)
            with torch.autocast("cuda", dtype, dtype is not None, cache_enabled=False):
                result = form(given[0], *given[1], **given[2])
            found = [leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor)]
            made: list[Tensor | None] = [leaf.detach() for leaf in found]
            reached = [leaf for leaf in found if leaf.requires_grad]
            if grad and reached:
                torch.autograd.backward(reached, [torch.ones_like(leaf) for leaf in reached])
                made += [leaf.grad for leaf in tree_iter(given) if isinstance(leaf, Tensor)]
            return made

        yield getattr(form, "__name__", str(form)), call


def _fresh(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def _same(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    return len(one) == len(other) and all(map(_equal, one, other))


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.layout is not torch.strided:
        return (one is None) is (other is None)
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return bool(torch.equal(one, other) or torch.allclose(one, other, 0, 0, equal_nan=True))


def _tried(call: Call) -> list[Tensor | None] | Exception:
    try:
        return call()
    except Exception as error:  # samples that a device does not take, or that are refused
        return error


def _under(backend: CudaBackend, call: Call) -> Call:
    """A call under the modes of a capture. Their end raises a refusal again that the call caught."""

    def checked() -> list[Tensor | None]:
        with backend.checked():
            return call()

    return checked


def _that_differ(backend: CudaBackend, dtype: torch.dtype | None) -> set[str]:
    """Ops that are the same each time without the modes, and others under them, or end in an error."""
    names: set[str] = set()
    for name, call in _calls(dtype):
        plain, again = _tried(call), _tried(call)
        if isinstance(plain, Exception) or isinstance(again, Exception) or not _same(plain, again):
            continue
        found = _tried(_under(backend, call))
        refused = isinstance(found, CaptureError)
        if not refused and (isinstance(found, Exception) or not _same(plain, found)):
            names.add(name)
    return names


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_ops_compute_as_without_the_modes(backend: CudaBackend, dtype: torch.dtype | None) -> None:
    assert _that_differ(backend, dtype) == set()


def test_without_the_mends_they_are_found(backend: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_reads, "_IN_BACKWARD", {})
    monkeypatch.setattr(sentry, "reaching", lambda *_: contextlib.nullcontext())
    found = _that_differ(backend, torch.bfloat16)
    assert {"prod", "cumprod", "linalg_pinv"} <= found, found


def _waits(call: Call) -> bool:
    """Whether it waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    found = _tried(call)
    torch.cuda.set_sync_debug_mode("default")
    return isinstance(found, Exception) and _SYNCHRONIZES in str(found)


def test_what_waits_for_the_device_waits_under_the_modes_too(backend: CudaBackend) -> None:
    """Or is refused. Where it waits, CUDA ends the capture, with an error."""
    hidden = set()
    for name, call in _calls(None):
        _tried(call)  # what waits the first time alone, waits in warm-up
        with Constants(HostMemory()):  # constants from the host are mended
            waits = _waits(call)
        if not waits:
            continue
        checked = _under(backend, call)
        if not _waits(checked) and not isinstance(_tried(checked), CaptureError):
            hidden.add(name)
    assert hidden == set()
