"""Averages of weights that hooks keep in an `AveragedModel` of torch's: graphs of their updates.

`AveragedModel.update_parameters` launches some four kernels for each parameter, and waits twice for the
device, to ask if it is the first update. Here each model has a `GraphedStep` of its own for it, with
warm-up, guards and verification, which is replayed where the hook makes the call. The hook itself
(`EMAWeightAveraging`, or one of the user's) runs as written, and with it its decision to update.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_cudagraph.capture.context import CaptureSettings
from lightning_cudagraph.capture.signatures.warm_ups import WARMUP_STEPS
from lightning_cudagraph.compat.attributes import bound
from lightning_cudagraph.compat.method_patches import Original, patch_method
from lightning_cudagraph.device.backend_for import backend_for
from lightning_cudagraph.errors import UnsupportedError
from lightning_cudagraph.graphed_step.framework import PlainLoop
from lightning_cudagraph.graphed_step.record import StepFunction
from lightning_cudagraph.graphed_step.replicas import StepReplicas
from lightning_cudagraph.graphed_step.run import StepRun
from lightning_cudagraph.trainer.common.host_rules import OWN_ATTRIBUTES
from lightning_cudagraph.trainer.config.support import callbacks_of
from lightning_cudagraph.trainer.metrics.model_metrics import is_metric
from lightning_cudagraph.trainer.training.hooks.user_hooks import is_known
from lightning_cudagraph.trainer.training.run import TrainingRun

_COUNT = "n_averaged"


class Averages:
    """The averages of one `fit`; an update inside a training step is part of that."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._patches = ExitStack()
        self._found: list[_Average] = []

    def find(self) -> None:
        """Capture the updates of the averages that callbacks and module hold by now."""
        callbacks, module = callbacks_of(self._run.trainer), self._run.module
        holders: list[tuple[object, Iterable[Any]]] = [
            *((callback, [*vars(callback).values()]) for callback in callbacks),
            (module, [*module.modules()]),
        ]
        for holder, held in holders:
            for model in held:
                if isinstance(model, AveragedModel) and _is_torchs(model.update_parameters):
                    average = _Average(model, type(holder).__qualname__, self._run)
                    patch_method(model, "update_parameters", average, self._patches)
                    self._found.append(average)

    @property
    def notes(self) -> list[str]:
        return [note for average in self._found if (note := average.note)]

    def close(self) -> None:
        with ExitStack() as stack:
            stack.callback(self._patches.close)
            for average in self._found:
                stack.callback(average.close)


def _is_torchs(update: Any) -> bool:
    """True if the method `update_parameters` is torch's own: not of a subclass, and not patched."""
    return getattr(update, "__func__", None) is AveragedModel.update_parameters and is_known(update)


class _Average:
    """Patch of one model's `update_parameters`."""

    def __init__(self, model: AveragedModel, holder: str, run: TrainingRun) -> None:
        self.holder = holder
        self.refused = ""
        self._model = model
        self._original = Original(model, "update_parameters")
        self._run = run
        self._source: nn.Module | None = None
        self._update: StepRun | None = None
        # The counter as the last update has left it: greater than zero.
        self._count: Tensor | None = None
        self._version = -1

    def __call__(self, model: nn.Module) -> None:
        is_torchs = _is_torchs(self._original.now)
        if is_torchs and not self.refused and not self._run.is_in_step and self._has_begun():
            try:
                if self._replayed(model):
                    return
            except UnsupportedError as error:  # nothing of the update has happened
                self._refuse(error.reason)
        self._original(model)

    @property
    def note(self) -> str:
        """A note for the report; empty if nothing was captured or refused."""
        average = f"the average of weights in `{self.holder}`"
        if self.refused:
            return f"{average} is updated eagerly: {self.refused}"
        if self._update is None:
            return ""
        return f"{average} has a graph of its own, replayed for {self._update.counts.replayed} updates"

    def close(self) -> None:
        update, self._update = self._update, None
        if update is not None:
            update.close()

    def _has_begun(self) -> bool:
        """True if there was a first update, which copies the weights."""
        count = self._model.n_averaged
        return (count is self._count and count._version == self._version) or bool(count > 0)

    def _replayed(self, model: nn.Module) -> bool:
        """Update by a replay, or in its warm-up; False if the model is not the one of the graph."""
        if self._update is None:
            self._source, self._update = model, self._of(model)
        if model is not self._source:
            return False
        self._update.call((), {})
        self._count = self._model.n_averaged
        self._version = self._count._version
        if self._update.counts.eager:
            self._refuse(next(iter(self._update.counts.eager)))
        return True

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        self.close()

    def _of(self, model: nn.Module) -> StepRun:
        settings, average, original = self._run.settings, self._model, self._original

        def update() -> None:
            buffers: dict[str, Any] = average._buffers
            with bound([(buffers, _COUNT, _Counter(buffers[_COUNT]))]):
                original(model)

        return StepRun(
            StepFunction(
                update,
                _Pair(average, model),
                optimizers={},
                scaler=None,
                framework=_BetweenSteps(),
                replicas=StepReplicas(nn.Module()),
                has_gradients=False,
            ),
            backend_for(self._run.backend.device),
            CaptureSettings(
                warmup_steps=WARMUP_STEPS,
                raise_unsupported=True,
                verify=settings.verify,
                harmless=settings.harmless,
                max_graphs=1,
                streams=settings.streams,
            ),
            processes=None,
            announce=lambda text: rank_zero_info(
                f"lightning_cudagraph: the average of weights in `{self.holder}`: {text}"
            ),
        )


class _Counter:
    """Stand-in for a counter that is known to be greater than zero, without asking the device."""

    def __init__(self, count: Tensor) -> None:
        self._count = count

    def __eq__(self, other: object) -> Any:
        return False if other == 0 else self._count == other

    __hash__ = None  # type: ignore[assignment]

    def __gt__(self, other: Any) -> Any:
        return True if other == 0 else self._count > other

    def __iadd__(self, other: Any) -> Tensor:
        self._count += other
        return self._count

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """The counter itself, for averaging functions."""
        return self._count.to(*args, **kwargs)


class _Pair(nn.Module):
    """An average, and the model whose weights are averaged."""

    def __init__(self, average: nn.Module, model: nn.Module) -> None:
        super().__init__()
        self.average, self.model = average, model


class _BetweenSteps(PlainLoop):
    """The loop around an update: no optimizer, no framework that it reads."""

    unwatched = PlainLoop.unwatched | OWN_ATTRIBUTES

    def stays_on_host(self, module: Any) -> bool:
        return is_metric(module)
