"""Attention in evaluation mode, where torch chooses its path by what it sees of us."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn, overrides
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch.overrides import TorchFunctionMode

from lightning_cudagraph import (
    CaptureError,
    CUDAGraphCallback,
    LayerTimings,
    LayerTimingsMonitor,
)
from lightning_cudagraph.device.sentry import own_modes
from lightning_cudagraph.device.sentry.own_modes import OwnFunctionMode
from tests.harness import Net, Trace, assert_same, fused_adamw, loader, make, train

# of Lightning, which counts the frozen modules
pytestmark = [
    pytest.mark.declared,
    pytest.mark.filterwarnings(
        "ignore:Found .* in eval mode at the start of training",
        "ignore:.* nested tensors is in prototype",
        "ignore:`torch.jit.*deprecated:DeprecationWarning",  # of torch, as it imports its compiler
    ),
]

_FAST = "aten::_transformer_encoder_layer_fwd"


class Distilled(Net):
    """Learns from a teacher of torch's own attention that is frozen, and in evaluation mode."""

    padded = False
    nested = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        layer = nn.TransformerEncoderLayer(12, 2, 48, batch_first=True)
        self.teacher = nn.TransformerEncoder(layer, 2, enable_nested_tensor=self.nested)
        self.last = nn.MultiheadAttention(12, 2, batch_first=True)

    def on_fit_start(self) -> None:
        for module in (self.teacher, self.last):
            module.eval().requires_grad_(False)

    on_validation_end = on_fit_start

    def taught(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, 4, 12)
        mask = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        mask[1:, 3] = True
        with torch.no_grad():
            y = self.teacher(x, src_key_padding_mask=mask if self.padded else None)
            return torch.cat([y, self.last(y, y, y)[0]], 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        taught = self.taught(batch[0])
        self.log("taught", taught.square().mean())
        loss = result["loss"] + (result["logits"].mean() - taught[:, 2]).square().mean()
        return {"loss": loss, "taught": taught}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("val_taught", self.taught(batch[0]).square().mean())


@pytest.fixture(autouse=True)
def torchs_own() -> Iterator[Callable[..., bool]]:
    """Whatever a run comes to, torch has its own functions back."""
    own, forward = overrides.has_torch_function, nn.TransformerEncoderLayer.forward
    yield own
    assert overrides.has_torch_function is own
    assert nn.TransformerEncoderLayer.forward is forward


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)  # with a tensor as its learning rate, under a mode


def _fit(
    kind: type[Distilled], path: Path, accelerator: str, *args: Any, optimizer: Any = _sgd, **kwargs: Any
) -> Trace:
    loaders = {"train_loader": loader(ragged=False), "val_loader": loader(False, seed=1, batches=2)}
    return train(
        make(partial(kind, optimizer)), path, *args, accelerator=accelerator, **loaders, **kwargs
    )


@pytest.mark.spread(3, first=1)
@pytest.mark.parametrize("timings", [None, LayerTimings(), LayerTimings(modules=["teacher.*"])])
@pytest.mark.parametrize("evaluation", [False, True])
def test_a_frozen_teacher(
    tmp_path: Path, accelerator: str, timings: LayerTimings | None, evaluation: bool
) -> None:
    callback = CUDAGraphCallback(timings=timings, evaluation=evaluation)
    plain = _fit(Distilled, tmp_path / "plain", accelerator)
    graph = _fit(Distilled, tmp_path / "graph", accelerator, callback)
    assert_same(plain, graph)
    assert graph.counts.replayed >= 16
    if timings is not None:
        assert "`teacher.layers.0.linear1`" in str(callback.summary)
        assert "is in evaluation mode, where torch computes it in one piece" in str(callback.summary)


def test_a_teacher_timed_without_graphs(tmp_path: Path, accelerator: str) -> None:
    timings = LayerTimingsMonitor(LayerTimings(modules=["teacher.*"]))
    plain = _fit(Distilled, tmp_path / "plain", accelerator)
    timed = _fit(Distilled, tmp_path / "timed", accelerator, callbacks=(timings,))
    assert_same(plain, timed)
    assert "teacher.layers.0 " in str(timings.summary)


