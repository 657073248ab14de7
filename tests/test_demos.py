"""The models that ship with Lightning run unchanged, and as without the callback.

`tests/gpu/test_demos.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback
from lightning.pytorch.demos import boring_classes, lstm, transformer
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_cudagraph import CUDAGraphCallback
from tests.harness import Trace, differences
from tests.rows import became, row

pytestmark = pytest.mark.declared

WORDS = 40


@pytest.fixture
def wikitext(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text where the demos look for theirs, which they download if it is not there."""
    rng = random.Random(0)
    lines = (" ".join(rng.choices([f"w{i}" for i in range(WORDS - 1)], k=12)) for _ in range(400))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "wikitext-2.txt").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    # It looks for a package that it needs to download with, before it sees that there is nothing to do.
    monkeypatch.setattr(transformer, "_REQUESTS_AVAILABLE", True)
    monkeypatch.setitem(__import__("sys").modules, "requests", object())


def _alone(trainer: pl.Trainer, module: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
    """With the loaders that the module makes."""
    trainer.fit(module)


def _fit_with(make_data: Callable[[], pl.LightningDataModule]) -> Callable[..., None]:
    def fit(trainer: pl.Trainer, module: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        trainer.fit(module, datamodule=make_data())

    return fit


BORING: dict[str, tuple[Callable[[], pl.LightningModule], Callable[..., None], int]] = {
    "BoringModel": (boring_classes.BoringModel, _alone, 64),
    "BoringModel, BoringDataModule": (
        boring_classes.BoringModel,
        _fit_with(boring_classes.BoringDataModule),
        64,
    ),
    "BoringModel, BoringDataModuleNoLen": (
        boring_classes.BoringModel,
        _fit_with(boring_classes.BoringDataModuleNoLen),
        512,
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", BORING)
def test_boring_models(tmp_path: Path, accelerator: str, name: str) -> None:
    build, fit, batches = BORING[name]
    epochs = 1 if batches > 100 else 2
    done = row(tmp_path, accelerator, build, fit=fit, max_epochs=epochs, checkpoint_every=50)
    became(done.graph, replayed=epochs * batches - 3)


def test_a_demo_model_with_loaders_of_ones_own(tmp_path: Path, accelerator: str) -> None:
    def fit(trainer: pl.Trainer, module: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        data = torch.randn(9, 4, 32, generator=torch.Generator().manual_seed(0))
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None))

    done = row(tmp_path, accelerator, boring_classes.DemoModel, fit=fit)
    became(done.graph, replayed=27 - 3)


class Classifier(pl.LightningModule):
    """A classifier as in Lightning's own tests: small layers, a metric for each stage, Adam as it is."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [32, 32, 32, 3]
        layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
        self.layers = nn.Sequential(*layers[:-1])
        self.accuracies = nn.ModuleDict(
            {stage: MulticlassAccuracy(num_classes=3) for stage in ("fit", "validate")}
        )

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.softmax(self.layers(x), dim=1)

    def _share(self, stage: str, batch: Any) -> Tensor:
        x, y = batch
        probabilities = self(x)
        loss = nn.functional.cross_entropy(probabilities, y)
        self.log(f"{stage}_loss", loss, prog_bar=stage == "fit")
        self.log(f"{stage}_accuracy", self.accuracies[stage](probabilities, y), prog_bar=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._share("fit", batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._share("validate", batch)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.parameters(), lr=0.01)], []


@pytest.mark.long
def test_a_classifier_with_adam(tmp_path: Path, accelerator: str) -> None:
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(3, 32, generator=generator)
    y = torch.randint(0, 3, (64 * 32,), generator=generator)
    x = centres[y] + torch.randn(len(y), 32, generator=generator)

    def fit(trainer: pl.Trainer, module: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        data = torch.utils.data.TensorDataset(x, y)
        trainer.fit(
            module,
            torch.utils.data.DataLoader(data, batch_size=32, shuffle=True),
            torch.utils.data.DataLoader(data, batch_size=32),
        )

    done = row(tmp_path, accelerator, Classifier, fit=fit, max_epochs=4, checkpoint_every=50)
    became(done.graph, replayed=4 * 64 - 3)
    assert done.graph.trainer is not None
    assert done.graph.trainer.callback_metrics["validate_accuracy"] > 0.9


class AutoEncoder(pl.LightningModule):
    """As in Lightning's examples: hyperparameters, helpers of the step, a callback that samples."""

    def __init__(self, hidden: int = 8, learning_rate: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 3))
        self.decoder = nn.Sequential(nn.Linear(3, hidden), nn.ReLU(), nn.Linear(hidden, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))  # type: ignore[no-any-return]

    def _common_step(self, batch: Any, stage: str) -> Tensor:
        x, _ = batch
        x = x.view(x.size(0), -1)
        loss = nn.functional.mse_loss(x, self(x))
        self.log(f"{stage}_loss", loss, on_step=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._common_step(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._common_step(batch, "val")

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.hparams["learning_rate"])


class Sampler(Callback):
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        with torch.no_grad():
            pl_module.eval()
            pl_module.decoder(torch.rand(4, 3, device=pl_module.device))
            pl_module.train()


class ImageClassifier(pl.LightningModule):
    def __init__(self, backbone: nn.Module | None = None) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["backbone"])
        self.features = backbone or nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten())
        self.head = nn.Sequential(nn.Dropout(0.25), nn.Linear(144, 4))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.log_softmax(self.head(self.features(x)), dim=1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.nll_loss(self(x), y.long())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adadelta(self.parameters(), lr=1.0)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)]


