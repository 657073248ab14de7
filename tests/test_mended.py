"""Remedies as a newcomer applies them: the mended step is captured, and trains to the same weights.

The message is that of the failing form, the weights are those of its run without the callback.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lightning_cudagraph import CUDAGraphCallback, UnsupportedError
from tests.harness import Net, differences, fused_adamw, loader, make, train

pytestmark = pytest.mark.long


class Loss(Net):
    """A step that makes something else of the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.of(super().training_step(batch, batch_idx)["loss"], *batch)

    def of(self, loss: Tensor, x: Tensor, y: Tensor) -> Any:
        raise NotImplementedError


class Last(Loss):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def of(self, loss: Tensor, x: Tensor, y: Tensor) -> Any:
        before = self.losses[-1] if self.losses else torch.ones_like(loss)
        self.losses.append(loss.detach())
        return loss * before


class LastMended(Loss):
    last: Any = None

    def of(self, loss: Tensor, x: Tensor, y: Tensor) -> Any:
        before = torch.ones_like(loss) if self.last is None else self.last
        self.last = loss.detach()
        return loss * before


class LastFew(Loss):
    def __init__(self) -> None:
        super().__init__()
        self.losses = [torch.ones(()) for _ in range(4)]

    def of(self, loss: Tensor, x: Tensor, y: Tensor) -> Any:
        self.losses.append(loss.detach())
        return loss / torch.stack([each.to(loss.device) for each in self.losses[-4:]]).mean()


class LastFewMended(Loss):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.ones(4))

    def of(self, loss: Tensor, x: Tensor, y: Tensor) -> Any:
        self.kept.copy_(torch.cat([self.kept[1:], loss.detach()[None]]))
        return loss / self.kept.mean()


class LastNumber(Last):
    """The same of numbers, which fp64 holds."""

    def of(self, loss: Tensor, x: Tensor, y: Tensor) -> Any:
        before = self.losses[-1] if self.losses else 1.0
        self.losses.append(loss.item())  # type: ignore[arg-type]
        return loss * before


class States(Loss):
    def __init__(self) -> None:
        super().__init__()
        self.states: Any = [None, None]

    def of(self, loss: Tensor, x: Tensor, y: Tensor) -> Any:
        for i, state in enumerate(self.states):
            self.states[i] = loss.detach() * (i + 1) + (0 if state is None else state * 0.5)
        return loss / self.states[1]


class StatesMended(States):
    def of(self, loss: Tensor, x: Tensor, y: Tensor) -> Any:
        states = [*self.states]
        for i, state in enumerate(states):
            states[i] = loss.detach() * (i + 1) + (0 if state is None else state * 0.5)
        self.states = tuple(states)
        return loss / self.states[1]


class Columns(Loss):
    def of(self, loss: Tensor, x: Tensor, y: Tensor) -> Any:
        n = min(int(y.max()) + 1, 3)
        return loss + self.head.weight[:, :n].sum()


class ColumnsMended(Loss):
    def of(self, loss: Tensor, x: Tensor, y: Tensor) -> Any:
        weight = self.head.weight
        n = (y.max() + 1).clamp(max=3)
        mask = torch.arange(weight.size(1), device=weight.device) < n
        return loss + torch.where(mask, weight, 0).sum()


class Longest(Loss):
    def of(self, loss: Tensor, x: Tensor, y: Tensor) -> Any:
        return loss * max(y)


class LongestMended(Loss):
    def of(self, loss: Tensor, x: Tensor, y: Tensor) -> Any:
        return loss * y.max()


class UpToNine(Loss):
    def of(self, loss: Tensor, x: Tensor, y: Tensor) -> Any:
        return loss * min(y.sum(), 9)


class UpToNineMended(Loss):
    def of(self, loss: Tensor, x: Tensor, y: Tensor) -> Any:
        return loss * y.sum().clamp(max=9)


class ReturnsEarly(Loss):
    def of(self, loss: Tensor, x: Tensor, y: Tensor) -> Any:
        return self.halved(loss)

    def halved(self, loss: Tensor) -> Tensor:
        if loss < 1.3:
            return loss * 0.5
        return loss


class ReturnsEarlyMended(ReturnsEarly):
    def halved(self, loss: Tensor) -> Tensor:
        return torch.where(loss < 1.3, loss * 0.5, loss)


class ReturnsNone(Loss):
    def of(self, loss: Tensor, x: Tensor, y: Tensor) -> Any:
        term = self.term(y)
        return loss if term is None else loss + loss * term

    def term(self, y: Tensor) -> Tensor | None:
        if y.sum() < 14:
            return None
        return y.float().mean()


class ReturnsNoneMended(Loss):
    def of(self, loss: Tensor, x: Tensor, y: Tensor) -> Any:
        return loss + loss * torch.where(y.sum() < 14, 0, y.float().mean())


