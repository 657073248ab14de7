"""Strings, numbers and paths in batches: part of the signature only if the captured step reads them.

`tests/gpu/test_host_values.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_cudagraph import CUDAGraphCallback, GraphedStep, UnsupportedError
from lightning_cudagraph.tensors.host_values import HostReads, HostValue
from tests.harness import Net, Trace, assert_same, differences, make, train

BATCHES, WARMUP = 12, 3
SIZE = "ignore:Trying to infer the `batch_size`"


def data(two_tasks: bool = True) -> Any:
    """Batches with other names, ids and lengths in each, and tasks in turn."""
    generator = torch.Generator().manual_seed(0)
    return DataLoader(
        [
            {
                "x": torch.randn(8, 12, generator=generator),
                "y": torch.randint(0, 4, (8,), generator=generator),
                "names": [f"{index}_{row}.png" for row in range(8)],
                "path": PurePosixPath(f"/data/{index}"),
                "id": index,
                "weight": 1.5 + index,
                "two": 2,
                "task": "ab"[index % (1 + two_tasks)],
            }
            for index in range(BATCHES)
        ],
        batch_size=None,
    )  # type: ignore[arg-type]


class Reads(Net):
    """Passes the loss and the batch to a function."""

    def __init__(self, use: Callable[[Tensor, Any], Any]) -> None:
        super().__init__()
        self.use = use

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step((batch["x"], batch["y"]), batch_idx)["loss"]
        return self.use(loss, batch)


def ignores(loss: Tensor, batch: Any) -> Tensor:
    """Uses the types of values, and passes them on."""
    assert isinstance(batch["id"], int)
    assert not isinstance(batch["id"], (str, bool))
    assert all(isinstance(name, str) for name in copy.deepcopy(batch["names"]))
    assert batch["task"] is not None
    return loss


def branches(loss: Tensor, batch: Any) -> Tensor:
    return loss * 2 if batch["task"] == "b" else loss


def looks_up(loss: Tensor, batch: Any) -> Tensor:
    return loss * {"a": 1.0, "b": 3.0}[batch["task"]]


def splits(loss: Tensor, batch: Any) -> Tensor:
    return loss * (1 + int(batch["names"][1].split("_")[0]) % 2)


def multiplies(loss: Tensor, batch: Any) -> Tensor:
    return loss * batch["weight"]


def multiplies_from_the_left(loss: Tensor, batch: Any) -> Tensor:
    return (1 + batch["id"]) * loss


def joins(loss: Tensor, batch: Any) -> Tensor:
    return loss * len("".join(batch["names"]))


def fills(loss: Tensor, batch: Any) -> Tensor:
    return loss + torch.full((), batch["id"], device=loss.device)


def scales_in_place(loss: Tensor, batch: Any) -> Tensor:
    part = batch["x"].new_ones(4)
    view = part[:2]
    view *= batch["two"]
    return loss * part.sum()


def returns_a_key(loss: Tensor, batch: Any) -> Any:
    return {"loss": loss, "by": {batch["task"]: loss.detach()}}


def asks_for_the_type(loss: Tensor, batch: Any) -> Tensor:
    return loss * 2 if type(batch["task"]) is str else loss


def catches(loss: Tensor, batch: Any) -> Tensor:
    try:
        return loss * len("".join(batch["names"]))
    except TypeError:
        return loss


def returns(loss: Tensor, batch: Any) -> Any:
    """Values of all types, among others."""
    names = ("names", "path", "id", "weight", "task")
    return {"loss": loss, "of": [loss.detach(), *(batch[name] for name in names)]}


def returns_a_part(loss: Tensor, batch: Any) -> Any:
    return {"loss": loss, "id": 1 + batch["id"]}


class Joining(Reads):
    def __init__(self) -> None:
        super().__init__(joins)


class Branching(Reads):
    def __init__(self) -> None:
        super().__init__(branches)


def both(
    tmp_path: Path, accelerator: str, use: Callable[[Tensor, Any], Any], **kwargs: Any
) -> tuple[Trace, Trace]:
    """Train without and with the callback."""
    kwargs = {"accelerator": accelerator, "max_epochs": 2, **kwargs}
    plain, graph = (
        train(make(lambda: Reads(use)), tmp_path / name, ours, train_loader=data(), **kwargs)
        for name, ours in (("plain", None), ("graph", CUDAGraphCallback()))
    )
    return plain, graph


@pytest.mark.filterwarnings(SIZE)
def test_values_that_the_step_does_not_read(tmp_path: Path, accelerator: str) -> None:
    plain, graph = both(tmp_path, accelerator, ignores)
    assert_same(plain, graph)
    assert graph.counts.captures == 1
    assert graph.counts.replayed == 2 * BATCHES - WARMUP


@pytest.mark.filterwarnings(SIZE)
@pytest.mark.spread
@pytest.mark.parametrize("window", [1, 2])
def test_values_that_the_step_returns_are_those_of_each_batch(
    tmp_path: Path, accelerator: str, window: int
) -> None:
    plain, graph = both(tmp_path, accelerator, returns, accumulate_grad_batches=window)
    assert_same(plain, graph)
    assert graph.counts.captures == window
    assert graph.counts.replayed == 2 * BATCHES - WARMUP * window
    returned = [step["outputs"]["of"] for step in graph.steps]
    assert [of[1][0] for of in returned] == 2 * [f"{index}_0.png" for index in range(BATCHES)]
    assert {tuple(map(type, of[2:])) for of in returned} == {(PurePosixPath, int, float, str)}


@pytest.mark.filterwarnings(SIZE)
def test_the_graph_is_one_of_a_step_with_the_values_themselves(tmp_path: Path, accelerator: str) -> None:
    """In place, `tensor *= number` is another op than with an object of an unknown class."""
    plain, graph = both(tmp_path, accelerator, scales_in_place)
    assert_same(plain, graph)
    assert graph.counts.captures == 1
    assert graph.counts.replayed == 2 * BATCHES - WARMUP


@pytest.mark.filterwarnings(SIZE)
@pytest.mark.spread
@pytest.mark.parametrize("use", [branches, looks_up, returns_a_key], ids=lambda use: use.__name__)
def test_a_value_that_is_read_has_a_graph_for_each(
    tmp_path: Path, accelerator: str, use: Callable[[Tensor, Any], Any]
) -> None:
    plain, graph = both(tmp_path, accelerator, use, max_epochs=3)
    assert_same(plain, graph)
    assert graph.counts.captures == 2
    assert graph.counts.replayed == 3 * BATCHES - 2 * WARMUP


@pytest.mark.filterwarnings(SIZE)
@pytest.mark.spread
@pytest.mark.parametrize(
    ("use", "path"),
    [
        (splits, "batch['names'][1]"),
        (multiplies, "batch['weight']"),
        (multiplies_from_the_left, "1 + batch['id']"),
        (joins, "batch['names'][0]"),
        (fills, "batch['id']"),
        (returns_a_part, "1 + batch['id']"),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_a_value_that_is_read_and_differs_in_each(
    tmp_path: Path, accelerator: str, use: Callable[[Tensor, Any], Any], path: str
) -> None:
    plain, graph = both(tmp_path, accelerator, use, max_epochs=3)
    assert_same(plain, graph)
    assert graph.counts.replayed < BATCHES
    assert f"`{path}`" in graph.counts.remedy
    is_number = path == "batch['weight']"
    assert ("of float64: use it as it is beside tensors" in graph.counts.remedy) == is_number


@pytest.mark.spread
@pytest.mark.filterwarnings(SIZE)
@pytest.mark.parametrize("use", [asks_for_the_type, catches], ids=lambda use: use.__name__)
def test_python_that_sees_the_difference_does_not_train_wrong(
    tmp_path: Path, accelerator: str, use: Callable[[Tensor, Any], Any]
) -> None:
    """The eager step of a check has the values themselves."""
    with pytest.raises(UnsupportedError, match="comes to other numbers"):
        both(tmp_path, accelerator, use)


@pytest.mark.filterwarnings(SIZE)
def test_the_remedy_names_the_value_and_the_line(tmp_path: Path, accelerator: str) -> None:
    _, graph = both(tmp_path, accelerator, multiplies_from_the_left)
    pattern = (
        r"`1 \+ batch\['id'\]`, which the step reads at .*test_host_values.*, has \d+ values; pass it"
    )
    assert re.search(pattern, graph.counts.remedy)


@pytest.mark.filterwarnings(SIZE)
def test_c_code_gets_the_value_itself(tmp_path: Path, accelerator: str) -> None:
    """All strings count then."""
    kwargs: dict[str, Any] = {"accelerator": accelerator, "max_epochs": 3}

    def constant() -> Any:
        same = {"names": ["a", "bc"], "path": PurePosixPath("/"), "id": 3, "weight": 2.0}
        return DataLoader([{**batch, **same} for batch in data(two_tasks=False)], batch_size=None)  # type: ignore[arg-type]

    plain, graph = (
        train(make(Joining), tmp_path / name, ours, train_loader=constant(), **kwargs)
        for name, ours in (("plain", None), ("graph", CUDAGraphCallback()))
    )
    assert_same(plain, graph)
    assert graph.counts.captures == 1
    assert graph.counts.replayed == 3 * BATCHES - WARMUP
    assert graph.callback is not None
    assert "all strings and numbers of a batch are part of its signature" in str(graph.callback.summary)


@pytest.mark.long
@pytest.mark.filterwarnings(SIZE)
def test_control_without_notes_of_reads(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two graphs become one, which is wrong for every other batch."""
    monkeypatch.setattr(HostReads, "noting", lambda self, path, value: HostValue(value, lambda: None))
    plain, graph = (
        train(make(Branching), tmp_path / name, ours, train_loader=data(), accelerator=accelerator)
        for name, ours in (("plain", None), ("graph", CUDAGraphCallback(verify=None)))
    )
    assert differences(plain, graph)


