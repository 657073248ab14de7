"""A step that is captured on several streams comes to the same numbers.

On the emulator each replay runs the ops in another order that the streams and their waits allow.
`tests/gpu/test_streams.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from benchmarks.models import WORKLOADS, Workload
from benchmarks.trainers import trainer_for
from lightning_cudagraph import (
    CUDAGraphCallback,
    GraphedStep,
    LayerTimings,
    Verification,
)
from lightning_cudagraph.capture.decisions import stream_choice
from lightning_cudagraph.capture.decisions.stream_choice import (
    AskedStreams,
    AutoStreams,
    StreamChoice,
)
from lightning_cudagraph.device.emulator.emulator_backend import EmulatorBackend
from lightning_cudagraph.device.streams.dataflow import Flow
from lightning_cudagraph.errors import ConfigurationError, VerificationError
from tests.harness import Net, Trace, assert_same, differences, loader, make, train

pytestmark = pytest.mark.declared


@pytest.fixture(autouse=True)
def trials_on_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs one op after another, and so makes none by itself."""
    monkeypatch.setattr(EmulatorBackend, "overlaps", True)


class Branched(Net):
    """Branches that do not need one another, views of one memory, and writes in place."""

    def __init__(self, make_optimizer: Any = None) -> None:
        super().__init__(make_optimizer)
        self.left, self.right = nn.Linear(12, 24), nn.Linear(12, 24)
        self.gate = nn.Linear(48, 4)
        self.register_buffer("seen", torch.zeros(3, 4))
        self.register_buffer("longest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        both = torch.cat([self.left(x).tanh(), nn.functional.dropout(self.right(x), 0.2)], 1)
        halves = both.clone()
        halves[:, :24].mul_(0.5)
        halves[:, 24:].add_(halves[:, :24])
        with torch.no_grad():
            self.longest.copy_(torch.maximum(self.longest, halves.detach().norm()))
            self.seen[1].add_(logits.detach().mean(0))
            self.seen[2].copy_(self.seen[1])
            self.seen[1].mul_(0.9)
        return logits + self.gate(halves) + self.seen[2]


def _foreach(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01, foreach=True)


def _run(folder: Path, accelerator: str, streams: AskedStreams | None, **kwargs: Any) -> Trace:
    """A run, plain without streams."""
    optimizer = kwargs.pop("optimizer", None)
    timings = kwargs.pop("timings", None)
    verify = kwargs.pop("verify", Verification())
    callback = CUDAGraphCallback(streams=streams or 1, timings=timings, verify=verify)
    kwargs = {"accelerator": accelerator, "train_loader": loader(ragged=False), **kwargs}
    build = make(lambda: Branched(optimizer))
    return train(build, folder, None if streams is None else callback, **kwargs)


@pytest.mark.spread(2)
@pytest.mark.parametrize("streams", [1, 2, 4, 8, "auto"])
def test_same_as_plain(tmp_path: Path, accelerator: str, streams: AskedStreams) -> None:
    plain = _run(tmp_path / "plain", accelerator, None)
    timings = LayerTimings(every_n_steps=5)  # a second instance beside the one that was tried
    graph = _run(tmp_path / "graph", accelerator, streams, timings=timings)
    assert_same(plain, graph)
    assert graph.counts.replayed == 18
    assert graph.counts.captures == 1


@pytest.mark.long
@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_same_with_lists_of_tensors_and_clipping(
    tmp_path: Path, accelerator: str, precision: Any, timed: bool
) -> None:
    kwargs: dict[str, Any] = {"precision": precision, "gradient_clip_val": 0.1, "optimizer": _foreach}
    plain = _run(tmp_path / "plain", accelerator, None, **kwargs)
    timings = LayerTimings() if timed else None
    graph = _run(tmp_path / "graph", accelerator, 4, timings=timings, **kwargs)
    assert_same(plain, graph)
    assert graph.counts.replayed == 18
    assert graph.callback is not None
    assert ("on several streams layers overlap" in str(graph.callback.summary)) is timed


@pytest.mark.long
def test_same_when_gradients_are_accumulated_and_validation_is_captured(
    tmp_path: Path, accelerator: str
) -> None:
    kwargs: dict[str, Any] = {"accumulate_grad_batches": 3, "accelerator": accelerator}
    plain = train(make(Branched), tmp_path / "plain", **kwargs)
    callback = CUDAGraphCallback(streams=3, evaluation=True)
    graph = train(make(Branched), tmp_path / "graph", callback, **kwargs)
    assert_same(plain, graph)
    assert graph.counts.replayed > 6
    assert callback.summary.validate.replayed > 0


class _Checkpointed(Branched):
    """A part is computed again in the backward pass, with the same random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        def part(x: Tensor) -> Tensor:
            return nn.functional.dropout(self.left(x).relu(), 0.2)[:, :4]

        # On a CPU the state of the generator cannot be set in a capture.
        again = checkpoint(part, x, use_reentrant=False, preserve_rng_state=x.is_cuda)
        return super().forward(x) + again


class _Penalised(Branched):
    """The loss has a gradient in it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        weights = [self.left.weight, self.gate.weight]
        gradients = torch.autograd.grad(loss, weights, create_graph=True)
        return loss + 0.1 * sum(gradient.square().sum() for gradient in gradients)


class _PerSample(Branched):
    """Gradients of each sample by itself, by `torch.func`."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        layer = self.right

        def size(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
            out: Tensor = torch.func.functional_call(layer, parameters, (x,))
            return out.tanh().square().mean()

        gradients = torch.func.vmap(torch.func.grad(size), (None, 0))(
            dict(layer.named_parameters()), batch[0]
        )
        return loss + 0.1 * sum(gradient.square().mean() for gradient in gradients.values())


@pytest.mark.long
@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize("cls", [_Checkpointed, _Penalised, _PerSample])
def test_nested_passes(
    tmp_path: Path, accelerator: str, cls: type[Branched], streams: AskedStreams
) -> None:
    def run(folder: str, callback: CUDAGraphCallback | None) -> Trace:
        batches = loader(ragged=False)
        return train(
            make(cls), tmp_path / folder, callback, accelerator=accelerator, train_loader=batches
        )

    plain = run("plain", None)
    callback = CUDAGraphCallback(streams=streams, timings=None, verify=Verification(every_n_steps=5))
    graph = run("graph", callback)
    assert_same(plain, graph)
    assert graph.counts.replayed == 18
    if streams == 4:
        assert "captured on 4 streams" in str(callback.summary)


# The other rules are taken out in `test_dataflow`, where schedules are made in which each one shows.
@pytest.mark.long
@pytest.mark.parametrize("rule", ["_read_after_write"])
def test_without_a_rule_the_numbers_are_others(
    tmp_path: Path, accelerator: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if accelerator != "cpu":
        pytest.skip(
            "a race on a GPU may come out right by chance; the emulator looks for the worst order"
        )
    monkeypatch.setattr(Flow, rule, lambda flow, piece: iter(()))
    _run(tmp_path, accelerator, 8, raises=VerificationError, verify=Verification(every_n_steps=1))


@pytest.mark.spread
@pytest.mark.parametrize(
    ("useful", "times", "said"),
    [
        ([4, 2], {1: 1.0, 4: 0.6}, "4 streams, 1.67 times as fast as on one (ms a replay, 1: 1.000,"),
        ([8, 4, 2], {1: 1.0, 8: 0.98}, "1 stream: 8 streams gain less than 3% (ms a replay, 1: 1.000,"),
        ([], {}, "1 stream: by its data flow, more gain less than 3%"),
    ],
)
@pytest.mark.parametrize("has_others", [False, pytest.param(True, marks=pytest.mark.long)])
def test_one_number_is_tried_and_the_faster_capture_kept(
    tmp_path: Path,
    useful: list[int],
    times: dict[int, float],
    said: str,
    has_others: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[int] = []
    on: list[int] = []
    capture = EmulatorBackend.capture

    def replay_ms(choice: StreamChoice, captured: Any) -> float:
        captured.rerun()  # a replay too many, which must leave nothing behind
        tried.append(choice._backend.streams)
        return times[tried[-1]]

    def noted(backend: EmulatorBackend, *args: Any, **kwargs: Any) -> Any:
        on.append(backend.streams)
        return capture(backend, *args, **kwargs)

    plain = _run(tmp_path / "plain", "cpu", None)
    monkeypatch.setattr(StreamChoice, "_replay_ms", replay_ms)
    monkeypatch.setattr(stream_choice, "streams_of", lambda flow: useful)
    monkeypatch.setattr(EmulatorBackend, "capture", noted)
    monkeypatch.setattr(EmulatorBackend, "stay", lambda backend, graph: not has_others)
    graph = _run(tmp_path / "graph", "cpu", "auto", timings=LayerTimings(every_n_steps=5))
    assert tried == list(times)
    assert_same(plain, graph)
    assert graph.callback is not None
    assert f"captured on {said}" in str(graph.callback.summary)
    chosen = int(said[0])
    # The first instance is kept; one with timing events follows.
    assert on == [*(times or (1,)), *[chosen] * has_others, chosen]


def test_a_trial_leaves_version_counters_alone() -> None:
    """Code around a `GraphedStep` may have saved its weights for a backward pass of its own."""
    net = nn.Linear(4, 4)

    def step(x: Tensor) -> Tensor:
        loss = net(x).square().mean()
        loss.backward()
        return loss

    with GraphedStep(step, net) as graphed:
        for x in torch.randn(8, 4, 4):
            net.zero_grad()
            around = net(x.clone().requires_grad_()).sum()
            graphed(x)
            around.backward()
        assert "captured on" in str(graphed.summary)


def test_without_memory_for_two_graphs_the_first_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live: list[int] = []

    def replay_ms(choice: StreamChoice, captured: Any) -> float:
        backend = choice._backend
        assert isinstance(backend, EmulatorBackend)
        live.append(len(backend._live))
        return 1.0

    plain = _run(tmp_path / "plain", "cpu", None)
    monkeypatch.setattr(StreamChoice, "_replay_ms", replay_ms)
    monkeypatch.setattr(EmulatorBackend, "free_bytes", lambda backend: 1 << 30)
    graph = _run(tmp_path / "graph", "cpu", "auto")
    assert live == [1, 1]
    assert_same(plain, graph)
    assert graph.counts.replayed == 18


_MIB = 1 << 20


@pytest.mark.long
@pytest.mark.parametrize("of", ["workspaces", "graphs"])
@pytest.mark.parametrize(
    ("memory_bytes", "said"),
    [
        (0, "36 MiB more, and 0 are allowed; not on 4: 27 MiB more, and 0 are allowed; not on 2: 9 MiB"),
        (
            26 * _MIB,
            "2: 0.500), for 9 MiB more; not on 5: 36 MiB more, and 26 are allowed; not on 4: 27",
        ),
        (27 * _MIB, "4: 0.250), for 27 MiB more; not on 5: 36 MiB more, and 27 are allowed"),
        (None, "5: 0.200), for 36 MiB more"),
    ],
)
def test_over_the_bound_on_memory_fewer_streams_are_used(
    tmp_path: Path, memory_bytes: int | None, said: str, of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def replay_ms(choice: StreamChoice, captured: Any) -> float:
        tried.append(choice._backend.streams)
        return 1.0 / tried[-1]

    def workspace_bytes(backend: EmulatorBackend) -> int:
        return 9 * _MIB * backend.streams if of == "workspaces" else 0

    def graph_bytes(backend: EmulatorBackend) -> int:
        return 9 * _MIB * backend.streams * len(backend._live) if of == "graphs" else 0

    monkeypatch.setattr(EmulatorBackend, "workspace_bytes", workspace_bytes)
    monkeypatch.setattr(EmulatorBackend, "graph_bytes", graph_bytes)
    monkeypatch.setattr(StreamChoice, "_replay_ms", replay_ms)
    plain = _run(tmp_path / "plain", "cpu", None)
    graph = _run(tmp_path / "graph", "cpu", AutoStreams(memory_bytes=memory_bytes))
    assert_same(plain, graph)
    assert graph.counts.replayed == 18
    assert graph.callback is not None
    report = str(graph.callback.summary)
    assert said in report
    streams = [5, 4, 2][: {0: 3, 26 * _MIB: 3, 27 * _MIB: 2, None: 1}[memory_bytes]]
    chosen = [streams.pop()] if memory_bytes != 0 else []
    assert tried == [1, *chosen]  # what takes too much memory is not replayed


def test_the_bound_of_a_loop_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EmulatorBackend, "workspace_bytes", lambda backend: 9 * _MIB * backend.streams)
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        (weight * x).sum().backward()
        optimizer.step()

    streams = AutoStreams(memory_bytes=8 * _MIB)
    with GraphedStep(step, optimizers=optimizer, backend="emulator", streams=streams) as run:
        for _ in range(6):
            run(torch.ones(3))
        assert "not on 2: 9 MiB more, and 8 are allowed" in str(run.summary)
        assert run.summary.calls.replayed == 3


def test_a_share_of_what_one_stream_takes_is_allowed() -> None:
    assert AutoStreams().allowed_bytes(10 * _MIB) == 1024 * _MIB
    assert AutoStreams().allowed_bytes(10 * 1024 * _MIB) == 1536 * _MIB


@pytest.mark.parametrize("memory_bytes", [-1, 1e9, True, "1 GiB"])
def test_what_is_no_bound_on_memory(memory_bytes: Any) -> None:
    with pytest.raises(ConfigurationError, match="expected a number of bytes"):
        AutoStreams(memory_bytes=memory_bytes)


class _Towers(Branched):
    """Products of a size that cuBLAS may split, with partial sums in scratch memory."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 256), nn.ReLU(), nn.Linear(256, 256), nn.Linear(256, 4))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(tower(x) for tower in self.towers)


class _AnotherFit(Callback):
    """Comes to its end between two steps, and has what torch keeps for cuBLAS freed."""

    def __init__(self, folder: Path, accelerator: str) -> None:
        self._folder = folder
        self._accelerator = accelerator

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 9:
            other = {"accelerator": self._accelerator, "max_steps": 3, "checkpoint_every": 0}
            train(make(Branched), self._folder, watched=False, **other)


@pytest.mark.long
def test_another_fit_ends_meanwhile(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_choice, "_LEAST_GAIN", -10)
    monkeypatch.setattr(stream_choice, "streams_of", lambda flow: [8])

    def run(folder: Path, callback: CUDAGraphCallback | None) -> Trace:
        other = (_AnotherFit(folder / "other", accelerator),)
        batches = {"train_loader": loader(ragged=False), "callbacks": other, "max_epochs": 2}
        return train(make(_Towers), folder, callback, accelerator=accelerator, **batches)

    plain = run(tmp_path / "plain", None)
    graph = run(tmp_path / "graph", CUDAGraphCallback(streams="auto"))
    assert_same(plain, graph)
    assert graph.counts.replayed == 11
    assert graph.counts.captures == 1
    assert graph.callback is not None
    assert "captured on 8 streams" in str(graph.callback.summary)


@pytest.mark.filterwarnings("ignore:.*sync_dist=True.*")
def test_processes_of_a_group_do_not_choose(tmp_path: Path, accelerator: str) -> None:
    """Not even one that is alone in it: whoever asks does not know what the others do."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        graph = _run(tmp_path, accelerator, "auto")
    finally:
        torch.distributed.destroy_process_group()
    assert graph.counts.replayed == 18
    assert graph.callback is not None
    assert "on one stream: here the processes of the group do not choose together" in str(
        graph.callback.summary
    )


@pytest.mark.parametrize("streams", [0, -1, 17, 2.0, True, "all", None])
def test_what_is_no_number_of_streams(streams: Any) -> None:
    with pytest.raises(ConfigurationError, match="expected an int from 1 to 16"):
        CUDAGraphCallback(streams=streams)
    with pytest.raises(ConfigurationError, match="expected an int from 1 to 16"):
        GraphedStep(lambda: None, streams=streams)


@pytest.mark.parametrize("streams", [2, "auto"])
def test_a_loop_of_ones_own(accelerator: str, streams: AskedStreams) -> None:
    device = "cuda" if accelerator == "gpu" else "cpu"

    def trained(backend: Any) -> tuple[list[Tensor], list[Tensor]]:
        torch.manual_seed(0)
        first, second = nn.Linear(6, 6).to(device), nn.Linear(6, 6).to(device)
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = (first(x).tanh() - second(x)).square().mean() + nn.functional.dropout(x, 0.5).mean()
            loss.backward()
            optimizer.step()
            return loss

        with GraphedStep(
            step, modules=[first, second], optimizers=optimizer, backend=backend, streams=streams
        ) as run:
            losses = [run(torch.randn(5, 6).to(device)) for _ in range(12)]
            assert backend == "off" or run.summary.calls.replayed == 9
        return losses, [*first.parameters(), *second.parameters()]

    assert differences(trained("off"), trained("auto")) == []


@pytest.mark.spread(4)
@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_nothing_in_the_benchmarks_is_waited_for(accelerator: str, workload: Workload) -> None:
    """Their figures are of ops that are all placed, what the step logs among them."""
    if not workload.is_here:
        pytest.skip(f"needs {workload.needs}")
    callback = CUDAGraphCallback(streams=4)
    with trainer_for(workload, [callback], accelerator=accelerator) as trainer:
        batches = DataLoader([workload.batch(True) for _ in range(8)], batch_size=None)  # type: ignore[arg-type]
        trainer.fit(workload.make(True), batches)
    assert callback.summary.fit.replayed == 5
    assert "all streams wait" not in str(callback.summary)
