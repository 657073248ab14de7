"""Runs that are refused before the first step, or go on without a graph, by policy."""

from __future__ import annotations

import copy
import pickle
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_wrapper,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook
from torch.utils.data import DataLoader, Dataset

from lightning_cudagraph import BatchError, ConfigurationError, CUDAGraphCallback, UnsupportedError
from lightning_cudagraph.trainer.config.support import check_run
from tests.harness import Net, assert_same, loader, make, train
from tests.rows import refused


class SparseAdamNet(Net):
    def __init__(self) -> None:
        super().__init__(torch.optim.SparseAdam)


class SparseNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 4, sparse=True)


class ScriptedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head: Any = torch.jit.script(self.head)


class SparseBuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("neighbours", torch.eye(12).to_sparse(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.sparse.mm(self.neighbours, x.t()).t())


class Iter(Net):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


class NestedBuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        parts = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        self.register_buffer("parts", parts, persistent=False)


class OwnStrategy(SingleDeviceStrategy):
    """Scales what goes back."""

    def pre_backward(self, closure_loss: Tensor) -> None:
        closure_loss.data.mul_(2)


def _strategy(accelerator: str) -> dict[str, Any]:
    device = "cuda:0" if accelerator == "gpu" else "cpu"
    return {"strategy": OwnStrategy(device=device)}


class NoOptimizer(Net):
    def configure_optimizers(self) -> None:  # type: ignore[override]
        return None


class OwnPrecision(Precision):
    """A plugin that may do anything around a step."""


REFUSED: dict[str, tuple[Callable[[], Net], dict[str, Any], str]] = {
    "no optimizer": (NoOptimizer, {}, r"`NoOptimizer\.configure_optimizers` gives no optimizer"),
    "detect_anomaly": (Net, {"detect_anomaly": True}, r"`Trainer\(detect_anomaly=True\)`"),
    "a precision of one's own": (
        Net,
        {"plugins": [OwnPrecision()]},
        r"`OwnPrecision` \(precision '32-true'\)",
    ),
    "sparse gradients": (SparseNet, {}, r"`table` is a `Embedding\(sparse=True\)`"),
    "sparse buffers": (SparseBuffer, {}, "`neighbours` has the layout `torch.sparse_coo`"),
    "nested buffers": (NestedBuffer, {}, "`parts` is a nested tensor"),
    "TorchScript": (ScriptedNet, {}, "`head` is a TorchScript module"),
}


@pytest.mark.spread(2)
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:You have turned on", "ignore:Using ModelCheckpoint with manual")
@pytest.mark.filterwarnings("ignore:`torch.jit")  # deprecated, and in use
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
def test_refused_before_the_first_step(tmp_path: Path, accelerator: str, name: str) -> None:
    build, kwargs, message = REFUSED[name]
    kwargs = {"accelerator": accelerator, **kwargs}
    module = make(build)
    weights = {k: v.clone() for k, v in module.state_dict().items()}
    with pytest.raises(UnsupportedError, match=f"(?s){message}") as caught:
        train(module, tmp_path / "raise", CUDAGraphCallback(), **kwargs)
    assert 'on_unsupported="eager"' in str(caught.value)
    assert all(torch.equal(weights[k], v.cpu()) for k, v in module.state_dict().items())

    plain = train(make(build), tmp_path / "plain", **kwargs)
    with pytest.warns(UserWarning, match="all steps eager"):
        eager = train(
            make(build), tmp_path / "eager", CUDAGraphCallback(on_unsupported="eager"), **kwargs
        )
    assert_same(plain, eager)
    assert eager.callback is not None


def test_a_strategy_with_steps_of_its_own(tmp_path: Path, accelerator: str) -> None:
    refused(
        tmp_path,
        accelerator,
        Net,
        lambda _: _strategy(accelerator),
        match=r"`OwnStrategy\.pre_backward` \(.*test_refusals\.py:\d+\) is not Lightning's own",
    )


@pytest.mark.filterwarnings(
    "ignore:You are using the `dataloader_iter` step flavor",
    "ignore:Found `dataloader_iter` argument",
)
def test_dataloader_iter_is_refused(tmp_path: Path, accelerator: str) -> None:
    with pytest.raises(UnsupportedError, match=r"`Iter.training_step` takes `dataloader_iter`"):
        train(make(Iter), tmp_path, CUDAGraphCallback(), accelerator=accelerator)


def test_sparse_adam_is_refused(tmp_path: Path, accelerator: str) -> None:
    # Without the callback it fails too, at the first dense gradient.
    with pytest.raises(UnsupportedError, match="SparseAdam"):
        train(make(SparseAdamNet), tmp_path, CUDAGraphCallback(), accelerator=accelerator)


def test_weight_decay_changed_once(tmp_path: Path, accelerator: str) -> None:
    class Decays(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.global_step == 10:
                self.trainer.optimizers[0].param_groups[0]["weight_decay"] = 0.3

    plain = train(make(Decays), tmp_path / "plain", accelerator=accelerator)
    graph = train(make(Decays), tmp_path / "graph", CUDAGraphCallback(), accelerator=accelerator)
    assert_same(plain, graph)
    assert graph.counts.captures == 2
    assert graph.counts.recaptures == ("`weight_decay` of param group 0 changed from 0.01 to 0.3",)


@pytest.mark.long
def test_parameters_frozen_at_an_epochs_start(tmp_path: Path, accelerator: str) -> None:
    class Freezes(Net):
        def on_train_epoch_start(self) -> None:
            self.head.weight.requires_grad_(self.current_epoch != 1)

    plain = train(make(Freezes), tmp_path / "plain", accelerator=accelerator)
    graph = train(make(Freezes), tmp_path / "graph", CUDAGraphCallback(), accelerator=accelerator)
    assert_same(plain, graph)
    assert graph.counts.captures == 3


class Wrapped:
    """An object that nobody can walk."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, *args: Any, **kwargs: Any) -> Wrapped:
        return Wrapped(self.x.to(*args, **kwargs))


class OfWrapped(Dataset[Any]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return {"inputs": Wrapped(torch.randn(8, 12)), "labels": torch.randint(0, 4, (8,))}


class TakesWrapped(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self(batch["inputs"].x), batch["labels"])


def test_an_object_that_hides_tensors(tmp_path: Path, accelerator: str) -> None:
    batches = DataLoader(OfWrapped(), batch_size=None)
    kwargs: dict[str, Any] = {"train_loader": batches, "accelerator": accelerator}
    with pytest.raises(BatchError, match=r"(?s)`batch\['inputs'\]` is a `Wr.*`batch\['inputs'\].x`"):
        train(make(TakesWrapped), tmp_path / "raise", CUDAGraphCallback(), **kwargs)
    callback = CUDAGraphCallback(on_unsupported="eager")
    eager = train(make(TakesWrapped), tmp_path / "eager", callback, **kwargs)
    assert sum(eager.counts.eager.values()) == eager.final["global_step"]


def test_given_twice(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"2 `CUDAGraphCallback`s; expected one"):
        train(make(Net), tmp_path, CUDAGraphCallback(), callbacks=(CUDAGraphCallback(),))


def test_a_trainer_of_the_other_package(tmp_path: Path) -> None:
    other = pytest.importorskip("pytorch_lightning")
    trainer = other.Trainer(
        callbacks=[CUDAGraphCallback()],
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )

    class OtherNet(other.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(12, 4)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.head(batch[0]).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.raises(ConfigurationError, match=r"from lightning\.pytorch import Trainer"):
        trainer.fit(OtherNet(), loader())


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"warmup_steps": 0}, r"warmup_steps=0.*at least 1"),
        ({"warmup_steps": "3"}, r"warmup_steps='3'.*an int"),
        ({"warmup_steps": True}, r"warmup_steps=True.*an int"),
        ({"timings": ["head"]}, r"timings=\['head'\].*`LayerTimings`"),
        ({"timings": False}, r"timings=False.*None for no timings"),
        ({"on_unsupported": "ignore"}, r"on_unsupported='ignore'.*'raise', 'eager'"),
        ({"backend": "tpu"}, r"backend='tpu'.*'auto'"),
    ],
)
def test_bad_arguments(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        CUDAGraphCallback(**kwargs)


def test_a_backend_of_another_device(tmp_path: Path, accelerator: str) -> None:
    other: Any = "cuda" if accelerator == "cpu" else "emulator"
    with pytest.raises(ConfigurationError, match=rf"backend='{other}'"):
        train(make(Net), tmp_path, CUDAGraphCallback(backend=other), accelerator=accelerator)


def _averaged(state: Any, bucket: Any) -> Any:
    return allreduce_hook(None, bucket)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (FSDPStrategy(), "A step under `FSDPStrategy` is not captured: FSDP1 gathers"),
        (
            DDPStrategy(mixed_precision=object()),
            r"`DDPStrategy\(mixed_precision=\.\.\.\)`",
        ),
        (
            DDPStrategy(ddp_comm_hook=powerSGD_hook),
            "ddp_comm_hook=.*powerSGD_hook.*of a library.*bf16_compress_hook",
        ),
        (
            DDPStrategy(ddp_comm_hook=_averaged, ddp_comm_wrapper=fp16_compress_wrapper),
            "ddp_comm_wrapper=fp16_compress_wrapper.*hides what its hook reads",
        ),
    ],
    ids=["FSDP", "mixed precision", "comm hook", "wrapped comm hook"],
)
def test_strategies_that_are_refused(strategy: Any, message: str) -> None:
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False)
    trainer._accelerator_connector.strategy = strategy
    if isinstance(strategy, DDPStrategy):
        strategy.cluster_environment = LightningEnvironment()
        strategy.parallel_devices = [torch.device("cpu")]
    with pytest.raises(UnsupportedError, match=f"(?s){message}"):
        check_run(trainer, Net())


@dataclass
class Sample:
    x: Tensor
    y: Tensor
    name: str


class OfSamples(Dataset[Any]):
    def __init__(self, names: list[str]) -> None:
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        return Sample(
            torch.randn(8, 12, generator=generator),
            torch.randint(0, 4, (8,), generator=generator),
            self.names[index],
        )


class TakesSample(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self(batch.x), batch.y)
        return loss * 2 if batch.name == "double" else loss


def test_python_values_in_a_batch_are_part_of_its_signature(tmp_path: Path, accelerator: str) -> None:
    names = ["single"] * 6 + ["double"] * 2 + ["single"] * 2
    batches = DataLoader(OfSamples(names), batch_size=None)
    kwargs: dict[str, Any] = {"train_loader": batches, "accelerator": accelerator, "max_epochs": 2}
    plain = train(make(TakesSample), tmp_path / "plain", **kwargs)
    graph = train(make(TakesSample), tmp_path / "graph", CUDAGraphCallback(), **kwargs)
    assert_same(plain, graph)
    assert graph.counts.replayed == 20 - 3 - 4
    (reason,) = graph.counts.eager
    assert re.fullmatch(
        r"another batch signature: `batch.name`, which the step reads at .*test_refusals.py:\d+"
        r" \(`return loss \* 2 .*`\), changed: expected 'single', found 'double'",
        reason,
    )


class NoBatchIdx(Net):
    def training_step(self, batch: Any) -> Any:  # type: ignore[override]
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


def test_training_step_without_batch_idx(tmp_path: Path, accelerator: str) -> None:
    plain = train(make(NoBatchIdx), tmp_path / "plain", accelerator=accelerator)
    graph = train(make(NoBatchIdx), tmp_path / "graph", CUDAGraphCallback(), accelerator=accelerator)
    assert_same(plain, graph)
    assert graph.counts.captures == 1


def test_callback_order(tmp_path: Path, accelerator: str) -> None:
    class Last(CUDAGraphCallback):
        """The harness puts others behind the callback under test; this one comes behind them."""

    plain = train(make(Net), tmp_path / "plain", accelerator=accelerator)
    last = Last()
    graph = train(make(Net), tmp_path / "graph", None, callbacks=(last,), accelerator=accelerator)
    assert_same(plain, graph)
    assert last.summary.fit.captures == 1


def test_copies_and_pickles_during_a_fit(tmp_path: Path, accelerator: str) -> None:
    class Copies(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            if trainer.global_step == 8:
                for thing in (ours, pl_module, trainer.optimizers[0]):
                    pickle.loads(pickle.dumps(thing))
                    copy.deepcopy(thing)

    ours = CUDAGraphCallback()
    plain = train(make(Net), tmp_path / "plain", accelerator=accelerator)
    graph = train(make(Net), tmp_path / "graph", ours, callbacks=(Copies(),), accelerator=accelerator)
    assert_same(plain, graph)
    pickle.loads(pickle.dumps(ours))


RETURNED: dict[str, Callable[[Any], Any]] = {
    "set": lambda logits: {logits},
    "deque": lambda logits: deque([logits]),
    "generator": lambda logits: (row for row in logits),
    "function": lambda logits: lambda: logits,
    "ndarray": lambda logits: np.zeros(3),
}


@pytest.mark.spread
@pytest.mark.parametrize("kind", RETURNED)
def test_outputs_that_no_replay_could_return(tmp_path: Path, accelerator: str, kind: str) -> None:
    class Returns(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits = self(batch[0]).detach()
            loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
            return {"loss": loss, "rest": RETURNED[kind](logits)}

    with pytest.raises(BatchError, match=rf"(?s)output of `training_step`\['rest'\].* is a `{kind}`"):
        train(make(Returns), tmp_path, CUDAGraphCallback(), accelerator=accelerator)
