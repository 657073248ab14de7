"""Replays draw what eager steps would: from the default generator, and from others.

`tests/gpu/test_random.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_cudagraph import CaptureError, CUDAGraphCallback, Verification
from tests.harness import Net, assert_same, differences, loader, make, train


class OwnGenerator(Net):
    """Noise from a generator of the module's own, and dropout from the default one."""

    def on_fit_start(self) -> None:
        self.noise = torch.Generator(device=self.device).manual_seed(11)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        x = x + torch.rand(x.shape, generator=self.noise, device=x.device)
        x = x + torch.empty_like(x).normal_(generator=self.noise) * 0.1
        return nn.functional.cross_entropy(self(x), y)

    def on_train_end(self) -> None:
        self.left_behind = self.noise.get_state()


def test_a_generator_of_ones_own(tmp_path: Path, accelerator: str) -> None:
    modules = [make(OwnGenerator) for _ in range(2)]
    plain = train(modules[0], tmp_path / "plain", accelerator=accelerator, logger=False)
    callback = CUDAGraphCallback()
    graph = train(modules[1], tmp_path / "b", callback, accelerator=accelerator, logger=False)
    plain.csv = graph.csv = "nothing is logged"
    assert_same(plain, graph)
    assert graph.counts.replayed == 18
    assert torch.equal(modules[0].left_behind, modules[1].left_behind)  # type: ignore[arg-type]


class Reseeds(OwnGenerator):
    """Sets generators on the host, between steps."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 8:
            torch.manual_seed(99)
            self.noise.manual_seed(77)
        with isolate_rng():
            torch.rand(3, device=self.device)


def test_seeds_set_between_steps_take_effect(tmp_path: Path, accelerator: str) -> None:
    plain = train(make(Reseeds), tmp_path / "plain", accelerator=accelerator, logger=False)
    graph = train(
        make(Reseeds), tmp_path / "graph", CUDAGraphCallback(), accelerator=accelerator, logger=False
    )
    plain.csv = graph.csv = "nothing is logged"
    assert_same(plain, graph)
    assert graph.counts.replayed == 18


class LateGenerator(OwnGenerator):
    """Draws from a generator for the first time in the step that is captured."""

    late = False

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 3:
            self.late = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        if self.late:
            x = x + torch.rand(x.shape, generator=self.noise, device=x.device)
        return nn.functional.cross_entropy(self(x), y)


def test_a_generator_that_warm_up_has_not_seen(tmp_path: Path, accelerator: str) -> None:
    with pytest.raises(CaptureError, match="generator that no step has drawn from in warm-up"):
        train(make(LateGenerator), tmp_path, CUDAGraphCallback(), accelerator=accelerator)


_UNDER = "_".join(["is", "noisy"])


class HiddenGenerator(OwnGenerator):
    """Draws from a generator from a step on, if an attribute is set whose name no code has."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 10:
            vars(self)[_UNDER] = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        if getattr(self, _UNDER, False):
            x = x + torch.rand(x.shape, generator=self.noise, device=x.device)
        return nn.functional.cross_entropy(self(x), y)


def test_a_generator_that_a_check_meets_first(tmp_path: Path, accelerator: str) -> None:
    """Numbers that a check draws from it would be missing later."""
    modules = [make(HiddenGenerator) for _ in range(2)]
    kwargs: dict[str, Any] = {"accelerator": accelerator, "logger": False, "watched": False}
    plain = train(modules[0], tmp_path / "plain", train_loader=loader(batches=20), **kwargs)
    callback = CUDAGraphCallback(verify=Verification(replays=8))
    graph = train(modules[1], tmp_path / "graph", callback, train_loader=loader(batches=20), **kwargs)
    assert not differences(plain.final, graph.final)
    assert torch.equal(modules[0].left_behind, modules[1].left_behind)
    assert any("generator that no step has drawn from" in reason for reason in graph.counts.recaptures)


class Checkpointed(Net):
    """Recomputes its activations in the backward pass, dropout included."""

    preserve = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        hidden = checkpoint(self.features, x, use_reentrant=False, preserve_rng_state=self.preserve)
        return self.head(hidden)  # type: ignore[no-any-return]


def _refused_with_its_line(cls: type[Net], tmp_path: Path, remedy: str, line: str) -> None:
    with pytest.raises(CaptureError) as caught:
        train(make(cls), tmp_path, CUDAGraphCallback())
    (found,) = caught.value.findings
    assert remedy in found.remedy
    assert found.location is not None
    assert (found.location.path, line in found.location.source) == (__file__, True)
    assert "no line of yours" not in found.what


def test_activation_checkpointing_keeps_its_random_numbers(tmp_path: Path, accelerator: str) -> None:
    if accelerator == "cpu":
        _refused_with_its_line(Checkpointed, tmp_path, "leave checkpointing out", "checkpoint(")
        return
    plain = train(make(Checkpointed), tmp_path / "plain", accelerator=accelerator)
    graph = train(make(Checkpointed), tmp_path / "graph", CUDAGraphCallback(), accelerator=accelerator)
    assert_same(plain, graph)
    assert graph.counts.replayed == 18


class Seeds(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        torch.manual_seed(batch_idx)
        return super().training_step(batch, batch_idx)


class Forks(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.random.fork_rng():
            noise = torch.rand(())
        return super().training_step(batch, batch_idx)["loss"] * noise


@pytest.mark.parametrize(
    ("cls", "remedy", "line"),
    [
        (Seeds, "Set it in `on_train_batch_start`", "torch.manual_seed(batch_idx)"),
        (Forks, "leave it out", "fork_rng():"),
    ],
)
def test_a_seed_in_the_step(
    tmp_path: Path, accelerator: str, cls: type[Net], remedy: str, line: str
) -> None:
    if accelerator == "cpu":  # a GPU can capture `fork_rng`, which sets no other seed
        _refused_with_its_line(cls, tmp_path, remedy, line)
    elif cls is Seeds:
        with pytest.raises(CaptureError, match=r"hold a use of `torch\.manual_seed`"):
            train(make(cls), tmp_path, CUDAGraphCallback(), accelerator=accelerator)
