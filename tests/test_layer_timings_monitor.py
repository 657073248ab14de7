"""`LayerTimingsMonitor`: eager runs, with the tags of those with graphs."""

from __future__ import annotations

import copy
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn

from lightning_cudagraph import (
    ConfigurationError,
    CUDAGraphCallback,
    LayerTimings,
    LayerTimingsMonitor,
)
from tests.harness import Net, Trace, assert_same, loader, make, train
from tests.test_clock import events, steps


def run(folder: Path, accelerator: str, *callbacks: Callback, **kwargs: Any) -> Trace:
    graph = [callback for callback in callbacks if isinstance(callback, CUDAGraphCallback)]
    return train(
        make(Net),
        folder,
        graph[0] if graph else None,
        accelerator=accelerator,
        callbacks=tuple(callback for callback in callbacks if callback not in graph),
        train_loader=loader(ragged=False, batches=8),
        logger=TensorBoardLogger(folder),
        **kwargs,
    )


@pytest.mark.spread
@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("n", [1, 3])
def test_the_same_run(tmp_path: Path, accelerator: str, n: int, accumulate: int, watched: bool) -> None:
    arguments: dict[str, Any] = {
        "accelerator": accelerator,
        "accumulate_grad_batches": accumulate,
        "gradient_clip_val": 0.5,
        "gradient_clip_algorithm": "value",
    }
    timings = LayerTimingsMonitor(LayerTimings(every_n_steps=n))
    plain = train(make(Net), tmp_path / "plain", watched=watched, **arguments)
    timed = train(make(Net), tmp_path / "timed", callbacks=(timings,), watched=watched, **arguments)
    assert_same(plain, timed)
    assert "features.0" in timings.summary.times.forward


@pytest.mark.spread(2)
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision(tmp_path: Path, accelerator: str, precision: Any) -> None:
    if precision == "16-mixed" and accelerator == "cpu":
        pytest.skip("Lightning has no gradient scaler on a CPU")
    plain = run(tmp_path / "plain", accelerator, precision=precision)
    timed = run(tmp_path / "timed", accelerator, LayerTimingsMonitor(), precision=precision)
    assert_same(plain, timed)
    tags = events(tmp_path / "timed").Tags()["scalars"]
    assert ("~step_ms/scaler" in tags) == (precision == "16-mixed")


@pytest.mark.long
@pytest.mark.spread(2, first=1)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_steps_and_the_tags_of_a_run_with_graphs(
    tmp_path: Path, accelerator: str, accumulate: int
) -> None:
    timings = LayerTimings(every_n_steps=2)
    arguments: dict[str, Any] = {
        "gradient_clip_val": 0.5,
        "gradient_clip_algorithm": "value",
        "accumulate_grad_batches": accumulate,
        "max_epochs": 4,
        "checkpoint_every": 0,
    }
    monitor = LayerTimingsMonitor(timings)
    run(tmp_path / "eager", accelerator, monitor, **arguments)
    run(tmp_path / "graph", accelerator, CUDAGraphCallback(timings=timings), **arguments)
    eager, graph = events(tmp_path / "eager"), events(tmp_path / "graph")
    expected = ("step_ms/clipping", "step_ms/gap", "step_ms/copy", "layer_backward_ms/head")
    tags = {tag for tag in eager.Tags()["scalars"] if tag.startswith(("~layer_", "~step_ms/"))}
    assert tags == {tag for tag in graph.Tags()["scalars"] if tag.startswith(("~layer_", "~step_ms/"))}
    assert {f"~{tag}" for tag in expected} <= tags
    n_steps = 32 // accumulate
    assert steps(eager, "step_ms/total") == list(range(1, n_steps, 2))
    found = steps(eager, "layer_forward_ms/head")
    assert found == [step for step in range(1, n_steps, 2) for _ in range(accumulate)]
    assert set(steps(graph, "step_ms/total")) < set(steps(eager, "step_ms/total"))
    text = eager.Tensors("~layer_timings/report/text_summary")[0].tensor_proto.string_val[0].decode()
    assert str(monitor.summary) in text


