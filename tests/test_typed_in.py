"""Steps whose code has no file: typed into a prompt or a notebook, on the standard input, run by `exec`.

They are looked at and guarded as all others are. `tests/gpu/test_typed_in.py` runs the same on CUDA.
"""

from __future__ import annotations

import io
import linecache
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_cudagraph import CaptureError, CUDAGraphCallback, GraphedStep, UnsupportedError
from tests.harness import Net, assert_same, make, train
from tests.loops import device_of

SOURCE = """
from dataclasses import dataclass

import torch
from tests.harness import Net


class Scale:
    value = 1.0


scale = Scale()


class ReadsTheEpoch(Net):
    def training_step(self, batch, batch_idx):
        loss = super(ReadsTheEpoch, self).training_step(batch, batch_idx)
        return {"loss": loss["loss"] * (1.0 + 0.1 * self.trainer.current_epoch)}


class ReadsAGlobal(Net):
    def on_train_epoch_start(self):
        scale.value = 1.0 + 0.1 * self.current_epoch

    def training_step(self, batch, batch_idx):
        loss = super(ReadsAGlobal, self).training_step(batch, batch_idx)
        return {"loss": loss["loss"] * scale.value}


class ReadsInValidation(Net):
    def validation_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self(x), y)
        self.log("val_loss", loss * (1.0 + 0.1 * self.current_epoch))


class Prints(Net):
    def training_step(self, batch, batch_idx):
        print("a step")
        return super(Prints, self).training_step(batch, batch_idx)


class Counts(Net):
    n = 0

    def training_step(self, batch, batch_idx):
        self.n += 1
        return super(Counts, self).training_step(batch, batch_idx)


@dataclass
class Held:
    value: torch.Tensor


class Compares(Net):
    def training_step(self, batch, batch_idx):
        assert Held(batch[0].sum()) == Held(batch[0].sum())
        return super(Compares, self).training_step(batch, batch_idx)
"""
# What the code is called, and the module that it says it is.
CALLED = {"<stdin>": "__main__", "<string>": "of_nobody", "<ipython-input-3-abc>": "__main__"}


@pytest.fixture(params=CALLED)
def file(request: pytest.FixtureRequest) -> Iterator[str]:
    linecache.cache[request.param] = (len(SOURCE), None, SOURCE.splitlines(True), request.param)
    yield str(request.param)
    del linecache.cache[request.param]


@pytest.fixture
def names(file: str) -> dict[str, Any]:
    """What the source defines, run as code that is called so."""
    names: dict[str, Any] = {"__name__": CALLED[file]}
    exec(compile(SOURCE, file, "exec"), names)
    return names


@pytest.mark.spread(2)
@pytest.mark.parametrize("name", ["ReadsTheEpoch", "ReadsAGlobal"])
def test_what_the_step_reads_is_watched(
    tmp_path: Path, accelerator: str, names: dict[str, Any], name: str
) -> None:
    plain = train(make(names[name]), tmp_path / "plain", accelerator=accelerator)
    callback = CUDAGraphCallback(timings=None)
    graph = train(make(names[name]), tmp_path / "graph", callback, accelerator=accelerator)
    assert_same(plain, graph)
    assert graph.counts.captures > 1, graph.counts


@pytest.mark.spread
def test_what_validation_reads_is_watched(
    tmp_path: Path, accelerator: str, names: dict[str, Any]
) -> None:
    plain = train(make(names["ReadsInValidation"]), tmp_path / "plain", accelerator=accelerator)
    callback = CUDAGraphCallback(timings=None, evaluation=True)
    module = make(names["ReadsInValidation"])
    assert_same(plain, train(module, tmp_path / "graph", callback, accelerator=accelerator))


