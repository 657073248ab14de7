"""Batches, loaders and data hooks of every kind: each run is the run without the callback.

`tests/gpu/test_rows_data.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from lightning_cudagraph import CUDAGraphCallback
from tests.harness import Net, differences, loader, make, train
from tests.rows import became, refused, row

WARMUP = 3
# Lightning counts rows itself where it can, and asks for `batch_size` where it cannot be sure.
SIZE = "ignore:Trying to infer the `batch_size`"


def numbers(count: int = 9, rows: int = 8, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Full batches, all different."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(rows, 12, generator=generator),
            torch.randint(0, 4, (rows,), generator=generator),
        )
        for _ in range(count)
    ]


def batches(of: list[Any]) -> DataLoader[Any]:
    """A loader that gives these very batches."""
    return DataLoader(of, batch_size=None)  # type: ignore[arg-type]


class Unpacks(Net):
    """Finds inputs and labels in a batch of some form."""

    def __init__(self, unpack: Callable[[Any], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.unpack = unpack

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(self.unpack(batch), batch_idx)


def on(data: Callable[[], Any]) -> Callable[[Path], dict[str, Any]]:
    """The setting of a row that trains on a loader made anew for each run."""
    return lambda folder: {"train_loader": data()}


@dataclass
class Sample:
    x: Tensor
    y: Tensor
    note: str = "same in all"


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    y: Tensor


Point = namedtuple("Point", ["x", "y"])

FORMS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Any]]] = {
    "tuple": (lambda x, y: (x, y), lambda b: (b[0], b[1])),
    "list": (lambda x, y: [x, y], lambda b: (b[0], b[1])),
    "dict": (lambda x, y: {"x": x, "y": y}, lambda b: (b["x"], b["y"])),
    "OrderedDict": (lambda x, y: OrderedDict(x=x, y=y), lambda b: (b["x"], b["y"])),
    "named tuple": (Point, lambda b: (b.x, b.y)),
    "dataclass": (Sample, lambda b: (b.x, b.y)),
    "nested": (
        lambda x, y: {"in": [{"x": x}, (x + 1, x[:, :3])], "out": (y, None)},
        lambda b: (b["in"][0]["x"] * b["in"][1][0], b["out"][0]),
    ),
    "single tensor": (lambda x, y: x, lambda b: (b, (b[:, 0] > 0).long())),
    "a tensor twice": (lambda x, y: (x, x, y), lambda b: (b[0] + b[1], b[2])),
    "strings and numbers beside": (
        lambda x, y: {"x": x, "y": y, "task": "digits", "scale": 0.5, "on": True, "ids": [1, 2]},
        lambda b: (b["x"] * b["scale"], b["y"]),
    ),
    "a None beside": (lambda x, y: (x, None, y), lambda b: (b[0], b[2])),
    "an empty list beside": (lambda x, y: (x, [], y), lambda b: (b[0], b[2])),
    "an empty tensor beside": (lambda x, y: (x, x[:0], y), lambda b: (b[0], b[2])),
    "many dtypes": (
        lambda x, y: (x.double(), (x > 0), x.to(torch.bfloat16), y.to(torch.uint8)),
        lambda b: (b[0].float() + b[1] + b[2].float(), b[3].long()),
    ),
    "transposed and sliced": (
        lambda x, y: (x.T.contiguous().T, x.repeat(1, 2)[:, ::2], y),
        lambda b: (b[0] + b[1], b[2]),
    ),
    "expanded": (lambda x, y: (x[:, :1].expand(-1, 12), y), lambda b: (b[0], b[1])),
}


@pytest.mark.spread(3)
@pytest.mark.parametrize("watched", [True, False], ids=["watched", "alone"])
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.filterwarnings(SIZE)
def test_forms_of_a_batch(tmp_path: Path, accelerator: str, name: str, watched: bool) -> None:
    pack, unpack = FORMS[name]
    done = row(
        tmp_path,
        accelerator,
        lambda: Unpacks(unpack),
        on(lambda: batches([pack(x, y) for x, y in numbers()])),
        max_epochs=2,
        watched=watched,
    )
    became(done.graph, replayed=2 * 9 - WARMUP)


def test_a_frozen_dataclass_fails_without_us_too(tmp_path: Path, accelerator: str) -> None:
    for name, callback in (("plain", None), ("graph", CUDAGraphCallback())):
        with pytest.raises(ValueError, match="frozen dataclass"):
            train(
                make(lambda: Unpacks(lambda b: (b.x, b.y))),
                tmp_path / name,
                callback,
                accelerator=accelerator,
                train_loader=batches([Frozen(x, y) for x, y in numbers()]),
            )


@pytest.mark.filterwarnings(SIZE, "ignore:train_dataloader yielded None")
def test_batches_that_are_none(tmp_path: Path, accelerator: str) -> None:
    def data() -> Any:
        made: list[Any] = list(numbers(12))
        for index in (1, 6, 7, 11):
            made[index] = None
        return DataLoader(made, batch_size=None, collate_fn=lambda batch: batch)  # type: ignore[arg-type]

    done = row(tmp_path, accelerator, Net, on(data), max_epochs=2)
    became(done.graph, replayed=2 * 8 - WARMUP)


@pytest.mark.long
@pytest.mark.filterwarnings(SIZE)
def test_names_that_differ_in_every_batch(tmp_path: Path, accelerator: str) -> None:
    named = [{"x": x, "y": y, "name": f"{i}.png"} for i, (x, y) in enumerate(numbers())]
    done = row(
        tmp_path,
        accelerator,
        lambda: Unpacks(lambda b: (b["x"], b["y"])),
        on(lambda: batches(named)),
        max_epochs=2,
    )
    became(done.graph, replayed=2 * 9 - WARMUP)


@pytest.mark.long
@pytest.mark.parametrize("rows", [(1,), (8, 5), (8, 8, 5, 3)], ids=str)
@pytest.mark.filterwarnings(SIZE)
def test_batch_sizes(tmp_path: Path, accelerator: str, rows: tuple[int, ...]) -> None:
    def data() -> Any:
        generator = torch.Generator().manual_seed(0)
        sizes = [rows[index % len(rows)] for index in range(12)]
        return batches(
            [
                (
                    torch.randn(n, 12, generator=generator),
                    torch.randint(0, 4, (n,), generator=generator),
                )
                for n in sizes
            ]
        )

    class NoBatchNorm(Net):
        """Batch norm does not train on one row."""

        def __init__(self) -> None:
            super().__init__()
            self.features[1] = nn.LayerNorm(24)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits = self(batch[0])
            loss = nn.functional.cross_entropy(logits, batch[1])
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

    counts = row(tmp_path, accelerator, NoBatchNorm, on(data)).graph.counts
    # The first shape has a graph, and each other one that came often enough; the rest is eager.
    assert counts.captures == {1: 1, 2: 2, 4: 1}[len(rows)]
    assert counts.replayed + counts.warmed_up + sum(counts.eager.values()) == 36
    assert counts.replayed >= {1: 33, 2: 15, 4: 15}[len(rows)]
    assert all(reason.startswith("another batch signature") for reason in counts.eager)


MODES = {"min_size": 7, "max_size_cycle": 9, "max_size": 9}


def _both(batch: Any) -> tuple[Tensor, Tensor]:
    (x, y), other = batch["a"], batch["b"]
    return (x, y) if other is None else (x + other[0], y)


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.filterwarnings(SIZE)
def test_combined_loaders(tmp_path: Path, accelerator: str, mode: Any) -> None:
    def data() -> Any:
        return CombinedLoader({"a": batches(numbers(9)), "b": batches(numbers(7, seed=1))}, mode)

    done = row(tmp_path, accelerator, lambda: Unpacks(_both), on(data))
    length = MODES[mode]
    assert done.graph.final["global_step"] == 3 * length
    # Where a loader is exhausted, `max_size` gives None for its batch.
    missing = 3 * 2 if mode == "max_size" else 0
    eager = {"another batch signature: containers changed": missing} if missing else {}
    became(done.graph, replayed=3 * length - WARMUP - missing, eager=eager)


@pytest.mark.long
@pytest.mark.parametrize("form", ["dict", "list", "nested"])
@pytest.mark.filterwarnings(SIZE)
def test_several_loaders(tmp_path: Path, accelerator: str, form: str) -> None:
    def data() -> Any:
        a, b = batches(numbers(9)), batches(numbers(7, seed=1))
        return {"dict": {"a": a, "b": b}, "list": [a, b], "nested": {"a": a, "more": [b]}}[form]

    def unpack(batch: Any) -> tuple[Tensor, Tensor]:
        first, second = (
            batch if form == "list" else (batch["a"], batch["b"] if form == "dict" else batch["more"][0])
        )
        return first[0] + second[0], first[1]

    done = row(tmp_path, accelerator, lambda: Unpacks(unpack), on(data))
    became(done.graph, replayed=done.graph.final["global_step"] - WARMUP)


def test_a_sequential_loader_fails_without_us_too(tmp_path: Path, accelerator: str) -> None:
    for name, callback in (("plain", None), ("graph", CUDAGraphCallback())):
        data = CombinedLoader([loader(), loader()], "sequential")
        with pytest.raises(ValueError, match='does not support the `CombinedLoader\\(mode="sequential"'):
            train(make(Net), tmp_path / name, callback, accelerator=accelerator, train_loader=data)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["sequential", "max_size", "min_size"])
def test_several_validation_loaders(tmp_path: Path, accelerator: str, mode: Any) -> None:
    class Validates(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            first = batch if mode == "sequential" else batch[0]
            if first is not None:
                x, y = first
                self.log("val_loss", nn.functional.cross_entropy(self(x), y), batch_size=len(x))

    def setting(folder: Path) -> dict[str, Any]:
        loaders = [loader(seed=1, batches=2), loader(seed=2, batches=3)]
        return {"val_loader": CombinedLoader(loaders, mode), "val_check_interval": 4}

    done = row(tmp_path, accelerator, Validates, setting)
    became(done.graph, replayed=18, eager={"another batch signature": 3})


class _Stream(IterableDataset[Any]):
    """Batches without an end that anybody knows; in each epoch another number of them."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.lengths = lengths
        self.epoch = -1

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        yield from numbers(self.lengths[self.epoch % len(self.lengths)], seed=self.epoch)


