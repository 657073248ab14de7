"""The calls of one captured function, on one device.

Each signature of arguments, and each mode in which the function is called (autograd, autocast, what
`DistributedDataParallel` is about to do), has an engine of its own, with its guards. They share the
device's pool of memory, and the optimizers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_cudagraph.capture.engine import StepEngine
from lightning_cudagraph.capture.steps import Place, Step, StepCounts
from lightning_cudagraph.capture.stream_choice import Streams
from lightning_cudagraph.checks.carried import CarriedTensors
from lightning_cudagraph.checks.guards.guards import Guards
from lightning_cudagraph.checks.unfit import refuse_unfit_modules
from lightning_cudagraph.checks.verify.verification import Verification
from lightning_cudagraph.checks.verify.verify import Verifier
from lightning_cudagraph.compat.tables import notes_of_captures
from lightning_cudagraph.device.backend import Backend, CudaBackend
from lightning_cudagraph.device.emulator import EmulatorBackend
from lightning_cudagraph.errors import BatchError, UnsupportedError
from lightning_cudagraph.graphed_step.gradients import GradientHabits
from lightning_cudagraph.graphed_step.processes import StepProcesses, are_several, digest_of
from lightning_cudagraph.graphed_step.record import Arguments, StepRecorder, StepResult, copied
from lightning_cudagraph.graphed_step.replicas import OWN_ATTRIBUTES, StepReplicas, Switches
from lightning_cudagraph.graphed_step.surroundings import PlainLoop
from lightning_cudagraph.optim.steps import OptimizerSteps
from lightning_cudagraph.processes.agreement import Intent
from lightning_cudagraph.tensors.batch import Signature, flatten_batch
from lightning_cudagraph.timing.output.stages import StageSummary
from lightning_cudagraph.timing.output.summary import RunSummary

__all__ = ["ARGUMENTS", "StepRun", "StepSettings", "backend_for"]

# What a batch is called in messages, and here: the arguments of a call by their names.
ARGUMENTS = ("`batch[", "`arguments[")

# Signatures whose warm-up is remembered.
_MAX_SIGNATURES = 64
# Signatures without a capture after which the user is told.
_MANY_SIGNATURES = 5
# Global switches of torch are compared once in so many calls.
_SUSPECT_EVERY_N_CALLS = 64
# Whether gradients are recorded, what autocast casts to, and what wrappers for several processes are
# about to do.
_Mode = tuple[bool, torch.dtype | None, Switches]
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepSettings:
    """What the user asked for; `GraphedStep` documents each."""

    warmup_steps: int
    raise_unsupported: bool
    verify: Verification
    harmless: frozenset[str]
    max_graphs: int
    streams: Streams = 1


@dataclass
class _Lane:
    """What belongs to one signature of arguments, in one mode."""

    signature: Signature
    mode: _Mode
    engine: StepEngine[StepResult]
    guards: Guards
    verifier: Verifier
    habits: GradientHabits
    digest: int
    calls: int = 0

    def is_known(self, batch: Any, device_type: str) -> bool:
        """Whether a quick look can tell that arguments are of this signature."""
        static = self.engine.static
        return static is not None and static.tensors_of(batch, device_type) is not None


class StepRun:
    """The calls of one function.

    Args:
        function: the user's.
        model: all modules that it works on, as one.
        optimizers: those that it steps, by name.
        scaler: the gradient scaler that it uses, or None.
        backend: where it runs.
        surroundings: what it is called from.
        settings: what the user asked for.
        replicas: the `DistributedDataParallel`s among the modules.
        processes: those that call the function together, or None if this one does alone.

    Attributes:
        counts: what became of the calls.

    Raises:
        UnsupportedError: if an optimizer has no form that a graph can hold.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        model: nn.Module,
        optimizers: Mapping[str, Optimizer],
        scaler: GradScaler | None,
        backend: Backend,
        surroundings: PlainLoop,
        settings: StepSettings,
        replicas: StepReplicas,
        processes: StepProcesses | None,
    ) -> None:
        self.counts = StepCounts()
        self.backend = backend
        self._model = model
        self._surroundings = surroundings
        self._settings = settings
        self._lanes: dict[tuple[Signature, _Mode], _Lane] = {}
        self._last: _Lane | None = None
        self._replicas = replicas
        self._processes = processes
        surroundings.check()
        refuse_unfit_modules(model, averaged=True)
        _refuse_several_devices(model, backend.device)
        self._optimizers = OptimizerSteps(optimizers, scaler, backend.device, self._drop_all)
        self._harmless = settings.harmless | (OWN_ATTRIBUTES if replicas else frozenset())
        rules = surroundings.rules(self._harmless, scaler)
        self._recorder = StepRecorder(
            function,
            model,
            self._optimizers,
            surroundings,
            rules,
            backend,
            replicas,
            are_agreed=processes is not None or not are_several(),
        )
        self._owns_gradients = replicas.own_gradients(self._recorder.parameters().values())

    @property
    def summary(self) -> RunSummary:
        """Summary of the calls."""
        checked = sum(lane.verifier.checked for lane in self._lanes.values())
        return RunSummary(
            backend=self.backend.description,
            calls=StageSummary.of(self.counts, checked),
            notes=tuple(self.notes),
        )

    @property
    def notes(self) -> list[str]:
        """What the user should know."""
        notes = [note for lane in self._lanes.values() for note in lane.verifier.notes]
        notes += [note for lane in self._lanes.values() for note in lane.engine.notes]
        off = notes_of_captures(self.backend.device)
        return list(dict.fromkeys([*notes, *self._optimizers.notes, *off]))

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function, in whichever way its phase says.

        Raises:
            UnsupportedError: if it cannot be captured. Nothing of the call has happened then.
        """
        arguments = self._recorder.arguments(args, kwargs)
        try:
            lane = self._lane(arguments.batch)
        except UnsupportedError as error:
            if self._settings.raise_unsupported:
                raise
            return self._eager(arguments, error.reason)
        if not lane.engine.has_graphs and self._graphs() >= self._settings.max_graphs:
            reason = f"more than {self._settings.max_graphs} signatures: {lane.signature}"
            return self._eager(arguments, reason)
        if self._last is not lane and self._last is not None:
            self._last.engine.leave()
        self._last = lane
        lane.calls += 1
        if self._processes is not None:
            self._processes.begin(lane.digest)
        if lane.calls % _SUSPECT_EVERY_N_CALLS == 0:
            lane.guards.suspect()
        returned: list[Any] = []
        step = self._step(lane, arguments, returned)
        _, result = lane.engine.step(step, self._optimizers.refresh, lane.signature)
        if result is None:
            return copied(returned[0])
        for note in result.host_notes:
            note()
        return copied(result.returned)

    def _step(self, lane: _Lane, arguments: Arguments, returned: list[Any]) -> Step[StepResult]:
        """One call, as the engine needs to know it; what an eager one returns is added to `returned`."""
        recorder, habits = self._recorder, lane.habits

        def run() -> None:
            with ExitStack() as stack:
                if not (lane.engine.has_graphs or lane.engine.given_up):
                    stack.enter_context(habits.learning())
                returned.append(recorder.run(arguments))
            self._replicas.ran()

        def record(batch: dict[str, Any], capturing: bool) -> StepResult:
            return recorder.record(batch, arguments, habits, lane.guards, capturing)

        return Step(
            batch=arguments.batch,
            run=run,
            record=lambda batch, cut, timed: record(batch, capturing=True),
            rehearse=lambda batch: record(batch, capturing=False),
            between=_no_turn,
            values=StepResult.values,
            state=lambda: recorder.state(habits),
            transaction=recorder.undone,
            parameters=habits.parameters,
            place=Place(True, habits.finds_gradients()),
            in_window=False,  # one capture of each place, and so one place for its gradients anyway
            kept=lambda: not self._owns_gradients,
            is_broken=self._replicas.is_broken,
            mend=self._replicas.reset,
            learning=lane.guards.effects.watched,
        )

    def close(self) -> None:
        """Let go of the graphs, and give the optimizers back."""
        with ExitStack() as stack:  # graphs first
            stack.callback(self._replicas.close)
            stack.callback(self._optimizers.close)
            for lane in self._lanes.values():
                stack.callback(lane.engine.close)

    def _graphs(self) -> int:
        return sum(lane.engine.has_graphs for lane in self._lanes.values())

    def _lane(self, batch: dict[str, Any]) -> _Lane:
        mode = self._mode()
        if (
            (last := self._last) is not None
            and last.mode == mode
            and last.is_known(batch, self.backend.device.type)
        ):
            return last
        signature = self._signature(batch)
        lane = self._lanes.get((signature, mode))
        return self._new_lane(signature, mode, batch) if lane is None else lane

    def _signature(self, batch: dict[str, Any]) -> Signature:
        signature = Signature(batch, self.backend.device)
        for path, leaf in flatten_batch(batch):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                raise BatchError(
                    f"`{path}` requires a gradient; a graph reads a copy of it, and the gradient would"
                    " be that of the copy.",
                    "Pass `tensor.detach()`, and call `requires_grad_()` inside, or compute in the step"
                    " what it comes from.",
                )
        return signature

    def _mode(self) -> _Mode:
        """Whether gradients are recorded, and what autocast casts to."""
        device_type = self.backend.device.type
        autocast = torch.is_autocast_enabled(device_type)
        if autocast and torch.is_autocast_cache_enabled():
            raise UnsupportedError(
                "The step is called inside `torch.autocast` with its cache of weights on: a graph would"
                " go on with the weights that are in it.",
                "Enter `torch.autocast` inside the step, or pass it `cache_enabled=False`.",
            )
        if torch.is_inference_mode_enabled():
            raise UnsupportedError(
                "The step is called inside `torch.inference_mode()`, whose tensors cannot be watched.",
                "Use `torch.no_grad()`.",
            )
        dtype = torch.get_autocast_dtype(device_type) if autocast else None
        return torch.is_grad_enabled(), dtype, self._replicas.switches()

    def _new_lane(self, signature: Signature, mode: _Mode, batch: dict[str, Any]) -> _Lane:
        while len(self._lanes) >= _MAX_SIGNATURES:
            idle = next((k for k, lane in self._lanes.items() if not lane.engine.has_graphs), None)
            if idle is None:
                break
            del self._lanes[idle]
        settings, backend = self._settings, self.backend
        habits = GradientHabits(self._recorder.parameters, self.backend.device.type)
        guards = Guards(
            self._model,
            self._optimizers.hyperparameters,
            self._optimizers.addresses,
            self._surroundings.unwatched | self._harmless,
            self._optimizers.frozen_values,
            stays_on_host=self._surroundings.stays_on_host,
            others=self._optimizers.places,
            around=self._surroundings.around,
            stepped=self._optimizers.parameters,
            callees=self._optimizers.stepped,
        )
        verifier = Verifier(
            backend,
            settings.verify.replays,
            settings.verify.every_n_steps,
            self._optimizers.learning_rates,
            self._processes,
            settings.verify.budget,
        )
        # Of a model without modules: what a function puts into attributes is refused.
        nothing = CarriedTensors(
            nn.Module(), backend.device, frozenset(), self._surroundings.stays_on_host
        )
        engine: StepEngine[StepResult] = StepEngine(
            backend=backend,
            guards=guards,
            carried=nothing,
            verifier=verifier,
            is_settled=lambda: (
                habits.is_settled() and self._optimizers.is_settled() and self._replicas.is_settled()
            ),
            warmup_steps=settings.warmup_steps,
            raise_unsupported=settings.raise_unsupported,
            announce=_log.warning,
            narrow=lambda error: False,
            on_give_up=lambda: None,
            what="The loop",
            streams=settings.streams,
            agreement=self._processes,
            counts=self.counts,
        )
        lane = _Lane(
            signature, mode, engine, guards, verifier, habits, digest_of(f"{_shapes(batch)} {mode}")
        )
        self._note_variety(lane)
        self._lanes[signature, mode] = lane
        return lane

    def _note_variety(self, lane: _Lane) -> None:
        """Say once that arguments differ so much that none has come up often enough to be captured."""
        if len(self._lanes) + 1 == _MANY_SIGNATURES and not (
            self.counts.captures or self.counts.variety
        ):
            first = next(iter(self._lanes.values())).signature
            difference = first.difference(lane.signature).replace(*ARGUMENTS)
            self.counts.variety = (
                f"{_MANY_SIGNATURES} or more different signatures of arguments, and none came up more"
                f" than {self._settings.warmup_steps} times: {difference}. Pad to one"
                " shape, and pass numbers that differ from call to call as tensors"
            )
            _log.info("There is no graph yet: %s.", self.counts.variety)

    def _drop_all(self, reason: str) -> None:
        for lane in self._lanes.values():
            lane.engine.drop(reason)

    def _eager(self, arguments: Arguments, reason: str) -> Any:
        self.counts.note_eager(reason)
        if self._last is not None:
            self._last.engine.leave()
        if self._processes is not None:
            self._processes.begin(0)  # whatever the others have, none of them replays it now
            self._processes.vote(Intent.EAGER)
        with self.backend.on_side_stream():
            returned = self._recorder.run(arguments)
        self._replicas.ran()
        return copied(returned)


def _shapes(batch: dict[str, Any]) -> list[object]:
    """What the processes compare of their arguments; numbers among them may be each one's own."""
    return [
        (path, tuple(leaf.shape), str(leaf.dtype)) if isinstance(leaf, Tensor) else path
        for path, leaf in flatten_batch(batch)
    ]


def _no_turn(result: StepResult, number: int) -> None:
    """A function of the user's gives the host no turn in its middle."""


def _refuse_several_devices(model: nn.Module, device: torch.device) -> None:
    for name, parameter in model.named_parameters():
        if parameter.device != device:
            raise UnsupportedError(
                f"The parameter `{name}` is on {parameter.device}, and others are on {device}.",
                "Move all modules to one device.",
            )


def backend_for(device: torch.device) -> Backend:
    """The backend for a device.

    Raises:
        UnsupportedError: if there is none for this kind of device.
    """
    if device.type == "cuda":
        return CudaBackend(device)
    if device.type == "cpu":
        return EmulatorBackend()
    raise UnsupportedError(f"The step runs on {device}, which has no CUDA graphs.", "Use a CUDA GPU.")
