"""The doctor: all that keeps a step from being captured is found in one run, each with its line."""

from __future__ import annotations

import inspect
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from io import StringIO
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from examples.gan import GAN, circle
from lightning_cudagraph import CaptureError, ConfigurationError, CUDAGraphCallback, GraphedStep
from lightning_cudagraph.trainer.command import main
from tests.harness import Net, differences, loader, make, train
from tests.test_examples import bert, char_gpt, digits, dlrm, image_classifier, ppo

HERE = Path(__file__)


class Planted(Net):
    """Habits of training steps that no graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.losses: list[Tensor] = []
        self.weight = 1.0
        self.generator = np.random.default_rng(0)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.weight = 1.0 / (1 + batch_idx)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        losses = nn.functional.cross_entropy(self(x), y, reduction="none")
        highest = losses.max().item()  # FIND item
        kept = losses[losses < 1e9]  # FIND mask
        loss = kept.mean()
        print(loss)  # FIND print
        if loss > 1e9:  # FIND branch
            loss = loss * 0
        noise = self.generator.random()  # FIND numpy
        factor = random.random()  # FIND random
        self.calls += 1  # FIND counter
        self.losses.append(loss.detach())  # FIND list
        loss = loss * self.weight  # FIND moving number
        loss = loss * (1 + batch_idx)  # FIND batch_idx
        loss = loss * (1 + self.global_step)  # FIND global_step
        parts = torch.tensor([loss.detach(), losses.detach().sum()])  # FIND list of tensors
        wrong = (losses > 9).nonzero()  # FIND nonzero
        self.log("seconds", time.time())  # FIND clock
        total = float(losses.detach().sum())  # FIND float
        loss = loss * (1 + 0.1 * noise + 0.1 * factor)
        return loss + 0 * (highest + len(parts) + len(wrong) + total)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        explodes = self.head.weight.grad.norm().item() > 1e9  # FIND hook
        if explodes:
            raise ValueError("the gradient explodes")


# Parts of the remedies, by what is planted.
HAND_OVER = "written with `copy_` or `fill_`"
AS_NUMBER = (
    "of float64: use it as it is beside tensors with dimensions, and `number.to(loss.dtype) * loss` only"
    " where it meets a loss, which has none"
)
DRAW = f"or in `on_train_batch_start` into a registered buffer ({AS_NUMBER})"
REMEDIES = {
    "item": "use the tensor itself, to compute (`.detach()` of it)",
    "mask": "`torch.where(mask, x, 0)`",
    "print": "Do it in `on_train_batch_end`",
    "branch": "`torch.where(condition, a, b)`",
    "numpy": DRAW,
    "random": DRAW,
    "counter": "Do it in a hook that runs on the host at every step, such as `on_train_batch_start`",
    "list": "return it, and take it from the outputs in `on_train_batch_end`",
    "moving number": f"{HAND_OVER} in a hook that runs on the host",
    "batch_idx": f"{HAND_OVER} ({AS_NUMBER})",
    "global_step": f"{HAND_OVER} ({AS_NUMBER})",
    "list of tensors": "Use `torch.stack`",
    "nonzero": "Use a form with a fixed size",
    "clock": "Read the clock in `on_train_batch_end`, which runs on the host after every step, and log",
    "float": "use the tensor itself, to compute (`.detach()` of it)",
    "hook": "count in a buffer how often it fails",
}


class Mended(Net):
    """The same with the remedy of each finding applied: it trains to the same bits."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.losses: list[Tensor] = []
        self.generator = np.random.default_rng(0)
        for name in ("weight", "batch_factor", "step_factor", "noise", "factor"):
            self.register_buffer(name, torch.ones((), dtype=torch.float64))
        self.register_buffer("exploded", torch.tensor(0))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.calls += 1  # MENDED counter
        self.weight.fill_(1.0 / (1 + batch_idx))  # MENDED moving number
        self.batch_factor.fill_(1 + batch_idx)  # MENDED batch_idx
        self.step_factor.fill_(1 + self.global_step)  # MENDED global_step
        self.noise.fill_(self.generator.random())  # MENDED numpy
        self.factor.fill_(random.random())  # MENDED random

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        losses = nn.functional.cross_entropy(self(x), y, reduction="none")
        highest = losses.detach().max()  # MENDED item
        kept = torch.where(losses < 1e9, losses, 0)  # MENDED mask
        loss = kept.mean()
        seen = loss.detach()
        loss = torch.where(loss > 1e9, loss * 0, loss)  # MENDED branch
        for number in (self.weight, self.batch_factor, self.step_factor):
            loss = loss * number.to(loss.dtype)
        parts = torch.stack([loss.detach(), losses.detach().sum()])  # MENDED list of tensors
        wrong = torch.where(losses > 9, 1, 0)  # MENDED nonzero
        total = losses.detach().sum()  # MENDED float
        loss = loss * (1 + 0.1 * self.noise + 0.1 * self.factor).to(loss.dtype)
        loss = loss + 0 * (highest + len(parts) + wrong.sum() + total)
        return {"loss": loss, "seen": seen}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.exploded += self.head.weight.grad.norm() > 1e9  # MENDED hook

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        print(outputs["seen"])  # MENDED print
        self.losses.append(outputs["seen"])  # MENDED list
        self.log("seconds", time.time())  # MENDED clock

    def on_train_epoch_end(self) -> None:
        if self.exploded:
            raise ValueError("the gradient explodes")


def _planted(mark: str = "FIND") -> dict[int, str]:
    lines = enumerate(HERE.read_text().splitlines(), start=1)
    marks = [(number, re.search(rf"  # {mark} ([a-z_ ]+)$", line)) for number, line in lines]
    return {number: mark[1] for number, mark in marks if mark is not None}


def _trainer(accelerator: str, **kwargs: Any) -> Trainer:
    return Trainer(accelerator=accelerator, devices=1, **{"logger": False, **kwargs})


def test_all_that_is_planted_is_found_in_one_run(accelerator: str) -> None:
    module = make(Planted)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    random_state, torch_state = random.getstate(), torch.get_rng_state()
    report = CUDAGraphCallback().check(module, loader(), _trainer(accelerator))
    lines = {finding.location.line for finding in report.findings if finding.location}
    planted = _planted()
    assert len(planted) == 16
    assert {planted[line] for line in planted if line not in lines} == set()
    assert {line for line in lines if line not in planted} == set()
    for finding in report.findings:
        assert finding.location is not None, finding
        assert finding.location.path == str(HERE)
        assert finding.location.source in HERE.read_text()
        assert REMEDIES[planted[finding.location.line]] in finding.remedy
        assert finding.in_optimizer == (planted[finding.location.line] == "hook")
    assert len(report.findings) == 16
    assert not report.is_captured
    # Nothing of it remains.
    assert not differences(before, dict(module.state_dict()))
    assert (module.calls, module.losses, module.weight) == (0, [], 1.0)
    assert random.getstate() == random_state
    assert torch.equal(torch.get_rng_state(), torch_state)


