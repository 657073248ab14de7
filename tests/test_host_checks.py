"""Checks of a step that raise on the host: equal where they pass, and found where they fail.

`tests/gpu/test_host_checks.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_cudagraph import CheckError, CUDAGraphCallback, GraphedStep
from lightning_cudagraph.device.sentry.host_checks import LateChecks
from tests import raising
from tests.harness import Net, Trace, differences, loader, make, train
from tests.loops import device_of
from tests.rows import refused, row

pytestmark = [
    # Lightning's advice on what to checkpoint.
    pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization"),
]
BATCHES, BAD = 16, 9  # none is checked by a verification: that would raise the user's own exception


FORMS = [
    *(
        raising.Asserts,
        raising.Raises,
        raising.ReadsANumber,
        raising.ReadsALimit,
        raising.AsksMath,
        raising.Distributes,
        raising.ChoosesAnAction,
        raising.Draws,
        raising.ChecksEach,
    ),
    *(raising.ChecksGradients, raising.Clips, raising.Manual),
]


@pytest.mark.spread
@pytest.mark.parametrize("form", FORMS)
def test_equal(tmp_path: Path, accelerator: str, form: Callable[[], Net]) -> None:
    found = row(tmp_path, accelerator, form, train_loader=loader(ragged=False, batches=BATCHES))
    assert not found.graph.counts.eager
    assert found.graph.counts.replayed > BATCHES


def _spoilt() -> DataLoader[Any]:
    x, y = loader(ragged=False, batches=BATCHES).dataset.tensors  # type: ignore[attr-defined]
    x = x.clone()
    x[8 * BAD] = float("nan")
    return DataLoader(TensorDataset(x, y), batch_size=8)


def _failed(
    tmp_path: Path,
    accelerator: str,
    form: Callable[[], pl.LightningModule],
    callback: CUDAGraphCallback | None = None,
    **kwargs: Any,
) -> Trace:
    """A run that a failed check ends, on the spoilt batch unless others are given."""
    merged = {"train_loader": _spoilt(), "accelerator": accelerator, "raises": CheckError, **kwargs}
    return train(make(form), tmp_path, callback or CUDAGraphCallback(), **merged)


@pytest.mark.spread
@pytest.mark.parametrize("form", FORMS)
def test_found(tmp_path: Path, accelerator: str, form: Callable[[], Net]) -> None:
    """The error names the step and the line; the plain run raises in that step."""
    plain = train(
        make(form), tmp_path / "plain", train_loader=_spoilt(), accelerator=accelerator, raises=Exception
    )
    graph = _failed(tmp_path / "graph", accelerator, form)
    assert plain.trainer is not None
    assert plain.trainer.global_step == BAD
    assert not isinstance(plain.error, CheckError)
    text = str(graph.error)
    assert f"(`batch_idx` {BAD}, `self.global_step` {BAD}), a check on the host failed" in text
    assert raising.__file__ in text
    assert 'pass `backend="off"`' in text
    assert graph.counts.replayed > 2
    # The step had run, and maybe later ones; nothing of them is saved.
    assert {*graph.checkpoints} == {*plain.checkpoints}


class Tightens(raising.ReadsALimit):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.limit = 0.0 if self.global_step >= BAD else raising.LIMIT


def test_a_limit_that_changes(tmp_path: Path, accelerator: str) -> None:
    """The graph with the old one is not replayed."""
    good = loader(ragged=False, batches=BATCHES)
    found = _failed(tmp_path, accelerator, Tightens, train_loader=good, raises=RuntimeError)
    assert str(found.error) == "too large"
    assert found.trainer is not None
    assert found.trainer.global_step == BAD
    assert found.counts.replayed == BAD - 3


def test_message(tmp_path: Path, accelerator: str) -> None:
    lines = str(_failed(tmp_path, accelerator, raising.ChoosesAnAction).error).splitlines()
    assert re.fullmatch(
        r"In replay \d+ \(.*\), a check on the host failed. A plain run raises there:", lines[0]
    )
    assert "(`actions = Categorical(logits=x, validate_args=True)`)" in lines[1]
    assert re.match(r"  which comes to .*distribution.py:\d+ \(`if not torch._is_all_true", lines[2])
    assert lines[3].startswith("A replay raises nothing: this step has run to its end")


@pytest.mark.parametrize("weights_only", [False, True])
def test_no_checkpoint_is_saved_unnoticed(tmp_path: Path, accelerator: str, weights_only: bool) -> None:
    """Not even just behind the step, where nothing has looked yet."""
    saver = ModelCheckpoint(
        tmp_path / "own", every_n_train_steps=BAD + 1, save_weights_only=weights_only, save_top_k=-1
    )
    found = _failed(tmp_path, accelerator, raising.Asserts, callbacks=(saver,), checkpoint_every=0)
    assert found.trainer is not None
    assert found.trainer.global_step == BAD + 1
    assert not found.checkpoints


def test_the_end_of_an_epoch_waits(tmp_path: Path, accelerator: str) -> None:
    """Without checkpoints, it is found there at the latest."""
    ended: list[int] = []

    class Notes(Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            ended.append(trainer.current_epoch)

    found = _failed(tmp_path, accelerator, raising.Asserts, callbacks=(Notes(),), checkpoint_every=0)
    assert not ended
    assert found.trainer is not None
    assert found.trainer.current_epoch == 0


def test_later_replays_look(tmp_path: Path, accelerator: str) -> None:
    """A run of one epoch does not go on to its end."""
    x, y = _spoilt().dataset.tensors  # type: ignore[attr-defined]
    batches = DataLoader(TensorDataset(x.repeat(5, 1), y.repeat(5)), batch_size=8)
    found = _failed(tmp_path, accelerator, raising.Asserts, train_loader=batches, checkpoint_every=0)
    assert found.trainer is not None
    assert BAD < found.trainer.global_step < 3 * BATCHES


@pytest.mark.parametrize("method", ["fit", "validate"])
def test_evaluation(tmp_path: Path, accelerator: str, method: str) -> None:
    def fit(trainer: pl.Trainer, module: pl.LightningModule, *loaders: Any, **kwargs: Any) -> None:
        if method == "validate":
            trainer.validate(module, loaders[1], verbose=False)
        else:
            trainer.fit(module, *loaders, **kwargs)

    callback = CUDAGraphCallback(evaluation=True)
    good = loader(ragged=False, batches=BATCHES)
    found = _failed(
        tmp_path,
        accelerator,
        raising.Evaluates,
        callback,
        val_loader=_spoilt(),
        train_loader=good,
        fit=fit,
    )
    assert f"(`batch_idx` {BAD})" in str(found.error)
    assert "assert x.isfinite().all()" in str(found.error)


def test_modules(tmp_path: Path, accelerator: str) -> None:
    def callback() -> CUDAGraphCallback:
        return CUDAGraphCallback(scope="modules", modules=["inner"])

    good = loader(ragged=False, batches=BATCHES)
    assert row(
        tmp_path, accelerator, raising.Outer, ours=callback, train_loader=good
    ).graph.counts.replayed
    text = str(_failed(tmp_path / "failed", accelerator, raising.Outer, callback()).error)
    assert f"(`self.global_step` {BAD})" in text


@pytest.mark.parametrize(
    "end", [GraphedStep.settle, GraphedStep.close, lambda step: step.__exit__(None, None, None)]
)
def test_graphed_step(accelerator: str, end: Callable[[Any], None]) -> None:
    device = device_of(accelerator)
    step = raising.checked_step(device)
    batches = [torch.randn(8, 12, device=device) for _ in range(BATCHES)]
    for x in batches:
        step(x)
    step.settle()
    batches[BAD][0] = torch.nan

    def call() -> None:
        for x in batches[: BAD + 1]:
            step(x)
        end(step)

    failed = {"match": r"(?s)In replay \d+, .*assert torch.isfinite\(loss\)"}
    with pytest.raises(CheckError, **failed):
        call()
    if end is GraphedStep.settle:  # and by all that follows, which a handler around it cannot hide
        for later in (lambda: step(batches[0]), step.settle, step.close):
            with pytest.raises(CheckError, **failed):
                later()
    step.close()
    with pytest.raises(AssertionError):  # of the first warm-up step of another run, on weights of NaN
        step(batches[0])
    step.close()


class Spiky(pl.LightningModule):
    """Skips a batch with large gradients by an exception, which `optimizer_step` catches."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(12, 4)
        self.skipped: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return torch.nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm()
        if norm > 20:
            raise RuntimeError("spike")

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        try:
            optimizer.step(closure=optimizer_closure)
        except RuntimeError:
            self.skipped.append(batch_idx)
            self.skip(optimizer, optimizer_closure)

    def skip(self, optimizer: Any, closure: Any) -> None:
        optimizer.zero_grad()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class SpikyAgain(Spiky):
    """Calls the closure again, as a step on the batch without its update."""

    def skip(self, optimizer: Any, closure: Any) -> None:
        optimizer.zero_grad()
        closure()
        optimizer.zero_grad()


