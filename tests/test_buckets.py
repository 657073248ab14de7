"""Padding to buckets: their choice, the padded batches, and runs that are padded by the callback.

`tests/gpu/test_buckets.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

import itertools
import pickle
import random
from collections import Counter, UserDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_cudagraph import Buckets, ConfigurationError, CUDAGraphCallback
from tests.harness import Apart, Net, Trace, assert_same, make, train

IGNORED = -100


def _cost(counts: Counter[int], lengths: tuple[int, ...]) -> int:
    return sum(n * min(to for to in lengths if to >= length) for length, n in counts.items())


def test_no_other_choice_has_less_padding() -> None:
    generator = random.Random(0)
    for _ in range(200):
        sample = generator.choices(range(1, 30), k=generator.randint(1, 12))
        most = generator.randint(1, 6)
        chosen = tuple(Buckets.from_sample(sample, most, values={"x": 0}).lengths)
        counts, longest = Counter(sample), max(sample)
        others = itertools.combinations(counts.keys() - {longest}, min(most, len(counts)) - 1)
        assert len(chosen) <= most
        assert _cost(counts, chosen) == min(_cost(counts, (*other, longest)) for other in others)


def test_their_choice() -> None:
    lengths = [8] * 50 + [9] * 20 + [20] * 30 + [60, 64]
    buckets = Buckets.from_sample(iter(lengths), 3, values={"x": 0}, dim=2, length_key="n")
    assert buckets == Buckets([64, 20, 9], {"x": 0}, dim=2, length_key="n")
    assert buckets.lengths == (9, 20, 64)


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: Buckets([], {"x": 0}), r"Buckets\(lengths=\[\]\)`: expected ints of at least 1"),
    (lambda: Buckets([4, -1], {"x": 0}), r"Buckets\(lengths=\[4, -1\]\)`: expected ints"),
    (lambda: Buckets([4.5], {"x": 0}), r"Buckets\(lengths=\[4.5\]\)`: expected ints"),  # type: ignore[list-item]
    (lambda: Buckets([4], {}), r"Buckets\(values=\{\}\)`: expected a dictionary"),
    (lambda: Buckets([4], {"x": "0"}), r"expected a number for 'x'; found '0'"),  # type: ignore[dict-item]
    (lambda: Buckets([4], {("x", 0): 0}), r"expected keys, indices or paths"),  # type: ignore[dict-item]
    (lambda: Buckets([4], {"x": 0}, dim=-1), r"dim=-1\)`: expected an int of at least 0"),
    (lambda: Buckets([4], {"x": 0}, length_key=1), r"length_key=1\)`: expected a string"),  # type: ignore[arg-type]
    (lambda: Buckets.from_sample([], values={"x": 0}), r"`Buckets.from_sample\(lengths=\[\]\)`"),
    (lambda: Buckets.from_sample("abc", values={"x": 0}), r"lengths='abc'\)`: expected ints"),  # type: ignore[arg-type]
    (lambda: Buckets.from_sample(5, values={"x": 0}), r"lengths=5\)`: expected ints"),  # type: ignore[arg-type]
    (lambda: Buckets.from_sample([0] * 60, values={"x": 0}), r"lengths='list'\)`: expected ints"),
    (lambda: Buckets.from_sample([4], 0, values={"x": 0}), r"max_buckets=0\)`: expected an int"),
    (lambda: CUDAGraphCallback(pad_to=[32]), r"pad_to=\[32\]\)`: expected a `Buckets`"),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("make_wrong", "message"), WRONG)
def test_wrong_arguments(make_wrong: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_wrong()


@dataclass(frozen=True)
class Images:
    """A batch that is a dataclass."""

    image: list[Tensor]
    name: str = "a.png"


def test_a_padded_batch() -> None:
    ids, mask = torch.arange(1, 7).view(2, 3), torch.ones(2, 3, dtype=torch.bool)
    labels = torch.ones(3, 4, dtype=torch.int32).T[1:3]  # not contiguous
    batch = UserDict(input_ids=ids, mask=mask, labels=labels, n=torch.zeros(7), name=["a", "b"])
    values = {"input_ids": 9, "mask": False, "batch['labels']": IGNORED}
    padded = Buckets([5, 8], values, length_key="length").pad(batch)
    assert type(padded) is UserDict
    assert torch.equal(padded["input_ids"], torch.tensor([[1, 2, 3, 9, 9], [4, 5, 6, 9, 9]]))
    assert padded["mask"].tolist() == [[True, True, True, False, False]] * 2
    assert padded["labels"].tolist() == [[1, 1, 1, IGNORED, IGNORED]] * 2
    assert (padded["labels"].dtype, padded["labels"].stride()) == (torch.int32, (5, 1))
    assert padded["n"] is batch["n"]
    assert padded["name"] == ["a", "b"]
    assert padded["length"] == 3
    assert sorted(batch) == ["input_ids", "labels", "mask", "n", "name"]


def test_other_containers_and_dimensions() -> None:
    image = torch.rand(2, 3, 5, 7)
    batch = (Images([image, image]), 1)
    paths = {"batch[0].image[1]": 0.5}
    padded, one = Buckets([8], paths, dim=3).pad(Buckets([6], paths, dim=2).pad(batch))
    assert one == 1
    assert padded.image[0] is image
    assert torch.equal(padded.image[1], nn.functional.pad(image, (0, 1, 0, 1), value=0.5))
    assert Buckets([8], {"batch": 0}).pad(torch.ones(1, 7)).sum() == 7
    assert Buckets([8], {1: 0}).pad([None, torch.ones(1, 7)])[1].shape == (1, 8)


def test_a_length_that_needs_no_padding() -> None:
    """All batches of a bucket have the same strides, and one beyond the largest is left as it is."""
    buckets = Buckets([3, 5], {"x": 0})
    wide = torch.ones(2, 12)
    assert buckets.pad({"x": wide[:, :5]})["x"].stride() == (5, 1)
    assert buckets.pad({"x": wide})["x"] is wide


@pytest.mark.parametrize(
    ("values", "batch", "message"),
    [
        ({"y": 0}, {"x": torch.ones(2, 3)}, r"no tensor `batch\['y'\]`; it has `batch\['x'\]`. Correct"),
        ({"x": 0}, {"x": [1, 2]}, r"no tensor `batch\['x'\]`"),
        ({0: 0}, (torch.ones(8),), r"`batch\[0\]` has the shape \(8,\), and no dimension 1. Correct"),
        ({"x": 0.5}, {"x": torch.ones(2, 3).long()}, "of torch.int64, which cannot hold the value 0.5"),
        ({"x": -1}, {"x": torch.ones(2, 3).byte()}, "of torch.uint8, which cannot hold the value -1"),
        ({"x": 2}, {"x": torch.ones(2, 3).bool()}, "of torch.bool, which cannot hold the value 2"),
        (
            {0: 0, 1: 0},
            (torch.ones(2, 3), torch.ones(2, 4)),
            r"one length in dimension 1, found 3 in `batch\[0\]`, 4 in `batch\[1\]`. Give each",
        ),
    ],
)
def test_a_batch_that_does_not_fit(values: Any, batch: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Buckets([8], values).pad(batch)


@pytest.mark.parametrize("batch", [(torch.ones(2, 3),), {0: torch.ones(2, 3), "n": 3}])
def test_a_batch_without_room_for_its_length(batch: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"`length_key='n'` is added to a dictionary without"):
        Buckets([8], {0: 0}, length_key="n").pad(batch)


class Tagger(Net):
    """Tags each token; padding is ignored by the loss, and by all else but batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 12)
        self.apart = Apart(lengths=set())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._loss(batch, "loss")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.apart["lengths"].add(batch["tokens"].shape[1])
        self._loss(batch, "val_loss")

    def _loss(self, batch: Any, name: str) -> Tensor:
        tags = batch["tags"].flatten()
        logits = self(self.table(batch["tokens"]).flatten(0, 1))
        loss = nn.functional.cross_entropy(logits, tags, ignore_index=IGNORED)
        self.log(name, loss, batch_size=4)
        return loss


