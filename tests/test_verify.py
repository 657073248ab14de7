"""Replays are held against eager steps, and what was baked in without anybody noticing is caught."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_cudagraph import ConfigurationError, CUDAGraphCallback, VerificationError
from lightning_cudagraph.capture.emulator import EmulatorBackend
from lightning_cudagraph.capture.verify import Verifier
from tests.harness import Net, assert_same, differences, make, train


class _Inner:
    scale = 1.0


class _Settings:
    inner = _Inner()


SETTINGS = _Settings()


class ReadsAGlobal(Net):
    """The scale is two levels down, where no guard looks; it changes before step `changes_at`."""

    changes_at = 4

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"] * SETTINGS.inner.scale

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        SETTINGS.inner.scale = 1.0 if self.global_step < self.changes_at else 3.0


class ReadsAGlobalLate(ReadsAGlobal):
    changes_at = 12


def test_a_frozen_global_is_caught(tmp_path: Path, accelerator: str) -> None:
    with pytest.raises(VerificationError, match=r"first in the loss, expected .*, found") as caught:
        train(make(ReadsAGlobal), tmp_path / "raise", CUDAGraphCallback(), accelerator=accelerator)
    assert 'on_unsupported="eager"' in str(caught.value)
    plain = train(make(ReadsAGlobal), tmp_path / "plain", accelerator=accelerator)
    callback = CUDAGraphCallback(on_unsupported="eager")
    eager = train(make(ReadsAGlobal), tmp_path / "eager", callback, accelerator=accelerator)
    assert_same(plain, eager)
    assert eager.counts.replayed == 1
    assert "comes to other numbers than the eager step" in next(iter(eager.counts.eager))


def test_the_state_is_that_before_the_step(tmp_path: Path, accelerator: str) -> None:
    module = make(ReadsAGlobal)
    with pytest.raises(VerificationError):
        train(module, tmp_path / "raise", CUDAGraphCallback(), accelerator=accelerator)
    plain = make(ReadsAGlobal)
    train(plain, tmp_path / "plain", accelerator=accelerator, max_steps=4, max_epochs=-1)
    for name, value in plain.state_dict().items():
        assert torch.equal(value.cpu(), module.state_dict()[name].cpu()), name


def test_without_verification_it_would_train_wrong(tmp_path: Path, accelerator: str) -> None:
    plain = train(make(ReadsAGlobal), tmp_path / "plain", accelerator=accelerator)
    callback = CUDAGraphCallback(verify_replays=0)
    graph = train(make(ReadsAGlobal), tmp_path / "graph", callback, accelerator=accelerator)
    assert differences(plain.final["weights"], graph.final["weights"])


def test_a_late_change_is_caught_by_the_cautious(tmp_path: Path, accelerator: str) -> None:
    plain = train(make(ReadsAGlobalLate), tmp_path / "plain", accelerator=accelerator)
    missed = train(
        make(ReadsAGlobalLate), tmp_path / "missed", CUDAGraphCallback(), accelerator=accelerator
    )
    assert differences(plain.final["weights"], missed.final["weights"])
    cautious = CUDAGraphCallback(verify_every_n_steps=1)
    with pytest.raises(VerificationError):
        train(make(ReadsAGlobalLate), tmp_path / "caught", cautious, accelerator=accelerator)


def test_checks_change_nothing(tmp_path: Path, accelerator: str) -> None:
    plain = train(make(Net), tmp_path / "plain", accelerator=accelerator)
    callback = CUDAGraphCallback(verify_every_n_steps=2)
    graph = train(make(Net), tmp_path / "graph", callback, accelerator=accelerator)
    assert_same(plain, graph)
    assert callback.report is not None
    assert "10 replay(s) verified against eager steps" in callback.report


class _Jittering:
    """A step whose eager form differs from run to run."""

    def __init__(self, jitter: float) -> None:
        self.weight = torch.ones(4)
        self.jitter = jitter
        self.runs = 0

    def state(self) -> dict[str, Tensor]:
        return {"weight": self.weight}

    def eagerly(self) -> dict[str, Tensor]:
        self.runs += 1
        self.weight.add_(1.0 + self.jitter * self.runs)
        return {"loss": self.weight.sum()}

    def replay(self, by: float) -> tuple[str, dict[str, Tensor]]:
        self.weight.add_(by)
        return "outputs", {"loss": self.weight.sum()}


def _verifier(step: _Jittering) -> Verifier:
    return Verifier(EmulatorBackend(), step.state, replays=1, every_n_steps=None)


def test_kernels_that_are_not_deterministic_are_told_from_faults() -> None:
    step = _Jittering(1e-5)
    verifier = _verifier(step)
    assert verifier.check(step.eagerly, lambda: step.replay(1.0)) == "outputs"
    assert torch.equal(step.weight, torch.full((4,), 2.0))  # what the replay came to
    assert "two eager steps from one state differ (first in loss)" in verifier.notes[0]
    with pytest.raises(VerificationError, match="first in loss"):
        verifier.check(step.eagerly, lambda: step.replay(2.0))
    assert torch.equal(step.weight, torch.full((4,), 2.0))  # as before the step


def test_a_difference_in_random_state_is_a_fault() -> None:
    step = _Jittering(0.0)

    def draws() -> Any:
        torch.rand(1)
        return step.replay(1.0)

    rng = torch.get_rng_state()
    with pytest.raises(VerificationError, match="other random numbers"):
        _verifier(step).check(step.eagerly, draws)
    assert torch.equal(torch.get_rng_state(), rng)


def test_a_check_that_fails_halfway_leaves_no_trace() -> None:
    step = _Jittering(0.0)

    def fails() -> dict[str, Tensor]:
        step.eagerly()
        raise ValueError("halfway")

    with pytest.raises(ValueError, match="halfway"):
        _verifier(step).check(fails, lambda: step.replay(1.0))
    assert torch.equal(step.weight, torch.ones(4))


@pytest.mark.parametrize("kwargs", [{"verify_replays": -1}, {"verify_every_n_steps": 0}])
def test_bad_arguments(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="verify_replays"):
        CUDAGraphCallback(**kwargs)
