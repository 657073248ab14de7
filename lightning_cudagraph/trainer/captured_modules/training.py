"""Training with captured modules: the step itself runs as without this package."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn

from lightning_cudagraph.capture.steps import StepCounts
from lightning_cudagraph.checks.unsupported_modules import refuse_unsupported_modules
from lightning_cudagraph.compat.attributes import setting
from lightning_cudagraph.compat.features import CAPTURED_MODULES, HELD_GRADIENTS
from lightning_cudagraph.compat.method_patches import Original, patch_method
from lightning_cudagraph.compat.tables import notes, require
from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.errors import ConfigurationError, UnsupportedError
from lightning_cudagraph.timing.output.stages import StageSummary
from lightning_cudagraph.timing.output.summary import RunSummary
from lightning_cudagraph.trainer.captured_modules.captured_module import CapturedModule
from lightning_cudagraph.trainer.captured_modules.run import ModulesRun
from lightning_cudagraph.trainer.common.captured_run import announce
from lightning_cudagraph.trainer.config.settings import Settings
from lightning_cudagraph.trainer.training.times.run_times import ended_by


class ModulesTraining:
    """One `fit` with graphs of modules.

    Raises:
        UnsupportedError: if modules of this configuration cannot be captured.
        ConfigurationError: if there is no module of a name.
    """

    def __init__(
        self, trainer: pl.Trainer, module: pl.LightningModule, backend: Backend, settings: Settings
    ) -> None:
        require(CAPTURED_MODULES)
        modules = _named(module, settings.modules)
        if settings.compile:
            raise UnsupportedError(
                "`compile=True` compiles the whole step, and modules with it.", "Leave it out."
            )
        if isinstance(trainer.strategy, ModelParallelStrategy):
            name = type(trainer.strategy).__qualname__
            raise UnsupportedError(
                f"Modules are not captured by themselves with `{name}`: weights are sharded.",
                'Pass `scope="auto"`.',
            )
        for each in modules.values():
            refuse_unsupported_modules(each)
        self._trainer = trainer
        self._refused: list[str] = []
        self._patches = ExitStack()
        self._run = ModulesRun(trainer, backend, settings, announce)
        self._captured = [CapturedModule(self._run, name, each) for name, each in modules.items()]

    def replace(self, counts: StepCounts, error: UnsupportedError, optimizer: str = "") -> None:
        """Take over from whole steps, which were refused; first with the `optimizer`, if not empty."""
        self._run.counts = counts
        self._refused = [f"whole steps are not captured: {error.reason}"]
        if optimizer:
            self._refused.insert(0, f"the optimizer was not to be captured: {optimizer}")
        self._run.announce(
            "Modules are captured from now on, and the rest of each step is eager:"
            f" {error.reason} Remedy: {error.remedy}"
        )

    @property
    def is_in_step(self) -> bool:
        """True while a step is under way."""
        return self._run.on.value

    @property
    def notes(self) -> list[str]:
        """Notes on features that are off."""
        return notes(HELD_GRADIENTS)

    @property
    def stage(self) -> StageSummary:
        """Counts of the steps so far."""
        return StageSummary.of(self._run.counts, self._run.verifier.checked)

    def install(self) -> None:
        """Install all patches."""
        loop = self._trainer.fit_loop.epoch_loop
        for owner in (loop.automatic_optimization, loop.manual_optimization):
            patch_method(
                owner, "run", partial(self._optimization, Original(owner, "run")), self._patches
            )
        for captured in self._captured:
            patch_method(captured.module, "forward", captured, self._patches)

    def _optimization(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the step of a batch on the side stream, where modules are captured."""
        self._run.begin_step()
        for captured in self._captured:
            captured.begin_step()
        numbers = {"self.global_step": self._trainer.global_step}
        self._run.backend.checks.step = self._run.counts.replayed, numbers
        with setting(self._run.on, value=True), self._run.backend.on_side_stream():
            done = run(*args, **kwargs)
        self._run.end_step()
        return done

    def suspect(self) -> None:
        """Compare everything before the next replay: code other than training steps has run."""
        self._run.verifier.pause()
        for captured in self._captured:
            captured.suspect()

    def leave(self) -> None:
        """Do nothing: graphs of evaluation share no memory with these."""

    def finish(
        self, summary: RunSummary, notes: Sequence[str] = (), exception: BaseException | None = None
    ) -> RunSummary:
        """Complete the summary of the run."""
        said = [f"captured are modules, and the rest of a step is eager. {self._captured[0].note}"]
        said += [captured.note for captured in self._captured[1:]]
        said += self._refused
        if self._run.settings.timings is not None:
            said.append('layers are not timed with `scope="modules"`')
        said += [*self._run.verifier.notes, *self.notes, *notes]
        ended = ended_by(self._trainer, exception)
        return replace(summary, fit=self.stage, notes=tuple(said), ended=ended)

    def close(self) -> None:
        """Undo all patches, and release the graphs and their memory."""
        with ExitStack() as stack:
            for captured in self._captured:
                stack.callback(captured.close)
            stack.callback(self._patches.close)


def _named(module: pl.LightningModule, names: Sequence[str]) -> dict[str, nn.Module]:
    """The modules of these names."""
    known = dict(module.named_modules())
    found: dict[str, nn.Module] = {}
    for name in names:
        if name not in known or not name:
            children = ", ".join(f"`{child}`" for child, _ in module.named_children()) or "none"
            raise ConfigurationError(
                f"`CUDAGraphCallback(modules=[...])`: there is no module `{name}`; expected names as in"
                f" `named_modules()`. The first ones are {children}."
            )
        if not _has_forward(known[name]):
            members = ", ".join(f"`{path}`" for path in _members(name, known[name]))
            remedy = f"Name its members: {members}." if members else "Name a module that the step calls."
            raise ConfigurationError(
                f"`CUDAGraphCallback(modules=[...])`: `{name}` is a `{type(known[name]).__qualname__}`,"
                f" which has no `forward` that could be captured. {remedy}"
            )
        for other, there in found.items():
            inner = {id(each) for each in there.modules()} & {id(e) for e in known[name].modules()}
            if inner:
                raise ConfigurationError(
                    f"`CUDAGraphCallback(modules=[...])`: `{name}` and `{other}` are one module, or have"
                    " one in common; expected each module in one of them. Name the outer one."
                )
        found[name] = known[name]
    return found


def _members(name: str, module: nn.Module) -> Iterator[str]:
    """The names of the outermost modules in a container that can be captured."""
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}"
        yield from [path] if _has_forward(child) else _members(path, child)


def _has_forward(module: nn.Module) -> bool:
    method = getattr(module, "forward", None)
    none = (None, nn.Module.forward, pl.LightningModule.forward)
    return getattr(method, "__func__", method) not in none
