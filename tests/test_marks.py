"""Marks inside a step: which layers are chosen, where their marks lie, and what they leave behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric

from lightning_cudagraph import ConfigurationError, CUDAGraphCallback, LayerTimings
from lightning_cudagraph.timing.layers.layer_selection import (
    Placement,
    select_layers,
)
from lightning_cudagraph.timing.readings.spans import BACKWARD_TAG, FORWARD_TAG, STEP_TAG, Reading
from lightning_cudagraph.timing.sinks.tensorboard.writer import TensorBoardWriter
from tests.harness import Net, Trace, assert_same, make, train


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(4, 4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


class Wide(nn.Linear):
    """A class that is derived from torch's."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = Wide(4, 10)
        self.tied = self.head


ATTENTION = [f"blocks.{i}.attn" for i in range(3)]
LINEARS = [f"blocks.{i}.{name}" for i in range(3) for name in ("attn", "mlp.0", "mlp.2")]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"modules": ["blocks.?.attn", "head"]}, [*ATTENTION, "head"]),
        ({"types": ["Linear"]}, [*LINEARS, "head"]),
        ({"types": ["torch.nn.Linear"]}, [*LINEARS, "head"]),
        ({"types": ["torch.nn.modules.linear.Linear"]}, [*LINEARS, "head"]),
        ({"types": ["Wide"]}, ["head"]),
        ({"types": [f"{__name__}.Wide", "Embedding"]}, ["embedding", "head"]),
        ({"depth": 1}, ["embedding", "blocks.0", "blocks.1", "blocks.2", "head"]),
        ({"depth": 2, "types": ["Linear"]}, [*ATTENTION, "head"]),
        ({"modules": ["blocks.1.*"], "types": ["Linear"]}, LINEARS[3:6]),
        ({"modules": ["tied"]}, ["tied"]),
        ({"modules": ["tied", "head"]}, ["head"]),
        ({"max_layers": 5}, ["embedding", "blocks.0", "blocks.1", "blocks.2", "head"]),
        ({"max_layers": 4}, ["embedding", "blocks.0", "blocks.1", "blocks.2"]),
    ],
)
def test_choice(arguments: dict[str, Any], expected: list[str]) -> None:
    model = Model()
    layers = select_layers(model, LayerTimings(**arguments))
    assert list(layers) == expected
    assert all(model.get_submodule(name) is module for name, module in layers.items())


def test_a_depth_beyond_the_last_level_takes_all() -> None:
    assert len(select_layers(Model(), LayerTimings(depth=99))) == 5 + 3 * 2 + 3 * 3


def test_a_layer_with_several_names_is_timed_once() -> None:
    model = nn.ModuleDict({"encoder": Block(), "other": nn.Linear(4, 4)})
    model["decoder"] = model["encoder"]
    for arguments in ({}, {"modules": ["*"]}, {"types": ["Linear"]}):
        timings = LayerTimings(**arguments)  # type: ignore[arg-type]
        names = list(select_layers(model, timings))
        assert any(name.startswith("encoder") for name in names)
        assert not any(name.startswith("decoder") for name in names)
    # What is asked for by one of the names alone has that one.
    assert list(select_layers(model, LayerTimings(modules=["decoder"]))) == ["decoder"]


def test_a_name_with_brackets() -> None:
    model = nn.ModuleDict({"d[0]": nn.Linear(2, 2), "d0": nn.Linear(2, 2)})
    assert "d[0]" in select_layers(model, LayerTimings(modules=["d[0]"]))
    assert list(select_layers(model, LayerTimings(modules=["d[01]"]))) == ["d0"]


def test_metrics_of_the_users_own_are_no_layers() -> None:
    class Own(MeanMetric):
        pass

    model = nn.ModuleDict({"metric": Own(), "relu": nn.ReLU()})
    assert list(select_layers(model, LayerTimings())) == ["relu"]