class _Sized(_Stream):
    def __len__(self) -> int:
        return self.lengths[0]


STREAMS: dict[str, tuple[type[_Stream], tuple[int, ...]]] = {
    "no length": (_Stream, (7,)),
    "no length, changing": (_Stream, (7, 4, 9)),
    "length": (_Sized, (7,)),
    "length, some missing": (_Sized, (7, 4, 6)),
}


@pytest.mark.spread
@pytest.mark.parametrize("watched", [True, False], ids=["watched", "alone"])
@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__`")
def test_iterable_datasets(tmp_path: Path, accelerator: str, name: str, watched: bool) -> None:
    cls, lengths = STREAMS[name]
    done = row(
        tmp_path,
        accelerator,
        Net,
        on(lambda: DataLoader(cls(lengths), batch_size=None)),
        watched=watched,
    )
    steps = sum(lengths[epoch % len(lengths)] for epoch in range(3))
    assert done.graph.final["global_step"] == steps
    became(done.graph, replayed=steps - WARMUP)


class _Iterable:
    """No loader of torch's, and no list, which would be several loaders."""

    def __iter__(self) -> Iterator[Any]:
        return iter(numbers(7))


@pytest.mark.long
def test_an_iterable_that_is_no_loader(tmp_path: Path, accelerator: str) -> None:
    done = row(tmp_path, accelerator, Net, on(_Iterable))
    became(done.graph, replayed=21 - WARMUP)


class _Rows(Dataset[Any]):
    """Rows that workers make, with random numbers of their own."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        row = torch.randn(12, generator=generator)
        return row + 0.1 * torch.randn(12), (row[0] > 0).long()


@pytest.mark.spread(2)
@pytest.mark.parametrize("persistent", [False, True], ids=["anew", "persistent"])
def test_workers(tmp_path: Path, accelerator: str, persistent: bool) -> None:
    def data() -> Any:
        return DataLoader(
            _Rows(),
            batch_size=8,
            shuffle=True,
            num_workers=2,
            persistent_workers=persistent,
            pin_memory=accelerator == "gpu",
        )

    done = row(tmp_path, accelerator, Net, on(data), max_epochs=2)
    became(done.graph, replayed=16 - WARMUP)


class _EverySecond(torch.utils.data.Sampler[list[int]]):
    """Indices of its own making, which knows the epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        indices = list(range(self.epoch % 2, 64, 2))
        yield from (indices[i : i + 4] for i in range(0, len(indices), 4))

    def __len__(self) -> int:
        return 8


SAMPLERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffle": lambda: DataLoader(_Rows(), batch_size=8, shuffle=True),
    "drop_last": lambda: DataLoader(_Rows(), batch_size=10, drop_last=True),
    "weighted": lambda: DataLoader(
        _Rows(), batch_size=8, sampler=WeightedRandomSampler(torch.arange(64.0), 64)
    ),
    "batch_sampler": lambda: DataLoader(_Rows(), batch_sampler=_EverySecond()),
    "a generator": lambda: DataLoader(
        _Rows(), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers(tmp_path: Path, accelerator: str, name: str) -> None:
    done = row(tmp_path, accelerator, Net, on(SAMPLERS[name]))
    became(done.graph, replayed=done.graph.final["global_step"] - WARMUP)


class _Transfers:
    """All three hooks around the transfer of a batch, with state and random numbers on the host."""

    moved = 0

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch["x"] - 0.5, batch["y"]]

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.moved += 1
        return tuple(member.to(device) for member in batch)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return x + 0.1 * torch.randn_like(x) + self.moved, y


class _TransfersInModule(_Transfers, Net):
    pass


class _Data(pl.LightningDataModule):
    """Prepares, sets up, and tears down, and says so."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage}")
        self.made = [{"x": x, "y": y} for x, y in numbers(7)]

    def train_dataloader(self) -> Any:
        self.calls.append("train_dataloader")
        return batches(self.made)

    def val_dataloader(self) -> Any:
        return batches(self.made[:2])

    def teardown(self, stage: str) -> None:
        self.calls.append(f"teardown {stage}")

    def state_dict(self) -> dict[str, Any]:
        return {"calls": list(self.calls)}


class _TransfersInData(_Transfers, _Data):
    pass


@pytest.mark.long
@pytest.mark.filterwarnings(SIZE)
def test_transfer_hooks_of_a_module(tmp_path: Path, accelerator: str) -> None:
    data = [{"x": x, "y": y} for x, y in numbers(7)]
    done = row(
        tmp_path,
        accelerator,
        _TransfersInModule,
        lambda folder: {"train_loader": batches(data), "val_loader": batches(data[:2])},
    )
    became(done.graph, replayed=21 - WARMUP)
    plain, graph = done.plain.module, done.graph.module
    assert graph.moved == plain.moved > 21  # type: ignore[union-attr]


@pytest.mark.spread
@pytest.mark.parametrize("hooks", [False, True], ids=["plain", "hooks"])
@pytest.mark.parametrize("reload", [0, 1])
@pytest.mark.filterwarnings(SIZE)
def test_datamodules(tmp_path: Path, accelerator: str, hooks: bool, reload: int) -> None:
    def build() -> pl.LightningModule:
        if hooks:
            return Net()
        module = Unpacks(lambda b: (b["x"], b["y"]))
        module.validation_step = lambda batch, batch_idx: None  # type: ignore[assignment,method-assign]
        return module

    made: list[_Data] = []

    def setting(folder: Path) -> dict[str, Any]:
        data = (_TransfersInData if hooks else _Data)()
        made.append(data)

        def fit(trainer: pl.Trainer, module: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
            trainer.fit(module, datamodule=data)

        return {"fit": fit, "reload_dataloaders_every_n_epochs": reload}

    done = row(tmp_path, accelerator, build, setting)
    became(done.graph, replayed=21 - WARMUP)
    plain, graph = made
    assert plain.calls == graph.calls
    assert graph.calls.count("train_dataloader") == (3 if reload else 1)
    assert graph.calls[-1].startswith("teardown")


class BatchOnly(Net):
    def training_step(self, batch: Any) -> Any:  # type: ignore[override]
        return super().training_step(batch, 0)


class OtherNames(Net):
    def training_step(self, samples: Any, batch_idx: int) -> Any:  # type: ignore[override]
        return super().training_step(samples, 0)


class OtherNameOfIndex(Net):
    def training_step(self, batch: Any, position: int) -> Any:  # type: ignore[override]
        return super().training_step(batch, 0)


class Stars(Net):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(args[0], 0)


class Defaults(Net):
    def training_step(self, batch: Any, batch_idx: int = 0, weight: float = 0.5) -> Any:
        output = super().training_step(batch, 0)
        return {"loss": output["loss"] * weight}


class Tensors(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, 0)["loss"]


class Extras(Net):
    """More than the loss, nested, with Python values and a None."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, 0)
        return {**output, "more": [output["logits"].sum(), (batch[1], "text", 3, None)]}


STEPS = [BatchOnly, OtherNames, OtherNameOfIndex, Stars, Defaults, Tensors, Extras]


@pytest.mark.spread(2)
@pytest.mark.parametrize("cls", STEPS)
def test_signatures_and_outputs_of_training_step(
    tmp_path: Path, accelerator: str, cls: type[Net]
) -> None:
    done = row(tmp_path, accelerator, cls, on(lambda: loader(ragged=False)))
    became(done.graph, replayed=21 - WARMUP)


class SkipsFirst(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if self.current_epoch == 0 else super().training_step(batch, 0)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_step_that_returns_none(tmp_path: Path, accelerator: str) -> None:
    done = refused(tmp_path, accelerator, SkipsFirst, match=r"`SkipsFirst.training_step` returned None")
    assert done.graph.counts.replayed == 0


class KeepsBatches(Net):
    """Keeps every batch that hooks see, without copies: later ones must not be written into it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.kept.append(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.kept.append((outputs, batch))


@pytest.mark.long
def test_batches_and_outputs_that_hooks_keep(tmp_path: Path, accelerator: str) -> None:
    done = row(tmp_path, accelerator, KeepsBatches)
    became(done.graph, replayed=18, eager={"another batch signature": 3})
    plain, graph = (trace.module.kept for trace in (done.plain, done.graph))  # type: ignore[union-attr]
    assert len(plain) == 48
    assert not differences(plain, graph)