VALUES = {"tokens": 0, "tags": IGNORED}
LENGTHS = [5, 9, 7, 6, 10, 4, 8, 5, 12, 9] * 4
BUCKETS = [6, 10]


def texts(lengths: list[int], to: Callable[[int], int] = lambda length: length) -> DataLoader[Any]:
    """Batches of these lengths, padded to others by hand."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for length in lengths:
        batch = {
            name: torch.full((4, to(length)), value, dtype=torch.int64) for name, value in VALUES.items()
        }
        for tensor, most in zip(batch.values(), (16, 4), strict=True):
            tensor[:, :length] = torch.randint(0, most, (4, length), generator=generator)
        batches.append({"name": f"{len(batches)}.txt", **batch})
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def by_hand(length: int) -> int:
    return 6 if length <= 6 else 10 if length <= 10 else length


def fit(
    tmp_path: Path, name: str, callback: CUDAGraphCallback | None, loader: Any, **kwargs: Any
) -> Trace:
    options = {"max_epochs": 1, "val_loader": texts([5, 9, 11] * 2), "checkpoint_every": 0}
    module = make(kwargs.pop("build", Tagger))
    return train(module, tmp_path / name, callback, train_loader=loader, **{**options, **kwargs})


@pytest.mark.spread
@pytest.mark.parametrize("watched", [True, False], ids=["watched", "alone"])
def test_a_run_is_that_of_padding_by_hand(tmp_path: Path, accelerator: str, watched: bool) -> None:
    options: dict[str, Any] = {"accelerator": accelerator, "watched": watched}
    plain = fit(tmp_path, "plain", None, texts(LENGTHS, by_hand), **options)
    callback = CUDAGraphCallback(pad_to=Buckets(BUCKETS, VALUES))
    graph = fit(tmp_path, "graph", callback, texts(LENGTHS), **options)
    assert_same(plain, graph)
    assert graph.counts.captures == len(BUCKETS)
    # The four batches of length 12 are longer than the buckets.
    assert (graph.counts.warmed_up, graph.counts.eager_steps) == (6, 4)
    assert graph.counts.replayed == len(LENGTHS) - 6 - 4
    assert vars(graph.trainer.precision_plugin).keys() == vars(plain.trainer.precision_plugin).keys()  # type: ignore[union-attr]
    assert graph.module.apart["lengths"] == {5, 9, 11}  # type: ignore[union-attr]


class ReadsLength(Tagger):
    """Weighs a batch by its length before the padding."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * batch["length"]


