"""`LayerTimingsMonitor`: eager runs, with the tags of those with graphs."""

from __future__ import annotations

import copy
import pickle
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
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
from tests.harness import Net, Trace, assert_same, differences, loader, make, train
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


class TwoNets(pl.LightningModule):
    """Two optimizers in manual optimization; every batch has two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.one = nn.Sequential(nn.Linear(12, 8), nn.Dropout(0.2), nn.Linear(8, 4))
        self.other = nn.Linear(12, 4)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        for net, optimizer in zip((self.one, self.other), self.optimizers(), strict=True):
            loss = nn.functional.cross_entropy(net(x), y)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.log("loss", loss)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.one, self.other)]


@pytest.mark.spread(2, first=1)
@pytest.mark.parametrize("n", [1, 3])
def test_manual_optimization(tmp_path: Path, accelerator: str, n: int) -> None:
    def fit(name: str, *callbacks: Callback) -> dict[str, Tensor]:
        module = make(TwoNets)
        trainer = pl.Trainer(
            max_epochs=2,
            accelerator=accelerator,
            devices=1,
            callbacks=[*callbacks],
            logger=TensorBoardLogger(tmp_path / name),
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            log_every_n_steps=1,
        )
        pl.seed_everything(3, verbose=False)
        trainer.fit(module, loader(ragged=False, batches=8))
        return {**module.state_dict(), "rng": torch.get_rng_state()}

    plain, timed = fit("plain"), fit("timed", LayerTimingsMonitor(LayerTimings(every_n_steps=n)))
    assert differences(plain, timed) == []
    found = events(tmp_path / "timed")
    for tag in ("step_ms/total", "layer_forward_ms/one", "layer_backward_ms/other"):
        assert len(steps(found, tag)) == len(range(n - 1, 16, n))
    parts = [found.Scalars(f"~step_ms/{part}") for part in ("forward", "backward", "optimizer")]
    for total, *rest in zip(found.Scalars("~step_ms/total"), *parts, strict=True):
        assert sum(part.value for part in rest) == pytest.approx(total.value, rel=0.05, abs=0.05)


class _Sleeps(torch.autograd.Function):
    """The identity, which takes a while in both passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(0.03)
        return gradient


class _SlowSGD(torch.optim.SGD):
    """Calls the step of its base, which has hooks of its own."""

    def __call__(self) -> None:
        """Nothing that anybody should take for a closure."""

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure else None
        super().step()
        time.sleep(0.04)
        return loss


class _ByHand(pl.LightningModule):
    """One way of manual optimization, all stages of which are slow."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.how = how
        self.layer = nn.Linear(12, 4)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer: Any = self.optimizers(use_pl_optimizer="raw" not in self.how)
        if "another" in self.how:
            optimizer, _ = optimizer

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(_Sleeps.apply(self.layer(x)), y)
            if self.how == "direct":
                loss.backward()
            else:
                self.manual_backward(loss)
            if "another" in self.how:
                _, other = self.optimizers()  # type: ignore[misc]
                other.step()
            return loss

        if "closure" in self.how:
            optimizer.step(closure=closure)
            return
        closure()
        if self.how == "clip":
            self.clip_gradients(optimizer, 0.1, "norm")
        optimizer.step()

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.05)
        super().clip_gradients(*args, **kwargs)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.how == "hook":
            time.sleep(0.06)

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> Any:
        torch.optim.SGD(self.parameters())  # from now on the base class has hooks, too
        if "another" in self.how:
            return [_SlowSGD([parameter], lr=0.1) for parameter in self.layer.parameters()]
        return _SlowSGD(self.parameters(), lr=0.1)


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    "how",
    [
        "closure",
        "another in its closure",
        "clip",
        "raw",
        "raw, by closure",
        "raw, another in its closure",
        "direct",
        "hook",
    ],
)
def test_the_stages_of_manual_optimization(tmp_path: Path, accelerator: str, how: str) -> None:
    def fit(name: str, *callbacks: Callback) -> Trace:
        return train(
            make(lambda: _ByHand(how)),
            tmp_path / name,
            accelerator=accelerator,
            callbacks=callbacks,
            train_loader=loader(ragged=False, batches=3),
            limit_val_batches=0,
            checkpoint_every=0,
            max_epochs=1,
            logger=TensorBoardLogger(tmp_path / name),
        )

    timings = LayerTimingsMonitor()
    timed = fit("timed", timings)
    assert_same(fit("plain"), timed)
    found = events(tmp_path / "timed")
    # How long the host sleeps in each. On a busy machine it may be any longer; and a GPU comes to the
    # beginning of a stage a little later than the host.
    slept_ms = {"forward": 20, "backward": 30, "optimizer": 40, "clipping": 50}
    if how == "hook":
        slept_ms["optimizer"] += 60
    if "another" in how:
        slept_ms["optimizer"] += 40
    if how == "direct":
        del slept_ms["backward"]
        slept_ms["forward"] += 30
    if how != "clip":
        del slept_ms["clipping"]
    stages = {tag for tag in found.Tags()["scalars"] if tag.startswith("~step_ms/")}
    assert stages - {f"~step_ms/{other}" for other in ("total", "gap", "copy")} == {
        f"~step_ms/{stage}" for stage in slept_ms
    }
    for stage, at_least_ms in slept_ms.items():
        times_ms = [point.value for point in found.Scalars(f"~step_ms/{stage}")]
        assert len(times_ms) == 3
        assert min(times_ms) > 0.6 * at_least_ms, stage
    said = "the step has no backward pass, or calls `backward` itself, and not `self.manual_backward`"
    assert (said in str(timings.summary)) == (how == "direct")
    assert timed.trainer is not None
    for optimizer in timed.trainer.optimizers:
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks


class _StepsBefore(TwoNets):
    """Trains one of its nets in a hook before the step, which is no part of it."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        optimizer, _ = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.one(batch[0]).square().mean())
        optimizer.step()

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...


def test_steps_before_the_step(tmp_path: Path, accelerator: str) -> None:
    def fit(name: str, *callbacks: Callback) -> Trace:
        loaders = {"train_loader": loader(ragged=False), "limit_val_batches": 0}
        kwargs: dict[str, Any] = {"accelerator": accelerator, "callbacks": callbacks, **loaders}
        return train(make(_StepsBefore), tmp_path / name, checkpoint_every=0, **kwargs)

    timings = LayerTimingsMonitor()
    assert_same(fit("plain"), fit("timed", timings))
    assert "one.0" in timings.summary.times.forward


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