class TransferLearning(ImageClassifier):
    """A backbone whose end is trained from the second epoch on, and all of it from the third."""

    def __init__(self) -> None:
        first, last = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 9, 3)
        super().__init__(nn.Sequential(first, nn.BatchNorm2d(4), nn.ReLU(), last, nn.Flatten()))
        self.accuracy = MulticlassAccuracy(num_classes=4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        self.log("train_acc", self.accuracy(logits, y), prog_bar=True)
        return nn.functional.cross_entropy(logits, y)

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.Adam(trained, lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2], gamma=0.1)]


class Milestones(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.features, train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        parts = {1: pl_module.features[-2:], 2: pl_module.features[:-2]}
        if epoch in parts:
            self.unfreeze_and_add_param_group(parts[epoch], optimizer, train_bn=False)


# By name: the module, its callback, the captures in four epochs.
PUBLISHED: dict[str, tuple[Callable[[], pl.LightningModule], Callable[[], Callback], int]] = {
    "autoencoder": (AutoEncoder, Sampler, 1),
    "image classifier": (ImageClassifier, Callback, 1),
    "fine-tuning": (TransferLearning, Milestones, 3),
}


@pytest.mark.long
@pytest.mark.spread
@pytest.mark.filterwarnings("ignore:You (passed in|defined) a `val")
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_shapes_of_published_examples(tmp_path: Path, accelerator: str, name: str) -> None:
    """The doctor finds nothing, and a fit is the same."""
    build, make_callback, captures = PUBLISHED[name]
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(64, 1, 8, 8, generator=generator), torch.randint(4, (64,), generator=generator)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)

    def fit(trainer: pl.Trainer, module: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        trainer.fit(module, data, data)

    trainer = pl.Trainer(accelerator=accelerator, devices=1, logger=False, callbacks=[make_callback()])
    report = CUDAGraphCallback().check(build(), data, trainer)
    assert report.findings == ()
    assert report.is_captured
    done = row(
        tmp_path,
        accelerator,
        build,
        lambda folder: {"callbacks": (make_callback(),)},
        fit=fit,
        max_epochs=4,
        checkpoint_every=0,
    )
    assert done.graph.counts.captures == captures
    assert done.graph.counts.replayed == 32 - 3 * captures


def test_a_manual_boring_model(tmp_path: Path, accelerator: str) -> None:
    model = boring_classes.ManualOptimBoringModel
    done = row(tmp_path, accelerator, model, fit=_alone, max_epochs=1, checkpoint_every=0)
    became(done.graph, replayed=64 - 3)


def _saved_at(trace: Trace) -> set[int]:
    """The steps of the checkpoints whose contents were compared."""
    return {saved["global_step"] for saved in trace.checkpoints.values()}


@pytest.mark.long
@pytest.mark.usefixtures("wikitext")
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_the_transformer(tmp_path: Path, accelerator: str) -> None:
    done = row(
        tmp_path,
        accelerator,
        lambda: transformer.LightningTransformer(vocab_size=WORDS),
        fit=_alone,
        max_epochs=2,
        limit_train_batches=6,
        checkpoint_every=5,
    )
    became(done.graph, replayed=12 - 3)
    assert _saved_at(done.graph) == {5, 10}


def _small_lstm() -> pl.LightningModule:
    """Narrower, so that a CPU is soon done with it."""
    module = lstm.LightningLSTM(vocab_size=WORDS)
    module.model = lstm.SimpleLSTM(vocab_size=WORDS, ninp=16, nhid=16, nlayers=2)
    return module


@pytest.mark.long
@pytest.mark.usefixtures("wikitext")
def test_the_lstm(tmp_path: Path, accelerator: str) -> None:
    build = _small_lstm if accelerator == "cpu" else lambda: lstm.LightningLSTM(vocab_size=WORDS)
    done = row(tmp_path, accelerator, build, fit=_alone, max_epochs=2, checkpoint_every=5)
    assert _saved_at(done.graph) == {5, 10}
    # It drops its hidden state at the end of an epoch: the next one begins with an eager step.
    n_steps = done.graph.final["global_step"]
    became(done.graph, replayed=n_steps - 4, eager={"`hidden` of the `LightningLSTM`": 1})
    assert not differences(done.plain.module.hidden, done.graph.module.hidden)  # type: ignore[union-attr]
