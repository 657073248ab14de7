"""Callbacks that average and prune weights beside ours: the same as without ours, bit for bit.

`tests/gpu/test_rows_weights.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn
from torch.nn.utils import prune

from lightning_cudagraph import CUDAGraphCallback
from tests.harness import Net, Trace, assert_same, differences, make, train
from tests.rows import became, refused, row

RAGGED = "another batch signature"


class Steady(Net):
    """Without a schedule: averaging of weights brings its own."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


class WithoutNorm(Steady):
    def __init__(self) -> None:
        super().__init__()
        del self.features[1]


def swa(**kwargs: Any) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: {
        "callbacks": (StochasticWeightAveraging(swa_lrs=1e-2, **kwargs),),
        "max_epochs": 5,
    }


@pytest.mark.long
@pytest.mark.parametrize("watched", [True, False], ids=["watched", "alone"])
@pytest.mark.parametrize("annealing", ["cos", "linear"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_swa(tmp_path: Path, accelerator: str, annealing: str, precision: str, watched: bool) -> None:
    setting = swa(swa_epoch_start=2, annealing_epochs=2, annealing_strategy=annealing)
    done = row(tmp_path, accelerator, WithoutNorm, setting, watched=watched, precision=precision)
    became(done.graph, replayed=32, eager={RAGGED: 5})


@pytest.mark.long
@pytest.mark.parametrize("watched", [True, False], ids=["watched", "alone"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_swa_with_batch_norm(tmp_path: Path, accelerator: str, accumulate: int, watched: bool) -> None:
    """One more epoch at the end only updates the statistics, in buffers that are new."""
    setting = swa(swa_epoch_start=0.4)
    done = row(
        tmp_path, accelerator, Steady, setting, watched=watched, accumulate_grad_batches=accumulate
    )
    counts = done.graph.counts
    assert counts.replayed == {1: 32, 3: 26}[accumulate]
    assert not counts.recaptures
    # All eight batches of that epoch; every batch is counted once.
    assert sum(n for reason, n in counts.eager.items() if "StochasticWeightAveraging" in reason) == 8
    assert counts.warmed_up + counts.replayed + sum(counts.eager.values()) == 48
    assert not differences(
        done.plain.module.state_dict(),  # type: ignore[union-attr]
        done.graph.module.state_dict(),  # type: ignore[union-attr]
    )


AVERAGES: dict[str, Callable[[], Any]] = {
    "mean": WeightAveraging,
    "mean-without-buffers": lambda: WeightAveraging(use_buffers=False),
    "EMA": lambda: EMAWeightAveraging(decay=0.9),
    "EMA-without-buffers": lambda: EMAWeightAveraging(decay=0.9, use_buffers=False),
    "EMA-seldom": lambda: EMAWeightAveraging(update_every_n_steps=3, update_starting_at_step=5),
}


@pytest.mark.spread(2)
@pytest.mark.parametrize("watched", [True, False], ids=["watched", "alone"])
@pytest.mark.parametrize("name", AVERAGES)
def test_averages(tmp_path: Path, accelerator: str, name: str, watched: bool) -> None:
    if accelerator == "gpu" and name == "mean":
        pytest.skip("torch itself cannot average the integer buffers of batch norm on a GPU")
    # The averages take the place of the weights in validation, here also between two replays.
    done = row(
        tmp_path,
        accelerator,
        setting=lambda folder: {"callbacks": (AVERAGES[name](),)},
        watched=watched,
        val_check_interval=3,
    )
    became(done.graph, replayed=18, eager={RAGGED: 3})
    assert "averaging_state" in done.graph.checkpoints["last.ckpt"]
    # On a GPU, torch's own mean asks the device for the number of updates.
    is_captured = accelerator == "cpu" or not name.startswith("mean")
    updates = f"has a graph of its own, replayed for {2 if name == 'EMA-seldom' else 17} updates"
    assert (updates if is_captured else "is updated eagerly") in str(done.graph.summary)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("name", ["EMA", "SWA"])
def test_averages_resumed(tmp_path: Path, accelerator: str, name: str) -> None:
    def callbacks() -> tuple[Any, ...]:
        if name == "EMA":
            return (EMAWeightAveraging(decay=0.9),)
        return (StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=2),)

    def run(folder: str, ours: CUDAGraphCallback | None, **kwargs: Any) -> Trace:
        kwargs |= {"accelerator": accelerator, "checkpoint_every": 8, "max_epochs": 5}
        return train(make(Steady), tmp_path / folder, ours, callbacks=callbacks(), **kwargs)

    first = run("first", CUDAGraphCallback())
    middle = str(next((tmp_path / "first" / "ckpt").glob("*step=24.ckpt")))
    plain = run("plain", None, ckpt_path=middle)
    graph = run("graph", CUDAGraphCallback(), ckpt_path=middle)
    assert_same(plain, graph)
    assert first.counts.replayed == 32
    assert graph.counts.replayed == 11


class Sees(Steady):
    """Notes after each step what is in the place of a weight."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("seen", self.head.weight.detach().abs().sum())


def _spectral(head: nn.Linear) -> None:
    # Each forward pass moves its vectors, so that a weight of another pass is another one.
    torch.nn.utils.spectral_norm(head)


_RECOMPUTED: dict[str, Callable[[nn.Linear], object]] = {
    "pruned": lambda head: prune.l1_unstructured(head, "weight", 0.5),  # type: ignore[no-untyped-call]
    "weight norm": torch.nn.utils.weight_norm,
    "spectral norm": _spectral,
}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("watched", [True, False], ids=["watched", "alone"])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("name", _RECOMPUTED)
def test_hooks_inside_of_steps_see_the_weights_of_their_step(
    tmp_path: Path, accelerator: str, name: str, every: int, watched: bool
) -> None:
    """What the forward pass has computed is there for hooks behind it, in a replay as in any step."""

    class Twice(Steady):
        """The weight is computed twice in each step."""

        def __init__(self) -> None:
            super().__init__()
            _RECOMPUTED[name](self.head)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with torch.no_grad():
                self.head(self.features(batch[0]))
            return super().training_step(batch, batch_idx)

    class Looks(Callback):
        seen: list[Tensor]

        def setup(self, *args: Any, **kwargs: Any) -> None:
            self.seen = []

        def look(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            weight = pl_module.head.weight.detach()
            self.seen.append(weight.clone())
            pl_module.head.bias.data.add_(0.01 * weight.sum())

        on_before_zero_grad = on_before_backward = on_after_backward = look

    looks: list[Looks] = []

    def setting(folder: Path) -> dict[str, Any]:
        looks.append(Looks())
        return {"callbacks": (looks[-1],), "watched": watched, "accumulate_grad_batches": every}

    done = row(tmp_path, accelerator, Twice, setting)
    assert done.graph.counts.replayed >= 12
    plain, graph = (each.seen for each in looks)
    assert len(plain) == len(graph) > 40
    assert all(torch.equal(a, b) for a, b in zip(plain, graph, strict=True))
    assert len({tuple(weight.flatten().tolist()) for weight in plain}) > 20 // every


PRUNINGS: dict[str, dict[str, Any]] = {
    "global": {"pruning_fn": "l1_unstructured", "amount": 0.2},
    "no-lottery": {
        "pruning_fn": "l1_unstructured",
        "amount": lambda epoch: 0.1 * (epoch + 1),
        "use_lottery_ticket_hypothesis": False,
        "make_pruning_permanent": False,
    },
    "local": {
        "pruning_fn": "ln_structured",
        "amount": 0.2,
        "use_global_unstructured": False,
        "parameter_names": ["weight"],
        "pruning_dim": 0,
        "pruning_norm": 2,
    },
    "after-validation": {
        "pruning_fn": "random_unstructured",
        "amount": 0.2,
        "prune_on_train_epoch_end": False,
    },
}


@pytest.mark.spread(2)
@pytest.mark.parametrize("watched", [True, False], ids=["watched", "alone"])
@pytest.mark.parametrize("name", PRUNINGS)
def test_pruning(tmp_path: Path, accelerator: str, name: str, watched: bool) -> None:
    def setting(folder: Path) -> dict[str, Any]:
        class Pruning(ModelPruning):
            def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
                if not self._use_global_unstructured:
                    self._parameters_to_prune = [
                        (pl_module.features[0], "weight"),
                        (pl_module.head, "weight"),
                    ]
                super().setup(trainer, pl_module, stage)

        return {"callbacks": (Pruning(**PRUNINGS[name]),)}

    done = row(tmp_path, accelerator, Sees if watched else Steady, setting, watched=watched)
    became(
        done.graph,
        replayed=12,
        captures=3,
        because=["`features.0`"] * 2,
        eager={RAGGED: 3},
    )


@pytest.mark.long
@pytest.mark.parametrize("accumulate", [1, 2])
def test_pruned_from_the_start(tmp_path: Path, accelerator: str, accumulate: int) -> None:
    class Pruned(Sees):
        def __init__(self) -> None:
            super().__init__()
            prune.random_unstructured(self.features[0], "weight", 0.3)
            prune.l1_unstructured(self.head, "weight", 0.5)
            prune.l1_unstructured(self.head, "bias", 1)

    done = row(tmp_path, accelerator, Pruned, accumulate_grad_batches=accumulate, val_check_interval=3)
    assert done.graph.counts.replayed >= 10
    assert not done.graph.counts.recaptures


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("normalised", ["weight_norm", "spectral_norm"])
def test_older_normalised_weights(tmp_path: Path, accelerator: str, normalised: str) -> None:
    class Normalised(Sees):
        def __init__(self) -> None:
            super().__init__()
            getattr(nn.utils, normalised)(self.head)

    done = row(tmp_path, accelerator, Normalised)
    became(done.graph, replayed=18, eager={RAGGED: 3})


class ReadsTooEarly(Steady):
    """Reads a weight that is the one of the step before."""

    def __init__(self) -> None:
        super().__init__()
        prune.l1_unstructured(self.head, "weight", 0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("early", self.head.weight.detach().abs().sum())
        return super().training_step(batch, batch_idx)


def test_a_pruned_weight_that_is_read_too_early(tmp_path: Path, accelerator: str) -> None:
    match = "AttributeError in the capture: 'Linear' object has no attribute 'weight'"
    done = refused(tmp_path, accelerator, ReadsTooEarly, match=match)
    became(done.graph, replayed=0, captures=0, eager={match: 21})


def everything(folder: Path) -> dict[str, Any]:
    return {
        "callbacks": (
            EMAWeightAveraging(decay=0.9),
            GradientAccumulationScheduler({0: 1, 2: 2}),
            LearningRateMonitor("step", log_momentum=True, log_weight_decay=True),
            EarlyStopping("val_loss", patience=20),
            ModelCheckpoint(folder / "more", monitor="val_loss", save_top_k=2, save_last=True),
        ),
        "max_epochs": 5,
        "val_check_interval": 4,
        "gradient_clip_val": 0.5,
    }


@pytest.mark.long
@pytest.mark.parametrize("position", [0, 3, -1])
def test_many_together(tmp_path: Path, accelerator: str, position: int) -> None:
    """In whichever place among the others ours stands."""
    done = row(tmp_path, accelerator, Steady, everything, position=position)
    became(
        done.graph,
        replayed=26,
        captures=3,
        because=["`accumulate_grad_batches` of the trainer changed from 1 to 2"],
        eager={RAGGED: 5},
    )


@pytest.mark.long
def test_copies_of_a_module_that_is_trained(tmp_path: Path, accelerator: str) -> None:
    """What SWA and EMA do when they start works in the middle of a run too."""

    class Copied(Steady):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.global_step in (2, 12):
                twin = copy.deepcopy(self)
                with torch.no_grad():
                    for mine, its in zip(self.parameters(), twin.parameters(), strict=True):
                        mine.copy_(its * 0.5)

    done = row(tmp_path, accelerator, Copied)
    became(done.graph, replayed=18, eager={RAGGED: 3})