@pytest.mark.parametrize(
    "value", ["text", b"bytes", 7, 2.5, 1 + 2j, PurePosixPath("/a/b"), np.float32(3), np.int64(-2)]
)
def test_a_host_value_behaves_as_its_value(value: Any) -> None:
    read: list[None] = []
    held = HostValue(value, lambda: read.append(None))
    assert isinstance(held, type(value))
    assert held is copy.copy(held) is copy.deepcopy(held)
    assert not read
    truth = () if isinstance(value, PurePosixPath) else (bool,)
    for use in (*truth, str, repr, hash, lambda v: v == value, lambda v: v != value, lambda v: f"{v}"):
        read.clear()
        assert use(held) == use(value)
        assert read, use
    for name in ("__len__", "__iter__", "__index__", "__fspath__", "__float__"):
        assert (getattr(type(held), name, None) is None) == (not hasattr(value, name))
    conversions: list[Any] = [len, iter, list, abs, float, int, round, pickle.dumps]
    if hasattr(value, "__complex__") or not isinstance(value, complex):  # Python 3.10 reads it in C
        conversions.append(complex)
    for use in (*conversions, lambda v: v + v, lambda v: 3 * v):
        try:
            expected = use(value)
        except (TypeError, ValueError):
            with pytest.raises((TypeError, ValueError)):
                use(held)
            continue
        read.clear()
        if use is not iter and use is not pickle.dumps:
            assert use(held) == expected
        else:
            use(held)
        assert read, use


