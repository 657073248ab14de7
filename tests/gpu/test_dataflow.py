"""Thousands of replays on several streams, with other work on the GPU; kernels of one's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_cudagraph import CUDAGraphCallback, GraphedStep
from lightning_cudagraph.device.streams.accesses import access_of
from tests.gpu_load import gpu_under_load
from tests.harness import Net, assert_same, differences, loader, make, train

_REPLAYS = 5000
_BATCHES = 64
_STREAMS = 4


class Critics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.critics = nn.ModuleList(
            nn.Sequential(
                nn.Linear(24, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)
            )
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([critic(x[:, :24]) for critic in self.critics], 1)


class Tables(nn.Module):
    """Many small tables, and the products of what they hold."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(100, 16) for _ in range(12))
        self.bottom = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
        self.top = nn.Sequential(nn.Linear(13 * 13, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x: Tensor) -> Tensor:
        rows = (x[:, :12].abs() * 30).long().clamp(max=99)
        found = [table(rows[:, index]) for index, table in enumerate(self.tables)]
        found.append(self.bottom(x))
        vectors = torch.stack(found, 1)
        return self.top((vectors @ vectors.transpose(1, 2)).flatten(1))


class Blocks(nn.Module):
    """Two blocks of a GPT, in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(32, 32 * 64)
        self.layers = nn.ModuleList(nn.Linear(64, width) for width in (192, 64, 256) * 2)
        self.back = nn.ModuleList(nn.Linear(256, 64) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            y = self.inlet(x).view(-1, 32, 64)
            for block in range(2):
                attend, project, widen = self.layers[3 * block : 3 * block + 3]
                heads = attend(self.norms[2 * block](y)).view(-1, 32, 3, 2, 32).permute(2, 0, 3, 1, 4)
                mixed = F.scaled_dot_product_attention(*heads.unbind(), is_causal=True, dropout_p=0.1)
                y = y + project(mixed.transpose(1, 2).flatten(2))
                y = y + F.dropout(self.back[block](F.gelu(widen(self.norms[2 * block + 1](y)))), 0.1)
            return y.float().mean((1, 2))


class Convolutions(nn.Module):
    """Convolutions with batch norm, side by side and one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Conv2d(2, 8, 3, padding=1)
        self.sides = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))
        self.out = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inlet(x.view(-1, 2, 4, 4))
        sides = [F.relu(norm(side(y))) for side, norm in zip(self.sides, self.norms, strict=True)]
        shared = self.norms[0](y) + self.norms[0](sides[1])
        return self.out((sum(sides, shared)).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.there, self.back = (nn.LSTM(8, 16, 2, dropout=0.2, batch_first=True) for _ in range(2))
        self.out = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 4, 8)
        return self.out(torch.cat([self.there(x)[0][:, -1], self.back(x.flip(1))[0][:, -1]], 1))


def _mlp() -> nn.Module:
    width = 256
    inner = [layer for _ in range(6) for layer in (nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1))]
    return nn.Sequential(nn.Linear(32, width), *inner, nn.Linear(width, 1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": _mlp,
    "critics": Critics,
    "tables": Tables,
    "blocks": Blocks,
    "convolutions": Convolutions,
    "recurrent": Recurrent,
}


def _trained(build: Callable[[], nn.Module], streams: int) -> dict[str, Any]:
    """The state after thousands of steps, the losses of all of them, and how they were run."""
    torch.manual_seed(0)
    model = build().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True, capturable=True)
    batches = torch.randn(_BATCHES, 128, 32, device="cuda")
    losses = torch.zeros(_REPLAYS, device="cuda")

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - x.mean(1, keepdim=True)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    with GraphedStep(step, modules=model, optimizers=optimizer, backend="cuda", streams=streams) as run:
        for index in range(_REPLAYS):
            losses[index] = run(batches[index % _BATCHES]).detach()
        torch.cuda.synchronize()
        replayed, report = run.summary.calls.replayed, str(run.summary)
    assert replayed > _REPLAYS - 20
    assert streams == 1 or f"captured on {streams} streams" in report
    assert bool(losses.isfinite().all())
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict()["state"],
        "losses": losses,
        "random": torch.cuda.get_rng_state(),
    }