class SpikyLoss(Spiky):
    """The check is in the part that the smaller graph holds."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if not torch.isfinite(loss):
            raise RuntimeError("loss")
        return loss


class SpikyDraw(Spiky):
    """`torch.normal` checks its scale there."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * torch.normal(1.0, loss.detach()[None]).mean()


@pytest.mark.parametrize("form", [SpikyLoss, SpikyDraw])
@pytest.mark.filterwarnings("ignore:lightning_cudagraph")
def test_one_of_the_forward_pass_that_optimizer_step_catches(
    tmp_path: Path, accelerator: str, form: Callable[[], Spiky]
) -> None:
    """No graph holds it."""
    eager = lambda: CUDAGraphCallback(on_unsupported="eager")  # noqa: E731
    found = row(tmp_path, accelerator, form, ours=eager)
    assert found.graph.counts.replayed == 0
    assert "A CUDA graph cannot hold" in str(found.graph.callback and found.graph.callback.summary)


class SpikyLossAgain(SpikyAgain, SpikyLoss):
    """The batch whose capture is refused has a result after all."""


@pytest.mark.parametrize("form", [SpikyLoss, SpikyLossAgain])
@pytest.mark.filterwarnings("ignore:lightning_cudagraph")
def test_the_error_of_a_capture_is_raised_though_optimizer_step_catches_it(
    tmp_path: Path, accelerator: str, form: Callable[[], Spiky]
) -> None:
    refused(tmp_path, accelerator, form, match="A CUDA graph cannot hold")


