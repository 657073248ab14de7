"""Cases of captured modules in several processes: gradients are averaged as in eager steps."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_cudagraph import CUDAGraphCallback
from tests.distributed.cases import BUCKETS, Here
from tests.harness import assert_same, loader
from tests.test_captured_modules import Dynamic


class Pair(nn.Module):
    """Returns the results of two layers, of which a loss may take one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.two(x)


class Routed(Dynamic):
    """Each process sends its samples to other experts, some of which get none."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.pair = Pair()

    def logits(self, x: Tensor, batch_idx: int) -> Tensor:
        hidden = self.features(x)
        chosen = (batch_idx + self.global_rank) % 3
        for index in {chosen, int(hidden.sum() > 0)}:
            hidden = self.experts[index](hidden)
        return self.head(self.pair(hidden)[chosen > 0])


def _same(here: Here, build: Any, modules: list[str], **kwargs: Any) -> None:
    callback = CUDAGraphCallback(scope="modules", modules=modules)
    runs = [
        here.train(name, each, build, **kwargs) for name, each in (("plain", None), ("graph", callback))
    ]
    assert_same(*runs)
    assert runs[1].counts.replayed >= 10, runs[1].counts


def same_parts(here: Here) -> None:
    """Buffers are broadcast, and each process has graphs of its own."""
    _same(here, Dynamic, ["features", "head"], max_epochs=4)


def same_parts_accumulated_in_buckets(here: Here) -> None:
    """Gradients are views of buckets, and are averaged in every other step."""
    wrapper = {"gradient_as_bucket_view": True, **BUCKETS}
    kwargs = {"accumulate_grad_batches": 2, "train_loader": loader(batches=20)}
    _same(here, Dynamic, ["features"], max_epochs=4, wrapper=wrapper, **kwargs)


def experts_that_get_no_samples(here: Here) -> None:
    """The wrapper looks for parameters without gradients in the autograd graph, and finds the same."""
    modules = ["features", "experts.0", "experts.1", "experts.2", "pair"]
    wrapper = {"find_unused_parameters": True}
    _same(here, Routed, modules, max_epochs=2, wrapper=wrapper, train_loader=loader(batches=20))
