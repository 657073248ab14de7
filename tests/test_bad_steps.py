"""Steps that no graph can hold: the error names the line, and nothing is lost or left behind."""

from __future__ import annotations

import math
import queue
import random
import re
import socket
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from lightning_cudagraph import CaptureError, CUDAGraphCallback, UnsupportedError
from lightning_cudagraph.checks.audit.effects import Effects
from lightning_cudagraph.checks.walk.scope import Scope
from lightning_cudagraph.checks.walk.walker import Walk
from lightning_cudagraph.compat.attributes import do_nothing
from tests.harness import Net, assert_same, make, train


class Item(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        output["seen"] = output["loss"].detach().item()  # BAD
        return output


class Branch(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        if loss > 1e9:  # BAD
            loss = loss * 0
        return loss


class Mask(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        losses = nn.functional.cross_entropy(self(x), y, reduction="none")
        return losses[losses > 0].mean()  # BAD


class BatchIdx(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        return loss * (1 + batch_idx)  # BAD


class GlobalStep(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        return loss * (1.0 + self.global_step)  # BAD


class Clock(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        started_s = time.perf_counter()  # BAD
        loss = super().training_step(batch, batch_idx)["loss"]
        return loss * (1 if started_s else 0)


class AsksForAFile(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        return loss * (2 if Path("slow").exists() else 1)  # BAD


class AsksTheNetwork(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        name = socket.gethostname()  # BAD
        return super().training_step(batch, batch_idx)["loss"] * len(name)


class Seeded(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        pl.seed_everything(3, verbose=False)  # BAD
        return super().training_step(batch, batch_idx)["loss"]


class SeedsAGenerator(Net):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.generator.manual_seed(3)  # BAD
        return super().training_step(batch, batch_idx)["loss"]


class RetainsAGradient(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.kept = super().training_step(batch, batch_idx)["loss"]
        self.kept.retain_grad()
        return self.kept * 2


class ReturnsARetainedGradient(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"] * 1
        loss.retain_grad()
        return {"loss": loss * 2, "one": loss}


class Isolated(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with isolate_rng():  # BAD
            return super().training_step(batch, batch_idx)["loss"]


class StepsTheScheduler(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.lr_schedulers().step()  # BAD
        return super().training_step(batch, batch_idx)["loss"]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return [optimizer], [{"scheduler": schedule, "frequency": 1000}]


class Attribute(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.calls = getattr(self, "calls", 0) + 1
        return output["loss"]


class GrowingList(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.seen.append(output["loss"].detach())
        return output["loss"]


class Rebound(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean_loss", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        self.mean_loss = 0.9 * self.mean_loss + 0.1 * loss.detach()
        return loss


class PythonRandom(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"] * (1 + random.random())


class NumpyRandom(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"] * (1 + float(np.random.rand()))


class _ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        assert float(gradient.sum()) < 1e9  # BAD
        return gradient


_POOL = ThreadPoolExecutor(1)


class InAThread(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        scale = _POOL.submit(lambda: 1 + loss.detach().item()).result()  # BAD
        return loss * scale


class BackwardItem(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return _ReadsInBackward.apply(super().training_step(batch, batch_idx)["loss"])


BAD: dict[type[Net], str] = {
    Item: "`.item()`",
    Branch: "Python branch",
    Mask: "boolean mask",
    BatchIdx: "`batch_idx`",
    GlobalStep: "`self.global_step`",
    Clock: "`time.perf_counter()`",
    Seeded: "`seed_everything`",
    SeedsAGenerator: "`torch.Generator.manual_seed`",
    RetainsAGradient: "`retain_grad()`",
    ReturnsARetainedGradient: "`retain_grad()`",
    Isolated: "`isolate_rng`",
    AsksForAFile: "`os.stat`",
    AsksTheNetwork: "`socket.gethostname`",
    StepsTheScheduler: "use of `LRScheduler.step`",
    InAThread: "`concurrent.futures.Future.result`",
    Attribute: "`calls` of the `Attribute`",
    GrowingList: "`seen` of the `GrowingList`",
    Rebound: "`mean_loss` of the `Rebound`",
    PythonRandom: "`random`",
    NumpyRandom: "`numpy.random`",
    BackwardItem: "`.item()`",
}


def _line_of(cls: type) -> int | None:
    lines = Path(__file__).read_text().splitlines()
    where = next(i for i, line in enumerate(lines) if line.startswith(f"class {cls.__name__}("))
    for number in range(where, len(lines)):
        if number > where and lines[number].startswith(("class ", "BAD")):
            return None
        if lines[number].endswith("# BAD"):
            return number + 1
    return None


@pytest.mark.spread(2)
@pytest.mark.parametrize("cls", BAD, ids=lambda cls: cls.__name__)
def test_raises_with_the_users_line(tmp_path: Path, accelerator: str, cls: type[Net]) -> None:
    module = make(cls)
    with pytest.raises(CaptureError, match=re.escape(BAD[cls])) as caught:
        train(module, tmp_path, CUDAGraphCallback(), accelerator=accelerator)
    text = str(caught.value)
    line = _line_of(_ReadsInBackward if cls is BackwardItem else cls)
    if line is not None:
        assert f"{__file__}:{line} " in text
    assert 'on_unsupported="eager"' in text
    assert text.count("A CUDA graph cannot hold") <= 1


def _start() -> None:
    thread = threading.Thread(target=do_nothing)
    thread.start()
    thread.join()


_HANDOVERS: dict[str, Callable[[], object]] = {
    "a pool": lambda: _POOL.submit(do_nothing).result(),
    "a thread": _start,
    "a queue": lambda: queue.Queue().put(1),
    "a queue of C": lambda: queue.SimpleQueue().put(1),
    "an event": lambda: threading.Event().set(),
}


@pytest.mark.parametrize("name", _HANDOVERS)
def test_handing_something_to_another_thread_is_told(name: str) -> None:
    told: list[None] = []
    effects = Effects(lambda mentioned: Walk([], Scope()), frozenset(), lambda module: False)
    with effects.watched(lambda: told.append(None)):
        len([torch.ones(2).sum()])
    assert not told
    assert not effects.hands_over
    with effects.watched(lambda: told.append(None)):
        _HANDOVERS[name]()
    assert len(told) >= 2
    assert effects.hands_over


@pytest.mark.spread(3)
@pytest.mark.parametrize("cls", BAD, ids=lambda cls: cls.__name__)
def test_goes_on_eagerly_with_the_same_numbers(tmp_path: Path, accelerator: str, cls: type[Net]) -> None:
    callback = CUDAGraphCallback(on_unsupported="eager")
    plain_module, module = make(cls), None
    plain = train(plain_module, tmp_path / "plain", accelerator=accelerator)
    module = make(cls)
    graph = train(module, tmp_path / "graph", callback, accelerator=accelerator)
    assert_same(plain, graph)
    assert graph.counts.captures == 0
    assert graph.counts.replayed == 0
    assert len(graph.counts.eager) == 1
    assert getattr(plain_module, "calls", 0) == getattr(module, "calls", 0)
    assert len(getattr(plain_module, "seen", [])) == len(getattr(module, "seen", []))


class Reads(Net):
    """Reads a tensor on the host, for what a class does with it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(64, 12))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))
        self.register_buffer("factor", torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.read(*batch)
        return super().training_step(batch, batch_idx)

    def read(self, x: Tensor, y: Tensor) -> None:
        raise NotImplementedError


class Classes(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        nn.functional.one_hot(y)  # BAD


class Factor(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        self.queue.add_(x.mean(0), alpha=self.factor)  # BAD


class Pointer(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        start = int(self.pointer)  # BAD
        self.queue[start : start + 2] = x[:2]


class PointerItem(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        start = self.pointer.item()  # BAD
        self.queue[start : start + 2] = x[:2]


class PointerInSlice(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        self.queue[self.pointer : 64].zero_()  # BAD


class PointerOfColumns(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        start = int(self.pointer)  # BAD
        self.queue[:, start : start + 2] = 1.0


class NotItself(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        if self.factor != self.factor:  # BAD
            self.factor.fill_(1)


class Covariance(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        normal = torch.distributions.MultivariateNormal
        normal(x[:, :2], x.new_ones(2).diag(), validate_args=False)  # BAD


class CheckedCovariance(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        torch.distributions.MultivariateNormal(x[:, :2], x.new_ones(2).diag())  # BAD


class LowRank(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        torch.distributions.LowRankMultivariateNormal(x, x[..., None], x.exp())  # BAD


class ChoosesADistribution(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        bends = torch.distributions.VonMises(x, x.exp())
        bends.sample() if self.training else bends.mean  # BAD


class OnASimplex(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        x = x.clone().requires_grad_()
        torch.distributions.LogisticNormal(x, x.exp(), validate_args=False).rsample()  # BAD


class Counts(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        torch.distributions.Multinomial(5, x.exp(), validate_args=False).entropy()  # BAD


class Matrices(Reads):
    """Its `sample` calls a constraint, which is no check of an argument."""

    def read(self, x: Tensor, y: Tensor) -> None:
        df, factor = x.new_full((), 4.0), torch.eye(3, device=x.device)
        wishart = torch.distributions.Wishart(df, scale_tril=factor, validate_args=False)
        wishart.sample()  # BAD


class MaskOfATransformer(Reads):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(12, 2, 8, batch_first=True), 1, enable_nested_tensor=False
        )
        self.register_buffer("later", torch.ones(8, 8, dtype=torch.bool).triu(1))

    def read(self, x: Tensor, y: Tensor) -> None:
        self.encoder(x[None], mask=self.later[: len(x), : len(x)])  # BAD


class LengthInSlice(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        x[: y.max()].sum()  # BAD


class Length(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        most = int(y.max())  # BAD
        x[:most].sum()


class Size(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        torch.arange(y.max())  # BAD


class Number(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        most = int(y.max())  # BAD
        self.log("most", most)


class Index(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        x[y.argmax()].sum()  # BAD


class IndexOfWrite(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        x.clone()[y.argmax()] = 0.0  # BAD


class IndexOfUpdate(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        z = x.clone()
        z[y.argmax()] += 1.0  # BAD


class Best(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        if x.sum() > self.factor:  # BAD
            self.factor = x.sum()


class BestOf(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        self.best = max(0.0, x.sum())  # BAD


class Loop(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        while (x > 1).any():  # BAD
            x = x / 2


class Choice(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        x = x if x.sum() > 0 else -x  # BAD


class Tells(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        if x.sum() > 99:  # BAD
            warnings.warn(f"large: {x.sum()}", stacklevel=2)
        elif self.training:
            self.log("small", x.sum())


class WritesOnly(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        if x.sum() > 0:  # BAD
            self.factor.fill_(2)


class CallsItsOwn(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        if x.sum() > 0:  # BAD
            self.keep(x)

    def keep(self, x: Tensor) -> None:
        self.queue[:1] = x[:1]


class CountsPlaces(Reads):
    at = 0

    def read(self, x: Tensor, y: Tensor) -> None:
        self.queue[self.at] = 1.0
        self.at += 1  # BAD


class Kept(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        kept: list[float] = []
        kept.append(x.sum().item())  # BAD


class Counted(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        torch.bincount(y)  # BAD


class DecidesOnAStep(Reads):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = Net.training_step(self, batch, batch_idx)["loss"]
        if loss > 1:  # BAD
            self.manual_backward(loss)
            self.optimizers().step()
        self.log("late", loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class BreaksSteps(DecidesOnAStep):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for _ in range(2):
            loss = Net.training_step(self, batch, batch_idx)["loss"]
            self.manual_backward(loss)
            self.optimizers().step()
            if loss > 100:  # BAD
                break


class BreaksBeforeSteps(DecidesOnAStep):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for _ in range(2):
            loss = Net.training_step(self, batch, batch_idx)["loss"]
            if loss > 100:  # BAD
                break
            self.manual_backward(loss)
            self.optimizers().step()


class BreaksALoop(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        for _ in range(2):
            if x.sum() > 100:  # BAD
                break
            x = x / 2


class CallsItself(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        if x.abs().max() > 1:  # BAD
            self.read(x / 2, y)


class Dropout(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        nn.functional.dropout(x, x.sum().sigmoid())  # BAD


class LengthOfEach(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        [x[i, : int(n)].sum() for i, n in enumerate(y)]  # BAD


class MaskAsked(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        mask = x > 0
        if not mask.all():  # BAD
            x = x * mask


class MaskOfAnotherName(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        am: Any = x > 0
        am = None if am.all() else am  # BAD


class LeavesOutABatch(Reads):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.factor.fill_(batch_idx)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.factor > 2:  # BAD
            return None
        return super().training_step(batch, batch_idx)

    def read(self, x: Tensor, y: Tensor) -> None: ...


class PassesOnNone(LeavesOutABatch):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = self.loss_of(batch)
        if found is None:
            return None
        return found

    def loss_of(self, batch: Any) -> Any:
        x, y = batch
        if self.factor > 2:  # BAD
            return None
        return nn.functional.cross_entropy(self(x), y)


class RaisesFurtherDown(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        try:
            if x.mean() > 9:  # BAD
                raise ValueError("too large")
        except ValueError:
            self.factor += 1


class NumberAtLeastOne(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        x / max(1, y.sum().item())  # BAD


class GrowsAsATuple(Reads):
    last: Any = ()

    def read(self, x: Tensor, y: Tensor) -> None:
        self.last = (*self.last, x.mean().detach())[-8:]  # BAD


class FlipsByChance(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        flips = random.random() < 0.5  # BAD
        if flips:
            x = x.flip(1)


class FlipsByTorch(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        if torch.rand(1) < 0.5:  # BAD
            x = x.flip(1)


class Crops(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        at = torch.randint(0, 2, (1,)).item()  # BAD
        x = x[:, at : at + 4]


class Brightens(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        x = x * torch.empty(1).uniform_(0.8, 1.2).item()  # BAD
        nn.functional.pad(x, (1, 1))


class Plays(Reads):
    def __init__(self) -> None:
        super().__init__()
        self.turns = 0
        self.seen: list[float] = []

    def play(self) -> None:
        reward = random.random()
        self.turns += 1
        self.seen.append(reward)

    def read(self, x: Tensor, y: Tensor) -> None:
        self.play()  # BAD


class MakesAMask(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        padding = x > 0
        bias = torch.where(padding, 0.0, -1e9)
        if padding.all():  # BAD
            bias = None  # type: ignore[assignment]
        del bias


class MaskCompared(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        attention_mask = (x > 0).long()
        if torch.all(attention_mask == 1):  # BAD
            attention_mask = None


class Rolls(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        shift = int(y[0])  # BAD
        torch.roll(x, shift, 1)


class SizeFurtherDown(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        n = y.max().item() + 1  # BAD
        x.new_zeros(len(x), n)


class LoopsOverNumber(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        for _ in range(y.max()):  # BAD
            x = x * 0.9


class LoopsOverClasses(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        for c in torch.unique(y).tolist():  # BAD
            x = x + torch.where(y == c, 1, 0)[:, None]


class LoopsOverLengths(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        for n in y.tolist():  # BAD
            x = x + n


class CutsLengths(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        for i, n in enumerate(y.tolist()):  # BAD
            x[i, :n].sum()


class CutsLengthsElsewhere(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        _mask_of(y.tolist(), x.size(1))  # BAD


def _mask_of(lengths: list[int], size: int) -> Tensor:
    mask = torch.zeros(len(lengths), size)
    for i, n in enumerate(lengths):
        mask[i, :n] = 1
    return mask


class CutsSegments(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        start = 0
        for end in y.cumsum(0).tolist():  # BAD
            x.view(-1)[start:end].sum()
            start = end


class LooksUp(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        weights = [1.0] * 12
        torch.tensor([weights[c] for c in y.tolist()])  # BAD


class CountsAtPlaces(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        counts = torch.zeros(12, 12)
        for i, j in zip(y.tolist(), y.tolist(), strict=True):  # BAD
            counts[i, j] += 1


class LongestOfAll(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        for _ in range(max(y.tolist())):  # BAD
            x = x * 0.9


class CutsABox(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        middle = int(y[0])  # BAD
        start, end = max(middle - 2, 0), min(middle + 2, 4)
        x[:, start:end].sum()


class AtLeastOne(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        x.sum() / max(1, y.sum())  # BAD


class ChoosesFurtherDown(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        chance = torch.rand(1, device=x.device).item()  # BAD
        x = x.flip(1) if chance < 0.5 else x


class KeepsFurtherDown(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        kept: list[float] = []
        value = x.sum().item()  # BAD
        kept.append(value)


class CutsByChanceInAFunction(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        ratio = random.random()  # BAD
        start, end = _box(x.size(1), ratio)
        x.clone()[:, start:end] = 0


def _box(size: int, ratio: float) -> tuple[int, int]:
    width = int(size * ratio)
    return 0, width


class Grows(Reads):
    bank = torch.zeros(0, 12)

    def read(self, x: Tensor, y: Tensor) -> None:
        self.bank = torch.cat([self.bank.to(x.device), x])  # BAD


class KeepsLosses(Reads):
    def __init__(self) -> None:
        super().__init__()
        self.losses: deque[Tensor] = deque(maxlen=4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = Net.training_step(self, batch, batch_idx)["loss"]
        self.losses.append(loss.detach())  # BAD
        return loss + torch.stack([*self.losses]).mean()


class SetsTheRate(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = group["lr"] * 0.99  # BAD


class SetsTheDecay(Reads):
    """Refused in the smaller part of the step, too."""

    def read(self, x: Tensor, y: Tensor) -> None:
        self.trainer.optimizers[0].param_groups[0]["weight_decay"] += 0.01  # BAD


class CallsAScheduler(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        self.lr_schedulers().step()  # BAD

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Clears(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        if not torch.isfinite(self.factor).all():  # BAD
            self.factor.zero_()


class Replaces(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        if torch.isnan(x).any():  # BAD
            x = torch.nan_to_num(x)


class ListOfTensors(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        self.hidden = [x.mean().detach()]  # BAD


class ToALibrary(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        self.factor.cpu().numpy().argsort()  # BAD


class ReboundBuffer(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        self.factor = self.factor * 0.9  # BAD


class ReboundParameter(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        self.head.bias = nn.Parameter(self.head.bias.detach() * 0.9)  # BAD


class ReplacedStorage(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        self.factor.data = self.factor * 0.9  # BAD


class Decides(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        pairs = y.tolist()  # BAD
        [(i, j) for i, one in enumerate(pairs) for j, other in enumerate(pairs) if one == other]


class CutsByChance(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        width = 3
        ratio = random.random()  # BAD
        size = int(4 * math.sqrt(1 - ratio))
        start, end = max(size - width // 2, 0), size + width
        x[:, start:end] = 0


class StopsTheFit(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        if x.mean() > 9:  # BAD
            self.trainer.should_stop = True


class WritesAtAMask(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        dead = self.factor.view(1) < 0
        if dead.any():  # BAD
            self.factor.view(1)[dead] = 1.0


class SetsTheDropout(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        self.drop = getattr(self, "drop", nn.Dropout())
        self.drop.p *= 0.9  # BAD


class KeepsADictionary(Reads):
    def read(self, x: Tensor, y: Tensor) -> None:
        self.last = {"mean": x.mean().detach()}  # BAD


PLACES = "Index with a tensor of places: `places = (pointer + torch.arange(n"
MASK = "leave the rest out by a mask, `torch.arange("
BOX = "choose by a mask: `at = torch.arange(len(x), device=x.device)`"
SIZE = "Use a size that is the same in every step, the largest one"
WRITE = "tensor without dimensions.*`x[index.view(1)] = y`"
BEST = "Keep it in a registered buffer.*`self.best.copy_(torch.where("
REMEDIES: dict[type[Net], str] = {
    Classes: "`one_hot` without `num_classes`.*Pass it: `one_hot(labels, num_classes=10)`",
    Factor: "a tensor as `alpha`.*`x.add_(factor * y)` for `x.add_(y, alpha=factor)`",
    Pointer: PLACES,
    PointerItem: PLACES,
    PointerInSlice: BOX,
    PointerOfColumns: PLACES,
    NotItself: "Count in a buffer, `self.bad",
    Covariance: "`scale_tril=torch.linalg.cholesky_ex(covariance)[0]`",
    CheckedCovariance: "Pass `validate_args=False`.*docs/recipes/distributions.md",
    LowRank: "Use `MultivariateNormal(loc, scale_tril=.*`factor @ factor.mT + torch.diag_embed(",
    ChoosesADistribution: "Write it out in tensors.*docs/recipes/distribution_samples.md",
    OnASimplex: "gradient of `cumprod`.*Write it out in tensors.*docs/recipes/distribution_samples.md",
    Counts: "Write it out in tensors.*docs/recipes/distribution_entropies.md",
    Matrices: "Write it out in tensors.*docs/recipes/wishart.md",
    MaskOfATransformer: "Pass `is_causal=True` beside a causal mask",
    LengthInSlice: MASK,
    Length: MASK,
    Size: SIZE,
    SizeFurtherDown: SIZE,
    Rolls: "Roll by an index, with `size = x.size(1)` and the shift as a tensor: `x.index_select(",
    LoopsOverNumber: "Loop as often as is needed at most, and leave out what is beyond",
    LoopsOverClasses: "`torch.unique`.*`.tolist()`.*`for c in range(num_classes)`, with a mask",
    LoopsOverLengths: "Loop over the tensor itself, `for each in x`",
    CutsLengths: f"Loop over the tensor itself, `for each in x`.*{MASK}",
    CutsLengthsElsewhere: f"Loop over the tensor itself, `for each in x`.*{MASK}",
    CutsSegments: BOX,
    LooksUp: "Make the table a tensor, `self.register_buffer(.*`self.table[y]`",
    CountsAtPlaces: "add at all places at once.*accumulate=True)`.*docs/recipes/loops.md",
    LongestOfAll: "Loop as often as is needed at most, and leave out what is beyond",
    CutsABox: BOX,
    AtLeastOne: "`x.clamp(min=1)` for `max(1, x)`",
    ChoosesFurtherDown: "Compute both, and choose with `torch.where`",
    KeepsFurtherDown: "Return the tensor from the step.*`on_train_batch_end`",
    CutsByChanceInAFunction: "Move an augmentation.*to `on_after_batch_transfer`",
    Grows: "changes `bank`.*Keep one size: by `DataLoader(drop_last=True)`.*recipes/kept_tensors.md",
    KeepsLosses: "changes `losses`.*To keep what the step computes, return it.*"
    "If later steps read it: the last one",
    SetsTheRate: "changes `param_groups[0]['lr']` of the.*Set it in `on_train_batch_start`, or let a",
    SetsTheDecay: "changes `param_groups[0]['weight_decay']` of the.*Set it in `on_train_batch_start`",
    CallsAScheduler: "use of `LRScheduler.step`.*Call it in `on_train_batch_start`",
    FlipsByTorch: "Move an augmentation.*to `on_after_batch_transfer`",
    Crops: "Move an augmentation.*to `on_after_batch_transfer`",
    Brightens: "Move an augmentation.*to `on_after_batch_transfer`",
    Plays: "calls `play`, which uses or changes.*docs/recipes/environments.md",
    MakesAMask: "Always pass the mask.*docs/recipes/attention_masks.md",
    MaskCompared: "Always pass the mask.*docs/recipes/attention_masks.md",
    MaskOfAnotherName: "Always pass the mask.*docs/recipes/attention_masks.md",
    PassesOnNone: "on a tensor.*Return the loss of every batch.*`optimizer.found_inf = self.skip`",
    RaisesFurtherDown: "Raise the error in a branch on the value itself",
    NumberAtLeastOne: "`x.clamp(min=1)` for `max(1, x)`",
    GrowsAsATuple: "Keep one size from the first step on: a registered buffer.*[self.kept[1:], new",
    LeavesOutABatch: "on a tensor.*Return the loss of every batch.*`optimizer.found_inf = self.skip`",
    FlipsByChance: "Move an augmentation.*`x = torch.where(torch.rand((), device=x.device) < p",
    Number: "use the tensor itself",
    Index: "tensor without dimensions.*`x[index.view(1)][0]`",
    IndexOfWrite: WRITE,
    IndexOfUpdate: WRITE,
    Best: BEST,
    BestOf: BEST,
    Loop: "Loop as often as is needed at most.*docs/recipes/loops_that_end.md",
    Choice: "Compute both, and choose with `torch.where`",
    Tells: "Return the tensor from the step.*`on_train_batch_end`",
    CallsItsOwn: "Compute both, and choose",
    WritesOnly: "Compute both, and choose with `torch.where`",
    CountsPlaces: "Keep it in a registered buffer.*`self.at.copy_(...)` for.*`x[self.at.view(1)] = y`",
    Kept: "Return the tensor from the step.*`on_train_batch_end`",
    Counted: "Count with a fixed size: `F.one_hot",
    DecidesOnAStep: "with one `GraphedStep` each.*docs/recipes/parts.md",
    BreaksBeforeSteps: "A replay takes all steps of the loop.*docs/recipes/nan_checks.md",
    BreaksSteps: "A replay takes all steps of the loop.*docs/recipes/nan_checks.md",
    BreaksALoop: "Loop as often as is needed at most.*docs/recipes/loops_that_end.md",
    CallsItself: "Loop as often as is needed at most.*docs/recipes/loops_that_end.md",
    Dropout: "`x * (torch.rand_like(x) >= p) / (1 - p)`",
    LengthOfEach: MASK,
    MaskAsked: "Always pass the mask.*docs/recipes/attention_masks.md",
    Clears: "Clear them without a branch: `p.grad.copy_(torch.where(",
    Replaces: "Do it in every step: finite numbers stay as they are.*docs/recipes/nan_checks.md",
    ListOfTensors: "Keep a tuple, `self.hidden = tuple(...)`",
    ReboundBuffer: "another tensor into the buffer `factor` of the.*`self.factor.copy_(...)`",
    ReplacedStorage: "gives `factor` another storage.*`copy_`",
    ToALibrary: "Compute with torch, on the device.*such as SciPy, is in no graph",
    Decides: "Python that decides by values is in no graph",
    CutsByChance: "Move an augmentation.*to `on_after_batch_transfer`.*what the slice selects",
    StopsTheFit: "`on_train_batch_end`.*self.trainer.should_stop = True",
    WritesAtAMask: "Compute both, and choose with `torch.where`",
    SetsTheDropout: "changes `p` of `drop`.*draw the mask yourself",
    KeepsADictionary: "empty it before the step returns: `self.last.clear()`.*`module.kept = output.det",
    ReboundParameter: "another tensor into the parameter `bias` of `head`.*`head.bias.copy_(...)`",
}


@pytest.mark.filterwarnings("ignore:Singular sample detected")  # by each sample
@pytest.mark.spread(2)
@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("cls", REMEDIES, ids=lambda cls: cls.__name__)
def test_names_the_line_and_a_remedy_that_fits_it(
    tmp_path: Path, accelerator: str, cls: type[Net], caplog: pytest.LogCaptureFixture
) -> None:
    pattern = ".*".join(map(re.escape, REMEDIES[cls].split(".*")))
    callback = CUDAGraphCallback(harmless=["factor"])  # not even then
    with pytest.raises(CaptureError, match=f"(?s){pattern}") as caught:
        train(make(cls), tmp_path, callback, accelerator=accelerator, val_loader=None)
    assert f"{__file__}:{_line_of(cls)} " in str(caught.value)
    assert "captured from now on" not in caplog.text
    if cls in (SetsTheRate, CallsAScheduler, LoopsOverClasses, LeavesOutABatch):
        assert len(caught.value.findings) == 1


class ReturnsNone(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None  # BAD


class LeavesBatchesOut(Net):
    """Returns None for each third batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("skips", torch.zeros(()), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        return None if batch_idx % 3 == 2 else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), fused=True)


class LetsTheOptimizerSkip(LeavesBatchesOut):
    """The remedy for it."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.skips.fill_(batch_idx % 3 == 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer: Any = super().configure_optimizers()
        optimizer.found_inf = self.skips
        return optimizer


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_path_that_returns_none_is_eager_and_has_a_remedy(
    tmp_path: Path, accelerator: str, caplog: pytest.LogCaptureFixture
) -> None:
    kwargs: dict[str, Any] = {"accelerator": accelerator, "max_epochs": 6}
    plain = train(make(LeavesBatchesOut), tmp_path / "plain", **kwargs)
    graph = train(make(LeavesBatchesOut), tmp_path / "graph", CUDAGraphCallback(), **kwargs)
    assert_same(plain, graph)
    assert graph.counts.captures == 1
    reason = r"a path without a graph: `LeavesBatchesOut.training_step` returned None .* else"
    assert any(re.match(reason, eager) for eager in graph.counts.eager), graph.counts
    assert re.search(r"run eagerly: .* Remedy: Return the loss of every batch", caplog.text)
    mended = train(make(LetsTheOptimizerSkip), tmp_path / "mended", CUDAGraphCallback(), **kwargs)
    assert not any("batch_idx" in eager for eager in mended.counts.eager)
    for name, value in plain.module.state_dict().items():
        assert torch.equal(mended.module.state_dict()[name], value), name


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_returning_none(tmp_path: Path, accelerator: str) -> None:
    message = (
        rf"`ReturnsNone.training_step` returned None[^\n]*\n  found at .*{Path(__file__).name}:"
        rf"{_line_of(ReturnsNone)} .*`found_inf`"
    )
    with pytest.raises(UnsupportedError, match=f"(?s){message}"):
        train(make(ReturnsNone), tmp_path / "raise", CUDAGraphCallback(), accelerator=accelerator)
    plain = train(make(ReturnsNone), tmp_path / "plain", accelerator=accelerator)
    eager = CUDAGraphCallback(on_unsupported="eager")
    graph = train(make(ReturnsNone), tmp_path / "graph", eager, accelerator=accelerator)
    assert_same(plain, graph)


def test_an_error_of_the_users_own_in_the_capture(tmp_path: Path, accelerator: str) -> None:
    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)["loss"]
            if self.fails:
                raise ValueError("the fourth step fails")
            return loss

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.fails = batch_idx == 3

    with pytest.raises(ValueError, match="the fourth step fails"):
        train(make(Fails), tmp_path / "graph", CUDAGraphCallback(), accelerator=accelerator)
    # The process is as good as new: random numbers, memory, another capture.
    plain = train(make(Net), tmp_path / "a", accelerator=accelerator)
    again = train(make(Net), tmp_path / "b", CUDAGraphCallback(), accelerator=accelerator)
    assert_same(plain, again)


@pytest.mark.spread
@pytest.mark.parametrize("hook", ["on_after_backward", "on_before_optimizer_step"])
def test_item_in_a_hook(tmp_path: Path, accelerator: str, hook: str) -> None:
    def item(self: Net, *args: Any) -> None:
        float(self.head.weight.grad.abs().max())

    cls: Callable[[], Any] = type("Hook", (Net,), {hook: item})
    with pytest.raises(CaptureError, match=r"float\(self.head.weight.grad.abs\(\).max\(\)\)"):
        train(make(cls), tmp_path, CUDAGraphCallback(scope="step"), accelerator=accelerator)
