"""Checkpoints written with the callback are those written without it, and the other way round.

`tests/gpu/test_checkpoints.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch.utils._pytree import tree_map

from lightning_cudagraph import CUDAGraphCallback
from tests.harness import Net, Trace, assert_same, differences, loader, make, train

O = torch.optim  # noqa: E741

FORMS: dict[str, Callable[[Any], O.Optimizer]] = {
    "AdamW-fused": lambda p: O.AdamW(p, lr=1e-2, fused=True),
    "AdamW-foreach": lambda p: O.AdamW(p, lr=1e-2, foreach=True),
    "NAdam": lambda p: O.NAdam(p, lr=1e-2),
    "SGD-momentum": lambda p: O.SGD(p, lr=0.1, momentum=0.9),
    "Adagrad": lambda p: O.Adagrad(p, lr=0.1),
}


@pytest.fixture(params=FORMS)
def build(request: Any) -> Callable[[], Net]:
    return lambda: Net(FORMS[request.param])


def _eager() -> CUDAGraphCallback:
    """Every step eager, in the arithmetic of the graph."""
    return CUDAGraphCallback(warmup_steps=10**6)


class Resumable:
    """A loader that knows where it was."""

    def __init__(self) -> None:
        self.batches = list(loader())
        self.next = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        start, self.next = self.next, 0
        for index in range(start, len(self.batches)):
            self.next = (index + 1) % len(self.batches)
            yield self.batches[index]

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Reseeded(Net):
    """Draws its dropout from a seed for each step, because Lightning saves no random state."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(self.global_step)


def on_host(value: Any) -> Any:
    return tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, value)