class _SlowHook(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        time.sleep(0.2)


@pytest.mark.spread(2)
@pytest.mark.parametrize("graphed", [False, True])
def test_hooks_before_a_step_are_in_the_gap(tmp_path: Path, accelerator: str, graphed: bool) -> None:
    """Of a run with graphs and of one without: what the host does there is no part of the step."""
    timings = LayerTimings()
    train(
        make(_SlowHook),
        tmp_path,
        CUDAGraphCallback(timings=timings) if graphed else None,
        accelerator=accelerator,
        callbacks=() if graphed else (LayerTimingsMonitor(timings),),
        logger=TensorBoardLogger(tmp_path),
        max_epochs=1,
    )
    gaps = [point.value for point in events(tmp_path).Scalars("~step_ms/gap")]
    assert len(gaps) >= 2
    assert min(gaps) > 195


class _Drops(Net):
    """Leaves out its head in every second step, and never calls another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        features = self.features(x)
        return self.head(features) if self.trainer.global_step % 2 else features[:, :4]


def test_layers_of_some_steps_are_timed(tmp_path: Path, accelerator: str) -> None:
    timings = LayerTimingsMonitor()
    for last in (7, 8):
        train(
            make(_Drops),
            tmp_path / str(last),
            accelerator=accelerator,
            callbacks=(timings,),
            max_steps=last,
            max_epochs=-1,
        )
        (note,) = [line for line in str(timings.summary).splitlines() if "does not call it" in line]
        assert "`idle`" in note
        assert "`head`" not in note


def test_no_step_was_timed(tmp_path: Path, accelerator: str) -> None:
    timings = LayerTimingsMonitor(LayerTimings(every_n_steps=1000))
    run(tmp_path, accelerator, timings)
    assert "in 1000 is timed, and the run has come to none of them" in str(timings.summary)


def test_the_parts_come_to_the_whole(tmp_path: Path, accelerator: str) -> None:
    run(tmp_path, accelerator, LayerTimingsMonitor())
    found = events(tmp_path)
    parts = [found.Scalars(f"~step_ms/{part}") for part in ("forward", "backward", "optimizer")]
    for total, *rest in zip(found.Scalars("~step_ms/total"), *parts, strict=True):
        assert sum(part.value for part in rest) == pytest.approx(total.value, rel=0.05, abs=0.05)


class _Skips(Net):
    """Has no loss in any step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_steps_without_a_backward_pass(tmp_path: Path, accelerator: str) -> None:
    timings = LayerTimingsMonitor()
    kwargs: dict[str, Any] = {"checkpoint_every": 0, "watched": False, "max_epochs": 1}
    train(make(_Skips), tmp_path, accelerator=accelerator, callbacks=(timings,), **kwargs)
    assert "`head`: the step has no backward pass" in str(timings.summary)


class _Manual(Net):
    """A net in manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx)["loss"])
        optimizer.step()


def test_manual_optimization_is_not_timed(
    tmp_path: Path, accelerator: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fit(name: str, *callbacks: Callback) -> Trace:
        kwargs: dict[str, Any] = {"accelerator": accelerator, "callbacks": callbacks}
        return train(make(_Manual), tmp_path / name, checkpoint_every=0, **kwargs)

    timings = LayerTimingsMonitor()
    assert_same(fit("plain"), fit("timed", timings))
    assert str(timings.summary) == "lightning_cudagraph: layers are not timed in manual optimization"
    assert str(timings.summary) in caplog.text
    assert timings.summary.times.parts == {}


def test_beside_a_callback_with_graphs(tmp_path: Path, accelerator: str) -> None:
    timings = LayerTimingsMonitor(LayerTimings(modules=["head"]))
    with pytest.raises(ConfigurationError, match=r"timings=LayerTimings\(modules=\('head',\)"):
        run(tmp_path / "both", accelerator, timings, CUDAGraphCallback())
    run(tmp_path / "off", accelerator, timings, CUDAGraphCallback(backend="off"))
    assert "head" in str(timings.summary)


def test_only_one(tmp_path: Path, accelerator: str) -> None:
    with pytest.raises(ConfigurationError, match="The trainer has 2 `LayerTimingsMonitor`s"):
        run(tmp_path, accelerator, LayerTimingsMonitor(), LayerTimingsMonitor(LayerTimings(depth=1)))


def test_a_pattern_that_matches_nothing(tmp_path: Path, accelerator: str) -> None:
    with pytest.raises(ConfigurationError, match="matches no module of `Net`"):
        run(tmp_path, accelerator, LayerTimingsMonitor(LayerTimings(modules=["blocks.*"])))


@pytest.mark.spread(2)
@pytest.mark.parametrize("where", ["forward", "backward", "end"])
def test_an_exception_leaves_nothing_behind(tmp_path: Path, accelerator: str, where: str) -> None:
    class Fails(Net):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            if where == "forward" and self.trainer.global_step == 5:
                raise ArithmeticError
            return out

        def on_after_backward(self) -> None:
            if where == "backward" and self.trainer.global_step == 5:
                raise ArithmeticError

        def on_train_batch_end(self, *args: Any) -> None:
            if where == "end" and self.trainer.global_step == 5:
                raise ArithmeticError

    timings = LayerTimingsMonitor()
    trace = train(
        make(Fails),
        tmp_path,
        accelerator=accelerator,
        callbacks=(timings,),
        logger=TensorBoardLogger(tmp_path),
        raises=ArithmeticError,
    )
    assert trace.module is not None
    assert trace.trainer is not None
    for module in trace.module.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert "configure_gradient_clipping" not in vars(trace.module)
    for name in ("batch_to_device", "optimizer_step"):
        assert name not in vars(trace.trainer.strategy)
    assert vars(timings)["_run"] is None
    found = steps(events(tmp_path), "step_ms/total")
    assert found == list(range(len(found)))
    assert len(found) >= 4


def test_a_batch_that_a_hook_skips(tmp_path: Path, accelerator: str) -> None:
    """It has a start and no end, and with it the epoch ends."""
    hooks: list[int] = []

    class Skips(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
            return -1 if batch_idx == 4 else None

        def on_train_epoch_start(self) -> None:
            hooks.append(sum(len(module._forward_hooks) for module in self.modules()))

    def fit(name: str, *callbacks: Callback) -> Trace:
        return train(
            make(Skips),
            tmp_path / name,
            accelerator=accelerator,
            callbacks=callbacks,
            logger=TensorBoardLogger(tmp_path / name),
        )

    assert_same(fit("plain"), fit("timed", LayerTimingsMonitor()))
    assert hooks == [0] * 6
    assert steps(events(tmp_path / "timed"), "step_ms/total") == [*range(12)]


def test_copies(tmp_path: Path, accelerator: str) -> None:
    copied: list[Any] = []

    class Copies(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            copied.append(copy.deepcopy(timings))
            copied.append(pickle.loads(pickle.dumps(timings)))

    timings = LayerTimingsMonitor(LayerTimings(types=["Linear"], every_n_steps=2))
    run(tmp_path, accelerator, timings, Copies(), limit_train_batches=2, max_epochs=1)
    assert len(copied) == 4
    for other in copied:
        assert other.timings == timings.timings
        assert repr(other.timings) == repr(timings.timings)
        assert vars(other)["_run"] is None
    assert timings.timings != LayerTimings(types=["Linear"])
    assert LayerTimings(types=["Linear"]) == LayerTimings(types=("Linear",))
    assert hash(timings.timings) == hash(copied[0].timings)


# Lightning's CLI uses what newer versions of jsonargparse deprecate.
@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train"])
    file = tmp_path / "config.yaml"
    file.write_text(
        "trainer:\n"
        "  callbacks:\n"
        "    - class_path: lightning_cudagraph.LayerTimingsMonitor\n"
        "      init_args: {timings: {types: [Linear], every_n_steps: 5}}\n"
        "    - class_path: lightning_cudagraph.CUDAGraphCallback\n"
        "      init_args: {backend: 'off', timings: {modules: [head], depth: 2}}\n"
        "    - class_path: lightning_cudagraph.CUDAGraphCallback\n"
        "    - class_path: lightning_cudagraph.CUDAGraphCallback\n"
        "      init_args: {timings: null}\n"
    )
    cli = LightningCLI(Net, run=False, args=["--config", str(file)], seed_everything_default=3)
    monitor, *graphs = cli.trainer.callbacks[:4]  # type: ignore[attr-defined]
    assert monitor.timings == LayerTimings(types=["Linear"], every_n_steps=5)
    assert [graph.timings for graph in graphs] == [
        LayerTimings(modules=["head"], depth=2),
        LayerTimings(),
        None,
    ]