def test_remedies_work_when_they_are_applied(tmp_path: Path, accelerator: str) -> None:
    assert sorted(_planted().values()) == sorted(_planted("MENDED").values()) == sorted(REMEDIES)
    report = CUDAGraphCallback().check(make(Mended), loader(), _trainer(accelerator))
    assert report.findings == ()
    assert report.is_captured
    plain = train(make(Mended), tmp_path / "plain", accelerator=accelerator)
    graph = train(make(Mended), tmp_path / "graph", CUDAGraphCallback(), accelerator=accelerator)
    assert graph.counts.captures == 1
    assert graph.counts.replayed == 18
    for trace in (plain, graph):
        assert isinstance(trace.module, Mended)
        assert trace.module.calls == len(trace.module.losses) == 24
    ours, theirs = ((trace.module.state_dict(), trace.module.losses) for trace in (graph, plain))
    assert not differences([*theirs], [*ours])
    planted = train(make(Planted), tmp_path / "planted", accelerator=accelerator)
    weights, others = (dict(trace.module.named_parameters()) for trace in (planted, graph))  # type: ignore[union-attr]
    assert not differences(weights, others)


class Three(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("mean", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        self.mean.mul_(0.5).add_(loss.detach())
        self.calls += 1
        seen = loss.item()
        return loss * (1 + random.random() + 0 * seen)


class Kept(Net):
    """The same without what stops a capture."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        self.mean.mul_(0.5).add_(loss.detach())
        return loss


def test_the_error_of_a_fit_names_them_all_and_leaves_the_step_undone(
    tmp_path: Path, accelerator: str
) -> None:
    module = make(Three)
    with pytest.raises(CaptureError) as caught:
        train(module, tmp_path / "a", CUDAGraphCallback(), accelerator=accelerator)
    found = [finding.what for finding in caught.value.findings]
    assert len(found) == 3
    assert found[0] == caught.value.what
    text = str(caught.value)
    assert all(text.count(what) == 1 for what in found)
    assert all(finding.remedy in text for finding in caught.value.findings)
    # The three steps of the warm-up happened, and nothing else.
    assert module.calls == 3
    steps = []

    class Plain(Three):
        def on_train_batch_end(self, *args: Any) -> None:
            steps.append({name: value.cpu().clone() for name, value in self.state_dict().items()})

    train(make(Plain), tmp_path / "b", accelerator=accelerator)
    left = {name: value.cpu() for name, value in module.state_dict().items()}
    assert not differences(steps[2], left)


def test_what_stops_nothing_is_no_finding(accelerator: str) -> None:
    batch = next(iter(loader()))
    for batches in (loader(), batch):
        report = CUDAGraphCallback().check(make(Kept), batches, _trainer(accelerator))
        assert report.is_captured
        assert report.findings == ()
        assert report.replayed_steps > 4
        assert "captured" in str(report)


def test_arguments_of_the_callback_hold(accelerator: str) -> None:
    callback = CUDAGraphCallback(harmless=["calls", "random"])
    report = callback.check(make(Three), loader(), _trainer(accelerator))
    sources = [finding.location and finding.location.source for finding in report.findings]
    assert sources == ["seen = loss.item()"]
    assert str(callback.summary).endswith("nothing has run yet")


class OnlyTheHook(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.head.weight.grad.norm() > 1e9:
            self.head.weight.grad.zero_()


class Moving(Kept):
    weight = 1.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.weight = 1.0 if self.global_step < 6 else 0.5

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * self.weight


@pytest.mark.spread
@pytest.mark.parametrize(("cls", "words"), [(OnlyTheHook, "optimizer"), (Moving, "`weight`")])
def test_what_the_callback_deals_with_is_a_note(accelerator: str, cls: type[Net], words: str) -> None:
    report = CUDAGraphCallback().check(make(cls), loader(), _trainer(accelerator))
    assert report.is_captured
    assert any(words in note for note in report.notes)


def test_several_refusals_of_a_trainer_come_together(accelerator: str) -> None:
    trainer = _trainer(accelerator, detect_anomaly=True, fast_dev_run=False)
    report = CUDAGraphCallback().check(make(Net), loader(), trainer)
    assert [finding.location for finding in report.findings] == [None]
    assert "anomaly" in report.findings[0].what
    assert "`Trainer(detect_anomaly=True)`" in report.search_ended_by
    assert str(report).count("`Trainer(detect_anomaly=True)`") == 1
    assert "The search ended early, behind number 1 of these." in str(report)


def test_a_run_without_graphs_is_not_called_captured(accelerator: str) -> None:
    report = CUDAGraphCallback(backend="off").check(make(Net), loader(ragged=False))
    assert (report.is_captured, report.replayed_steps) == (False, 0)
    assert "nothing was found, and nothing was captured" in str(report)


@pytest.mark.parametrize(
    ("args", "wrong"),
    [
        (["script"], "`script` names no function: `script:make`, say."),
        (["a:b", "c:d"], "Examined is one function: `a:make`, say."),
    ],
)
def test_the_command_shows_its_usage(
    capsys: pytest.CaptureFixture[str], args: list[str], wrong: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *args])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "usage: lightning-cudagraph doctor" in told
    assert wrong in told


@pytest.mark.long
@pytest.mark.parametrize("example", [char_gpt, digits, bert, dlrm, image_classifier, ppo])
def test_the_examples_have_no_findings(accelerator: str, example: Callable[[str], Any]) -> None:
    build, data = example(accelerator)
    report = CUDAGraphCallback().check(make(build), data, _trainer(accelerator))
    assert report.findings == ()
    assert report.is_captured


class GivesOtherMemory(Net):
    def on_train_batch_end(self, *args: Any) -> None:
        self.head.bias.data = self.head.bias.data * 0.9


class MovesAlways(Moving):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.weight = 1.0 / (1 + batch_idx)


class NewNames(Kept):
    phase = "a"

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.phase = f"batch {batch_idx}"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1 if self.phase.endswith("1") else 2)


class Freezes(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.head.bias.requires_grad_(batch_idx % 2 == 0)


class Hooks(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx:
            self.handle.remove()
        self.handle = self.head.register_forward_hook(lambda module, given, out: out * 0.5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("cls", "what", "remedy"),
    [
        (
            GivesOtherMemory,
            "the address of parameter `head.bias` changed",
            "Write into the tensor (`copy_`",
        ),
        (
            MovesAlways,
            "`weight` of the `MovesAlways` changed",
            "Hand it to the step in a registered buffer",
        ),
        (NewNames, "`phase` of the `NewNames` changed", "Branch on `batch_idx`"),
        (
            Freezes,
            "`requires_grad` of parameter `head.bias` changed",
            "`if batch_idx % 2: h = h.detach()`",
        ),
        (Hooks, "`_forward_hooks` of `head` changed", "Register the hook once"),
    ],
)
def test_a_graph_that_goes_stale_again_and_again_is_a_finding(
    accelerator: str, cls: type[Net], what: str, remedy: str
) -> None:
    report = CUDAGraphCallback().check(make(cls), loader(), _trainer(accelerator))
    (finding,) = report.findings
    assert re.match(rf"Between steps {re.escape(what)}, \d times", finding.what)
    assert remedy in finding.remedy
    name = re.findall(r"`(\w+)` of the", what)
    assert [f"self.{each}" in str(finding.location) for each in name] == [True for _ in name]


class OfEpochs(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        if self.global_step < 2:
            print(loss.item())
        return loss * 2 if self.current_epoch >= 1 else loss


@pytest.mark.long
def test_a_new_epoch_is_a_note_and_a_path_of_the_warm_up_too(accelerator: str) -> None:
    report = CUDAGraphCallback().check(make(OfEpochs), loader(ragged=False), _trainer(accelerator))
    assert report.is_captured, report
    (stale,) = (note for note in report.notes if "captured again" in note)
    assert "`current_epoch` changed" in stale
    assert report.replayed_steps
    (path,) = (note for note in report.notes if "another path" in note)
    assert path.startswith("2 warm-up step(s) of another path: `self.global_step < 2`")


class KeepsMany(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for name in "abcdefgh":
            setattr(self, f"last_{name}", self.global_step)
        return super().training_step(batch, batch_idx)


@pytest.mark.long
def test_findings_of_one_line_are_one(accelerator: str) -> None:
    report = CUDAGraphCallback().check(make(KeepsMany), loader(), _trainer(accelerator))
    (finding,) = report.findings
    assert "changes `last_a` of the" in finding.what
    assert finding.what.endswith("So too with `last_b`, `last_c`, `last_d`, `last_e` and 3 more.")
    harmless = [f"last_{name}" for name in "abcdefgh"]
    assert f"harmless={harmless}".replace("'", '"') in finding.remedy
    allowed = CUDAGraphCallback(harmless=harmless).check(
        make(KeepsMany), loader(), _trainer(accelerator)
    )
    assert not allowed.findings


class OnOneLine(Net):
    """Things that several checks, or several lines of a library, find."""

    def __init__(self) -> None:
        super().__init__()
        self.history: dict[str, list[float]] = {"a": [], "b": []}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        x += 1  # ONCE
        loss = super().training_step((x, y), batch_idx)["loss"]
        self.history["a"].append(1.0)  # ONCE
        if batch_idx % 2 == 0:
            self.history["b"].append(1.0)  # ONCE
        return loss * float(np.clip(self.global_step / 20, 0, 1))  # ONCE

    def on_after_backward(self) -> None:
        self.head.bias.grad.add_(1.0, alpha=1 + self.global_step)  # ONCE


@pytest.mark.long
def test_one_finding_a_line(accelerator: str) -> None:
    """The search goes on behind a write into the batch, and behind C code that gets no number."""
    report = CUDAGraphCallback().check(make(OnOneLine), loader(), _trainer(accelerator))
    lines = [finding.location and finding.location.line for finding in report.findings]
    source = enumerate(HERE.read_text().splitlines(), start=1)
    assert lines == [number for number, line in source if line.endswith("  # ONCE")]


class LogsWhatItReads(Net):
    """Logs numbers of a line above, and one of its own; and takes the time."""

    start: float = 0.0
    mean: float | None = None
    steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        begin = time.time()  # FOUND
        self.start = time.perf_counter()  # FOUND
        loss = super().training_step(batch, batch_idx)["loss"]
        largest = loss.item()  # FOUND
        self.mean = loss.item() if self.mean is None else 0.9 * self.mean + loss.item()  # FOUND
        self.log("largest", largest)
        self.log("mean", self.mean)
        self.log("rate", self.optimizers().param_groups[0]["lr"])  # FOUND
        seconds = time.time() - begin  # FOUND
        self.log("seconds", seconds)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.steps += 1  # FOUND

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.optimizers().param_groups[0]["lr"] *= 0.9


@pytest.mark.long
def test_a_number_that_is_read_and_logged_is_one_finding(accelerator: str) -> None:
    report = CUDAGraphCallback().check(make(LogsWhatItReads), loader(), _trainer(accelerator))
    source = enumerate(HERE.read_text().splitlines(), start=1)
    wanted = [number for number, line in source if line.endswith("  # FOUND")]
    found = {each.location.line: each for each in report.findings if each.location}
    assert sorted(found) == wanted
    of = {found[line].location.source.split(" ")[0]: found[line] for line in wanted}  # type: ignore[union-attr]
    # A clock that nothing in the step reads may be allowed.
    assert "harmless" not in of["begin"].remedy + of["seconds"].remedy
    assert 'harmless=["time.perf_counter()"]' in of["self.start"].remedy
    assert "To log it, use `LearningRateMonitor`" in of['self.log("rate",'].remedy
    hook = "(in `on_before_optimizer_step`, a hook that is inside the graph)"
    assert hook in of["self.steps"].what


class Helps(Net):
    """Calls a function with three effects and a read of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.norm = 0, 1.0, list[int](), 0.0

    def count(self, *given: Any) -> None:
        self.a += 1
        self.b *= 2
        self.c.append(self.a)
        self.norm = self.head.weight.norm().item()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count()
        return super().training_step(batch, batch_idx)


class HelpsWithABatch(Helps):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count(batch)
        return Net.training_step(self, batch, batch_idx)


class HelpsALittle(Helps):
    def count(self, *given: Any) -> None:
        self.a += 1
        self.b *= 2


@pytest.mark.spread
@pytest.mark.parametrize(
    ("form", "lines"), [(Helps, ["self.count()"]), (HelpsWithABatch, 4), (HelpsALittle, 2)]
)
def test_a_call_without_tensors_is_one_finding(
    accelerator: str, form: Callable[[], Net], lines: list[str] | int
) -> None:
    """If it has many effects; a call that is given the batch cannot be made elsewhere."""
    report = CUDAGraphCallback().check(make(form), loader(), _trainer(accelerator))
    sources = [finding.location and finding.location.source for finding in report.findings]
    assert sources == lines if isinstance(lines, list) else len(sources) == lines
    assert ("calls `count`" in str(report)) == isinstance(lines, list)


def test_steps_of_loops_name_all_too(accelerator: str) -> None:
    device = "cuda" if accelerator == "gpu" else "cpu"
    model = nn.Linear(6, 2).to(device)
    seen: list[float] = []

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        seen.append(loss.item())
        return loss * random.random()

    before = model.weight.detach().clone()
    batches = torch.randn(8, 4, 6, device=device)
    with GraphedStep(step, model) as graph, pytest.raises(CaptureError) as caught:
        [*map(graph, batches)]
    found = [finding.what for finding in caught.value.findings]
    assert len(found) == 2  # what is read for `seen` is a part of that
    assert not any("The training step" in what for what in found)
    assert "`seen`" in str(found)
    assert "`random`" in str(found)
    assert len(seen) == 3  # the warm-up
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None


def test_a_graphed_step_names_what_ended_the_search_by_number(accelerator: str) -> None:
    model, batches = nn.Linear(4, 1), torch.ones(8, 2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        print("a step")
        optimizer.param_groups[0]["lr"] *= 0.9
        loss = model(x).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    if accelerator == "gpu":
        model, batches = model.cuda(), batches.cuda()
    with GraphedStep(step, model, optimizer) as graph, pytest.raises(CaptureError) as caught:
        [*map(graph, batches)]
    told = str(caught.value)
    assert "The search ended early, so there can be more, behind number 2.\n" in told
    assert told.count("sets or changes `param_groups[0]['lr']`") == 1


def test_what_raises_behind_a_finding_ends_the_search_with_its_line(accelerator: str) -> None:
    class Writes(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            print("a step")
            self.line = json.dumps({"step": batch_idx})
            return super().training_step(batch, batch_idx)

    report = CUDAGraphCallback().check(make(Writes), loader(), _trainer(accelerator))
    assert re.match(r"TypeError: .*, at .*test_doctor\.py:\d+ \(`self\.line = ", report.search_ended_by)


def test_what_cannot_be_gone_on_behind_ends_the_search(accelerator: str) -> None:
    class Draws(Net):
        def __init__(self) -> None:
            super().__init__()
            self.numbers = iter(range(1000))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)["loss"]
            if loss > 1e9:
                loss = loss * 0
            loss = loss * next(self.numbers)
            return loss * random.random()

    module = make(Draws)
    report = CUDAGraphCallback().check(module, loader(), _trainer(accelerator))
    assert [f.location and f.location.source for f in report.findings] == [
        "if loss > 1e9:",
        "loss = loss * next(self.numbers)",
    ]
    assert report.search_ended_by.startswith("A CUDA graph cannot hold a draw from")
    assert "The search ended early, behind number 2 of these." in str(report)
    assert " ".join(str(report).split()).count(report.findings[1].what) == 1
    assert next(module.numbers) == 0
    with pytest.raises(CaptureError) as caught:
        train(make(Draws), Path(tempfile.mkdtemp()), CUDAGraphCallback(), accelerator=accelerator)
    told = str(caught.value)
    number = 1 + [f.what for f in caught.value.findings].index(report.findings[1].what)
    assert f"The search ended early, so there can be more, behind number {number}." in told
    assert told.count(report.findings[1].what) == 1


class Counting(Dataset[Any]):
    """A dataset, a sampler and a transform with state of all kinds that reading changes."""

    def __init__(self) -> None:
        self.reads = 0
        self.cache: dict[int, Tensor] = {}
        self.noise = np.random.default_rng(3)
        self.transform = nn.Dropout()
        self.seen = np.zeros(64, dtype=np.int64)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.reads += 1
        self.seen[index] += 1
        x = torch.full((12,), float(index) + float(self.noise.random()))
        self.cache[index] = x
        return x, index % 4

    def state(self) -> Any:
        return self.reads, {**self.cache}, self.noise.bit_generator.state, self.seen.tolist()


class Remembering(Sampler[int]):
    def __init__(self) -> None:
        self.last: list[int] = []
        self.random = random.Random(5)

    def __len__(self) -> int:
        return 64

    def __iter__(self) -> Any:
        for _ in range(64):
            self.last.append(self.random.randrange(64))
            yield self.last[-1]


class Loaders(LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.loader, self.setups = DataLoader(Counting(), batch_size=8, sampler=Remembering()), 0

    def setup(self, stage: str) -> None:
        self.setups += 1

    def train_dataloader(self) -> Any:
        return self.loader


class WithLoader(Kept):
    """A module that reaches its loader by a closure, which is not copied with it."""

    def __init__(self, loader: Any) -> None:
        super().__init__()
        self.train_dataloader = lambda: loader  # type: ignore[method-assign]


@pytest.mark.spread
@pytest.mark.parametrize("how", ["loader", "datamodule", "module"])
@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_are_as_they_were(accelerator: str, how: str, workers: int) -> None:
    data = Loaders()
    data.loader = DataLoader(
        data.loader.dataset,
        batch_size=8,
        sampler=Remembering(),
        generator=torch.Generator().manual_seed(9),
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    if workers and how != "loader":
        pytest.skip("the same")
    module = make(lambda: WithLoader(data.loader)) if how == "module" else make(Kept)
    given = {"loader": data.loader, "datamodule": data, "module": None}[how]

    def state() -> Any:
        of = data.loader
        return (
            of.dataset.state(),
            [*of.sampler.last],
            of.sampler.random.getstate(),
            of.generator.get_state(),
            of._iterator,
            data.setups,
            data.trainer,
        )

    before = state()
    report = CUDAGraphCallback().check(module, given, _trainer(accelerator))
    assert report.is_captured
    assert not [note for note in report.notes if "put back" in note]
    assert not differences([*before], [*state()])
    if not workers:
        next(iter(data.loader))
        assert differences([*before], [*state()])  # reading changes it


class Streamed(IterableDataset[Any]):
    def __init__(self) -> None:
        self.numbers = iter(range(1000))
        self.last = torch.zeros(())

    def __iter__(self) -> Any:
        for number in self.numbers:
            self.last.fill_(number)
            yield torch.full((12,), float(number)), number % 4


def test_what_cannot_be_put_back_is_told(accelerator: str) -> None:
    data = DataLoader(Streamed(), batch_size=8)
    report = CUDAGraphCallback().check(make(Kept), data, _trainer(accelerator))
    assert report.is_captured
    told = [note for note in report.notes if note.startswith("not put back after the check: ")]
    assert any("`dataset.numbers`" in note for note in told), told
    assert any("1 tensor(s) of the `DataLoader` were written" in note for note in told), told


def test_a_batch_is_as_it_was(accelerator: str) -> None:
    class Writes(Kept):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            batch[0].mul_(0.5)
            return super().training_step(batch, batch_idx)

    batch = next(iter(loader()))
    before = [part.clone() for part in batch]
    CUDAGraphCallback().check(make(Writes), batch, _trainer(accelerator))
    assert not differences(before, batch)


def test_the_estimate(accelerator: str) -> None:
    class Plain(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 4)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return nn.functional.cross_entropy(self.layer(x), y)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, foreach=False)

    found = {}
    for batches in (1, 4):  # of 7: the second window of four is cut short
        trainer = _trainer(accelerator, accumulate_grad_batches=batches)
        report = CUDAGraphCallback().check(make(Plain), loader(ragged=False), trainer)
        found[batches] = estimate = report.estimate
        assert estimate is not None
        # `add_` for each of two parameters.
        assert estimate.optimizer_ops == 2
        assert estimate.graph_bytes
        assert json.loads(json.dumps(report.to_dict()))["estimate"]["ops"] == estimate.ops
        if accelerator == "gpu":
            assert estimate.is_launch_bound
            assert estimate.kernels
            assert estimate.host_ms
            assert estimate.host_ms <= estimate.step_ms
            assert estimate.device_ms < estimate.step_ms
            assert "launch-bound  yes, about " in str(report)
        else:
            assert estimate.is_launch_bound is estimate.kernels is estimate.host_ms is None
            assert "launch-bound  not measured: this is no GPU" in str(report)
            low_ms, high_ms = estimate.assumed_host_ms
            assert f"{low_ms:.1f} to {high_ms:.1f} ms a step" in str(report)
    # addmm, log_softmax and nll_loss; backward of the latter two, mm and sum; and the optimizer.
    # Lightning divides the loss by the number of micro-batches, and copies it.
    assert 3 + 4 + 2 <= found[1].ops <= 3 + 4 + 2 + 4
    # Gradients of two parameters are added to those of earlier micro-batches.
    assert found[4].ops - 2 == 4 * (found[1].ops - 2) + 3 * 2


def test_a_step_that_is_not_captured_has_an_estimate(accelerator: str) -> None:
    report = CUDAGraphCallback().check(make(Three), loader(), _trainer(accelerator))
    assert report.findings
    assert report.estimate is not None
    assert report.estimate.ops > 20
    assert report.estimate.replay_ms is report.estimate.graph_bytes is None


def test_a_trainer_that_cannot_be_copied_has_no_estimate(accelerator: str) -> None:
    class Locked(Callback):
        def __init__(self) -> None:
            self.lock = threading.Lock()

    trainer = _trainer(accelerator, callbacks=[Locked()])
    report = CUDAGraphCallback().check(make(Net), loader(ragged=False), trainer)
    assert report.is_captured
    assert report.estimate is None
    assert any("no estimate: the trainer cannot be copied" in note for note in report.notes)


def test_manual_optimization(accelerator: str) -> None:
    report = CUDAGraphCallback().check(make(lambda: GAN(width=8)), circle(64 * 8), _trainer(accelerator))
    assert report.is_captured, report
    assert report.estimate is None


@pytest.mark.long
def test_a_path_that_was_not_examined_is_told(accelerator: str) -> None:
    class Shows(GAN):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            super().training_step(batch, batch_idx)
            if batch_idx % 10 == 0:
                print(self.generator[0].weight.sum().item())

    data = circle(64 * 24)
    report = CUDAGraphCallback().check(make(lambda: Shows(width=8)), data, _trainer(accelerator))
    assert report.is_captured, report
    (told,) = (note for note in report.notes if "`batch_idx % 10 == 0`" in note)
    assert told.startswith("1 warm-up step(s) of another path: ")
    assert f"{HERE}:" in told


def raises_in_its_step() -> Any:
    class Broken(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ZeroDivisionError("a bug of the script")

    return make(Broken), loader(), _trainer("cpu")


def exits() -> Any:
    sys.exit(3)


def exits_in_its_step() -> Any:
    class Exits(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            sys.exit(0)

    return make(Exits), loader(), _trainer("cpu")


def passes_a_wrong_argument() -> Any:
    return make(Kept), loader(), _trainer("cpu", callbacks=CUDAGraphCallback(max_graphs=0))


def has_no_batches() -> Any:
    return make(Kept), DataLoader([], batch_size=2), _trainer("cpu")  # type: ignore[arg-type]


class Yields(IterableDataset[Any]):
    """A number of batches, once."""

    def __init__(self, batches: int) -> None:
        self._batches = iter(loader(ragged=False, batches=batches))

    def __iter__(self) -> Any:
        return self._batches


def yields_nothing() -> Any:
    return make(Kept), DataLoader(Yields(0), batch_size=None), _trainer("cpu")


def has_trained_before() -> Any:
    trainer = _trainer("cpu")
    trainer.fit_loop.max_epochs = 1
    trainer.fit(make(Kept), loader())
    return make(Kept), DataLoader([], batch_size=2), trainer  # type: ignore[arg-type]


def has_no_time() -> Any:
    return make(Kept), loader(), _trainer("cpu", max_time={"seconds": 0})


def test_an_iterable_that_is_used_up_ends_the_steps(accelerator: str) -> None:
    # Of which the estimate takes some.
    loader_of_few = DataLoader(Yields(8 if accelerator == "cpu" else 16), batch_size=None)
    trainer = _trainer(accelerator, max_time={"minutes": 5})
    report = CUDAGraphCallback().check(make(Kept), loader_of_few, trainer)
    assert report.is_captured, report
    assert report.replayed_steps < 8


def test_an_iterable_that_the_estimate_uses_up(accelerator: str) -> None:
    loader_of_few = DataLoader(Yields(2 if accelerator == "cpu" else 8), batch_size=None)
    with pytest.raises(ConfigurationError, match="No batch is left for the check: the loader yields"):
        CUDAGraphCallback().check(make(Kept), loader_of_few, _trainer(accelerator))


def interrupts() -> Any:
    raise KeyboardInterrupt


def is_terminated() -> Any:
    class Terminated(Kept):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            raise SIGTERMException

    return make(Terminated), loader(), _trainer("cpu")


def interrupts_in_its_fit() -> Any:
    class Interrupted(Kept):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            raise KeyboardInterrupt

    return make(Interrupted), loader(), _trainer("cpu")


@pytest.mark.parametrize(
    ("function", "status"), [(interrupts, 130), (interrupts_in_its_fit, 130), (is_terminated, 143)]
)
def test_an_interrupted_examination_has_a_status_of_its_own(
    capsys: pytest.CaptureFixture[str], function: Callable[[], Any], status: int
) -> None:
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as ended:
            main(["doctor", "--json", f"tests.test_doctor:{function.__name__}"])
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning ignores it from then on
    assert ended.value.code == status
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.splitlines()[-1] == "The examination was interrupted: there is no report."
    assert "Traceback" not in told.err


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_what_the_parser_prints_is_no_exit_of_the_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("model: {class_path: tests.test_doctor.WithData}\n")
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--config", str(config), "--print_config"])
    assert ended.value.code == 0
    assert "could not be examined" not in capsys.readouterr().err
    # One in the fit is none of the parser.
    config.write_text(config.read_text().replace("WithData", "ExitsInItsLoader"))
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--config", str(config)])
    assert ended.value.code == 2
    assert "could not be examined" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
@pytest.mark.filterwarnings("ignore:Total length of `")
@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("tests.test_doctor:raises_in_its_step", "ZeroDivisionError: a bug of the script"),
        ("tests.test_doctor:exits", "SystemExit: 3"),
        ("tests.test_doctor:exits_in_its_step", "SystemExit: 0"),
        ("tests.test_doctor:passes_a_wrong_argument", "`CUDAGraphCallback(max_graphs=0)`: expected"),
        ("tests.test_doctor:has_no_batches", "The trainer ran no step: expected a training loader with"),
        ("tests.test_doctor:yields_nothing", "The trainer ran no step"),
        ("tests.test_doctor:has_trained_before", "The trainer ran no step"),
        ("tests.test_doctor:has_no_time", "The trainer ran no step"),
        ("tests.test_doctor:make_four", "returned a tuple of 4; expected a `LightningModule`, or"),
        ("tests.test_doctor:make_none", "returned a tuple of 0; expected a `LightningModule`, or"),
        (":make", "`:make` names no module."),
        ("tests.test_doctor:gone", "`tests.test_doctor` has no function `gone`, it has `"),
        ("tests/test_doctor.py:gone", "`tests.test_doctor` has no function `gone`, it has `"),
        ("tests.test_doctor:HERE", "`tests.test_doctor` has no function `HERE`"),
        (
            "tests.test_doctor:make_with_validation",
            "is a `torch.utils.data.dataloader.DataLoader`; expected a `lightning.pytorch.Trainer`.",
        ),
        ("tests.test_doctor:_planted", "`tests.test_doctor:_planted` returned a `"),
        ("no_such_script:make", "There is no module `no_such_script` in the current directory, `"),
        ("tests/no_such:make", "There is no module `tests.no_such` in the current directory"),
        ("/no_such/script.py:make", "There is no module `/no_such/script.py` in the current directory"),
    ],
)
def test_a_script_with_a_bug_has_a_status_of_its_own(
    capsys: pytest.CaptureFixture[str], function: str, words: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", function])
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert told.out == ""
    what, where, remedy = told.err.splitlines()[-3:]
    assert words in what
    is_of_script = any(each in what for each in ("ZeroDivisionError", "SystemExit", "max_graphs=0"))
    assert is_of_script == (f"{HERE}:" in where)
    assert (where == f"  found at the arguments `{function}`") != is_of_script
    assert remedy.startswith("  Remedy: ")
    assert "Traceback" not in told.err


def test_a_function_that_is_not_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are there are named: no private ones, and none that are imported."""
    code = "from copy import deepcopy\ndef _help(): ...\n" + "def make(): ...\n"
    (tmp_path / "few_functions.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "few_functions:nope"])
    assert ended.value.code == 2
    what, *_ = capsys.readouterr().err.splitlines()[-3:]
    assert what.endswith(" `few_functions` has no function `nope`, it has `make`.")


def test_an_import_of_the_script_that_fails_is_its_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imports_much.py").write_text("import no_such_package\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "imports_much:make"])
    assert ended.value.code == 2
    what, where, _ = capsys.readouterr().err.splitlines()[-3:]
    assert "No module named 'no_such_package'" in what
    assert f"{tmp_path}/imports_much.py:1" in where


@pytest.mark.long
def test_a_closed_pipe_ends_it_quietly() -> None:
    command = [sys.executable, "-c", "from lightning_cudagraph.trainer.command import main; main()"]
    given = ["doctor", "tests.test_doctor:make_three"]
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run(
        [*command, *given], stdout=write, stderr=subprocess.PIPE, text=True, cwd=HERE.parents[1]
    )
    os.close(write)
    assert ended.returncode == 1
    assert "BrokenPipe" not in ended.stderr


def test_a_check_of_the_class_says_how_to_call_it() -> None:
    wanted = r"on the class, with a `Net` .*: `CUDAGraphCallback\(\).check\(module, loader\)`."
    with pytest.raises(TypeError, match=wanted):
        CUDAGraphCallback.check(make(Net), loader())  # type: ignore[arg-type]


def test_an_error_in_the_step_has_the_frames_of_the_user(accelerator: str) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        CUDAGraphCallback().check(*raises_in_its_step())
    assert [entry.name for entry in caught.traceback if entry.path == HERE][1:] == ["training_step"]
    assert len(caught.traceback) <= 4


class OwnLogger(Logger):
    """A logger as a user writes it, which notes its calls."""

    name = version = "own"
    calls: ClassVar[SimpleQueue[str]] = SimpleQueue()

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.rows = 0.5, [1.0]

    @property
    def experiment(self) -> Any:
        self.calls.put("experiment")
        return self

    def add_image(self, *args: Any) -> None:
        self.calls.put("add_image")

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        self.calls.put("log_metrics")

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        self.calls.put("log_hyperparams")


class UsesTrainer(Net):
    def __init__(self, use: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.use = use

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        scale = self.use(self, loss)
        return loss if scale is None else loss * scale


# With the logger, and what is refused.
USES: dict[str, tuple[Callable[[Any, Tensor], Any], Any, str]] = {
    "scalars": (
        lambda net, loss: net.logger.experiment.add_scalar("loss", loss, 0),
        lambda path: TensorBoardLogger(path),
        "`SummaryWriter.add_scalar`",
    ),
    "a row": (
        lambda net, loss: net.logger.log_metrics({"loss": 1.0}),
        lambda path: CSVLogger(path, version=3),
        "`CSVLogger.log_metrics`",
    ),
    "a folder": (lambda net, loss: Path(net.logger.save_dir) and None, CSVLogger, ""),
    "a checkpoint": (
        lambda net, loss: net.trainer.checkpoint_callback.best_model_path[:0] or None,
        lambda path: TensorBoardLogger(path),
        "",
    ),
    "an attribute": (lambda net, loss: net.logger.scale, lambda path: OwnLogger(), ""),
    "a class": (
        lambda net, loss: 2 if isinstance(net.logger, OwnLogger) else loss.item(),
        lambda path: OwnLogger(),
        "",
    ),
    "a list": (lambda net, loss: net.logger.rows.append(1), lambda path: OwnLogger(), "`rows`"),
    "a row of its own": (
        lambda net, loss: net.logger.log_metrics({"loss": loss}),
        lambda path: OwnLogger(),
        "`OwnLogger.log_metrics`",
    ),
}


@pytest.mark.spread
@pytest.mark.parametrize("case", USES)
def test_loggers_and_checkpoints_are_seen_and_write_nothing(
    accelerator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """As in a `fit`, which has the same finding or none."""
    use, logger, words = USES[case]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def trainer(path: Path) -> Trainer:
        return _trainer(
            accelerator,
            logger=logger(path),
            default_root_dir=path,
            enable_checkpointing=True,
            max_epochs=4,
            log_every_n_steps=1,
        )

    OwnLogger.calls = SimpleQueue()
    one = trainer(tmp_path)
    report = CUDAGraphCallback().check(make(lambda: UsesTrainer(use)), loader(ragged=False), one)
    assert [*tmp_path.rglob("*")] == []
    assert OwnLogger.calls.empty()
    assert any("`OwnLogger` takes its place" in note for note in report.notes) == (
        "OwnLogger" in str(logger(tmp_path))
    )
    assert report.is_captured == (not words)
    found = [finding.what for finding in report.findings if "Between two steps" not in finding.what]
    fit = trainer(tmp_path / "fit")
    fit.callbacks.append(CUDAGraphCallback())
    with pytest.raises(CaptureError, match=words) if words else nullcontext() as caught:
        fit.fit(make(lambda: UsesTrainer(use)), loader(ragged=False), loader(seed=1, batches=2))
    in_fit = [finding.what for finding in caught.value.findings] if words else []
    assert found == [what for what in in_fit if "of the class `OwnLogger`" not in what]  # its notes


def test_the_experiment_of_an_own_logger(accelerator: str) -> None:
    def use(net: Any, loss: Tensor) -> None:
        net.logger.experiment.config.update({})
        net.logger.experiment.add_image(loss)

    OwnLogger.calls = SimpleQueue()
    trainer = _trainer(accelerator, logger=OwnLogger())
    report = CUDAGraphCallback().check(make(lambda: UsesTrainer(use)), loader(ragged=False), trainer)
    assert OwnLogger.calls.empty()
    assert "`OwnLogger.experiment.add_image`" in report.findings[0].what


def test_without_a_trainer_there_is_lightnings_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def use(net: Any, loss: Tensor) -> None:
        assert net.trainer.checkpoint_callback.best_model_path == ""
        net.logger.experiment.add_scalar("loss", loss, 0)

    report = CUDAGraphCallback().check(make(lambda: UsesTrainer(use)), loader(ragged=False))
    assert "`SummaryWriter.add_scalar`" in report.findings[0].what
    assert [*tmp_path.iterdir()] == []


def make_three() -> Any:
    return make(Three), loader()


def make_with_validation() -> Any:
    return make(Kept), loader(), loader()


def make_four() -> Any:
    return make(Kept), loader(), None, None


def make_none() -> Any:
    return ()


def make_kept() -> Any:
    return make(Kept), loader(), _trainer("cpu")


class WritesToStreams(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        sys.stdout.write("to one\n")
        sys.stderr.write("to the other\n")
        return super().training_step(batch, batch_idx)


def make_writing() -> Any:
    return make(WritesToStreams), loader(), _trainer("cpu")


@pytest.mark.long
def test_the_command_names_the_streams_of_a_fit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it sends one where the other goes, which it leaves open."""
    fit = CUDAGraphCallback().check(*make_writing()).to_dict()["findings"]
    assert 'harmless=["sys.stdout.write"]' in fit[0]["remedy"]
    assert 'harmless=["sys.stderr.write"]' in fit[1]["remedy"]
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["doctor", "--json", "tests.test_doctor:make_writing"])
    told = capsys.readouterr()
    assert json.loads(told.out)["findings"] == fit
    lines = [line for line in told.err.splitlines() if line.startswith("to ")]
    assert lines[:2] == ["to one", "to the other"]
    monkeypatch.setattr("sys.stderr", StringIO())  # as in a notebook, without bytes below it
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "tests.test_doctor:make_kept"])
    assert ended.value.code == 0


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "tests.test_doctor:make_three"])
    assert ended.value.code == 1
    said = capsys.readouterr().out
    code, first = inspect.getsourcelines(Three)
    lines = [
        n for n, line in enumerate(code, first) if re.search(r"calls \+=|item\(\)|random\(\)", line)
    ]
    assert len(lines) == 3
    assert all(f"tests/{HERE.name}:{line}\n" in said for line in lines)
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--json", "tests.test_doctor:make_kept"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    told = json.loads(said)
    assert told["is_captured"]
    assert told["findings"] == []
    config = tmp_path / "config.yaml"
    config.write_text(
        "model: {class_path: tests.test_doctor.WithData}\n"
        "trainer:\n"
        "  accelerator: cpu\n"
        "  callbacks: [{class_path: lightning_cudagraph.CUDAGraphCallback, init_args:"
        " {harmless: [calls]}}]\n"
    )
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--json", "--config", str(config)])
    assert ended.value.code == 1
    told = json.loads(capsys.readouterr().out)
    assert [finding["source"] for finding in told["findings"]] == [
        "seen = loss.item()",
        "return loss * (1 + random.random() + 0 * seen)",
    ]
    assert {finding["file"] for finding in told["findings"]} == {str(HERE)}


