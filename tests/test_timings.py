"""Layer times in TensorBoard: a value per replay for each timed layer, and the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from lightning_cudagraph import (
    ConfigurationError,
    CUDAGraphCallback,
    LayerTimings,
    LayerTimingsMonitor,
    RunSummary,
    Verification,
)
from lightning_cudagraph.timing.layers.layer_selection import select_layers, without_curves
from lightning_cudagraph.timing.readings.step_time import StepTime
from lightning_cudagraph.trainer.training.times import run_times
from tests.harness import Net, make, train

LAYERS = ["features", "features.0", "features.1", "features.2", "features.3", "head"]


def events(tmp_path: Path) -> EventAccumulator:
    folder = next(tmp_path.rglob("events.out.tfevents*")).parent
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def run(tmp_path: Path, accelerator: str, callback: CUDAGraphCallback, cls: Any = Net) -> Any:
    return train(
        make(cls),
        tmp_path,
        callback,
        accelerator=accelerator,
        logger=TensorBoardLogger(tmp_path),
    )


def test_a_value_per_replay_for_each_layer(tmp_path: Path, accelerator: str) -> None:
    callback = CUDAGraphCallback(timings=LayerTimings(modules=["*"]))
    trace = run(tmp_path, accelerator, callback)
    accumulator = events(tmp_path)
    tags = set(accumulator.Tags()["scalars"]) - {"~step_ms/gap", "~step_ms/copy"}
    expected = {f"~step_ms/{part}" for part in ("forward", "backward", "optimizer", "total")}
    for layer in LAYERS:
        expected |= {f"~layer_forward_ms/{layer}", f"~layer_backward_ms/{layer}"}
    assert {tag for tag in tags if tag.startswith(("~layer_", "~step_ms"))} == expected
    # Three epochs of eight steps; warm-up takes the first three, the ragged last ones are eager.
    replayed = [step for step in range(24) if step > 2 and step % 8 != 7]
    assert len(replayed) == trace.counts.replayed
    for tag in expected:
        scalars = accumulator.Scalars(tag)
        assert [scalar.step for scalar in scalars] == replayed, tag
        assert all(0 <= scalar.value < 10_000 for scalar in scalars)
    for parts in zip(
        *(
            accumulator.Scalars(f"~step_ms/{part}")
            for part in ("forward", "backward", "optimizer", "total")
        ),
        strict=True,
    ):
        forward, backward, optimizer, total = (scalar.value for scalar in parts)
        assert forward + backward + optimizer == pytest.approx(total, rel=0.02, abs=0.01)
    whole = accumulator.Scalars("~layer_forward_ms/features")[-1].value
    members = [accumulator.Scalars(f"~layer_forward_ms/features.{i}")[-1].value for i in range(4)]
    assert sum(members) <= whole * 1.05 + 0.01
    text = accumulator.Tensors("~cudagraph/report/text_summary")[0].tensor_proto.string_val[0].decode()
    assert str(callback.summary) in text


def test_report(tmp_path: Path, accelerator: str) -> None:
    callback = CUDAGraphCallback()
    run(tmp_path, accelerator, callback)
    report = str(callback.summary)
    lines = report.splitlines()
    assert "3 warmed up, 18 replayed, 3 eager; captured 1 time(s)" in report
    assert "3 eager: another batch signature: `batch[0]` changed: expected (8, 12)" in str(
        callback.summary
    )
    assert "ms replayed" in report
    assert "MiB taken" in report
    assert any(line.split()[:1] == ["head"] for line in lines)


def test_patterns(tmp_path: Path, accelerator: str) -> None:
    callback = CUDAGraphCallback(timings=LayerTimings(modules=["features.[03]", "head"]))
    run(tmp_path, accelerator, callback)
    tags = events(tmp_path).Tags()["scalars"]
    timed = {tag.split("/")[1] for tag in tags if tag.startswith("~layer_forward_ms")}
    assert timed == {"features.0", "features.3", "head"}


def test_a_pattern_that_matches_nothing(tmp_path: Path, accelerator: str) -> None:
    callback = CUDAGraphCallback(timings=LayerTimings(modules=["blocks.*"]))
    with pytest.raises(ConfigurationError, match=r"'blocks\.\*' matches no module of `Net`.*features"):
        run(tmp_path, accelerator, callback)


def test_a_layer_called_twice_and_one_never_called(tmp_path: Path, accelerator: str) -> None:
    class Twice(Net):
        def __init__(self) -> None:
            super().__init__()
            self.square = nn.Linear(12, 12)
            self.unused = nn.Identity()
            self.frozen = nn.Linear(12, 12).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.square(self.square(self.frozen(x))))

    trace = run(tmp_path, accelerator, CUDAGraphCallback(), Twice)
    assert trace.counts.captures == 1
    accumulator = events(tmp_path)
    tags = accumulator.Tags()["scalars"]
    assert "~layer_backward_ms/square" in tags
    assert "~layer_forward_ms/frozen" in tags
    assert "~layer_backward_ms/frozen" not in tags
    assert not any("unused" in tag for tag in tags)


def test_automatic_choice_is_bounded() -> None:
    deep = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(10)))
    model = nn.Sequential(deep, nn.Linear(2, 2))
    assert len(select_layers(model, LayerTimings())) == 2 + 10 + 20
    assert len(select_layers(model, LayerTimings(max_layers=12))) == 12
    assert list(select_layers(model, LayerTimings(max_layers=11))) == ["0", "1"]


def test_curves_of_the_automatic_choice_are_few() -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    model = nn.ModuleDict(
        {
            "tables": nn.ModuleList([nn.Embedding(2, 2) for _ in range(4)]),
            "blocks": nn.Sequential(*(block() for _ in range(6))),
            "head": nn.Linear(2, 2),
        }
    )
    timings = LayerTimings()
    names = set(select_layers(model, timings))
    # Not the items of a list, nor the members of a block.
    shown = {"blocks", *(f"blocks.{i}" for i in range(6)), "head"}
    assert names - without_curves(model, timings) == shown
    assert without_curves(model, LayerTimings(modules=["*"])) == set()
    wide = nn.Sequential(*(block() for _ in range(20)))
    assert len(set(select_layers(wide, timings)) - without_curves(wide, timings)) == 12


class Features(nn.ModuleDict):
    """As feature nets are made, which are called."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.values():
            x = layer(x)
        return x


