"""The first error that a new user meets: scripts with one fault each, run as a user runs them.

What the terminal shows is short, and enough to mend the script: what, where, what to do, and the page.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[1]
MAX_LINES = 14  # the traceback with the user's lines, and the message of four

SCRIPT = """
import time

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_cudagraph import CUDAGraphCallback
{imports}

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 4)
        self.calls = 0

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.layer(x), y)
        {fault}
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters())
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
        return [optimizer], [{{"scheduler": schedule, "interval": "step"}}]


data = TensorDataset(torch.randn(64, 16), torch.randint(0, 4, (64,)))
trainer = Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                  enable_progress_bar=False, callbacks=[CUDAGraphCallback()])
trainer.fit(Net(), DataLoader(data, batch_size=8))
"""


@dataclass(frozen=True)
class Fault:
    """A line of a step that no graph can hold, and what the user is told.

    Attributes:
        line: the line.
        what: a part of what was found.
        remedy: a part of the remedy.
        recipe: the page.
        called: a part of the library's line, if it is in a library.
        package: a package that the script needs besides.
    """

    line: str
    what: str
    remedy: str
    recipe: str
    called: str = ""
    package: str = ""


FAULTS = {
    "item": Fault("best = loss.item()", "`.item()`", "Keep the value on the device", "item_and_print"),
    "branch": Fault(
        "loss = loss * 0 if loss > 99 else loss", "branch", "`torch.where`", "item_and_print"
    ),
    "mask": Fault("loss = loss + x[x > 0].mean()", "boolean mask", "`torch.where(mask", "masks"),
    "print": Fault('print("a step")', "a use of `print`", "in `on_train_batch_end`", "item_and_print"),
    "counter": Fault(
        "self.calls += 1", "sets or changes `calls`", "hook that runs on the host", "counters"
    ),
    "skip": Fault("if torch.isnan(loss): return None", "are finite", "Count in a buffer", "nan_checks"),
    "all finite": Fault(
        "loss = loss if torch.isfinite(self.layer(x)).all() else loss * 0",
        "are finite",
        "Count in a buffer",
        "nan_checks",
    ),
    "math": Fault(
        "loss = loss if math.isfinite(loss) else loss * 0",
        "are finite",
        "Count in a buffer",
        "nan_checks",
        package="math",
    ),
    "last batch": Fault(
        "loss = loss * 2 if self.trainer.is_last_batch else loss",
        "a read of `trainer.is_last_batch`",
        "`batch_idx + 1 == self.trainer.num_training_batches`",
        "paths",
    ),
    "distribution": Fault(
        "with contextlib.suppress(ValueError): x = torch.distributions.Normal(x, x.exp()).sample()",
        "branch on a tensor",
        "`validate_args=False`",
        "distributions",
        "torch/distributions/distribution.py",
        package="contextlib",
    ),
    "learning rate": Fault(
        'self.log("lr", self.lr_schedulers().get_last_lr()[0])',
        "a read of `LRScheduler.get_last_lr`",
        "`LearningRateMonitor`",
        "logged_values",
    ),
    "step": Fault(
        'self.log("step", float(self.global_step))',
        "a read of `self.global_step`",
        "Log it in `on_train_batch_start`",
        "logged_values",
    ),
    "clock": Fault(
        'self.log("seconds", time.perf_counter())',
        "a read of `time.perf_counter()`",
        "Read the clock in `on_train_batch_end`",
        "logged_values",
    ),
    "numpy": Fault(
        "loss = loss * np.random.uniform(0.9, 1.1)",
        "draws from `numpy.random`",
        "Draw on the device",
        "host_random",
    ),
    "scipy": Fault(
        "loss = loss * scipy.stats.norm.rvs(loc=1.0, scale=0.1)",
        "draws from `numpy.random`",
        "Draw on the device",
        "host_random",
        package="scipy.stats",
    ),
}


def _stderr(script: Path, **env: str) -> list[str]:
    """The traceback of a script, in lines."""
    done = subprocess.run(
        [sys.executable, script],
        cwd=script.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    return done.stderr[done.stderr.index("Traceback (most recent call last)") :].splitlines()


def _script(tmp_path: Path, fault: Fault) -> tuple[Path, int]:
    text = SCRIPT.format(fault=fault.line, imports=f"import {fault.package}" if fault.package else "")
    path = tmp_path / "train.py"
    path.write_text(text)
    (number,) = [n for n, line in enumerate(text.splitlines(), start=1) if line.strip() == fault.line]
    return path, number


@pytest.mark.long
@pytest.mark.parametrize("name", FAULTS)
def test_what_the_terminal_shows(tmp_path: Path, name: str) -> None:
    fault = FAULTS[name]
    if fault.package:
        pytest.importorskip(fault.package)
    script, number = _script(tmp_path, fault)
    lines = _stderr(script)
    begin = next(n for n, line in enumerate(lines) if line.startswith("lightning_cudagraph.errors."))
    what, where, *rest = lines[begin:]
    assert re.match(r"lightning_cudagraph\.errors\.CaptureError: \S", what)
    assert fault.what in what
    assert where == f"  found at {script}:{number} (`{fault.line}`)"
    if fault.called:
        called, *rest = rest
        assert called.startswith("  which comes to ")
        assert fault.called in called
    remedy, way_out = rest
    assert remedy.startswith("  Remedy: ")
    assert fault.remedy in remedy
    assert remedy.endswith(f" See docs/recipes/{fault.recipe}.md.")
    assert (ROOT / "docs" / "recipes" / f"{fault.recipe}.md").exists()
    assert way_out.startswith("To train on without a graph, pass `CUDAGraphCallback(on_unsupported=")
    # The call of `fit`, its own frame, and the line in the step if it was refused as it ran.
    shown = [line for line in lines[:begin] if line.startswith("  File ")]
    assert sum(str(script) in line for line in shown) == len(shown) - (2 if IS_310 else 1)
    # Without the marks under calls, and all lines of a call, which Python 3.13 shows.
    calls = [line for line in lines[:begin] if line.startswith("  File ")]
    assert 2 * len(calls) + len(lines[begin:]) <= MAX_LINES + IS_310 * 2, "\n".join(lines)


IS_310 = sys.version_info < (3, 11)


@pytest.mark.long
def test_all_frames_on_request(tmp_path: Path) -> None:
    script, number = _script(tmp_path, FAULTS["item"])
    lines = _stderr(script, CUDAGRAPH_TRACEBACK="full")
    assert len([line for line in lines if line.startswith("  File ")]) > 30
    assert f"  found at {script}:{number} (`{FAULTS['item'].line}`)" in lines


DRAWS = (
    "loss = loss * random.uniform(0.9, 1.1)",
    "loss = loss * np.random.uniform(0.9, 1.1)",
    "loss = loss * np.random.normal(1.0, 0.1)",
)


@pytest.mark.long
def test_draws_of_two_generators_have_lines_of_their_own(tmp_path: Path) -> None:
    fault = Fault("\n        ".join(DRAWS), "draws from", "Draw on the device", "host_random")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(fault=fault.line, imports="import random"))
    lines = _stderr(path)
    assert any("It is named in other lines of the file too: " in each for each in lines), lines
    for line in DRAWS[:2]:
        assert any("found at" in each and f"(`{line}`)" in each for each in lines), lines
