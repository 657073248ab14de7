"""Graphs go on with their own scratch memory when torch's workspaces for cuBLAS are cleared."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.fabric.accelerators.cuda import _clear_cuda_memory
from torch import nn

from lightning_cudagraph import GraphedStep
from lightning_cudagraph.capture.decisions.stream_choice import AskedStreams
from lightning_cudagraph.device.cuda.cuda_backend import CudaBackend

# Products of these sizes are split on an H200, and their partial sums go to the workspace.
_BATCH, _WIDTH, _DEPTH = 128, 256, 6
_FILLER = 7.0
_DEVICE = torch.device("cuda", 0)
_MIB = 1 << 20


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(_DEPTH) for layer in (nn.Linear(_WIDTH, _WIDTH), nn.Tanh())]
    return nn.Sequential(*layers).cuda()


def _batches(count: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    for _ in range(count):
        yield torch.randn(_BATCH, _WIDTH, device="cuda", generator=generator)


def _train(
    model: nn.Module, graphed: bool, clear_at: int | None, streams: AskedStreams = "auto"
) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    fillers: list[torch.Tensor] = []
    backend = "cuda" if graphed else "off"
    with GraphedStep(step, modules=model, optimizers=optimizer, backend=backend, streams=streams) as run:
        for index, x in enumerate(_batches(40)):
            if index == clear_at:
                _clear_cuda_memory()
                # What was freed is somebody else's now.
                fillers = [torch.full((2**20,), _FILLER, device="cuda") for _ in range(64)]
            run(x)
        assert not graphed or run.summary.calls.replayed > 30
    torch.cuda.synchronize()
    assert all(bool((filler == _FILLER).all()) for filler in fillers)
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("clear_at", [1, 3, 5, 20])
def test_clearing_workspaces_leaves_graphs_their_scratch_memory(clear_at: int) -> None:
    plain = _train(_model(), False, None)
    graphed = _train(_model(), True, clear_at)
    torch.testing.assert_close(graphed, plain, rtol=0, atol=0)


def test_streams_are_used_again_when_their_graphs_are_gone() -> None:
    # As many each time; trials may choose others, and each has a workspace.
    _train(_model(), True, None, streams=4)
    reserved_bytes = torch.cuda.memory_reserved()
    for _ in range(4):
        _train(_model(), True, None, streams=4)
        _clear_cuda_memory()
    assert torch.cuda.memory_reserved() <= reserved_bytes


_MANY_POOLS = """
import torch
from lightning_cudagraph.device.streams.side_streams import SideStream
taken = [torch.cuda.MemPool() for _ in range(300)]  # their numbers are counted by reference
kept = []
for index in range(80):  # more than torch has streams
    kept.append(SideStream(torch.device("cuda")))
    kept += [object() for _ in range(50_000)] + list(range(1000 * index, 1000 * index + 50_000))
assert kept[0].workspace_bytes(torch.cuda.memory_snapshot()) > 0
"""


def _run(code: str, **environment: str) -> None:
    """Run it in a process of its own, in which nobody else has used a stream, or broken the device."""
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, f"{run.returncode}: {run.stderr[-2000:]}"


def test_in_a_process_with_many_pools() -> None:
    _run(_MANY_POOLS)


def test_with_expandable_segments() -> None:
    code = "from tests.gpu.test_side_streams import _model, _train; _train(_model(), True, 5)"
    _run(code, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")


_OTHERS_TAKE_STREAMS = """
import torch
from lightning_cudagraph.device.streams.side_streams import EventStream, SideStream
device = torch.device("cuda", 0)
own = [SideStream(device), EventStream(device)]
torchs = {torch.cuda.Stream().cuda_stream for _ in range(64)}
assert len(torchs) == 32
own += [each(device) for each in (SideStream, EventStream) for _ in range(20)]
assert len({each.stream.cuda_stream for each in own}) == len(own)
assert torchs.isdisjoint(each.stream.cuda_stream for each in own)
with torch.cuda.stream(own[0].stream):
    assert torch.cuda.current_stream() == own[0].stream
"""


def test_no_other_code_is_given_their_streams() -> None:
    _run(_OTHERS_TAKE_STREAMS)


def large_blocks(streams: int, clear: bool = False) -> tuple[Counter[int], list[str]]:
    """Where memory of the streams of a capture is; all that the step asks for itself is smaller.

    Args:
        streams: how many.
        clear: workspaces are cleared in the middle of a warm-up step, which makes others then.

    Returns:
        For each stream, how many blocks of a MiB or more are alive in the pool of its workspaces; and
        such blocks that are elsewhere.
    """
    model, batch = _model(), next(_batches(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        (model(batch) - batch).square().mean().backward()
        optimizer.step()

    backend = CudaBackend(_DEVICE, streams=streams)
    with backend.on_side_stream():
        if clear:
            _clear_cuda_memory()
        step()
    graph, _ = backend.capture(step)
    graph.replay()
    torch.cuda.synchronize()
    pools = {side.stream.cuda_stream: side._pooled.pool.id for side in backend._sides()}
    inside: Counter[int] = Counter()
    elsewhere = []
    for segment in torch.cuda.memory_snapshot():
        stream, pool = segment["stream"], segment["segment_pool_id"]
        for block in segment["blocks"] if stream in pools else ():
            if block["state"] == "active_allocated" and block["size"] >= _MIB:
                inside[stream] += pool == pools[stream]
                if pool != pools[stream]:
                    elsewhere.append(f"{block['size']} bytes in pool {pool}, not {pools[stream]}")
    assert len(pools) == streams
    return inside, elsewhere


_WHERE = """
from tests.gpu.test_side_streams import large_blocks
inside, elsewhere = large_blocks(4, clear={clear})
assert not elsewhere, elsewhere
assert len(inside) == 4 and min(inside.values()) >= 1, inside
"""

_WHERE_WITHOUT_LT = """
import torch
from lightning_cudagraph.device.streams import side_streams
from tests.gpu.test_side_streams import large_blocks