@pytest.fixture
def _one_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's fastest sums come in any order, on one stream, too."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@pytest.mark.usefixtures("_one_algorithm")
@pytest.mark.parametrize("name", MODELS)
def test_thousands_of_replays_under_load(name: str) -> None:
    one = _trained(MODELS[name], 1)
    with gpu_under_load(0):
        several = _trained(MODELS[name], _STREAMS)
    assert differences(one, several) == []


_SOURCE = """
extern "C" __global__ void leak(const float* x, float* y, float* steepest, int n, float slope) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        y[i] = x[i] > 0.0f ? x[i] : slope * x[i];
        if (i == 0) steepest[0] = 0.5f * steepest[0] + x[0];
    }
}
"""


def _leak(x: Tensor, steepest: Tensor, slope: float = 0.1) -> Tensor:
    """A kernel that is compiled here and launched without an op; it writes a buffer, too."""
    if not hasattr(_leak, "kernel"):
        compiler = getattr(torch.cuda, "_compile_kernel", None) or torch.cuda.compile_kernel
        _leak.kernel = compiler(_SOURCE, "leak")  # type: ignore[attr-defined]
    x = x.contiguous()
    y = torch.empty_like(x)
    blocks = (x.numel() + 255) // 256
    _leak.kernel(  # type: ignore[attr-defined]
        grid=(blocks, 1, 1), block=(256, 1, 1), args=[x, y, steepest, x.numel(), slope]
    )
    return y


class _Leak(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, steepest: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _leak(x, steepest)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return torch.where(x > 0, gradient, 0.1 * gradient), None


@torch.library.custom_op("lightning_cudagraph_tests::leak", mutates_args=("steepest",))
def _leak_op(x: Tensor, steepest: Tensor) -> Tensor:
    return _leak(x, steepest)


class _LeakByOp(_Leak):
    @staticmethod
    def forward(ctx: Any, x: Tensor, steepest: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _leak_op(x, steepest)


class WithKernel(Net):
    """Two branches, with a kernel of one's own in each."""

    def __init__(self, leak: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.leak = leak
        self.left, self.right = nn.Linear(12, 24), nn.Linear(12, 24)
        self.gate = nn.Linear(24, 4)
        self.register_buffer("steepest", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        left = self.leak(self.left(x), self.steepest)
        right = self.leak(self.right(x).tanh(), self.steepest)
        return super().forward(x) + self.gate(left * right) + self.steepest


@pytest.mark.parametrize(
    ("leak", "said"),
    [
        (_Leak.apply, "work that is no op of torch's"),
        (_LeakByOp.apply, "lightning_cudagraph_tests.leak"),
    ],
    ids=["launched", "op"],
)
def test_a_kernel_of_ones_own_is_right_and_said(tmp_path: Path, leak: Any, said: str) -> None:
    def run(name: str, callback: CUDAGraphCallback | None) -> Any:
        module = make(lambda: WithKernel(leak))
        return train(
            module, tmp_path / name, callback, accelerator="gpu", train_loader=loader(ragged=False)
        )

    plain = run("plain", None)
    graph = run("graph", CUDAGraphCallback(streams=_STREAMS))
    assert_same(plain, graph)
    assert graph.counts.replayed == 18
    assert said in str(graph.callback.summary)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized:UserWarning")
def test_a_result_that_is_given_other_memory_sends_the_step_to_one_stream() -> None:
    out = torch.zeros(2, device="cuda")
    x = torch.randn(1000, device="cuda")
    assert access_of(torch.ops.aten.add.out, (x, x), {"out": out}) is not None

    def step(x: Tensor) -> Tensor:
        return torch.add(x, x, out=torch.zeros(2, device=x.device)).sum()

    with GraphedStep(step, backend="cuda", streams=_STREAMS) as run:
        for _ in range(6):
            assert torch.equal(run(x), (x + x).sum())
        assert run.summary.calls.replayed > 0
        assert "captured on one stream" in str(run.summary)