def test_a_container_that_is_called_is_a_level() -> None:
    layers = {"first": nn.Linear(2, 2), "second": nn.Linear(2, 2)}
    model = nn.ModuleDict({"features": Features(layers), "head": nn.Linear(2, 2)})
    assert list(select_layers(model, LayerTimings(depth=1))) == ["features", "head"]
    assert "features" in select_layers(model, LayerTimings())
    model = nn.ModuleDict({"features": nn.ModuleDict(layers), "head": nn.Linear(2, 2)})
    assert list(select_layers(model, LayerTimings(depth=1))) == [
        "features.first",
        "features.second",
        "head",
    ]


def test_replays_that_are_checked_are_not_in_the_pace(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    paces: list[StepTime] = []

    class FirstRefusal(StepTime):
        def __init__(self) -> None:
            super().__init__()
            paces.append(self)

    monkeypatch.setattr(run_times, "StepTime", FirstRefusal)
    for verified in (0, 10):
        callback = CUDAGraphCallback(verify=Verification(replays=verified))
        run(tmp_path / str(verified), accelerator, callback)
        assert callback.summary.fit.replayed == 18
    # Those that follow what is no replay, or is another epoch, have no beginning.
    never, ten = (pace._replays for pace in paces)
    assert 0 < ten <= 8 < never


def test_a_fit_without_steps_has_no_report(tmp_path: Path, accelerator: str) -> None:
    callback = CUDAGraphCallback()
    run(tmp_path / "first", accelerator, callback)
    train(make(Net), tmp_path / "second", callback, accelerator=accelerator, max_epochs=0)
    assert callback.summary == RunSummary()
    assert str(callback.summary) == "lightning_cudagraph: nothing has run yet"
    timings = LayerTimingsMonitor()
    train(make(Net), tmp_path / "third", timings, accelerator=accelerator)
    assert timings.summary.times.parts
    train(make(Net), tmp_path / "fourth", timings, accelerator=accelerator, max_epochs=0)
    assert timings.summary == RunSummary()
    assert str(timings.summary) == "lightning_cudagraph: nothing has run yet"


def test_an_argument_that_there_is_not() -> None:
    with pytest.raises(TypeError, match=r"^LayerTimings\.__init__\(\) got an unexpected .* 'wrong'"):
        LayerTimings(wrong=3)  # type: ignore[call-arg]


@pytest.mark.parametrize("kwargs", [{"max_layers": 0}, {"modules": "blocks.*"}])
def test_bad_arguments(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="LayerTimings"):
        LayerTimings(**kwargs)