def test_operators_of_tensors_with_host_values() -> None:
    x = torch.tensor([1.0, 2.0])
    three = HostValue(3, lambda: None)
    for use in (
        lambda v: x * v,
        lambda v: v * x,
        lambda v: x - v,
        lambda v: v - x,
        lambda v: v / x,
        lambda v: x**v,
        lambda v: v**x,
        lambda v: x > v,
        lambda v: x.view(HostValue(2, lambda: None), -1) * v,
    ):
        assert torch.equal(use(three), use(3))


class InTheLastPhase(Net):
    """Reads the task in the last micro-batch of a window alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step((batch["x"], batch["y"]), batch_idx)["loss"]
        if not self.trainer.fit_loop.epoch_loop._should_accumulate():
            loss = loss * {"a": 1.0, "b": 3.0}[batch["task"]]
        return loss


@pytest.mark.long
@pytest.mark.filterwarnings(SIZE)
def test_a_value_that_one_accumulation_phase_reads(tmp_path: Path, accelerator: str) -> None:
    """The phases of a window share a static batch, with the value of another batch."""
    kwargs: dict[str, Any] = {"accelerator": accelerator, "accumulate_grad_batches": 2, "max_epochs": 3}
    plain, graph = (
        train(make(InTheLastPhase), tmp_path / name, ours, train_loader=data(), **kwargs)
        for name, ours in (("plain", None), ("graph", CUDAGraphCallback(verify=None)))
    )
    assert_same(plain, graph)
    assert graph.counts.replayed > BATCHES


@pytest.mark.long
@pytest.mark.filterwarnings(SIZE)
def test_an_optimizer_that_moves_leaves_the_graph_beside_names(tmp_path: Path, accelerator: str) -> None:
    """A refusal that has nothing to do with the batch is the same on each attempt."""

    class Moves(Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            trainer.optimizers[0].param_groups[0]["own"] = trainer.global_step

    kwargs: dict[str, Any] = {"accelerator": accelerator, "max_epochs": 3}
    plain, graph = (
        train(
            make(lambda: Reads(ignores)),
            tmp_path / name,
            ours,
            train_loader=data(),
            callbacks=[Moves()],
            **kwargs,
        )
        for name, ours in (("plain", None), ("graph", CUDAGraphCallback()))
    )
    assert_same(plain, graph)
    assert graph.counts.replayed > BATCHES
    assert graph.callback is not None
    assert "part of its signature" not in str(graph.callback.summary)


def test_values_that_a_step_returns(accelerator: str) -> None:
    """All arguments of a `GraphedStep` count, and it returns the values themselves."""
    net = torch.nn.Linear(4, 1, device="cuda" if accelerator == "gpu" else "cpu")

    def step(x: Tensor, name: str, k: int) -> Any:
        loss = net(x).square().mean()
        loss.backward()
        return {"loss": loss, "name": name, "k": k}

    with GraphedStep(step, [net]) as graphed:
        for _ in range(8):
            x = torch.randn(3, 4, device=net.weight.device)
            returned = graphed(x, "train", 3)
            assert type(returned["name"]) is str
            assert type(returned["k"]) is int
        assert graphed.summary.calls.replayed > 0


class ReturnsByHand(Reads):
    """Manual optimization, and predictions with the names beside them."""

    def __init__(self) -> None:
        super().__init__(returns)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(outputs["loss"])
        optimizer.step()
        return {"loss": outputs["loss"].detach(), "of": outputs["of"]}

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch["x"]), batch["names"], batch["id"]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), fused=True)


@pytest.mark.long
@pytest.mark.filterwarnings(SIZE)
@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")
def test_values_that_steps_of_manual_optimization_and_of_prediction_return(
    tmp_path: Path, accelerator: str
) -> None:
    traces, predicted = [], []
    for name, ours in (("plain", None), ("graph", CUDAGraphCallback(evaluation=True))):
        kwargs: dict[str, Any] = {"accelerator": accelerator, "max_epochs": 2}
        traces.append(train(make(ReturnsByHand), tmp_path / name, ours, train_loader=data(), **kwargs))
        if ours is not None:
            assert traces[1].counts.replayed == 2 * BATCHES - WARMUP
        predicted.append(traces[-1].trainer.predict(traces[-1].module, data()))  # type: ignore[union-attr]
    assert_same(*traces)
    assert not differences(*predicted)
    (stage,) = traces[1].summary.stages.values()
    assert stage.replayed == BATCHES - WARMUP