def test_the_step_gets_the_length_before_the_padding(tmp_path: Path, accelerator: str) -> None:
    """A tensor: batches of many lengths share the graph of their bucket."""
    padded = Buckets(BUCKETS, VALUES, length_key="length")

    def by_hand_with_length() -> Any:
        batches = zip(texts(LENGTHS, by_hand), LENGTHS, strict=True)
        given = [{**batch, "length": torch.tensor(length)} for batch, length in batches]
        return DataLoader(given, batch_size=None)  # type: ignore[arg-type]

    options: dict[str, Any] = {"accelerator": accelerator, "build": ReadsLength}
    plain = fit(tmp_path, "plain", None, by_hand_with_length(), **options)
    graph = fit(tmp_path, "graph", CUDAGraphCallback(pad_to=padded), texts(LENGTHS), **options)
    assert_same(plain, graph)
    assert (graph.counts.captures, graph.counts.replayed) == (2, len(LENGTHS) - 6 - 4)


def test_a_run_without_graphs_is_padded_too(tmp_path: Path, accelerator: str) -> None:
    plain = fit(tmp_path, "plain", None, texts(LENGTHS, by_hand), accelerator=accelerator)
    callback = CUDAGraphCallback(pad_to=[Buckets(BUCKETS, VALUES)], backend="off")
    assert_same(plain, fit(tmp_path, "off", callback, texts(LENGTHS), accelerator=accelerator))


