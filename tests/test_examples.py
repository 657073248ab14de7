"""The shipped examples train the same with the callback as without it.

On a CPU in small settings; `tests/gpu` collects these tests again, in the full ones.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging

from examples import plain_loop, profile_any_graph
from examples.char_gpt import CharData, CharGPT
from examples.digits import DigitsCNN, DigitsData
from examples.dlrm import DLRM, ClicksData
from examples.gan import GAN, circle
from examples.ppo import PPO, CartPoles
from lightning_cudagraph import CUDAGraphCallback
from lightning_cudagraph.trainer.command import main
from tests.harness import assert_same, differences, make, train

CONFIGS = Path(__file__).parents[1] / "configs"


def char_gpt(accelerator: str) -> tuple[Callable[[], pl.LightningModule], pl.LightningDataModule]:
    size: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32}
    if accelerator == "gpu":
        size = {}
    data = CharData(
        batch_size=8,
        block_size=size.get("block_size", 256),
        train_batches=20,
        val_batches=2,
        max_chars=200_000,
    )
    return lambda: CharGPT(**size, warmup_steps=5, sample_chars=20), data


def digits(accelerator: str) -> tuple[Callable[[], pl.LightningModule], pl.LightningDataModule]:
    channels = 32 if accelerator == "gpu" else 4
    return lambda: DigitsCNN(channels=channels, lr_decay_epochs=1), DigitsData(batch_size=128)


def bert(accelerator: str) -> tuple[Callable[[], pl.LightningModule], pl.LightningDataModule]:
    pytest.importorskip("transformers")
    from examples.bert import BertClassifier, PassagesData

    size: dict[str, Any] = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 256}
    if accelerator == "gpu":
        size = {}
    data = PassagesData(
        batch_size=16, max_length=32, max_passages=24, vocab_size=size.get("vocab_size", 4096)
    )
    return lambda: BertClassifier(**size, warmup_steps=5), data


def dlrm(accelerator: str) -> tuple[Callable[[], pl.LightningModule], pl.LightningDataModule]:
    size: dict[str, Any] = {"tables": 4, "rows": 50}
    if accelerator == "gpu":
        size = {}
    return lambda: DLRM(**size), ClicksData(batch_size=32, **size, train_batches=12, val_batches=2)


def image_classifier(
    accelerator: str,
) -> tuple[Callable[[], pl.LightningModule], pl.LightningDataModule]:
    pytest.importorskip("torchvision")
    from examples.image_classifier import AugmentedDigits, ImageClassifier

    name = "resnet18" if accelerator == "gpu" else "squeezenet1_1"
    return lambda: ImageClassifier(name), AugmentedDigits(batch_size=161)


def ppo(accelerator: str) -> tuple[Callable[[], pl.LightningModule], None]:
    size: dict[str, Any] = {"carts": 8, "rollout_steps": 16, "batch_size": 32, "hidden": 16}
    if accelerator == "gpu":
        size = {}
    return lambda: PPO(**size, most_steps=12, rollout_epochs=2), None


@pytest.mark.spread
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("example", [char_gpt, digits, bert, dlrm, image_classifier])
def test_example(
    tmp_path: Path, accelerator: str, example: Any, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # cuDNN's default gradients of convolutions differ from run to run, with or without a graph.
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    build, data = example(accelerator)
    data.prepare_data()
    data.setup("fit")

    def run(name: str, callback: CUDAGraphCallback | None) -> Any:
        return train(
            make(build),
            tmp_path / name,
            callback,
            accelerator=accelerator,
            train_loader=data.train_dataloader(),
            val_loader=data.val_dataloader(),
            max_epochs=2,
            precision=precision,
            checkpoint_every=20,
            gradient_clip_val=1.0 if example in (char_gpt, bert) else None,
            callbacks=(EMAWeightAveraging(decay=0.9),) if example is image_classifier else (),
        )

    plain, again, graph = run("a", None), run("b", None), run("c", CUDAGraphCallback())
    assert_same(plain, again)
    assert_same(plain, graph)
    assert graph.counts.captures == 1
    assert graph.counts.replayed >= graph.final["global_step"] - 3 - 2


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
@pytest.mark.parametrize(
    ("name", "package", "fewer"),
    [
        ("bert", "transformers", ["--data.max_passages=16"]),
        pytest.param("digits", "sklearn", ["--data.batch_size=16"], marks=pytest.mark.long),
        ("dlrm", "torch", ["--data.train_batches=6"]),
        pytest.param("ppo", "torch", ["--model.carts=24"], marks=pytest.mark.long),
        pytest.param("gan", "torch", ["--model.width=16"], marks=pytest.mark.long),
        ("image_classifier", "torchvision", ["--data.batch_size=4", "--model.name=squeezenet1_1"]),
    ],
)
def test_the_config(
    tmp_path: Path,
    name: str,
    package: str,
    fewer: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The command in the docstring of an example and in its configs, on fewer steps."""
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-cudagraph"])
    configs = [CONFIGS / f"{name}.yaml", CONFIGS / f"{name}_cpu.yaml"]
    for config in configs:
        assert f"lightning-cudagraph fit --config configs/{name}.yaml" in config.read_text()
    named = [argument for config in configs for argument in ("--config", str(config))]
    shorter = ["max_epochs=1", "limit_train_batches=6", "limit_val_batches=1", "accelerator=cpu"]
    fewer = [*(f"--trainer.{argument}" for argument in shorter), *fewer]
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        main(["fit", *named, *fewer])
    assert "lightning_cudagraph: 3 of 6 steps replayed (50.0%)" in caplog.text
    assert [*(tmp_path / "runs" / name).rglob("events.out.tfevents.*")]