class OfNone(Loss):
    """A mean over no sample, which gives no gradient to the step without it."""

    def of(self, loss: Tensor, x: Tensor, y: Tensor) -> Any:
        return loss + self.mean_of(self.head.weight.sum() * x.mean(1), y == 3)

    def mean_of(self, values: Tensor, mask: Tensor) -> Tensor:
        if mask.sum() == 0:
            return values.new_zeros(())
        return (values * mask).sum() / mask.sum()


class OfNoneMended(OfNone):
    def mean_of(self, values: Tensor, mask: Tensor) -> Tensor:
        mean = (values * mask).sum() / mask.sum().clamp(min=1)
        return torch.where(mask.sum() == 0, values.new_zeros(()), mean)


class Cumulative(Net):
    def __init__(self) -> None:
        super().__init__()
        self.features[1] = nn.BatchNorm1d(24, momentum=None)


class CumulativeMended(Net):
    def __init__(self) -> None:
        super().__init__()
        self.features[1] = nn.BatchNorm1d(24, momentum=0.1)


class Retains(Net):
    """Reads the gradient, and lets it decide on something."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        hidden = self.features(x)
        hidden.retain_grad()
        self.hidden = hidden
        return nn.functional.cross_entropy(self.head(hidden), y)

    def gradient(self) -> Tensor:
        found = self.hidden.grad
        assert found is not None
        return found

    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        self.head.bias.add_(self.gradient().norm())


class RetainsMended(Retains):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        hidden = self.features(x)
        hidden.register_hook(lambda grad: setattr(self, "grad_of_h", grad))
        return nn.functional.cross_entropy(self.head(hidden), y)

    def gradient(self) -> Tensor:
        return self.grad_of_h  # type: ignore[no-any-return]


class Plateau(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.after(loss.detach())
        return {"loss": loss.detach()}

    def after(self, loss: Tensor) -> None:
        self.lr_schedulers().step(loss)

    def configure_optimizers(self) -> Any:
        optimizer = fused_adamw(self.parameters())
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
        return [optimizer], [schedule]


class PlateauMended(Plateau):
    def after(self, loss: Tensor) -> None: ...

    def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
        self.lr_schedulers().step(outputs["loss"])


class Pointer(Loss):
    """A queue that is written at the places behind a pointer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(32))
        self.point()

    def point(self) -> None:
        self.pointer: Any = 0

    def of(self, loss: Tensor, x: Tensor, y: Tensor) -> Any:
        loss = loss + 0.01 * self.queue.mean()
        self.put(x.mean(1), len(x))
        return loss

    def put(self, x: Tensor, n: int) -> None:
        begin = self.pointer
        self.queue[begin : begin + n] = x
        self.pointer = (self.pointer + n) % len(self.queue)


class PointerMended(Pointer):
    def point(self) -> None:
        self.register_buffer("pointer", torch.tensor(0))

    def put(self, x: Tensor, n: int) -> None:
        places = (self.pointer + torch.arange(n, device=self.pointer.device)) % len(self.queue)
        self.queue[places] = x
        self.pointer.copy_((self.pointer + n) % len(self.queue))


class Place(Pointer):
    def put(self, x: Tensor, n: int) -> None:
        self.queue[self.pointer] = x.mean()
        self.pointer = (self.pointer + 1) % len(self.queue)


class PlaceMended(PointerMended):
    def put(self, x: Tensor, n: int) -> None:
        self.queue[self.pointer.view(1)] = x.mean()
        self.pointer.copy_((self.pointer + 1) % len(self.queue))


class Tells(Loss):
    def of(self, loss: Tensor, x: Tensor, y: Tensor) -> Any:
        if loss > 1:
            print("the loss is large", loss)
        return {"loss": loss}


class TellsMended(Loss):
    def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
        if outputs["loss"] > 1:
            print("the loss is large", outputs["loss"])

    def of(self, loss: Tensor, x: Tensor, y: Tensor) -> Any:
        return {"loss": loss}


class Moves(Loss):
    """A number beside a loss and beside other tensors."""

    weight: Any = 1.0

    def on_train_batch_start(self, *args: Any) -> None:
        self.weight = 1 / (3 + self.global_step)

    def of(self, loss: Tensor, x: Tensor, y: Tensor) -> Any:
        penalty = (self.head.weight.square() * (1 - self.weight)).mean()
        return (loss * self.weight + penalty).exp()


class MovesMended(Loss):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones((), dtype=torch.float64))

    def on_train_batch_start(self, *args: Any) -> None:
        self.weight.fill_(1 / (3 + self.global_step))

    def of(self, loss: Tensor, x: Tensor, y: Tensor) -> Any:
        penalty = (self.head.weight.square() * (1 - self.weight)).mean()
        return (loss * self.weight.to(loss.dtype) + penalty).exp()


