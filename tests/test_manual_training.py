"""Manual optimization by the callback: the whole `training_step` in a graph, against the plain run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_cudagraph import CUDAGraphCallback, GraphedStep, UnsupportedError
from tests.harness import Trace, assert_same, make, train

WARMUP = 3
BATCHES = 8

pytestmark = [
    # Lightning's advice on what to checkpoint.
    pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization"),
]


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(8 * BATCHES, 4, generator=generator))
    return DataLoader(data, batch_size=8)


def net(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, outputs)
    )


class GAN(pl.LightningModule):
    """Two nets and two optimizers, toggled, with logs, clipping by hand and schedules by the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = net(3, 4)
        self.critic = net(4, 1)

    def noise(self, real: Tensor) -> Tensor:
        return torch.randn(len(real), 3, device=real.device)

    def learn_critic(self, real: Tensor) -> Tensor:
        _, optimizer = self.optimizers()
        self.toggle_optimizer(optimizer)
        fake = self.generator(self.noise(real)).detach()
        loss: Tensor = self.critic(fake).mean() - self.critic(real).mean()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        self.untoggle_optimizer(optimizer)
        return loss

    def learn_generator(self, real: Tensor) -> Tensor:
        optimizer, _ = self.optimizers()
        self.toggle_optimizer(optimizer)
        loss: Tensor = -self.critic(self.generator(self.noise(real))).mean()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (real,) = batch
        critic = self.learn_critic(real)
        self.log("critic", critic, on_step=True, on_epoch=True, prog_bar=True)
        generator = self.learn_generator(real)
        self.log_dict({"generator": generator, "both": generator + critic})
        return {"loss": generator.detach(), "n": len(real)}

    def on_train_epoch_end(self) -> None:
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", self.critic(batch[0]).mean())

    def configure_optimizers(self) -> Any:
        optimizers = [
            torch.optim.Adam(self.generator.parameters(), lr=1e-2, betas=(0.5, 0.999)),
            torch.optim.SGD(self.critic.parameters(), lr=1e-2, momentum=0.9),
        ]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in optimizers]