@pytest.mark.parametrize("form", [Spiky, SpikyAgain])
def test_an_exception_that_optimizer_step_catches(
    tmp_path: Path, accelerator: str, form: Callable[[], Spiky]
) -> None:
    """The check is no part of the graph: the optimizer steps eagerly, and the exception is in time."""
    x, y = loader(ragged=False, batches=BATCHES).dataset.tensors  # type: ignore[attr-defined]
    x = x.clone()
    x[8 * BAD : 8 * BAD + 8] *= 1000.0
    batches = DataLoader(TensorDataset(x, y), batch_size=8)
    found = row(tmp_path, accelerator, form, train_loader=batches)
    for trace in (found.plain, found.graph):
        module: Any = trace.trainer and trace.trainer.lightning_module
        assert BAD in module.skipped
    assert found.graph.counts.replayed > BATCHES
    assert "the optimizer steps eagerly" in str(found.graph.callback and found.graph.callback.summary)


@pytest.mark.spread
@pytest.mark.parametrize(
    "form",
    [
        *(raising.Keeps, raising.Catches, raising.Suppresses, raising.SuppressesOfADraw),
        *(raising.Skips, raising.Generates),
    ],
)
def test_refused(tmp_path: Path, accelerator: str, form: Callable[[], Net]) -> None:
    refused(tmp_path, accelerator, form, match="A CUDA graph cannot hold")