@pytest.mark.spread
@pytest.mark.parametrize(("name", "found"), [("Prints", "`print`"), ("Counts", "`n`")])
def test_what_a_replay_would_not_repeat_is_named(
    tmp_path: Path, accelerator: str, names: dict[str, Any], file: str, name: str, found: str
) -> None:
    with pytest.raises(CaptureError, match=f"(?s){found}.*") as refused:
        train(make(names[name]), tmp_path, CUDAGraphCallback(), accelerator=accelerator)
    line = {"Prints": 'print("a step")', "Counts": "self.n += 1"}[name]
    assert re.search(rf" {re.escape(file)}:\d+ \(`{re.escape(line)}`\)", str(refused.value))


@pytest.mark.parametrize("file", ["<ipython-input-3-abc>"], indirect=True)
def test_the_line_that_calls_generated_code_is_named(
    tmp_path: Path, accelerator: str, names: dict[str, Any], file: str
) -> None:
    module = make(names["Compares"])
    with pytest.raises(CaptureError) as refused:
        train(module, tmp_path, CUDAGraphCallback(), accelerator=accelerator)
    location = refused.value.location
    assert location is not None
    assert (location.path, location.source) == (
        file,
        "assert Held(batch[0].sum()) == Held(batch[0].sum())",
    )


@dataclass
class Token:
    text: str


class WritesThroughAMethod(Net):
    """Code of a dataclass sets an attribute of the same name as the one with the effect."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.text = io.StringIO()
        self.put = self.text.write

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.put(Token("a step").text)
        return super().training_step(batch, batch_idx)


def test_generated_code_is_no_line_of_an_effect(tmp_path: Path, accelerator: str) -> None:
    with pytest.raises(CaptureError, match="`text`") as refused:
        train(make(WritesThroughAMethod), tmp_path, CUDAGraphCallback(), accelerator=accelerator)
    location = refused.value.location
    assert location is not None
    assert location.path == os.path.abspath(__file__)


def test_code_without_a_name_is_refused(tmp_path: Path, accelerator: str) -> None:
    names: dict[str, Any] = {}
    exec(SOURCE, names)
    module = make(names["ReadsTheEpoch"])
    with pytest.raises(UnsupportedError, match=r"(?s)The class `ReadsTheEpoch` .* without a name"):
        train(module, tmp_path, CUDAGraphCallback(), accelerator=accelerator)
    exec("def step(x):\n    return x * 2", names)
    with pytest.raises(UnsupportedError, match=r"(?s)The function `step` .* without a name"):
        GraphedStep(names["step"])(torch.ones(3, device=device_of(accelerator)))


SCRIPT = """
import warnings

import lightning.pytorch as pl
import torch

from lightning_cudagraph import CUDAGraphCallback


class Weighted(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        weight = 1.0 if self.current_epoch < 2 else 0.01
        return self.layer(batch).square().mean() * weight

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02)


warnings.simplefilter("ignore")
quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
batches = torch.utils.data.DataLoader(torch.randn(40, 4), batch_size=4)
weights = []
for callbacks in ([], [callback := CUDAGraphCallback()]):
    torch.manual_seed(0)
    module = Weighted()
    trainer = pl.Trainer(
        accelerator=ACCELERATOR, max_epochs=4, enable_checkpointing=False, callbacks=callbacks, **quiet
    )
    trainer.fit(module, batches)
    weights.append(module.layer.weight.tolist())
assert weights[0] == weights[1], weights
assert callback.summary.fit.captures > 1, callback.summary
"""


@pytest.mark.long
@pytest.mark.parametrize("way", ["-", "-c"])
def test_a_script_on_the_standard_input(accelerator: str, way: str) -> None:
    script = SCRIPT.replace("ACCELERATOR", repr(accelerator))
    command = [sys.executable, way] if way == "-" else [sys.executable, way, script]
    root = str(Path(__file__).parents[1])
    paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    run = subprocess.run(
        command,
        input=script if way == "-" else None,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        timeout=240,
    )
    assert run.returncode == 0, run.stderr[-3000:]
