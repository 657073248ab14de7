"""The arguments of the callback and of `GraphedStep`: alike in both, and in a config of LightningCLI."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.cli import LightningCLI

from lightning_cudagraph import (
    AutoStreams,
    Buckets,
    ConfigurationError,
    CUDAGraphCallback,
    GraphedStep,
    LayerTimings,
    LayerTimingsMonitor,
    Verification,
)
from tests.harness import FULL_BATCHES, Net, loader
from tests.test_evaluation import Evaluated, Session

SHARED = ["warmup_steps", "on_unsupported", "verify", "harmless", "backend", "max_graphs", "streams"]


def test_what_both_have_is_the_same() -> None:
    ours, loops = (inspect.signature(cls).parameters for cls in (CUDAGraphCallback, GraphedStep))
    both = [name for name in ours if name in loops and name != "modules"]  # names there, objects here
    assert both == [name for name in ours if name in SHARED]
    for name in SHARED:
        if name not in ("warmup_steps", "streams"):  # None is the number that DDP needs; `--streams`
            assert ours[name].default == loops[name].default, name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"warmup_steps": 0}, r"warmup_steps=0\)`: expected an int of at least 1"),
        ({"max_graphs": 0}, r"max_graphs=0\)`: expected an int of at least 1"),
        ({"max_graphs": True}, r"max_graphs=True\)`: expected an int"),
        ({"verify": 2}, r"verify=2\)`: expected a `Verification`.* or None for no checks"),
        ({"streams": None}, r'streams=None\)`: expected an int from 1 to 16, "auto"'),
        ({"on_unsupported": None}, r"on_unsupported=None\)`: expected one of 'raise', 'eager'"),
        ({"backend": "gpu"}, r"backend='gpu'\)`: expected one of 'auto', 'cuda', 'emulator', 'off'"),
        ({"harmless": "print"}, r"harmless='print'\)`: expected a list of names"),
        ({"harmless": [print]}, r"harmless=.*expected a list of names"),
    ],
)
def test_wrong_ones_are_refused_alike(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^`CUDAGraphCallback\({message}"):
        CUDAGraphCallback(**arguments)
    with pytest.raises(ConfigurationError, match=rf"^`GraphedStep\({message}"):
        GraphedStep(len, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scope": "all"}, r"scope='all'\)`: expected one of 'auto', 'step', 'forward_backward'"),
        ({"timings": False}, r"timings=False\)`: expected a `LayerTimings`"),
        ({"evaluation": 1}, r"evaluation=1\)`: expected True"),
        ({"compile": "max-autotune"}, r"compile='max-autotune'\)`: expected True"),
    ],
)
def test_wrong_ones_of_the_callback(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^`CUDAGraphCallback\({message}"):
        CUDAGraphCallback(**arguments)


def test_what_the_monitor_is_not_given() -> None:
    timings: Any = ["head"]
    with pytest.raises(ConfigurationError, match=r"`LayerTimingsMonitor\(\['head'\]\)`: expected a"):
        LayerTimingsMonitor(timings)


@pytest.mark.filterwarnings("ignore:.*test_dataloader.*:UserWarning")
@pytest.mark.parametrize(("max_graphs", "captures"), [(1, 1), (2, 2)])
def test_max_graphs_bounds_those_of_evaluation(
    tmp_path: Path, accelerator: str, max_graphs: int, captures: int
) -> None:
    callback = CUDAGraphCallback(evaluation=True, max_graphs=max_graphs, warmup_steps=1)
    session = Session(Evaluated, tmp_path, callback, accelerator=accelerator)
    session.run("validate", [loader(False, seed=1), loader(False, seed=2)])
    stage = callback.summary.validate
    assert stage.captures == captures
    assert bool(stage.eager) is (max_graphs == 1)
    assert all("another batch signature" in reason for reason in stage.eager)


@pytest.mark.filterwarnings("ignore:.*test_dataloader.*:UserWarning")
def test_an_evaluation_of_other_batches_gets_their_graphs(tmp_path: Path, accelerator: str) -> None:
    """The place of the least recently used goes to what has come eight times since."""
    callback = CUDAGraphCallback(evaluation=True, max_graphs=1, warmup_steps=1)
    session = Session(Evaluated, tmp_path, callback, accelerator=accelerator)
    session.run("validate", [loader(False, seed=1), loader(False, seed=2, batches=16)])
    stage = callback.summary.validate
    assert (stage.captures, stage.evictions) == (2, 1)
    assert stage.replayed == (FULL_BATCHES - 1) + (16 - 8 - 1)


CONFIG = """
trainer:
  callbacks:
    - class_path: lightning_cudagraph.CUDAGraphCallback
    - class_path: lightning_cudagraph.CUDAGraphCallback
      init_args: {verify: null, streams: 4, max_graphs: 2, timings: null}
    - class_path: lightning_cudagraph.CUDAGraphCallback
      init_args:
        verify: {replays: 3, every_n_steps: 100}
        streams: {memory_bytes: 1000}
        timings: {depth: 1}
    - class_path: lightning_cudagraph.CUDAGraphCallback
      init_args: {streams: auto, verify: {budget: 0.5}}
    - class_path: lightning_cudagraph.CUDAGraphCallback
      init_args:
        pad_to: {lengths: [32, 64], values: {input_ids: 0, labels: -100}, length_key: length}
    - class_path: lightning_cudagraph.CUDAGraphCallback
      init_args:
        pad_to: [{lengths: [32], values: {0: 0.5}, dim: 2}, {lengths: [8], values: {1: 0}}]
"""


# Lightning's CLI uses what newer versions of jsonargparse deprecate.
@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train"])
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    cli = LightningCLI(Net, run=False, args=["--config", str(file)], seed_everything_default=3)
    plain, none, some, auto, pads, pads_two = cli.trainer.callbacks[:6]  # type: ignore[attr-defined]
    assert (plain.verify, plain.timings, plain.max_graphs) == (Verification(), LayerTimings(), 16)
    assert (none.verify, none.streams, none.max_graphs, none.timings) == (None, 4, 2, None)
    assert some.verify == Verification(replays=3, every_n_steps=100)
    assert some.streams == AutoStreams(memory_bytes=1000)
    assert some.timings == LayerTimings(depth=1)
    assert (auto.streams, auto.verify) == ("auto", Verification(budget=0.5))
    assert pads.pad_to == (Buckets([32, 64], {"input_ids": 0, "labels": -100}, length_key="length"),)
    assert pads_two.pad_to == (Buckets([32], {0: 0.5}, dim=2), Buckets([8], {1: 0}))
