"""What ops are said to read and write is what they read and write: schemas lie."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from lightning_cudagraph.device.streams import accesses
from lightning_cudagraph.device.streams.accesses import access_of, made_by, only_looks
from lightning_cudagraph.tensors import writes
from lightning_cudagraph.tensors.writes import written_by
from tests.checked import (
    LOSSES,
    MODELS,
    OPTIMIZERS,
    Convolutions,
    Everything,
    mlp,
    optimized,
    scaled,
    sweep,
    told,
    trained,
)
from tests.declared import Declared

aten = torch.ops.aten


@pytest.fixture
def device(accelerator: str) -> str:
    return "cuda" if accelerator == "gpu" else "cpu"


def _is_true(watch: Declared, *, mutates: bool = True) -> None:
    assert not watch.lies
    # Barriers: cuDNN's recurrent nets, the state that their dropout draws from, and the look whether
    # their weights lie one behind the other.
    nets = ("aten::_cudnn_rnn", "aten::_thnn_fused")
    barriers = (*nets, "aten::_cudnn_init_dropout_state", "aten::set_.source_Storage")
    assert not {op for op in watch.unknown if not op.startswith(barriers)}
    assert watch.ops
    assert bool(watch.written) is mutates


@pytest.mark.spread(2)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_models(name: str, autocast: Any, device: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().to(device)
    watch = trained(model, torch.optim.SGD(model.parameters(), 0.1), device, autocast=autocast)
    _is_true(watch)
    if name == "convolutions":
        assert any("batch_norm" in op for op in watch.written)


@pytest.mark.parametrize("loss", LOSSES)
def test_losses(loss: str, device: str) -> None:
    model = mlp().to(device)
    _is_true(trained(model, torch.optim.SGD(model.parameters(), 0.1), device, loss=LOSSES[loss]))


@pytest.mark.spread(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, device: str) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"torch {torch.__version__} has no {name}")
    sparse = name == "SparseAdam"
    for form, watch in optimized(name, device):
        assert not watch.lies, form
        assert watch.written, form
        assert bool(watch.unknown) is sparse, form  # a sparse tensor is several


@pytest.mark.parametrize("clip", ["foreach", "one by one"])
@pytest.mark.parametrize("fused", [False, True])
def test_scaler_and_clipping(clip: str, fused: bool, device: str) -> None:
    watch = scaled(clip, fused, device)
    _is_true(watch)
    assert "aten::_amp_update_scale_" in watch.written


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of a thousand samples, not one of them ours
def test_all_ops_that_torch_has_samples_for(device: str) -> None:
    with patch.object(accesses, "_CHECKED", Everything()):
        seen = sweep(device)
    # Or else `python -m tests.checked` adds it.
    assert sorted(seen.known - accesses._CHECKED) == []
    assert not seen.lies
    assert len(seen.ops) > 600
    assert len(seen.written) > 150
    assert not {op for op in seen.unknown if op.startswith("aten::_foreach")}


def test_without_the_table_the_lies_are_found(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writes, "UNDECLARED_WRITES", {})
    model = Convolutions().to(device)
    watch = trained(model, torch.optim.SGD(model.parameters(), 0.1), device)
    assert {lie.split("writes")[1] for lie in watch.lies} == {
        " into memory of running_mean",
        " into memory of running_var",
    }


def test_a_write_beside_what_is_declared_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(4, 4)
    monkeypatch.setattr(accesses, "span_of", lambda tensor: (tensor.data_ptr(), tensor.data_ptr() + 4))
    assert told(lambda: x[1].add_(1), x).lies == {"aten::add_.Tensor writes into memory of self"}


def test_ops_that_nobody_has_checked_are_not_known() -> None:
    with torch.library._scoped_library("effects_of", "DEF") as library:
        library.define("quietly(Tensor x) -> Tensor")
        library.impl("quietly", lambda x: x.add_(1).clone(), "CPU")
        x = torch.zeros(3)
        watch = told(lambda: torch.ops.effects_of.quietly(x), x)
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