def test_a_module_that_holds_itself() -> None:
    model = Model()
    model.head.root = model  # type: ignore[assignment]
    assert list(select_layers(model, LayerTimings(modules=["head"]))) == ["head"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"modules": ["layers.*"]}, r"'layers\.\*' matches no module of `Model`.*embedding, blocks"),
        ({"types": ["Conv2d"]}, r"'Conv2d' is the class of no module of `Model`.*Linear \(9\)"),
        ({"types": ["torch.nn.Conv2d"]}, r"'torch.nn.Conv2d' is the class of no module"),
        ({"modules": ["head"], "types": ["Embedding"]}, "no module of `Model`.*satisfies all of them"),
    ],
)
def test_what_selects_nothing(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        select_layers(Model(), LayerTimings(**arguments))


@pytest.mark.spread(2)
@pytest.mark.parametrize("arguments", [{"modules": ["*"]}, {"types": ["Identity"]}])
def test_too_many_layers(arguments: dict[str, Any]) -> None:
    model = nn.ModuleList(nn.Identity() for _ in range(20_000))
    with pytest.raises(ConfigurationError, match=r"select 20000 layers.*at most 1000.*Narrow"):
        select_layers(model, LayerTimings(**arguments))


@pytest.mark.long
def test_many_layers_and_an_automatic_choice() -> None:
    model = nn.ModuleList(nn.ReLU() for _ in range(20_000))
    assert len(select_layers(model, LayerTimings())) == 32


def test_blocks_for_which_there_is_no_room() -> None:
    model = nn.Sequential(nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(40))))
    assert set(select_layers(model, LayerTimings())) == {"0"}
    assert len(select_layers(model, LayerTimings(max_layers=50))) == 41


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"types": "Linear"}, r"one string. Pass `\['Linear'\]`"),
        ({"types": [nn.Linear]}, 'expected a list of strings, such as `."Linear".`'),
        ({"modules": 3}, "expected a list of strings"),
        ({"depth": 0}, r"depth=0.*at least 1"),
        ({"depth": 1.5}, r"depth=1.5.*an int of at least 1"),
        ({"every_n_steps": 0}, r"every_n_steps=0.*at least 1"),
        ({"every_n_steps": True}, r"every_n_steps=True.*an int"),
        ({"window_steps": 0}, r"window_steps=0.*at least 1"),
        ({"trace_steps": -1}, r"trace_steps=-1.*at least 0"),
        ({"placement": "parallel"}, "placement='parallel'.*'forked' or 'serial'"),
        ({"max_layers": 2000}, "max_layers=2000.*at most 1000"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        LayerTimings(**arguments)


@dataclass
class Projected:
    sum: Tensor
    unused: Tensor


class Attention(nn.Module):
    """Projections of one input, side by side, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(24, 24) for _ in range(3))

    def forward(self, x: Tensor) -> Projected:
        weights = F.softmax(self.q(x) * self.k(x), dim=-1)
        return Projected(weights * self.v(x), weights)


class Odd(Net):
    """All kinds of layers: shared, checkpointed, frozen, in place, without gradients, never called."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.stem = nn.Linear(12, 24)
        self.attention = Attention()
        self.block = nn.Sequential(
            nn.Linear(24, 24), nn.Dropout(0.2), nn.LayerNorm(24), nn.ReLU(inplace=True)
        )
        self.shared = nn.Linear(24, 24)
        self.teacher = nn.Linear(12, 4).requires_grad_(False)
        self.reduce = nn.Linear(24, 12)
        self.unused = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.shared(self.shared(self.attention(self.stem(x)).sum))
        if self.training:
            y = checkpoint(self.block, y, use_reentrant=self.reentrant)
        with torch.no_grad():
            taught = self.teacher(x)
        return super().forward(self.reduce(y)) + taught


# A GPU's capture holds what checkpointing does to the generator, the emulator does not.
def odd(reentrant: bool, accelerator: str) -> Callable[[], Odd]:
    def build() -> Odd:
        module = Odd(reentrant)
        if accelerator == "cpu":
            module.block[1].p = 0.0
        return module

    return build


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[Reading]:
    """What the sinks are given."""
    found: list[Reading] = []
    monkeypatch.setattr(TensorBoardWriter, "add", lambda self, reading: found.append(reading))
    return found


def times_of(reading: Reading) -> dict[str, float]:
    return dict(zip(reading.layout.tags, reading.durations_ms.tolist(), strict=True))


def run(
    folder: Path, accelerator: str, timings: LayerTimings | None, build: Any = Net, **kwargs: Any
) -> Trace:
    """A run with graphs and times, or a plain one."""
    callback = None if timings is None else CUDAGraphCallback(timings=timings)
    return train(make(build), folder, callback, accelerator=accelerator, **kwargs)


def report_of(trace: Trace) -> str:
    assert trace.callback is not None
    return str(trace.callback.summary)


def hooks_of(module: nn.Module | None) -> list[str]:
    assert module is not None
    return [
        f"{name}.{attribute}"
        for name, layer in module.named_modules()
        for attribute in (
            "_forward_hooks",
            "_forward_pre_hooks",
            "_forward_hooks_always_called",
            "_backward_hooks",
        )
        if vars(layer)[attribute]
    ]


@pytest.mark.spread
@pytest.mark.parametrize("placement", ["forked", "serial"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_timed_run_is_the_same(
    tmp_path: Path, accelerator: str, placement: Placement, reentrant: bool, readings: list[Reading]
) -> None:
    build = odd(reentrant, accelerator)
    plain = run(tmp_path / "plain", accelerator, None, build)
    timed = run(tmp_path / "timed", accelerator, LayerTimings(depth=9, placement=placement), build)
    assert_same(plain, timed)
    assert timed.counts.replayed == 18
    assert len(readings) == 18
    assert hooks_of(timed.module) == []
    report = report_of(timed)
    assert "not timed: the backward pass of `teacher`: it computes nothing that" in report
    assert "not timed: `unused`: the step does not call it, or past its hooks only" in report


@pytest.mark.spread(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_spans_lie_in_each_other(
    tmp_path: Path, accelerator: str, reentrant: bool, readings: list[Reading]
) -> None:
    run(tmp_path, accelerator, LayerTimings(depth=9), odd(reentrant, accelerator))
    layout = readings[-1].layout
    calls = {span.tag: span.calls for span in layout.spans}
    layers = {tag.split("/")[1] for tag in calls if tag.startswith(FORWARD_TAG)}
    assert {"stem", "attention.q", "block.3", "shared", "teacher", "features.2", "head"} <= layers
    assert {tag.split("/")[1] for tag in calls if tag.startswith(BACKWARD_TAG)} == layers - {"teacher"}

    def inside(inner: str, outer: str) -> bool:
        return all(any(a <= begin <= end <= b for a, b in calls[outer]) for begin, end in calls[inner])

    for tag in calls:
        for prefix, stage in ((FORWARD_TAG, "forward"), (BACKWARD_TAG, "backward")):
            if tag.startswith(prefix):
                assert inside(tag, STEP_TAG + stage)
                parent = tag.rpartition(".")[0]
                assert not parent or inside(tag, parent)
    # Layers beside each other do not run at the same time.
    for prefix in (FORWARD_TAG, BACKWARD_TAG):
        for names in (["q", "k", "v"], ["stem", "shared", "reduce", "head"], ["0", "1", "2", "3"]):
            around = {"q": "attention.", "0": "block."}.get(names[0], "")
            stretches = sorted(call for name in names for call in calls[f"{prefix}{around}{name}"])
            assert all(end <= begin for (_, end), (begin, _) in pairwise(stretches))
    assert len(calls[f"{FORWARD_TAG}shared"]) == 2
    # Neighbours share: far fewer than the four of each layer and the ends of the stages.
    step_marks = 1 + calls["step_ms/total"][0][1]
    assert step_marks < 4 * len(layers)
    assert layout.n_marks == len(readings[-1].offsets_ms)


def test_times_of_members_add_up(tmp_path: Path, accelerator: str, readings: list[Reading]) -> None:
    run(tmp_path, accelerator, LayerTimings(depth=2))
    assert readings
    for reading in readings:
        offsets_ms = np.asarray(reading.offsets_ms)
        assert np.isfinite(offsets_ms).all()
        times_ms = times_of(reading)
        assert all(value >= 0 for value in times_ms.values())
        for prefix in (FORWARD_TAG, BACKWARD_TAG):
            members = sum(times_ms[f"{prefix}features.{i}"] for i in range(4))
            assert members == pytest.approx(times_ms[f"{prefix}features"], rel=1e-4, abs=1e-4)
            both = times_ms[f"{prefix}features"] + times_ms[f"{prefix}head"]
            stage = "forward" if prefix == FORWARD_TAG else "backward"
            assert both <= times_ms[STEP_TAG + stage] + 1e-4


class BeforeBackward(Callback):
    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self.loss = float(loss.detach())


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


@pytest.mark.spread
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("turns", [False, True])
def test_the_stages_of_a_step(
    tmp_path: Path, accelerator: str, clips: bool, scales: bool, turns: bool, readings: list[Reading]
) -> None:
    device = "cuda" if accelerator == "gpu" else "cpu"

    def arguments() -> dict[str, Any]:
        scaler = torch.amp.GradScaler(device, init_scale=128.0)
        return {
            "build": lambda: Net(make_optimizer=sgd),
            "gradient_clip_val": 0.5 if clips else None,
            "plugins": [MixedPrecision("16-mixed", device, scaler)] if scales else [],
            "callbacks": (BeforeBackward(),) if turns else (),
        }

    plain = run(tmp_path / "plain", accelerator, None, **arguments())
    timed = run(tmp_path / "timed", accelerator, LayerTimings(), **arguments())
    assert_same(plain, timed)
    assert len(readings) == timed.counts.replayed == 18
    stages = {"forward", "backward", "optimizer"}
    stages |= {
        name for name, there in (("clipping", clips), ("scaler", scales), ("host", turns)) if there
    }
    for reading in readings:
        times_ms = times_of(reading)
        of_step = {tag.removeprefix(STEP_TAG) for tag in times_ms if tag.startswith(STEP_TAG)}
        assert of_step - {"gap", "copy"} == stages | {"total"}
        parts = sum(times_ms[STEP_TAG + stage] for stage in stages)
        assert parts == pytest.approx(times_ms["step_ms/total"], rel=1e-4, abs=1e-4)
        assert all(times_ms[STEP_TAG + stage] > 0 for stage in stages)


def test_steps_without_an_optimizer(tmp_path: Path, accelerator: str, readings: list[Reading]) -> None:
    trace = run(
        tmp_path / "accumulated", accelerator, LayerTimings(), accumulate_grad_batches=2, max_epochs=5
    )
    kinds = {("step_ms/optimizer" in r.layout.tags, "step_ms/total" in r.layout.tags) for r in readings}
    assert kinds == {(True, True), (False, False)}
    assert len(readings) == trace.counts.replayed > 15
    assert "it runs eagerly after the replay" not in report_of(trace)

    readings.clear()
    callback = CUDAGraphCallback(scope="forward_backward")
    behind = train(make(Net), tmp_path / "behind", callback, accelerator=accelerator)
    assert len(readings) == behind.counts.replayed == 18
    assert all("step_ms/optimizer" not in reading.layout.tags for reading in readings)
    assert "backward pass: it runs eagerly after the replay" in report_of(behind)
    assert "between two steps" not in report_of(behind)


class Refused(Odd):
    """Reads a value of the device, in the middle of a layer that is timed."""

    def __init__(self) -> None:
        super().__init__()
        self.block[1].p = 0.0
        self.block.append(Reads())


class Reads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if float(x.detach().sum()) > -1e9 else -x


def test_a_refused_capture_leaves_nothing(tmp_path: Path, accelerator: str) -> None:
    names = ("_checkpoint_hook", "_recomputation_hook")
    before = [getattr(torch.utils.checkpoint, name) for name in names]
    callback = CUDAGraphCallback(timings=LayerTimings(depth=9), on_unsupported="eager")
    plain = run(tmp_path / "plain", accelerator, None, Refused)
    graph = train(make(Refused), tmp_path / "graph", callback, accelerator=accelerator)
    assert_same(plain, graph)
    assert graph.counts.replayed == 0
    assert "float(tensor)" in report_of(graph)
    assert hooks_of(graph.module) == []
    assert [getattr(torch.utils.checkpoint, name) for name in names] == before


class Freezes(Net):
    """In the second epoch nothing that comes before the head is trained."""

    def on_train_epoch_start(self) -> None:
        self.features.requires_grad_(self.current_epoch == 0)


def test_what_has_times_is_not_said_to_have_none(tmp_path: Path, accelerator: str) -> None:
    """Those of before the layers were frozen are in the table."""
    plain = run(tmp_path / "plain", accelerator, None, Freezes, max_epochs=2)
    timed = run(tmp_path / "timed", accelerator, LayerTimings(), Freezes, max_epochs=2)
    assert_same(plain, timed)
    assert timed.counts.captures == 2
    assert timed.callback.summary.times.backward["features.0"].p50_ms > 0
    assert "not timed" not in report_of(timed)
