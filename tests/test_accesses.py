"""What ops are said to read and write is what they read and write: schemas lie."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_iter

from lightning_cudagraph.capture import writes
from lightning_cudagraph.capture.streams import accesses
from lightning_cudagraph.capture.streams.accesses import access_of, made_by, only_looks
from lightning_cudagraph.capture.writes import written_by
from tests.declared import Declared

aten = torch.ops.aten
_SAMPLES = 2


@pytest.fixture
def device(accelerator: str) -> str:
    return "cuda" if accelerator == "gpu" else "cpu"


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, groups=8),
            nn.GroupNorm(2, 8),
            nn.SiLU(inplace=True),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.BatchNorm1d(32),
            nn.Linear(32, 12),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.repeat(1, 12)[:, :108].reshape(-1, 3, 6, 6))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x.repeat(1, 16)[:, :128].reshape(-1, 8, 16))
        q, k, v = (t.reshape(-1, 8, 2, 8).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1).flatten(1)[:, :12]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, 2, dropout=0.2, batch_first=True)
        self.gru = nn.GRU(6, 6, batch_first=True, bidirectional=True)
        self.rnn = nn.RNN(12, 12, batch_first=True)
        self.cell = nn.LSTMCell(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.rnn(self.gru(self.lstm(x.reshape(-1, 3, 4))[0])[0])[0]
        return self.cell(x[:, -1])[0]


class Embeddings(nn.Module):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.rows = nn.Embedding(10, 6, sparse=sparse)
        self.bags = nn.EmbeddingBag(10, 6, mode="sum")
        self.out = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        indices = (x.abs() * 3).long().clamp(max=9)
        return self.out(torch.cat([self.rows(indices).mean(1), self.bags(indices)], 1))


class Lists(nn.Module):
    """Views that are written through, lists of tensors, and memory that is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)
        self.register_buffer("seen", torch.zeros(3, 12))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen[1].add_(x.mean(0))
            self.seen.t()[2:5].mul_(0.5)
            torch._foreach_lerp_([*self.seen.unbind()], [x[0], x[1], x[2]], 0.1)
            self.seen.index_add_(0, torch.zeros(2, dtype=torch.long, device=x.device), x[:2])
            self.seen.scatter_(1, self.seen.argsort(1)[:, :2], x[:3, :2])
        out = self.layer(x)
        out[:, 3:6] *= 2
        return out + self.seen.sum(0).detach()


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 24), nn.LayerNorm(24), nn.GELU(), nn.Dropout(0.3), nn.Linear(24, 12)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": _mlp,
    "convolutions": Convolutions,
    "attention": Attention,
    "recurrent": Recurrent,
    "embeddings": Embeddings,
    "lists": Lists,
}
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": F.mse_loss,
    "cross_entropy": lambda out, x: F.cross_entropy(out, x.argmax(1), label_smoothing=0.1),
    "huber": F.huber_loss,
    "bce": lambda out, x: F.binary_cross_entropy_with_logits(out, x.sigmoid()),
    "kl": lambda out, x: F.kl_div(out.log_softmax(1), x.softmax(1), reduction="batchmean"),
}
OPTIMIZERS = [
    "SGD",
    "Adam",
    "AdamW",
    "NAdam",
    "RAdam",
    "Adamax",
    "Adagrad",
    "Adadelta",
    "ASGD",
    "Rprop",
    "RMSprop",
    "LBFGS",
    "SparseAdam",
    "Adafactor",
    "Muon",
]


def _told(run: Callable[[], Any], *older: Any) -> Declared:
    """Run something, and look at its ops."""
    watch = Declared()
    watch.meet(older)
    with watch:
        run()
    return watch


def _train(
    model: nn.Module, optimizer: Any, device: str, loss: Any = F.mse_loss, **how: Any
) -> Declared:
    """Three steps, and what was said and done in them."""
    scaler = torch.amp.GradScaler(device) if how.get("scaler") else None
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(9, 12, generator=generator).to(device) for _ in range(3)]

    def steps() -> None:
        for x in batches:
            optimizer.zero_grad(set_to_none=how.get("set_to_none", True))
            dtype = how.get("autocast")
            with torch.autocast(device, dtype) if dtype else contextlib.nullcontext():
                value = loss(model(x), x)
            (scaler.scale(value) if scaler else value).backward()
            if scaler:
                scaler.unscale_(optimizer)
            if how.get("clip"):
                nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=how["clip"] == "foreach")
                nn.utils.clip_grad_value_(model.parameters(), 0.1)
            scaler.step(optimizer) if scaler else optimizer.step()
            if scaler:
                scaler.update()

    return _told(steps, list(model.state_dict().values()), batches)