def _pieces(kind: type[Distilled], path: Path, accelerator: str, *callbacks: pl.Callback) -> int:
    """How often an encoder layer was computed in one piece, in a run without graphs."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, acc_events=True) as found:
        _fit(kind, path, accelerator, callbacks=callbacks)
    return sum(event.count for event in found.key_averages() if event.key == _FAST)


@pytest.mark.long
def test_timed_layers_are_computed_as_without(tmp_path: Path, accelerator: str) -> None:
    pieces = _pieces(Distilled, tmp_path / "plain", accelerator)
    timed = LayerTimingsMonitor(LayerTimings(modules=["teacher.*"]))
    assert pieces > 40
    assert _pieces(Distilled, tmp_path / "timed", accelerator, timed) == pieces


class Hooked(Distilled):
    """With a hook of its own in the teacher, which torch sees, and ours beside it."""

    def on_fit_start(self) -> None:
        super().on_fit_start()
        if not self.teacher.layers[0].linear1._forward_hooks:
            self.teacher.layers[0].linear1.register_forward_hook(lambda *_: None)


@pytest.mark.long
def test_a_hook_of_the_users(tmp_path: Path, accelerator: str) -> None:
    timings = LayerTimings(modules=["teacher.*"])
    plain = _fit(Hooked, tmp_path / "plain", accelerator)
    graph = _fit(Hooked, tmp_path / "graph", accelerator, CUDAGraphCallback(timings=timings))
    assert_same(plain, graph)
    assert "teacher.layers.0.linear1 " in str(graph.callback.summary)  # type: ignore[union-attr]


class OnADevice(Distilled):
    """Under a function mode of the user's, which torch sees, too."""

    def taught(self, x: Tensor) -> Tensor:
        with torch.device(x.device):
            return super().taught(x)


@pytest.mark.long
def test_a_function_mode_of_the_users(tmp_path: Path, accelerator: str) -> None:
    plain = _fit(OnADevice, tmp_path / "plain", accelerator)
    graph = _fit(OnADevice, tmp_path / "graph", accelerator, CUDAGraphCallback())
    assert_same(plain, graph)


class Compiled(Distilled):
    """By `compile` of the modules, where Dynamo leaves calls alone whose code is torch's own."""

    def on_fit_start(self) -> None:
        super().on_fit_start()
        if self.teacher.layers[0]._compiled_call_impl is None:
            self.teacher.layers[0].compile(backend="aot_eager")
            self.last.compile(backend="aot_eager")


@pytest.mark.long
@pytest.mark.parametrize("optimizer", [_sgd, fused_adamw])
@pytest.mark.parametrize("timings", [None, LayerTimings()])
def test_a_compiled_teacher(
    tmp_path: Path, accelerator: str, optimizer: Any, timings: LayerTimings | None
) -> None:
    compiled: list[set[tuple[str | None, str | None]]] = []

    def fit(name: str, *args: Any) -> Trace:
        torch.compiler.reset()
        clear_compilation_metrics()
        trace = _fit(Compiled, tmp_path / name, accelerator, *args, optimizer=optimizer)
        compiled.append({(found.co_filename, found.co_name) for found in get_compilation_metrics()})
        return trace

    plain, graph = fit("plain"), fit("graph", CUDAGraphCallback(timings=timings))
    assert_same(plain, graph)
    assert graph.counts.replayed >= 16
    # Nothing of ours in the place of torch's. In warm-up the same may be compiled more often: from torch
    # 2.14 on, Dynamo compiles these calls, too, and asks which function modes there are.
    assert compiled[0] == compiled[1]


