"""The frames and the warnings that a user sees of a step: the user's own."""

from __future__ import annotations

import copy
import importlib.util
import math
import traceback
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_cudagraph import CaptureError, CUDAGraphCallback, GraphedStep
from lightning_cudagraph.device.refusals.host_reads import of_library
from lightning_cudagraph.errors import Location
from tests.harness import Net, make, train
from tests.loops import device_of

HERE = str(Path(__file__))


class Reads(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        return loss * (1 if loss > 0 else 2)


class Raises(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 2:
            raise ValueError("the user's own")
        return super().training_step(batch, batch_idx)


def _files(trace: TracebackType | None) -> list[str]:
    return [frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace)]


def _of_packages(files: list[str]) -> list[str]:
    return [file for file in files if "-packages" in file or "lightning_cudagraph/" in file]


def test_a_fit_shows_the_line_in_the_step(tmp_path: Path, accelerator: str) -> None:
    with pytest.raises(CaptureError) as caught:
        train(make(Reads), tmp_path, CUDAGraphCallback(), accelerator=accelerator)
    files = _files(caught.value.__traceback__)
    assert len(_of_packages(files)) <= 2  # `fit`, and before Python 3.11 what it calls
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.filename, last.line) == (HERE, "return loss * (1 if loss > 0 else 2)")


