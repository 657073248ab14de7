"""Communication hooks of the user's own, with and without state, in loops of `GraphedStep`."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_cudagraph import CaptureError, CUDAGraphCallback, UnsupportedError
from tests.distributed.cases import WARM_UP, Here
from tests.distributed.step_cases import STEPS, Plain, _same
from tests.harness import assert_same


class Feedback:
    """The error of rounding to bfloat16, by bucket: it is added to the next gradients."""

    def __init__(self) -> None:
        self.lost: dict[int, Tensor] = {}
        self.scale = 1.0
        self.calls = 0


def _mean(text: Any) -> Any:
    return text.value()[0]


def _rounded(state: Any, bucket: Any) -> Any:
    whole = bucket.buffer()
    if bucket.index() not in state.lost:
        state.lost[bucket.index()] = torch.zeros_like(whole)
    lost = state.lost[bucket.index()]
    lost.add_(whole)
    sent = lost.bfloat16()
    lost.sub_(sent)
    sent.mul_(state.scale / dist.get_world_size())
    future = dist.all_reduce(sent, async_op=True).get_future()

    def received(done: Any) -> Tensor:
        whole.copy_(done.value()[0])
        return whole

    return future.then(received)


class LowRank:
    """PowerSGD of rank one with a warm start and error feedback; all that it keeps is on the device."""

    def __init__(self, net: nn.Module) -> None:
        generator = torch.Generator().manual_seed(5)
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        for parameter in net.parameters():
            if parameter.ndim == 2:
                q = torch.randn(parameter.shape[1], 1, generator=generator).to(parameter.device)
                self.kept[id(parameter)] = q, torch.zeros_like(parameter)

    def hook(self, state: Any, bucket: Any) -> Any:
        whole = bucket.buffer()
        whole.div_(dist.get_world_size())
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if id(parameter) not in self.kept:
                dist.all_reduce(gradient)
                continue
            q, lost = self.kept[id(parameter)]
            gradient.add_(lost)
            p = gradient @ q
            dist.all_reduce(p)
            p /= p.norm() + 1e-8
            torch.matmul(gradient.t(), p, out=q)
            torch.sub(gradient, p @ q.t(), out=lost)
            dist.all_reduce(q)
            torch.matmul(p, q.t(), out=gradient)
        return dist.all_reduce(whole.new_zeros(1), async_op=True).get_future().then(lambda _: whole)


def _rebinding(state: Any, bucket: Any) -> Any:
    whole = bucket.buffer()
    sent = whole + state.lost.get(bucket.index(), 0)
    rounded = sent.bfloat16()
    state.lost[bucket.index()] = sent - rounded
    return dist.all_reduce(rounded.float() / 2, async_op=True).get_future().then(_mean)


def _counting(state: Any, bucket: Any) -> Any:
    state.calls += 1
    return _rounded(state, bucket)


class WithFeedback(Plain):
    hook: Any = staticmethod(_rounded)

    def build(self) -> None:
        super().build()
        self.feedback = Feedback()
        self.net.register_comm_hook(self.feedback, self.hook)

    def state(self) -> Any:
        return super().state() | {"lost": self.feedback.lost}


class Compressed(Plain):
    def build(self) -> None:
        super().build()
        self.low_rank = LowRank(self.net)
        hook = self.low_rank.hook
        hook.__func__.__annotations__.clear()  # torch compares them, and these are texts
        self.net.register_comm_hook(None, hook)

    def state(self) -> Any:
        return super().state() | {"kept": [*self.low_rank.kept.values()]}


class Decorated(Compressed):
    def build(self) -> None:
        Plain.build(self)
        self.low_rank = LowRank(self.net)
        self.net.register_comm_hook(None, torch.no_grad()(self.low_rank.hook))


class Scaled(WithFeedback):
    def around(self, index: int) -> None:
        if index == WARM_UP + 3:
            self.feedback.scale = 0.5


class Rebinding(WithFeedback):
    hook: Any = staticmethod(_rebinding)


class Counting(WithFeedback):
    hook: Any = staticmethod(_counting)


class PowerSGD(Plain):
    def build(self) -> None:
        super().build()
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
        self.net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


for _hook in (_rounded, _rebinding, _counting):
    _hook.__annotations__.clear()  # torch compares them, and these are texts


def state_on_the_device(here: Here) -> None:
    """A hook that writes what it keeps into tensors."""
    step = _same(here, WithFeedback, STEPS - WARM_UP)
    assert step.summary.calls.captures == 1, step.summary


def of_low_rank(here: Here) -> None:
    """A method that averages factors of each gradient."""
    for loop in (Compressed, Decorated):
        step = _same(here, loop, STEPS - WARM_UP)
        assert step.summary.calls.captures == 1, step.summary


def options_of_the_host(here: Here) -> None:
    """A number of the state that the hook reads is guarded."""
    step = _same(here, Scaled, STEPS - WARM_UP - 3)
    assert step.summary.calls.captures == 2, step.summary


class Registers(Callback):
    """Registers a hook on the wrapper of the strategy."""

    def __init__(self) -> None:
        self.feedback = Feedback()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        ddp = trainer.strategy.model
        assert isinstance(ddp, DistributedDataParallel)
        ddp.register_comm_hook(self.feedback, _rounded)

    def state_dict(self) -> dict[str, Any]:
        return {"lost": self.feedback.lost}

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 4:
            self.feedback.scale = 0.5


def under_the_callback(here: Here) -> None:
    """The same in a fit, with checkpoints of what the hook keeps."""
    runs = [
        here.train(name, callback, callbacks=(Registers(),), max_epochs=7)
        for name, callback in (("plain", None), ("graph", CUDAGraphCallback()))
    ]
    assert_same(*runs, ignore=("_ms/",))
    counts = runs[1].counts
    assert counts.captures == 2, counts
    assert counts.replayed >= 20, counts
    assert any("`state.scale` of the communication hook" in text for text in counts.recaptures), counts


def refused(here: Here) -> None:
    """Hooks that bind other tensors or count, and torch's, which do both."""
    for loop, kind, reason in (
        (Rebinding, CaptureError, "lost"),
        (Counting, CaptureError, "calls"),
        (PowerSGD, UnsupportedError, "`powerSGD_hook`, which runs Python of a library"),
    ):
        with pytest.raises(kind, match=f"(?s){reason}"):
            loop(here).run(graphed=True)