class InGraphs(Distilled):
    """By `torch.compile`: graphs, which ask whether functions of torch's are still those of before."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.teacher.layers[0] = torch.compile(self.teacher.layers[0], backend="aot_eager")
        self.last = torch.compile(self.last, backend="aot_eager")  # type: ignore[assignment]


@pytest.mark.long
@pytest.mark.parametrize("timings", [None, LayerTimings()])
def test_a_teacher_in_graphs_of_dynamos(
    tmp_path: Path, accelerator: str, timings: LayerTimings | None
) -> None:
    graphs: list[int] = []

    def fit(name: str, *args: Any) -> Trace:
        torch.compiler.reset()
        counters.clear()
        trace = _fit(InGraphs, tmp_path / name, accelerator, *args)
        frames = counters["frames"]
        graphs.append(counters["stats"]["unique_graphs"])
        # None is broken up, and none is of code without anything of torch's in it.
        assert not counters["graph_break"]
        assert frames["total"] == frames["ok"] == graphs[-1]
        return trace

    plain, graph = fit("plain"), fit("graph", CUDAGraphCallback(timings=timings))
    assert_same(plain, graph)
    assert graph.counts.replayed >= 16
    assert 0 < graphs[0] <= graphs[1]  # again under the modes that watch the warm-up


@pytest.mark.long
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.filterwarnings(  # of torch, where Dynamo looks at every attribute
    "ignore:The .grad attribute of a Tensor that is not a leaf",
    "ignore:Dynamo does not know how to trace the builtin",
)
def test_dynamo_knows_torchs_functions_afterwards(
    tmp_path: Path, accelerator: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CompiledPart(Distilled):
        """Traced for the first time in the warm-up, by Dynamo that has never traced before."""

        def forward(self, x: Tensor) -> Tensor:
            return compiled(super().forward(x))

    compiled = torch.compile(lambda x: torch.relu(x) + 0.5**x, backend="eager")
    handlers = TorchInGraphFunctionVariable._get_handlers
    torch.compiler.reset()
    counters.clear()
    handlers.cache_clear()
    with monkeypatch.context() as patch:
        if not known:
            patch.setattr(own_modes, "_known_to_dynamo", lambda: None)
        _fit(CompiledPart, tmp_path, accelerator, CUDAGraphCallback())
    try:
        assert counters["frames"]["ok"] >= 2
        assert (counters["frames"]["ok"] == counters["frames"]["total"]) is known
        assert (overrides.has_torch_function in handlers()) is known
    finally:
        torch.compiler.reset()
        handlers.cache_clear()


class Padded(Distilled):
    padded = True


class PaddedNotNested(Padded):
    nested = False


def test_what_is_padded(tmp_path: Path, accelerator: str) -> None:
    with pytest.raises(CaptureError, match=r"(?s)hold nested tensors.*test_attention.*comes to"):
        _fit(Padded, tmp_path / "refused", accelerator, CUDAGraphCallback())
    plain = _fit(Padded, tmp_path / "plain", accelerator)
    padded = plain.steps[-1]["outputs"]["taught"][1, 3]
    assert not padded.any()
    eager = _fit(Padded, tmp_path / "eager", accelerator, CUDAGraphCallback(on_unsupported="eager"))
    assert_same(plain, eager)
    assert eager.counts.replayed == 0


@pytest.mark.long
def test_what_is_padded_without_nested_tensors(tmp_path: Path, accelerator: str) -> None:
    plain = _fit(PaddedNotNested, tmp_path / "plain", accelerator)
    graph = _fit(PaddedNotNested, tmp_path / "graph", accelerator, CUDAGraphCallback())
    assert_same(plain, graph)
    assert graph.counts.replayed >= 16


@pytest.mark.long
def test_a_mode_that_torch_sees_is_found(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the tests above compare differs if torch is told of our modes."""
    plain = _fit(Distilled, tmp_path / "plain", accelerator)
    monkeypatch.setattr(own_modes, "_has_torch_function", lambda relevant_args: True)
    told = _fit(Distilled, tmp_path / "told", accelerator, CUDAGraphCallback(verify=None))
    with pytest.raises(AssertionError, match="taught"):
        assert_same(plain, told)


class _Watches(OwnFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Users(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Overriding(Tensor):
    pass


def test_which_modes_are_told_of(torchs_own: Callable[..., bool]) -> None:
    plain = (torch.zeros(1), nn.Parameter(torch.zeros(1)), None, 1.5)
    other = torch.zeros(1).as_subclass(_Overriding)
    assert not torchs_own(plain)
    assert torchs_own((*plain, other))
    with _Watches():
        assert torchs_own(plain)  # what would be answered
        assert not overrides.has_torch_function(plain)
        assert overrides.has_torch_function((*plain, other))
        with _Users():
            assert overrides.has_torch_function(plain)
            with _Watches():
                assert overrides.has_torch_function(plain)
        with _Watches():
            assert not overrides.has_torch_function(plain)
        assert overrides.has_torch_function is not torchs_own


def test_a_mode_that_ends_in_an_error(torchs_own: Callable[..., bool]) -> None:
    with pytest.raises(KeyError), _Watches():
        raise KeyError
    assert overrides.has_torch_function is torchs_own