@pytest.mark.spread(5, first=2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_resumed_in_the_middle_of_an_epoch(tmp_path: Path, accelerator: str, form: str) -> None:
    def run(folder: str, **kwargs: Any) -> Trace:
        return train(
            make(lambda: Reseeded(FORMS[form])),
            tmp_path / folder,
            CUDAGraphCallback(),
            accelerator=accelerator,
            checkpoint_every=6,
            train_loader=Resumable(),
            **kwargs,
        )

    whole = run("whole")
    middle = str(next((tmp_path / "whole" / "ckpt").glob("*step=12.ckpt")))
    resumed = run("resumed", ckpt_path=middle)
    assert (whole.counts.replayed, resumed.counts.replayed) == (18, 7)
    for name in ("weights", "optimizer", "schedulers", "rng_cpu", "rng_device", "global_step"):
        # NAdam: a load puts state on the GPU that the optimizer makes on the host.
        assert not differences(on_host(whole.final[name]), on_host(resumed.final[name])), name


@pytest.mark.spread(5, first=4)
def test_a_file_loads_without_the_callback_and_with_weights_only(
    tmp_path: Path, accelerator: str, build: Callable[[], Net]
) -> None:
    graph = train(make(build), tmp_path / "graph", CUDAGraphCallback(), accelerator=accelerator)
    plain = train(make(build), tmp_path / "plain", accelerator=accelerator)
    path = tmp_path / "graph" / "ckpt" / "last.ckpt"
    saved = torch.load(path, weights_only=True, map_location="cpu")
    theirs = plain.checkpoints["last.ckpt"]["optimizer_states"][0]
    assert saved["optimizer_states"][0]["param_groups"] == theirs["param_groups"]
    assert graph.counts.replayed == 18
    # On a CPU, in plain torch, it goes on training.
    module = make(build)
    module.load_state_dict(saved["state_dict"])
    optimizer = module.configure_optimizers()["optimizer"]
    optimizer.load_state_dict(saved["optimizer_states"][0])
    batch = next(iter(loader()))
    torch.nn.functional.cross_entropy(module(batch[0]), batch[1]).backward()
    optimizer.step()


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.long
def test_a_plain_file_is_resumed_with_the_callback(
    tmp_path: Path, accelerator: str, build: Callable[[], Net]
) -> None:
    kwargs: dict[str, Any] = {"accelerator": accelerator}
    train(make(build), tmp_path / "first", max_epochs=1, **kwargs)
    last = str(tmp_path / "first" / "ckpt" / "last.ckpt")
    eager = train(make(build), tmp_path / "eager", _eager(), ckpt_path=last, **kwargs)
    graph = train(make(build), tmp_path / "graph", CUDAGraphCallback(), ckpt_path=last, **kwargs)
    assert_same(eager, graph)
    assert graph.counts.replayed >= 10


class LoadsInBetween(Net):
    """Goes back to an earlier state in the middle of an epoch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        optimizer = self.trainer.optimizers[0]
        if self.global_step == 6:
            self.kept = (
                {name: value.clone() for name, value in self.state_dict().items()},
                torch.utils._pytree.tree_map(_copied, optimizer.state_dict()),
            )
        if self.global_step == 13:
            self.load_state_dict(self.kept[0])
            optimizer.load_state_dict(self.kept[1])


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


@pytest.mark.spread(3)
@pytest.mark.parametrize("form", ["AdamW-fused", "SGD-momentum", "AdamW-foreach"])
def test_a_state_loaded_in_the_middle_of_a_run(tmp_path: Path, accelerator: str, form: str) -> None:
    def build() -> Net:
        return LoadsInBetween(FORMS[form])

    eager = train(make(build), tmp_path / "eager", _eager(), accelerator=accelerator)
    graph = train(make(build), tmp_path / "graph", CUDAGraphCallback(), accelerator=accelerator)
    assert_same(eager, graph)
    assert graph.counts.captures == 2
    assert graph.counts.recaptures == ("a state was loaded into the optimizer",)


class KeepsTheState(Net):
    """Keeps a `state_dict` of the optimizer, which is live, and other tensors in its memory."""

    def __init__(self, form: str, use: str, is_loaded: bool) -> None:
        super().__init__(FORMS[form])
        self.has_aliases, self.is_loaded = use.endswith("alias"), is_loaded
        self.use = USES[use.partition(" ")[0]]
        self.seen: list[Any] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        optimizer = self.trainer.optimizers[0]
        if self.global_step == 2:
            self.aliases = torch.utils._pytree.tree_map(_alias, optimizer.state_dict())
        if self.global_step == 6 and self.is_loaded:
            optimizer.load_state_dict(torch.utils._pytree.tree_map(_copied, optimizer.state_dict()))
        if self.global_step == 8:
            kept = self.kept = optimizer.state_dict()
            if self.is_loaded:
                self.aliases = torch.utils._pytree.tree_map(_alias, kept)
            live = [optimizer.state[parameter] for parameter in self.parameters()]
            same = [kept["state"][index] is state for index, state in enumerate(live)]
            self.seen.append(same)
        if self.global_step == 13:
            self.use(optimizer, self.aliases if self.has_aliases else self.kept)
        if self.global_step >= 8:
            for kept in (self.kept, self.aliases):
                self.seen.append([float(state["step"]) for state in kept["state"].values()])


def _alias(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _write(optimizer: O.Optimizer, kept: Any) -> None:
    for state in kept["state"].values():
        state["step"].fill_(2.0)


def _bind(optimizer: O.Optimizer, kept: Any) -> None:
    kept["state"][0]["step"] = torch.full_like(kept["state"][0]["step"], 3.0)


USES: dict[str, Callable[[O.Optimizer, Any], None]] = {
    "loads": lambda optimizer, kept: optimizer.load_state_dict(kept),
    "writes": _write,
    "binds": _bind,
}


@pytest.mark.spread(5)
@pytest.mark.parametrize("is_loaded", [False, True], ids=["", "loaded"])
@pytest.mark.parametrize("use", [*USES, "loads an alias", "writes an alias"])
@pytest.mark.parametrize("form", ["AdamW-fused", "AdamW-foreach", "NAdam"])
def test_a_kept_state_dict_is_live(
    tmp_path: Path, accelerator: str, form: str, use: str, is_loaded: bool
) -> None:
    # A load puts `mu_product` there, and a run with graphs moves it to the host: then a `state_dict` has
    # dictionaries of its own.
    is_moved = form == "NAdam" and is_loaded and accelerator == "gpu"
    if is_moved and use == "binds":
        pytest.skip("a tensor bound in such a dictionary is lost, as docs/steps.md says")

    def run(folder: str, callback: CUDAGraphCallback | None = None) -> Trace:
        module = make(lambda: KeepsTheState(form, use, is_loaded))
        return train(module, tmp_path / folder, callback, accelerator=accelerator)

    plain, graph = run("plain"), run("graph", CUDAGraphCallback())
    assert_same(plain, graph)
    assert graph.counts.replayed >= 8
    assert isinstance(plain.module, KeepsTheState)
    assert isinstance(graph.module, KeepsTheState)
    assert plain.module.seen[is_moved:] == graph.module.seen[is_moved:]


def _averaging(name: str) -> pl.Callback:
    if name == "EMA":
        return EMAWeightAveraging(decay=0.9)
    return StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)


@pytest.mark.long
@pytest.mark.parametrize("name", ["EMA", "SWA"])
@pytest.mark.filterwarnings("ignore:Swapping scheduler", "ignore:.*SWA")
def test_averaged_weights(tmp_path: Path, accelerator: str, name: str) -> None:
    def run(folder: str, callback: CUDAGraphCallback | None) -> Trace:
        return train(
            make(Net),
            tmp_path / folder,
            callback,
            accelerator=accelerator,
            callbacks=(_averaging(name),),
            max_epochs=4,
        )

    plain, graph = run("plain", None), run("graph", CUDAGraphCallback())
    assert_same(plain, graph)
    assert not differences(plain.module.state_dict(), graph.module.state_dict())  # type: ignore[union-attr]
    assert graph.counts.replayed >= 18