def _is_true(watch: Declared, *, mutates: bool = True) -> None:
    assert not watch.lies
    # Barriers: cuDNN's recurrent nets, the state that their dropout draws from, and the look whether
    # their weights lie one behind the other.
    nets = ("aten::_cudnn_rnn", "aten::_thnn_fused")
    barriers = (*nets, "aten::_cudnn_init_dropout_state", "aten::set_.source_Storage")
    assert not {op for op in watch.unknown if not op.startswith(barriers)}
    assert watch.ops
    assert bool(watch.written) is mutates


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_models(name: str, autocast: Any, device: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().to(device)
    watch = _train(model, torch.optim.SGD(model.parameters(), 0.1), device, autocast=autocast)
    _is_true(watch)
    if name == "convolutions":
        assert any("batch_norm" in op for op in watch.written)


@pytest.mark.parametrize("loss", LOSSES)
def test_losses(loss: str, device: str) -> None:
    model = _mlp().to(device)
    _is_true(_train(model, torch.optim.SGD(model.parameters(), 0.1), device, loss=LOSSES[loss]))


def _forms(name: str, device: str) -> Iterator[dict[str, Any]]:
    """All the ways to ask for an optimizer that it has."""
    known = inspect.signature(getattr(torch.optim, name)).parameters
    yield {}
    for option, value in (("foreach", True), ("foreach", False), ("fused", True)):
        if option in known and (name, option, device) != ("Adagrad", "fused", "cuda"):  # no such kernel
            yield {option: value}
            if "capturable" in known and device == "cuda":
                yield {option: value, "capturable": True}
    for option, value in (("amsgrad", True), ("maximize", True), ("momentum", 0.9), ("centered", True)):
        if option in known:
            yield {option: value}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, device: str) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"torch {torch.__version__} has no {name}")
    for form in _forms(name, device):
        torch.manual_seed(0)
        sparse = name == "SparseAdam"
        model = Embeddings(sparse).to(device) if sparse else _mlp().to(device)
        parameters = [
            parameter
            for place, parameter in model.named_parameters()
            if (place == "rows.weight" if sparse else name != "Muon" or parameter.ndim == 2)
        ]
        optimizer = getattr(torch.optim, name)(parameters, lr=0.01, **form)
        if name == "LBFGS":
            watch = _lbfgs(model, optimizer, device)
        else:
            watch = _train(model, optimizer, device, set_to_none=bool(form))
        assert not watch.lies, form
        assert watch.written, form
        assert bool(watch.unknown) is sparse, form  # a sparse tensor is several


def _lbfgs(model: nn.Module, optimizer: Any, device: str) -> Declared:
    x = torch.randn(9, 12, device=device)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        return loss

    return _told(lambda: optimizer.step(closure), list(model.parameters()), x)


@pytest.mark.parametrize("clip", ["foreach", "one by one"])
@pytest.mark.parametrize("fused", [False, True])
def test_scaler_and_clipping(clip: str, fused: bool, device: str) -> None:
    model = _mlp().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    watch = _train(model, optimizer, device, scaler=True, clip=clip, autocast=torch.float16)
    _is_true(watch)
    assert "aten::_amp_update_scale_" in watch.written


def _samples(device: str) -> Iterator[tuple[Callable[..., Any], Any, bool]]:
    """Calls of all ops that torch has samples for: what to call, with what, and whether backwards."""
    pytest.importorskip("expecttest", reason="torch's own samples of ops need it")
    # The import forbids to set torch's switches, to all that is tested in the same process.
    with patch.object(torch.backends, "disable_global_flags", lambda: None):
        from torch.testing._internal import common_methods_invocations as ops

    for op in ops.op_db:
        dtypes = op.supported_dtypes(torch.device(device).type)
        if not dtypes:
            continue
        dtype = torch.float32 if torch.float32 in dtypes else min(dtypes, key=str)
        forms = [(op.get_op(), op.supports_autograd and dtype is torch.float32)]
        forms += [(op.inplace_variant, False)] if op.inplace_variant is not None else []
        for form, grad in forms:
            with contextlib.suppress(RuntimeError, NotImplementedError):
                some = itertools.islice(op.sample_inputs_func(op, device, dtype, grad), _SAMPLES)
                yield from ((form, sample, grad) for sample in some)
    for kind in ("unary", "binary", "pointwise", "reduce", "other"):
        for op in getattr(ops, f"foreach_{kind}_op_db"):
            for form in filter(None, (op.method_variant, op.inplace_variant)):
                some = itertools.islice(
                    op.sample_inputs_func(op, device, torch.float32, False), _SAMPLES
                )
                yield from ((form, sample, False) for sample in some)