def make_by_own_cli() -> Any:
    cli = LightningCLI(
        Kept,
        Loaders,
        args=["--trainer.accelerator=cpu", "--trainer.logger=false"],
        run=False,
        save_config_callback=None,
    )
    return cli.model, cli.datamodule, cli.trainer


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
@pytest.mark.parametrize("subcommand", ["fit", "doctor"])
def test_a_config_that_is_a_part_of_another(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, subcommand: str
) -> None:
    monkeypatch.setattr("sys.argv", ["lightning-cudagraph"])
    with pytest.raises(SystemExit) as ended:
        main([subcommand, "--config", str(HERE.parents[1] / "configs" / "digits_cpu.yaml")])
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "`--config configs/digits.yaml --config configs/digits_cpu.yaml`" in last


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_a_config_that_names_no_classes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the user's own LightningCLI: the error says what to do, and that works."""
    config = tmp_path / "config.yaml"
    config.write_text("model: {width: 16}\n")
    monkeypatch.setattr("sys.argv", ["lightning-cudagraph", "doctor", "some:thing"])
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--config", str(config)])
    assert ended.value.code == 2
    what, where, remedy = capsys.readouterr().err.splitlines()[-3:]
    assert "'width' is not accepted" in what
    assert where == f"  found at the arguments `--config {config}`"
    assert "`LightningCLI(Model, Data)`" in remedy
    assert "docs/doctor.md" in remedy
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "tests.test_doctor:make_by_own_cli"])
    assert ended.value.code == 0, capsys.readouterr().out