class Critics(GAN):
    """A WGAN with a gradient penalty: several steps of the critic, then one of the generator."""

    def learn_critic(self, real: Tensor) -> Tensor:
        _, optimizer = self.optimizers()
        for _ in range(2):
            fake = self.generator(self.noise(real)).detach()
            between = torch.lerp(real, fake.float(), torch.rand(len(real), 1, device=real.device))
            between.requires_grad_()
            (slope,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
            loss: Tensor = self.critic(fake).mean() - self.critic(real).mean()
            loss = loss + 10 * ((slope.norm(2, dim=1) - 1) ** 2).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss


class Adversarial(GAN):
    """Moves the batch along its gradient, as adversarial training does."""

    def learn_critic(self, real: Tensor) -> Tensor:
        real.requires_grad_()
        self.manual_backward(self.critic(real).mean())
        assert real.grad is not None
        return super().learn_critic(real.detach() + 0.1 * real.grad.sign())


class Keeps(GAN):
    """Keeps the images, with a graph of autograd behind them, and compares with those before."""

    images: Any = None

    def learn_generator(self, real: Tensor) -> Tensor:
        before = self.images
        self.images = self.generator(self.noise(real))
        loss = -self.critic(self.images).mean()
        if before is not None and len(before) == len(self.images):
            loss = loss + (self.images - before.detach()).square().mean()
        optimizer, _ = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.log("images", self.images.mean())


class Accumulates(GAN):
    """Gradients of two halves of a batch, added up by hand; a metric; nothing returned."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for half in batch[0].chunk(2):
            loss = self.generator(self.critic(half).expand(-1, 3)).square().mean()
            self.manual_backward(loss / 2)
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="value")
        optimizer.step()
        self.mean.update(loss)
        self.log("mean", self.mean, on_step=False, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class QLearner(pl.LightningModule):
    """Double Q-learning from a replay memory on the device, with a target net that follows."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.values, self.target = nn.Linear(4, 3), nn.Linear(4, 3)
        self.target.requires_grad_(False)
        self.register_buffer("memory", torch.zeros(64, 4))
        self.register_buffer("filled", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (seen,) = batch
        places = (self.filled + torch.arange(len(seen), device=seen.device)) % len(self.memory)
        self.memory[places] = seen
        self.filled += len(seen)
        drawn = torch.randint(len(self.memory), (16,), device=seen.device)
        state, after = self.memory[drawn], self.memory[(drawn + 1) % len(self.memory)]
        action = torch.multinomial(self.values(state).softmax(1), 1)
        with torch.no_grad():
            best = self.target(after).gather(1, self.values(after).argmax(1, keepdim=True))
            wanted = state[:, :1] + 0.9 * best
        loss = nn.functional.smooth_l1_loss(self.values(state).gather(1, action), wanted)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        with torch.no_grad():
            for target, value in zip(self.target.parameters(), self.values.parameters(), strict=True):
                target.lerp_(value, 0.05)
        self.log("loss", loss)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", self.values(batch[0]).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.values.parameters(), lr=1e-2)


class PolicyLearner(QLearner):
    """Proximal policy optimization: passes over a batch, with advantages computed in the step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (seen,) = batch
        with torch.no_grad():
            before = self.values(seen).log_softmax(1)
            action = torch.multinomial(before.exp(), 1)
            advantage = (seen.gather(1, action) - seen.mean(1, keepdim=True)).tanh()
        optimizer = self.optimizers()
        for _ in range(3):
            ratio = (self.values(seen).log_softmax(1) - before).gather(1, action).exp()
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
        self.log("loss", loss)


def both(tmp_path: Path, accelerator: str, build: Any, **kwargs: Any) -> Trace:
    kwargs = {"accelerator": accelerator, "max_epochs": 3, "val_loader": loader(), **kwargs}
    plain, graph = (
        train(make(build), tmp_path / name, ours, **{"train_loader": loader(), **kwargs})
        for name, ours in (("plain", None), ("graph", CUDAGraphCallback()))
    )
    assert_same(plain, graph)
    return graph


@pytest.mark.spread
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("build", [GAN, Critics, Keeps, Accumulates, QLearner, PolicyLearner])
def test_the_whole_step(tmp_path: Path, accelerator: str, build: Any, precision: Any) -> None:
    run = both(tmp_path, accelerator, build, precision=precision, max_epochs=5)
    assert run.counts.captures == 1
    assert (run.counts.warmed_up, run.counts.replayed) == (WARMUP, 5 * BATCHES - WARMUP)
    assert run.counts.eager == {}


@pytest.mark.long
@pytest.mark.parametrize("build", [Critics, PolicyLearner, QLearner])
def test_two_hundred_steps(tmp_path: Path, accelerator: str, build: Any) -> None:
    run = both(tmp_path, accelerator, build, max_epochs=25)
    assert run.counts.replayed == 25 * BATCHES - WARMUP == 197
    assert run.final["global_step"] == 200 * {Critics: 3, PolicyLearner: 3, QLearner: 1}[build]


class OneNet(GAN):
    """Only the generator learns, and has a schedule."""

    def configure_optimizers(self) -> Any:
        optimizers, schedulers = super().configure_optimizers()
        return optimizers[:1], schedulers[:1]

    def optimizers(self, *args: Any) -> Any:
        optimizer = super().optimizers(*args)
        return optimizer, None

    def on_train_epoch_end(self) -> None:
        pass


class Reads(GAN):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.learn_critic(batch[0])
        return self.learn_generator(batch[0] * batch_idx)


class InTurn(GAN):
    """Trains the critic on every batch but each third, which trains the generator."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx % 3 == 2:
            return self.learn_generator(batch[0])
        return self.learn_critic(batch[0])


class Named(GAN):
    """Each batch has a name of its own, and every other one a number that the step reads."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        real, _, is_even = batch
        if is_even:
            return self.learn_critic(real)
        return self.learn_generator(real)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if not self.trainer.training:
            return batch
        self.named = getattr(self, "named", 0) + 1
        return [batch[0], f"{self.named}.png", self.named % 2]


class Schedules(OneNet):
    """Moves the rate at the end of each step, as Lightning's documentation does."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.learn_generator(batch[0])
        self.lr_schedulers().step()
        return loss


class KeepsInTurn(Keeps):
    """Keeps them on one path and compares on both."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx % 3 == 2:
            return self.learn_generator(batch[0])
        return self.learn_critic(batch[0] + (0 if self.images is None else self.images.mean().detach()))


class Deep(GAN):
    """A path in a path, which is read after the other path has a graph."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx % 3 == 2:
            return self.learn_generator(batch[0] * 2 if batch_idx % 2 else batch[0])
        return self.learn_critic(batch[0])


class ByStep(GAN):
    """Reads the number of steps before its optimizers and between them: it moves on by two a batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        real = batch[0] * 2 if self.global_step % 4 == 0 else batch[0]
        loss = self.learn_critic(real)
        if self.trainer.global_step % 4 == 3:
            real = real + 1
        self.log("early", loss * (2.0 if self.global_step < 30 else 1.0))
        return self.learn_generator(real)


class Ramp(GAN):
    """A weight that depends on the number of steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.learn_critic(batch[0])
        return self.learn_generator(batch[0] * (self.global_step / 100))


@pytest.mark.long
@pytest.mark.parametrize(
    ("build", "captures"), [(InTurn, 2), (KeepsInTurn, 2), (Named, 2), (Deep, 4), (ByStep, 4)]
)
def test_paths(tmp_path: Path, accelerator: str, build: Any, captures: int) -> None:
    run = both(tmp_path, accelerator, build, max_epochs=8)
    assert run.counts.captures == captures
    assert run.counts.replayed > 4 * BATCHES
    assert run.counts.eager == {}


def test_more_batch_sizes_than_graphs(tmp_path: Path, accelerator: str) -> None:
    """The report's first line names those to pad to."""
    sizes = [torch.ones(1 + i % 12, 4) for i in range(240)]
    batches = DataLoader([(each,) for each in sizes], batch_size=None)  # type: ignore[arg-type]
    callback = CUDAGraphCallback(max_graphs=4, verify=None)
    kwargs: dict[str, Any] = {"max_epochs": 1, "checkpoint_every": 0, "watched": False}
    kwargs |= {"train_loader": batches, "val_loader": loader(), "accelerator": accelerator}
    run = train(make(QLearner), tmp_path, callback, **kwargs)
    assert run.counts.captures == 4
    first = str(run.summary).splitlines()[0]
    assert "% of your steps ran eagerly: dimension 0 of `batch[0]` has 12 lengths; pad it to" in first


@pytest.mark.long
def test_batch_sizes_that_grow(tmp_path: Path, accelerator: str) -> None:
    """Those that come now have the graphs of the least recently used ones."""
    sizes = [size for size in (3, 4, 5, 6) for _ in range(24)]
    values = torch.randn(len(sizes), 6, 4, generator=torch.Generator().manual_seed(0))
    batches: Any = [(each[:size],) for each, size in zip(values, sizes, strict=True)]
    plain, graph = (
        train(
            make(PolicyLearner),
            tmp_path / name,
            ours,
            accelerator=accelerator,
            train_loader=DataLoader(batches, batch_size=None),
            val_loader=loader(),
            max_epochs=1,
        )
        for name, ours in (("plain", None), ("graph", CUDAGraphCallback(max_graphs=2)))
    )
    assert_same(plain, graph)
    assert (graph.counts.captures, graph.counts.evictions) == (4, 2)
    assert graph.counts.replayed == 2 * (24 - WARMUP) + 2 * (24 - WARMUP - 8)


@pytest.mark.long
def test_a_kept_tensor_of_another_size(tmp_path: Path, accelerator: str) -> None:
    def ragged() -> DataLoader[Any]:
        return DataLoader(loader().dataset, batch_size=12)  # the last one has 4

    run = both(tmp_path, accelerator, Keeps, max_epochs=8, train_loader=ragged())
    assert run.counts.captures == 1
    assert run.counts.replayed > 2 * BATCHES
    assert any("without a graph" in reason and "`images`" in reason for reason in run.counts.eager)


@pytest.mark.long
def test_the_gradient_of_a_batch(tmp_path: Path, accelerator: str) -> None:
    run = both(tmp_path, accelerator, Adversarial)
    assert run.counts.replayed > BATCHES


def test_a_scheduler_in_the_step(tmp_path: Path, accelerator: str) -> None:
    run = both(tmp_path, accelerator, Schedules)
    assert run.counts.captures == 2  # the rate is found to move
    assert run.counts.replayed == 3 * BATCHES - 2 * WARMUP


class SchedulesInBetween(Schedules):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        return self.learn_generator(batch[0])


class Logs(Schedules):
    """Logs the rate that its scheduler has moved on."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"])


class StepsAgain(Schedules):
    """Steps torch's own optimizer once more, which Lightning does not see."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        self.trainer.optimizers[0].step()


class OwnScheduler(OneNet):
    """A scheduler that the trainer does not know, and that moves no rate in the captured step."""

    def configure_optimizers(self) -> Any:
        (optimizer,), _ = super().configure_optimizers()
        self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, WARMUP + 4)
        return optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.learn_generator(batch[0])
        self.scheduler.step()
        return loss


class Items(OneNet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.learn_generator(batch[0])
        self.log("x", loss.item())
        return loss


REFUSED = {
    "batch_idx": (Reads, "`batch_idx`"),
    "global_step": (Ramp, r"`\(self.global_step \+ 1\) / 100`, computed from `self.global_step`"),
    "scheduler": (SchedulesInBetween, "Call the scheduler at the end of the step"),
    "a rate that has moved": (Logs, "reads a learning rate after its scheduler has moved it"),
    "a step after the scheduler": (
        StepsAgain,
        r"(?s)\A(?!\d+ things).*reads a learning rate after its scheduler has moved it",
    ),
    "own scheduler": (OwnScheduler, r"`LRScheduler\.step`"),
    "item": (Items, r"`\.item\(\)`"),
}


@pytest.mark.spread
@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path: Path, accelerator: str, case: str) -> None:
    build, message = REFUSED[case]
    with pytest.raises(UnsupportedError, match=message):
        both(tmp_path, accelerator, build)


@pytest.mark.spread
@pytest.mark.parametrize("case", REFUSED)
def test_refused_and_eager(tmp_path: Path, accelerator: str, case: str) -> None:
    build, _ = REFUSED[case]
    loaders = {"accelerator": accelerator, "val_loader": loader()}
    plain, eager = (
        train(make(build), tmp_path / name, ours, train_loader=loader(), **loaders)
        for name, ours in (("plain", None), ("eager", CUDAGraphCallback(on_unsupported="eager")))
    )
    assert_same(plain, eager)
    assert eager.counts.replayed == 0


class Weighs(GAN):
    """A number of the module that changes with the epoch."""

    weight = 1.0

    def on_train_epoch_start(self) -> None:
        self.weight = 1.0 + self.current_epoch

    def noise(self, real: Tensor) -> Tensor:
        return super().noise(real) * self.weight


@pytest.mark.long
def test_a_number_that_changes(tmp_path: Path, accelerator: str) -> None:
    run = both(tmp_path, accelerator, Weighs, max_epochs=2)
    assert run.counts.captures == 2
    assert any("weight" in reason for reason in run.counts.recaptures)


@pytest.mark.parametrize("option", [{"compile": True}, {"scope": "forward_backward"}], ids=str)
def test_options_of_automatic_optimization(tmp_path: Path, accelerator: str, option: Any) -> None:
    with pytest.raises(UnsupportedError, match=f"`{next(iter(option))}="):
        train(make(GAN), tmp_path, CUDAGraphCallback(**option), accelerator=accelerator)


def test_a_part_that_is_captured_already(tmp_path: Path, accelerator: str) -> None:
    class Parts(GAN):
        def on_fit_start(self) -> None:
            self.part = GraphedStep(self.learn_critic, optimizers=self.optimizers())

    with pytest.raises(UnsupportedError, match=r"Parts\.part` is a `GraphedStep`"):
        both(tmp_path, accelerator, Parts)


class Boosts(Callback):
    """Calls a function in the middle of the second epoch."""

    def __init__(self, change: Callable[[pl.Trainer, Callback], None]) -> None:
        self.change = change

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == (1, 2):
            self.change(trainer, self)


def _shrink(trainer: Any, module: Any, *args: Any) -> None:
    module.generator[0].weight.data.mul_(0.9)


def _other_class(trainer: Any, callback: Callback) -> None:
    hook = staticmethod(_shrink)
    callback.__class__ = type("Other", (Boosts,), {"on_before_backward": hook})  # type: ignore[assignment]


def _own_hook(trainer: Any, callback: Callback) -> None:
    callback.on_after_backward = _shrink  # type: ignore[method-assign]


def _another_callback(trainer: Any, callback: Callback) -> None:
    other = Callback()
    other.on_before_optimizer_step = _shrink  # type: ignore[method-assign]
    trainer.callbacks.append(other)


def _other_optimizers(trainer: Any, callback: Callback) -> None:
    trainer.strategy.optimizers = [
        torch.optim.SGD(optimizer.param_groups[0]["params"], lr=0.05) for optimizer in trainer.optimizers
    ]


def _other_scaler(trainer: Any, callback: Callback) -> None:
    scaler = torch.amp.GradScaler(trainer.strategy.root_device.type, init_scale=32.0)
    trainer.precision_plugin.scaler = scaler


@pytest.mark.spread
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_other_class, "`Boosts`"),
        (_own_hook, "`on_after_backward` of the `Boosts` was replaced"),
        (_another_callback, "`Callback` of the trainer"),
        (_other_optimizers, "`LightningAdam` of the trainer"),
        (_other_scaler, "`GradScaler` of the trainer"),
    ],
)
def test_a_change_around_the_step(tmp_path: Path, accelerator: str, change: Any, words: str) -> None:
    device = "cuda" if accelerator == "gpu" else "cpu"
    runs = []
    for ours in (None, CUDAGraphCallback()):
        scaler = torch.amp.GradScaler(device, init_scale=4096.0)
        kwargs = {"callbacks": (Boosts(change),), "accelerator": accelerator, "max_epochs": 3}
        if change is _other_scaler:
            kwargs["plugins"] = [MixedPrecision("16-mixed", device, scaler)]
        folder = tmp_path / str(len(runs))
        loaders = {"train_loader": loader(), "val_loader": loader()}
        runs.append(train(make(GAN), folder, ours, **loaders, **kwargs))
    assert_same(*runs)
    counts = runs[1].counts
    assert words in counts.recaptures[0]
    # Before the change: then the new parts are not for a graph, and steps go on without one.
    assert counts.replayed == BATCHES + 2 - WARMUP