def _sweep(device: str) -> Declared:
    """Call all ops that torch has samples for, and look at what they dispatch."""
    seen = Declared()
    for form, sample, grad in _samples(device):
        watch = Declared()
        watch.meet((sample.input, sample.args, sample.kwargs))
        # Samples that a device does not take, or that are meant to fail: what ran was looked at.
        with contextlib.suppress(Exception), watch:
            result = form(sample.input, *sample.args, **sample.kwargs)
            if grad:
                found = [t for t in tree_iter(result) if isinstance(t, Tensor) and t.requires_grad]
                torch.autograd.backward(found, list(map(torch.ones_like, found)))
        for name in ("ops", "written", "unknown", "lies"):
            getattr(seen, name).update(getattr(watch, name))
    return seen


@pytest.mark.filterwarnings("ignore")  # of a thousand samples, not one of them ours
def test_all_ops_that_torch_has_samples_for(device: str) -> None:
    seen = _sweep(device)
    assert not seen.lies
    assert len(seen.ops) > 600
    assert len(seen.written) > 150
    assert not {op for op in seen.unknown if op.startswith("aten::_foreach")}


def test_without_the_table_the_lies_are_found(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writes, "UNDECLARED_WRITES", {})
    model = Convolutions().to(device)
    watch = _train(model, torch.optim.SGD(model.parameters(), 0.1), device)
    assert {lie.split("writes")[1] for lie in watch.lies} == {
        " into memory of running_mean",
        " into memory of running_var",
    }


def test_a_write_beside_what_is_declared_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(4, 4)
    monkeypatch.setattr(accesses, "_span", lambda tensor: (tensor.data_ptr(), tensor.data_ptr() + 4))
    assert _told(lambda: x[1].add_(1), x).lies == {"aten::add_.Tensor writes into memory of self"}


def test_ops_that_nobody_has_checked_are_not_known() -> None:
    with torch.library._scoped_library("effects_of", "DEF") as library:
        library.define("quietly(Tensor x) -> Tensor")
        library.impl("quietly", lambda x: x.add_(1).clone(), "CPU")
        x = torch.zeros(3)
        watch = _told(lambda: torch.ops.effects_of.quietly(x), x)
        assert watch.unknown == {"effects_of::quietly"}
        assert not watch.lies


def test_what_is_not_known_of_aten() -> None:
    x = torch.zeros(4)
    assert access_of(aten.resize_.default, (x, [2]), {}) is None
    assert access_of(aten.set_.source_Tensor, (x, x.clone()), {}) is None
    assert access_of(aten.add.Tensor, (x, x.to_sparse()), {}) is None
    assert access_of(aten.add.out, (x, x), {"out": torch.empty(0)}) is None


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized:UserWarning")
def test_a_result_that_is_too_large_for_its_memory_is_noticed() -> None:
    x, out = torch.zeros(1000), torch.zeros(2)
    access = access_of(aten.add.out, (x, x), {"out": out})
    assert access is not None
    torch.add(x[:2], x[:2], out=out)
    assert not access.moved()
    torch.add(x, x, out=out)
    assert access.moved()


def test_views_launch_nothing() -> None:
    assert only_looks(aten.slice.Tensor)
    assert only_looks(aten._unsafe_view.default)
    assert not only_looks(aten.clone.default)
    x = torch.zeros(4, 4)
    assert made_by(x[1:2], [x], "cpu") == []
    (made,) = made_by(x.t().reshape(16), [x.t()], "cpu")
    assert made.shape == (16,)


def test_the_parts_of_a_sparse_tensor_are_made() -> None:
    x = torch.eye(4)
    sparse = x.to_sparse()
    (indices, values) = made_by(sparse, [x], "cpu")
    assert indices.data_ptr() == sparse._indices().data_ptr()
    assert values.data_ptr() == sparse._values().data_ptr()


def test_lists_and_out_and_liars_are_written() -> None:
    a, b, c = torch.zeros(2), torch.zeros(2), torch.zeros(2)
    assert written_by(aten._foreach_add_.List, ([a, b], [c, c]), {}) == [a, b]
    assert written_by(aten.add.out, (a, b), {"out": c}) == [c]
    statistics = (a, None, None, b, c, True, 0.1, 1e-5)
    assert written_by(aten.native_batch_norm.default, statistics, {}) == [b, c]