class Case(NamedTuple):
    """A form that fails, and what its message leads to.

    Attributes:
        remedy: a part of the message.
        source: the line that it names.
    """

    fails: type[Net]
    mended: type[Net]
    remedy: str
    source: str


TO_LAST = "If later steps read it: the last one as an attribute, `self.last = new.detach()`"
TO_FEW = "`self.kept.copy_(torch.cat([self.kept[1:], new.detach()[None]]))`"
WHERE = "Compute both, and choose with `torch.where`"
ZERO = "such as zero for a term: `torch.where(condition, 0, x)`"
LENGTH = "The length is a tensor: `y.max().clamp(max=9)` for `min(int(y.max()), 9)`"
AFTERWARDS = 'call it in `on_train_batch_end`, with `outputs["loss"]`'
CASES = [
    Case(Last, LastMended, TO_LAST, "self.losses.append("),
    Case(LastFew, LastFewMended, TO_FEW, "self.losses.append("),
    Case(LastNumber, LastMended, TO_LAST, "self.losses.append(loss.item())"),
    Case(States, StatesMended, "Keep a tuple, `self.states = tuple(...)`", "self.states[i] ="),
    Case(Columns, ColumnsMended, LENGTH, "n = min(int(y.max()) + 1, 3)"),
    Case(Longest, LongestMended, "`x.max()` for `max(x)`", "loss * max(y)"),
    Case(UpToNine, UpToNineMended, "`x.clamp(max=9)` for `min(x, 9)`", "min(y.sum(), 9)"),
    Case(ReturnsEarly, ReturnsEarlyMended, WHERE, "if loss < 1.3:"),
    Case(ReturnsNone, ReturnsNoneMended, ZERO, "if y.sum() < 14"),
    Case(OfNone, OfNoneMended, "both must be finite: `n.clamp(min=1)`", "if mask.sum() == 0"),
    Case(Cumulative, CumulativeMended, "Pass a number as `momentum`", "self.head(self.features(x))"),
    Case(Retains, RetainsMended, "`h.register_hook(lambda grad: setattr(", "hidden.retain_grad()"),
    Case(Plateau, PlateauMended, AFTERWARDS, ".step(loss)"),
    Case(Pointer, PointerMended, "Index with a tensor of places", "self.pointer = (self.pointer + n)"),
    Case(Place, PlaceMended, "`x[self.pointer.view(1)] = y`", "self.pointer = (self.pointer + 1)"),
    Case(Tells, TellsMended, "Return the tensor from the step, and do it in", "if loss > 1:"),
]


@pytest.mark.spread(2)
@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.fails.__name__)
def test_the_mended_step_is_captured_and_trains_the_same(
    tmp_path: Path, accelerator: str, case: Case
) -> None:
    def run(build: type[Net], name: str, graphs: bool, fails: bool = False) -> Any:
        return train(
            make(build),
            tmp_path / name,
            CUDAGraphCallback() if graphs else None,
            accelerator=accelerator,
            train_loader=loader(ragged=False),
            checkpoint_every=0,
            watched=False,
            raises=UnsupportedError if fails else None,
        )

    refused = run(case.fails, "refused", graphs=True, fails=True)
    assert case.remedy in str(refused.error)
    assert re.search(rf"found at .*{re.escape(case.source)}", str(refused.error))
    plain, mended = run(case.fails, "plain", graphs=False), run(case.mended, "mended", graphs=True)
    assert (mended.counts.captures, mended.counts.eager) == (1, {})
    weights, others = (dict(each.module.named_parameters()) for each in (plain, mended))
    assert not differences(weights, others)


@pytest.mark.spread
@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_a_number_that_moves_has_its_bits_in_a_buffer(
    tmp_path: Path, accelerator: str, precision: Any
) -> None:
    """Bit for bit, and a loss of the same dtype."""
    kwargs: dict[str, Any] = {"accelerator": accelerator, "precision": precision, "watched": False}
    kwargs |= {"checkpoint_every": 0, "train_loader": loader(ragged=False)}
    slow = train(make(Moves), tmp_path / "slow", CUDAGraphCallback(), **kwargs)
    assert "(of float64: use it as it is beside tensors with dimensions, and" in str(slow.summary)
    plain = train(make(Moves), tmp_path / "plain", **kwargs)
    mended = train(make(MovesMended), tmp_path / "mended", CUDAGraphCallback(), **kwargs)
    # On a GPU the optimizer may be left eager in float64, which makes one step more eager.
    assert mended.counts.captures == 1
    assert mended.counts.replayed >= 12
    weights, others = (
        dict(each.module.named_parameters())  # type: ignore[union-attr]
        for each in (plain, mended)
    )
    assert not differences(weights, others)