def test_the_page(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its script, its command, and the report of it."""
    page = (HERE.parents[1] / "docs" / "doctor.md").read_text()
    script, command, shown = re.findall(r"^```(?:python|bash|text)\n(.*?)^```$", page, re.M | re.S)[:3]
    (tmp_path / "my_script.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    program, *args = command.split()
    assert program == "lightning-cudagraph"
    with pytest.raises(SystemExit):
        main(args)
    found, wanted = (text.partition("\nEstimate, ") for text in (capsys.readouterr().out, shown))
    assert found[0] == wanted[0]
    # Versions of torch differ in the number of ops.
    as_words = [re.sub(r"[\d.]+", "N", " ".join(text[2].split())) for text in (found, wanted)]
    assert as_words[0] == as_words[1] != ""


class HasClosures(Net):
    """Hooks that refer to `self`, directly and by default arguments; their contents are no attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = [0]
        self.outputs: dict[str, Tensor] = {}
        seen = self.seen = [0]
        layer = next(child for child in self.modules() if isinstance(child, nn.Linear))
        layer.register_forward_hook(lambda m, args, output: self.outputs.update(layer=output))
        layer.register_forward_hook(lambda m, args, output, of=self.calls: of.append(0))

        def count(*args: Any) -> None:
            seen.append(0)

        self.on_train_batch_end = count

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        loss = loss + self.outputs["layer"].square().mean()
        self.outputs.clear()
        self.calls.clear()
        return loss


def test_hooks_that_refer_to_the_module_find_the_copy(accelerator: str) -> None:
    module = make(HasClosures)
    report = CUDAGraphCallback().check(module, loader(), _trainer(accelerator))
    assert report.is_captured, report
    assert (module.calls, module.outputs, module.seen) == ([0], {}, [0])


class HasHooksOfTensors(Net):
    """Hooks of parameters, one of which is removed before the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[Tensor] = []
        self.calls, self.removed = 0, 0
        self.head.weight.register_hook(lambda grad: self.norms.append(grad.norm()))
        self.head.weight.register_post_accumulate_grad_hook(self.count)
        self.handle = self.head.bias.register_hook(self.never)

    def count(self, parameter: Tensor) -> None:
        self.calls += 1

    def never(self, grad: Tensor) -> None:
        self.removed += 1

    def on_train_start(self) -> None:
        self.handle.remove()


def test_hooks_of_parameters_are_seen(accelerator: str) -> None:
    module = make(HasHooksOfTensors)
    report = CUDAGraphCallback().check(module, loader(), _trainer(accelerator))
    found = {name for name in ("norms", "calls", "removed") if f"changes `{name}`" in str(report)}
    assert found == {"norms", "calls"}
    assert (module.norms, module.calls, module.removed) == ([], 0, 0)
    assert len(module.head.bias._backward_hooks) == 1


class NoCopy:
    """An object that cannot be copied, and one that cannot either in it."""

    def __init__(self) -> None:
        self.count = 0
        self.seen: list[int] = []
        self.lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError("no copies")


class HoldsWhatHasNoCopy(Kept):
    """Values that the copy of the module shares: changed by hooks between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = NoCopy()
        self.lock = threading.Lock()
        self.numbers = (number for number in range(1000))
        self.written = NoCopy()
        self.written.seen = torch.zeros(())  # type: ignore[assignment]
        self.scaled = self.head.weight * 2  # has an autograd graph

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        with self.lock, self.shared.lock:
            self.shared.count += 1
            self.shared.seen.append(next(self.numbers))
            self.written.seen += 1  # type: ignore[assignment,operator]


def test_what_has_no_copy_is_put_back_or_told(accelerator: str) -> None:
    module = make(HoldsWhatHasNoCopy)
    report = CUDAGraphCallback().check(module, loader(), _trainer(accelerator))
    assert report.is_captured, report
    assert (module.shared.count, module.shared.seen) == (0, [])
    left = [note for note in report.notes if note.startswith("not put back after the check: ")]
    assert any("`generator`" in note for note in left), report
    assert any("1 tensor(s) of the `NoCopy` were written" in note for note in left), report
    assert not any("``" in note for note in left), report
    assert module.scaled.grad_fn is not None
    assert module.head.weight.grad is None


class ReadsAName(Kept):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, name = batch
        return super().training_step((x, y), batch_idx) * len(name)


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")
def test_batches_that_vary_too_much_are_told(accelerator: str) -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(8, 12, generator=generator), torch.arange(8) % 4, "n" * (1 + i)) for i in range(24)
    ]
    report = CUDAGraphCallback().check(
        make(ReadsAName), DataLoader(batches, batch_size=None), _trainer(accelerator)
    )
    assert not report.is_captured
    (finding,) = report.findings
    assert finding.what.startswith("In 24 steps nothing was captured: 5 different batch signatures")
    assert "`batch[2]`" in finding.what
    assert "or pass a tensor" in finding.remedy
    source = "return super().training_step((x, y), batch_idx) * len(name)"
    assert finding.location is not None
    assert (finding.location.path, finding.location.source) == (str(HERE), source)
    assert "(no line of yours)" not in str(report)
    assert "not captured, for 1 reason\n" in str(report)


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")
def test_batches_that_vary_at_first_are_no_finding(accelerator: str) -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(8, 12, generator=generator), torch.arange(8) % 4, "n" * (1 + min(i, 6)))
        for i in range(24)
    ]
    report = CUDAGraphCallback().check(
        make(ReadsAName), DataLoader(batches, batch_size=None), _trainer(accelerator)
    )
    assert report.is_captured, report
    assert report.findings == ()
    assert "nothing was captured" not in str(report)


class SetsAndEnds(Net):
    """Effects behind what ends the search, and a tensor that goes from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.last: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        self.last = loss.detach()
        loss = loss * nn.functional.dropout(loss, 0.5 - 0.001 * self.global_step)
        self.losses.append(loss.detach())
        return loss + self.last


@pytest.mark.long
def test_what_a_step_sets_is_no_change_between_two(accelerator: str) -> None:
    report = CUDAGraphCallback().check(make(SetsAndEnds), loader(), _trainer(accelerator))
    assert [finding.what[:37] for finding in report.findings] == [
        "A CUDA graph cannot hold a read of `0"
    ]
    assert "draw" in report.findings[0].remedy.lower()
    assert report.search_ended_by
    with pytest.raises(CaptureError, match="The search ended early"):
        train(make(SetsAndEnds), Path(tempfile.mkdtemp()), CUDAGraphCallback(), accelerator=accelerator)


class WithData(Three):
    def train_dataloader(self) -> Any:
        return loader()


class ExitsInItsLoader(Three):
    def train_dataloader(self) -> Any:
        return DataLoader([0], collate_fn=sys.exit)  # type: ignore[arg-type]