def test_a_warm_up_step_raises_itself(tmp_path: Path, accelerator: str) -> None:
    x, y = loader(ragged=False).dataset.tensors  # type: ignore[attr-defined]
    x = x.clone()
    x[8] = torch.nan
    batches = DataLoader(TensorDataset(x, y), batch_size=8)
    found = _failed(tmp_path, accelerator, raising.Raises, train_loader=batches, raises=ValueError)
    assert str(found.error).startswith("not finite: ")


def test_without_the_checks_nothing_is_found(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the tests above see what the examination finds."""
    monkeypatch.setattr(LateChecks, "launched", lambda *args: None)
    unseen = {"raises": None, "max_epochs": 1, "limit_val_batches": 0}
    callback = CUDAGraphCallback(verify=None)
    found = _failed(tmp_path, accelerator, raising.Asserts, callback, **unseen)
    assert found.counts.replayed == BATCHES - 3


SHAPES = [
    *(((), ()), ((1,), (1,)), ((15,), (15,)), ((16,), (16,)), ((1000,), (1000,))),  # torch draws by 16
    *(((5, 1), (7,)), ((33,), ()), ((), (33,)), ((0, 3), (3,)), ((3, 0), (3, 0)), ((2, 1, 9), (4, 1))),
]


@pytest.mark.spread
@pytest.mark.parametrize("generated", [False, True])
@pytest.mark.parametrize(
    "dtypes",
    [
        *(
            (torch.float32, torch.float32),
            (torch.float64, torch.float64),
            (torch.float16, torch.float32),
        ),
        *(
            (torch.bfloat16, torch.bfloat16),
            (torch.float32, torch.float64),
            (torch.complex64, torch.float32),
        ),
    ],
    ids=lambda pair: f"{pair[0]}-{pair[1]}".replace("torch.", ""),
)
def test_draws_have_the_bits_of_torch(
    accelerator: str, dtypes: tuple[torch.dtype, torch.dtype], generated: bool
) -> None:
    """Also that of numbers, of transposed tensors, and what is drawn afterwards."""
    device = device_of(accelerator)
    generator = torch.Generator(device) if generated else None

    def draw(x: Tensor) -> list[Tensor]:
        found = []
        for mean_shape, std_shape in SHAPES:
            mean = x[: math.prod(mean_shape)].view(mean_shape).to(dtypes[0])
            std = x[-math.prod(std_shape) or len(x) :].view(std_shape).abs().to(dtypes[1])
            found += [
                torch.normal(mean, std, generator=generator),
                torch.normal(0.3, std, generator=generator),
            ]
        table = x.view(8, -1)
        return [
            *found,
            torch.normal(table.t(), table.abs().t(), generator=generator),
            torch.rand(3, device=x.device),
        ]

    batches = [torch.randn(1000, device=device) for _ in range(6)]

    def drawn(function: Callable[[Tensor], list[Tensor]]) -> list[list[Tensor]]:
        torch.manual_seed(4)
        if generator is not None:
            generator.manual_seed(5)
        return [function(x) for x in batches]

    step = GraphedStep(draw)
    assert not differences(drawn(step), drawn(draw))
    (counts,) = step.summary.stages.values()
    assert counts.replayed == len(batches) - 3
    step.close()


def test_a_trial_leaves_nothing() -> None:
    """Replays that try out numbers of streams are undone, and so are their checks."""
    nothing: list[Any] = []
    trials, steps = LateChecks(are_left_out=True), LateChecks()
    for late in (trials, steps):
        late.launched(torch.zeros(1), nothing)
    trials.settle()
    with pytest.raises(ValueError, match="zip"):  # one value, and no check for it
        steps.settle()
