"""Tensors with unusual strides or lazy signs, in batches and in attributes: sums keep their last bits.

`tests/gpu/test_strides.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cudagraph import CUDAGraphCallback
from lightning_cudagraph.tensors import layouts
from lightning_cudagraph.tensors.batch import copied_leaf
from lightning_cudagraph.tensors.batch_signature import Signature
from lightning_cudagraph.tensors.layouts import alignment_bytes
from lightning_cudagraph.tensors.static import StaticBatch
from tests.harness import Net, assert_same, loader, make, train

CPU = torch.device("cpu")


def _layouts(x: Tensor) -> list[Tensor]:
    """Views of new tensors: at odd addresses, expanded, with gaps, overlapping, with lazy signs."""
    pairs = torch.view_as_complex(x.reshape(-1, 6, 2).repeat(50, 1, 1))
    long = x.repeat(9, 80).reshape(-1)
    return [
        *(long[first:][: 64 * 95].view(64, 95) for first in (1, 3)),
        x[:, :1].expand(-1, 777),
        x[0].repeat(50)[None].expand(9, 600),
        x.reshape(-1).repeat(50)[::3],
        x.repeat(9, 9).as_strided((5, 7, 6), (1, 3, 5)),
        pairs.conj(),
        pairs.conj()[:, :1].expand(-1, 7),
        pairs.conj().imag,
    ]


class InTheBatch(Net):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [*batch, _layouts(batch[0])]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, sums = batch
        parts = [part for t in sums for part in ([t.real, t.imag] if t.is_complex() else [t])]
        total = sum(part.sum() + part.var() for part in parts)
        loss = nn.functional.cross_entropy(self(x), y) + 1e-3 * self.head.bias[0] * total
        return {"loss": loss, "kept": self.left(x)}

    def left(self, x: Tensor) -> Any:
        return _layouts(x)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for i, t in enumerate(outputs["kept"] or ()):
            self.log(f"kept_{i}", (t.imag if t.is_complex() else t).sum(), batch_size=8)


class InAttributes(InTheBatch):
    """Set by a hook and by the step."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.by_hook = tuple(_layouts(batch[0]))
        if batch_idx == 0:
            self.by_step = self.by_hook

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step([*batch, [*self.by_hook, *self.by_step]], batch_idx)

    def left(self, x: Tensor) -> Any:
        self.by_step = tuple(_layouts(x * 2))


@pytest.mark.spread
@pytest.mark.parametrize("cls", [InTheBatch, InAttributes])
def test_sums(tmp_path: Path, accelerator: str, cls: type[Net]) -> None:
    kwargs: dict[str, Any] = {"accelerator": accelerator, "max_epochs": 2, "limit_val_batches": 0}
    kwargs["train_loader"] = loader(ragged=False)
    plain = train(make(cls), tmp_path / "plain", **kwargs)
    graph = train(make(cls), tmp_path / "graph", CUDAGraphCallback(), **kwargs)
    assert_same(plain, graph)
    assert graph.counts.replayed >= 10


def test_static_tensors_and_copies_have_the_layout_of_their_tensor(accelerator: str) -> None:
    device = "cuda" if accelerator == "gpu" else "cpu"
    static = StaticBatch(_layouts(torch.randn(4, 12, device=device)))
    new = _layouts(torch.randn(4, 12, device=device))
    static.copy_from(new)
    for copies in (static.batch, [*map(copied_leaf, new)]):
        for copy, tensor in zip(copies, new, strict=True):
            assert torch.equal(copy, tensor)
            assert copy.stride() == tensor.stride()
            assert alignment_bytes(copy) == alignment_bytes(tensor)
            assert (copy.is_conj(), copy.is_neg()) == (tensor.is_conj(), tensor.is_neg())


def test_an_address_that_sums_read_in_another_order_is_another_signature(accelerator: str) -> None:
    kind = "cuda" if accelerator == "gpu" else "cpu"
    device, is_cuda = torch.device(kind), kind == "cuda"
    x = torch.randn(200, device=device)
    one, alike, other, far = (x[first:][:96] for first in (1, 5, 3, 4))
    assert StaticBatch([one]).leaves_of([alike], kind) is not None
    assert Signature([one], device) == Signature([alike], device)
    for another in (other, x[:96]):
        assert (StaticBatch([one]).leaves_of([another], kind) is None) == is_cuda
        assert (StaticBatch([another]).leaves_of([one], kind) is None) == is_cuda
        assert (Signature([one], device) != Signature([another], device)) == is_cuda
    assert Signature([x[:96]], device) == Signature([far], device)
    difference = Signature([one], device).difference(Signature([other], device))
    assert ("12 bytes past an aligned address" in difference) == is_cuda
    # A copy of a batch in host memory is aligned.
    assert StaticBatch([x[:96]]).leaves_of([one.cpu()], "cpu") is not None
    assert (StaticBatch([one]).leaves_of([x[:96].cpu()], "cpu") is None) == is_cuda


def test_the_remedy_for_another_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the addresses of a CPU taken for those of a GPU."""
    monkeypatch.setattr(layouts, "past_aligned_bytes", lambda t: t.storage_offset() * t.itemsize % 256)
    x = torch.randn(200)
    one, alike, other = (x[first:][:96] for first in (1, 5, 3))
    assert Signature([one], CPU) == Signature([alike], CPU)
    assert Signature([one], CPU) != Signature([other], CPU)
    assert StaticBatch([one]).leaves_of([alike], "cpu") is not None
    assert StaticBatch([one]).leaves_of([other], "cpu") is None
    assert "`x.clone()`" in Signature([one], CPU).remedy(Signature([other], CPU))
    assert "Pad to" in Signature([one], CPU).remedy(Signature([other[:9]], CPU))


def test_a_lazy_sign_is_another_signature() -> None:
    plain = torch.randn(4, dtype=torch.cfloat)
    for other, word in ((plain.conj(), "conjugated"), (torch._neg_view(plain), "negated")):
        assert StaticBatch([plain]).leaves_of([other], "cpu") is None
        one, another = Signature([plain], CPU), Signature([other], CPU)
        assert one != another
        assert f"with strides (1,), lazily {word}" in one.difference(another)