def matmul(operand, pool):
    with torch.cuda.use_mem_pool(pool, operand.device):
        torch.mm(operand, operand)

side_streams._matmul = matmul
assert large_blocks(4)[1]
"""


@pytest.mark.parametrize("clear", [False, True])
@pytest.mark.parametrize("unified", [None, "0", "1"])
def test_workspaces_lie_in_the_pools_of_their_streams(unified: str | None, clear: bool) -> None:
    code = _WHERE.format(clear=clear)
    _run(code, **({} if unified is None else {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": unified}))


def test_without_a_product_for_cublaslt_its_workspaces_lie_elsewhere() -> None:
    _run(_WHERE_WITHOUT_LT, TORCH_CUBLASLT_UNIFIED_WORKSPACE="0")


def train_critics(graphed: bool) -> list[torch.Tensor]:
    """Two critics on eight streams; when they are captured, all that others can clear is cleared."""
    torch.manual_seed(0)
    critics = nn.ModuleList(
        nn.Sequential(
            *(nn.Linear(24, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
        )
        for _ in range(2)
    ).cuda()
    optimizer = torch.optim.AdamW(critics.parameters(), fused=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum((critic(x) - x.mean(1, keepdim=True)).square().mean() for critic in critics)
        loss.backward()
        optimizer.step()
        return loss

    arguments: dict[str, Any] = {"backend": "cuda", "streams": "auto"} if graphed else {"backend": "off"}
    fillers: list[torch.Tensor] = []
    generator = torch.Generator("cuda").manual_seed(1)
    with GraphedStep(step, modules=critics, optimizers=optimizer, **arguments) as run:
        for index in range(30):
            if index == 20:
                _clear_cuda_memory()
                torch.cuda.empty_cache()
                fillers = [torch.full((_MIB,), _FILLER, device="cuda") for _ in range(256)]
                for stream in [torch.cuda.Stream() for _ in range(4)]:
                    with torch.cuda.stream(stream):
                        wide = torch.randn(1024, 1024, device="cuda", generator=generator)
                        torch.addmm(wide[0], wide, wide)
                torch.cuda.synchronize()
            run(torch.randn(256, 24, device="cuda", generator=generator))
        assert not graphed or run.summary.calls.replayed > 20
        assert not graphed or "captured on 8 streams" in str(run.summary), run.summary
    torch.cuda.synchronize()
    assert all(bool((filler == _FILLER).all()) for filler in fillers)
    return [parameter.detach().clone() for parameter in critics.parameters()]


_CRITICS = """
import torch
from lightning_cudagraph.capture.decisions import stream_choice
from tests.gpu.test_side_streams import train_critics
stream_choice._LEAST_GAIN = -10
stream_choice.streams_of = lambda flow: [8]
torch.testing.assert_close(train_critics(True), train_critics(False), rtol=0, atol=0)
"""


def test_trials_on_several_streams_leave_nothing_behind_that_others_free() -> None:
    _run(_CRITICS)


def test_a_graph_that_is_released_while_it_runs_reads_what_it_should() -> None:
    wide, late = torch.ones(4096, 4096, device="cuda"), torch.zeros(1000, device="cuda")
    values = [float(number) for number in range(1000)]

    def step() -> None:
        product = wide
        for _ in range(20):
            product = product @ wide * (1 / 4096)
        late.copy_(torch.tensor(values, device="cuda"))  # in a graph, from pinned memory

    backend = CudaBackend(_DEVICE)
    with backend.on_side_stream():
        step()
    graph, _ = backend.capture(step)
    late.zero_()
    graph.replay()
    backend.release(graph)
    pinned = [torch.full((_MIB,), 255, dtype=torch.uint8, pin_memory=True) for _ in range(4)]
    torch.cuda.synchronize()
    assert late.tolist() == values
    assert all(bool((block == 255).all()) for block in pinned)


def test_captures_apart_follow_one_another_beside_a_graph_that_lives() -> None:
    x = torch.ones(_MIB, device="cuda")
    backend = CudaBackend(_DEVICE)
    with backend.on_side_stream():
        x.mul(2)
    lives, doubled = backend.capture(lambda: x * 2)
    with backend.in_pool():
        first, kept = backend.capture(lambda: x * 3)  # that is alive keeps the pool in use
        backend.release(first)
        second, fourfold = backend.capture(lambda: x * 4)
        second.replay()
        assert bool((fourfold == 4).all())
        backend.release(second)
    lives.replay()
    assert bool((doubled == 2).all())
    backend.release(lives)
    assert kept.numel() == _MIB


def test_later_graphs_share_the_pool_of_one_captured_apart_that_stays() -> None:
    x = torch.ones(_MIB, device="cuda")
    backend = CudaBackend(_DEVICE)
    with backend.on_side_stream():
        x.mul(2)
    with backend.in_pool():
        lost, _ = backend.capture(lambda: x * 2)
    with backend.in_pool():
        first, tripled = backend.capture(lambda: x * 3)
    backend.release(lost)
    assert backend.stay(first)
    second, fourfold = backend.capture(lambda: x * 4)
    assert len({live.pool for live in backend._live}) == 1
    first.replay()
    second.replay()
    assert bool((tripled == 3).all())
    assert bool((fourfold == 4).all())
    with backend.in_pool():
        other, _ = backend.capture(lambda: x * 5)
    assert not backend.stay(other)  # two graphs are in the other pool
    for graph in (first, second, other):
        backend.release(graph)