def test_all_frames_on_request(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDAGRAPH_TRACEBACK", "full")
    with pytest.raises(CaptureError) as caught:
        train(make(Reads), tmp_path, CUDAGraphCallback(), accelerator=accelerator)
    assert len(_of_packages(_files(caught.value.__traceback__))) > 20


def test_errors_of_the_users_code_keep_their_frames(tmp_path: Path, accelerator: str) -> None:
    with pytest.raises(ValueError, match="the user's own") as caught:
        train(make(Raises), tmp_path, CUDAGraphCallback(), accelerator=accelerator)
    assert len(_of_packages(_files(caught.value.__traceback__))) > 10


def test_other_callbacks_see_the_error(tmp_path: Path, accelerator: str) -> None:
    seen: list[BaseException] = []

    class Sees(Callback):
        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            seen.append(exception)

    with pytest.raises(CaptureError) as caught:
        train(make(Reads), tmp_path, CUDAGraphCallback(), callbacks=(Sees(),), accelerator=accelerator)
    assert seen == [caught.value]


def test_a_call_of_a_step_shows_its_line_and_what_it_raised(accelerator: str) -> None:
    device = "cuda" if accelerator == "gpu" else "cpu"
    model = nn.Linear(6, 2).to(device)

    def step(x: Tensor) -> Tensor:
        try:
            return model(x) * model(x).sum().item()
        except CaptureError as error:
            raise KeyError("hides it") from error

    batches = torch.randn(8, 4, 6, device=device)
    with GraphedStep(step, model, warmup_steps=1) as graph, pytest.raises(CaptureError) as caught:
        [*map(graph, batches)]
    assert len(_of_packages(_files(caught.value.__traceback__))) <= 2
    cause = caught.value.__cause__
    assert isinstance(cause, KeyError)
    assert _of_packages(_files(cause.__traceback__)) in ([], _files(cause.__traceback__)[:1])


class Warns(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        wide = nn.functional.mse_loss(batch[0][:, :1], batch[0][:, 0])  # WARNS
        return loss + 0 * wide


def test_a_warning_comes_once_at_the_users_line(tmp_path: Path, accelerator: str) -> None:
    shown = warnings.showwarning
    counts = []
    for callback in (None, CUDAGraphCallback()):
        globals().pop("__warningregistry__", None)
        with warnings.catch_warnings(record=True) as caught:
            warnings.filterwarnings("default", message="Using a target size")
            folder = tmp_path / str(len(counts))
            train(make(Warns), folder, callback, accelerator=accelerator)
        found = [one for one in caught if "Using a target size" in str(one.message)]
        lines = Path(HERE).read_text().splitlines()
        assert {one.filename for one in found} == {HERE}
        assert all(lines[one.lineno - 1].endswith("# WARNS") for one in found)
        counts.append(len(found))
    plain, graphed = counts
    assert plain == graphed
    assert warnings.showwarning is shown


@pytest.mark.parametrize(
    ("file", "function", "said"),
    [
        ("torch/distributions/distribution.py", "__init__", "`validate_args=False`"),
        ("torch/distributions/von_mises.py", "_rejection_sample", "Write it out in tensors"),
        ("transformers/masking_utils.py", "_ignore_causal_mask_sdpa", "Leave `attention_mask` out"),
        ("transformers/models/bert/modeling_bert.py", "forward", "in the dataset"),
        (
            "torchvision/transforms/v2/_container.py",
            "forward",
            "in `on_after_batch_transfer`, which runs",
        ),
    ],
)
def test_remedies_of_libraries(file: str, function: str, said: str) -> None:
    library = Location(f"{Path(torch.__file__).parents[1]}/{file}", 1, "", function=function)
    for where in (library, Location("/home/train.py", 3, "", called=library)):
        assert said in of_library(where, "as before")


def _caught(read: Callable[[Tensor], object]) -> Callable[[Tensor], object]:
    """Without the `try`, a check that raises is captured."""

    def caught(x: Tensor) -> object:
        try:
            return read(x)
        except (AssertionError, ValueError):
            return None

    return caught


def _plain_check(x: Tensor) -> None:
    assert torch.all(x < 99), "too large"


def _branch(x: Tensor) -> Tensor:
    return x if x.sum() < 99 else -x


def _checks_with_math(x: Tensor) -> object:
    return None if math.isfinite(x.sum()) else x


def _checks_with_numpy(x: Tensor) -> object:
    return None if np.isnan(np.asarray(x)).any() else x


READS: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "math.isfinite": (_checks_with_math, "Count in a buffer"),
    "np.isnan": (_checks_with_numpy, "Count in a buffer"),
    "a deep copy": (lambda x: copy.deepcopy(x), "Use `clone`"),
    "math": (lambda x: math.exp(x.sum()), "Keep the value on the device"),
    "a branch": (_branch, "Compute both, and choose with `torch.where"),
    "an assertion": (_caught(_plain_check), "Raise the error in a branch on the value"),
    "torch": (
        _caught(lambda x: F.gaussian_nll_loss(x, x, x.exp())),
        "`gaussian_nll_loss` of torch reads",
    ),
    "a module of torch": (
        _caught(lambda x: nn.GaussianNLLLoss()(x, x, x.exp())),
        "`gaussian_nll_loss` of torch",
    ),
    "a check of torch": (
        _caught(lambda x: torch.distributions.Poisson(x.exp(), validate_args=True)),
        "Pass `validate_args=False`",
    ),
}


@pytest.mark.parametrize("name", READS)
def test_remedies_by_who_reads(accelerator: str, name: str) -> None:
    read, said = READS[name]
    step = GraphedStep(read, nn.Linear(1, 1), warmup_steps=1)
    x = torch.ones(4, device=device_of(accelerator))
    with step, pytest.raises(CaptureError) as caught:
        deque(map(step, [x, x, x]))
    assert caught.value.remedy.startswith(said)
    # And no more for what it comes to, but for the two checks of a distribution.
    assert len(caught.value.findings) == (2 if name == "a check of torch" else 1)
    assert caught.value.location is not None
    assert caught.value.location.path == HERE


LIBRARY = """
import numpy as np
import torch


class Counts:
    calls = 0

    def __call__(self, x):
        self.calls += 1
        return x * self.calls


class Owns:
    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __call__(self, x):
        return x * float(self.rng.uniform(0.5, 1.5))


class Draws:
    def __call__(self, x):
        return x * np.random.uniform(0.5, 1.5)


class Asks:
    def __call__(self, x):
        keep = x > -99
        keep = None if torch.all(keep) else keep
        return x if keep is None else torch.where(keep, x, 0)
"""
_BETWEEN = "If the call needs the batch alone, as an augmentation does, make it before you call the step"
OF_LIBRARY = {
    "Counts": ("self.calls += 1", _BETWEEN),
    "Owns": ("return x * float(self.rng.uniform(0.5, 1.5))", _BETWEEN),
    "Draws": ("return x * np.random.uniform(0.5, 1.5)", _BETWEEN),
    "Asks": ("keep = None if torch.all(keep) else keep", "Else override its `__call__` in a subclass"),
}


@pytest.mark.parametrize("name", OF_LIBRARY)
def test_what_a_library_does_has_its_line_and_a_remedy_from_outside(
    tmp_path: Path, accelerator: str, name: str
) -> None:
    line, said = OF_LIBRARY[name]
    path = tmp_path / "site-packages" / "its_library.py"
    path.parent.mkdir()
    path.write_text(LIBRARY)
    spec = importlib.util.spec_from_file_location("its_library", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    library = getattr(module, name)()
    x = torch.ones(4, device=device_of(accelerator))

    def step(x: Tensor) -> Tensor:
        return library(x) + 1  # type: ignore[no-any-return]

    with GraphedStep(step, nn.Linear(1, 1)) as graphed, pytest.raises(CaptureError) as caught:
        deque(map(graphed, [x] * 5))
    where = caught.value.location
    assert where is not None
    assert where.called is not None
    assert (where.path, where.called.path, where.called.source) == (HERE, str(path), line)
    assert said in caught.value.remedy