@pytest.mark.parametrize(
    ("name", "package"), [("bert", "tokenizers"), ("image_classifier", "torchvision")]
)
def test_a_library_that_is_not_installed(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"examples.{name}", raising=False)
    with pytest.raises(ModuleNotFoundError, match=rf"^examples/{name}.py needs .* `?pip install \w+`?$"):
        importlib.import_module(f"examples.{name}")


@pytest.mark.long
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_ppo(tmp_path: Path, accelerator: str, precision: Any) -> None:
    """The actor of each rollout is that of the steps before it."""

    def fit(trainer: pl.Trainer, module: Any, *loaders: Any, **kwargs: Any) -> None:
        trainer.fit(module, **kwargs)  # on batches of its own

    def run(name: str, callback: CUDAGraphCallback | None) -> Any:
        build, _ = ppo(accelerator)
        return train(
            make(build),
            tmp_path / name,
            callback,
            accelerator=accelerator,
            max_epochs=6,
            precision=precision,
            gradient_clip_val=0.5,
            checkpoint_every=20,
            fit=fit,
        )

    plain, graph = run("plain", None), run("graph", CUDAGraphCallback())
    assert_same(plain, graph)
    assert plain.csv.count("steps_until_fall") == 1
    assert graph.counts.captures == 1
    assert graph.counts.replayed == graph.final["global_step"] - 3 > 20


def test_poles_fall_unless_they_are_balanced() -> None:
    rounds = 300
    torch.manual_seed(0)
    for balanced in (False, True):
        poles = CartPoles(32, most_steps=rounds, device=torch.device("cpu"))
        n_fallen = n_last = 0
        for _ in range(rounds):
            x, v, angle, spin = poles.state.unbind(1)
            lean = angle + spin + 0.1 * x + 0.1 * v
            actions = (lean > 0).long() if balanced else torch.ones(32, dtype=torch.int64)
            _, fallen, last = poles.step(actions)
            n_fallen, n_last = n_fallen + int(fallen.sum()), n_last + int(last.sum())
        # Pushed in one direction, a pole falls within eight to eleven steps.
        expected = (0, 32) if balanced else (n_fallen, 0)
        assert (n_fallen, n_last) == expected
        assert balanced or 32 * rounds // 11 <= n_fallen <= 32 * rounds // 8


@pytest.mark.spread(2)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_gan(tmp_path: Path, accelerator: str, precision: Any) -> None:
    found = []
    callback = CUDAGraphCallback()
    for callbacks in ([], [callback]):
        module = make(lambda: GAN(width=32))
        trainer = pl.Trainer(
            max_epochs=3,
            accelerator=accelerator,
            devices=1,
            precision=precision,
            callbacks=callbacks,
            default_root_dir=tmp_path,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        pl.seed_everything(7, verbose=False)
        trainer.fit(module, circle(64 * 10 + 7))
        loops, metrics = trainer.fit_loop.state_dict(), dict(trainer.callback_metrics)
        found.append([module.state_dict(), loops, metrics, torch.get_rng_state()])
        assert trainer.global_step == 2 * 33
    assert not differences(*found)
    assert callback.summary.fit.replayed == 33 - 3 - 3, callback.summary


def test_plain_loop(accelerator: str) -> None:
    device = "cuda" if accelerator == "gpu" else "cpu"
    plain, plain_losses, _ = plain_loop.train(40, graphs=False, device=device)
    graphed, losses, report = plain_loop.train(40, device=device)
    assert not differences([plain.state_dict(), plain_losses], [graphed.state_dict(), losses])
    assert "37 replayed, 0 eager" in report


def test_profile_any_graph(accelerator: str) -> None:
    device = "cuda" if accelerator == "gpu" else "cpu"
    times_ms = profile_any_graph.run(5, device, width=32, depth=2)
    assert [*times_ms] == [f"blocks.{i}.{half}" for i in range(2) for half in ("norm", "mlp")]
    for found_ms in times_ms.values():
        assert len(found_ms) == 5
        assert all(time_ms > 0 for time_ms in found_ms)