@pytest.mark.long
def test_evaluation(tmp_path: Path, accelerator: str) -> None:
    """Validation that is captured is padded, and the sanity check too."""
    options: dict[str, Any] = {"accelerator": accelerator, "max_epochs": 3}
    validated = texts([5, 9, 11] * 2, by_hand)
    plain = fit(tmp_path, "plain", None, texts(LENGTHS, by_hand), val_loader=validated, **options)
    callback = CUDAGraphCallback(pad_to=Buckets(BUCKETS, VALUES), evaluation=True)
    graph = fit(tmp_path, "graph", callback, texts(LENGTHS), **options)
    assert_same(plain, graph)
    assert graph.module.apart["lengths"] == {6, 10, 11}  # type: ignore[union-attr]
    assert graph.summary.validate.captures == 3
    checked = fit(tmp_path, "sanity", callback, texts(LENGTHS), num_sanity_val_steps=1)
    assert checked.module.apart["lengths"] == {6, 10, 11}  # type: ignore[union-attr]


class Validates(Tagger):
    """Calls another method of the trainer in a `fit`, which goes on."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.apart.setdefault("trained", []).append(batch["tokens"].shape[1])

    def on_train_epoch_end(self) -> None:
        self.trainer.validate(self, verbose=False)
        self.trainer.training = True

    def train_dataloader(self) -> Any:
        return texts(LENGTHS)

    def val_dataloader(self) -> Any:
        return texts([5, 9])


@pytest.mark.filterwarnings("ignore:lightning_cudagraph. the graphs of a `fit` were released after step")
def test_padding_outlasts_another_method(tmp_path: Path) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",  # where `validate` leaves the weights, too
        max_epochs=2,
        callbacks=[CUDAGraphCallback(pad_to=Buckets(BUCKETS, VALUES))],
        check_val_every_n_epoch=5,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    module = make(Validates)
    trainer.fit(module)
    assert module.apart["trained"] == [*map(by_hand, LENGTHS)] * 2  # type: ignore[union-attr]
    assert module.apart["lengths"] == {5, 9}  # type: ignore[union-attr]
    assert "convert_input" not in vars(trainer.precision_plugin)


def test_it_ends_with_an_exception(tmp_path: Path, accelerator: str) -> None:
    callback = CUDAGraphCallback(pad_to=Buckets([8], {"text": 0}))
    options: dict[str, Any] = {"accelerator": accelerator, "raises": ConfigurationError}
    run = fit(tmp_path, "run", callback, texts(LENGTHS), **options)
    assert "no tensor `batch['text']`; it has `batch['tokens']`, `batch['tags']`." in str(run.error)
    assert "convert_input" not in vars(run.trainer.precision_plugin)  # type: ignore[union-attr]


def stacked(samples: list[list[int]]) -> dict[str, Tensor]:
    rows = [torch.tensor(sample) for sample in samples]
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"tokens": tokens, "tags": tokens % 4}


def test_a_collate_function(tmp_path: Path, accelerator: str) -> None:
    data = [[1 + i % 15] * (3 + i % 5) for i in range(24)]
    collate = Buckets([5, 9], VALUES, length_key="length").collate(stacked)
    padded = pickle.loads(pickle.dumps(collate))(data[:2])  # as workers get it
    assert padded["tokens"].tolist() == [[1, 1, 1, 0, 0], [2, 2, 2, 2, 0]]
    assert padded["tags"].tolist() == [[1, 1, 1, 0, IGNORED], [2, 2, 2, 2, IGNORED]]
    assert padded["length"] == 4
    loader = DataLoader(data, batch_size=4, collate_fn=collate, num_workers=1)  # type: ignore[arg-type]
    assert [batch["tokens"].shape[1] for batch in loader] == [9, 9, 9, 9, 9, 9]
