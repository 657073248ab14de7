"""The run of one captured function: a specialization for each kind of call.

The key of a specialization is the signature of the arguments and the mode (autograd, autocast, switches
of `DistributedDataParallel`). Each has its own engine and guards, because a loop may freeze parameters,
switch modules to another mode or change an optimizer option before calls of one kind and revert it
before those of another. All specializations share the memory pool, the optimizers, the budget of
verification, the counts, and the limit on graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cudagraph.capture.context import CaptureSettings, RunContext
from lightning_cudagraph.capture.engine import StepEngine
from lightning_cudagraph.capture.signatures.by_signature import GraphsOfSignature
from lightning_cudagraph.capture.signatures.sizes import Sizes
from lightning_cudagraph.capture.steps import AccumulationPhase
from lightning_cudagraph.checks.audit.effects import optimizer_roots
from lightning_cudagraph.checks.guards.guards import GuardedValues, Guards, OutsideModel, Unguarded
from lightning_cudagraph.checks.guards.hooks import roots_of_comm_hooks
from lightning_cudagraph.checks.guards.structure import Identity
from lightning_cudagraph.checks.guards.switches import refuse_inference_mode
from lightning_cudagraph.checks.rebound_methods import refuse_rebound_methods
from lightning_cudagraph.checks.unsupported_modules import refuse_unsupported_modules
from lightning_cudagraph.checks.walk.scope import Root
from lightning_cudagraph.compat.features import HELD_GRADIENTS
from lightning_cudagraph.compat.tables import notes
from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.device.cuda.capture_errors import clear_frames
from lightning_cudagraph.device.lines.user_lines import user_location
from lightning_cudagraph.errors import UnsupportedError, Wording
from lightning_cudagraph.graphed_step.gradients import MixedWarmUpError
from lightning_cudagraph.graphed_step.processes import StepProcesses, are_several, digest_of
from lightning_cudagraph.graphed_step.record import (
    Arguments,
    StepFunction,
    StepResult,
    copied,
)
from lightning_cudagraph.graphed_step.replicas import OWN_ATTRIBUTES
from lightning_cudagraph.graphed_step.specialization import (
    FoundGraphs,
    Mode,
    Specialization,
    SpecializedStep,
)
from lightning_cudagraph.graphed_step.wording import WORDING
from lightning_cudagraph.optim.steps import OptimizerSteps
from lightning_cudagraph.processes.agreement import Intent
from lightning_cudagraph.tensors.batch import flatten_batch
from lightning_cudagraph.tensors.batch_signature import Signature
from lightning_cudagraph.tensors.host_values import HostReads
from lightning_cudagraph.tensors.signatures import make_room
from lightning_cudagraph.timing.output.stages import StageSummary
from lightning_cudagraph.timing.output.summary import RunSummary

# Global switches of torch are compared once in this number of calls.
_SUSPECT_EVERY_N_CALLS = 64
_MAX_NAMED = 3  # in notes
_log = logging.getLogger(__name__)


class StepRun:
    """The run of one function; `processes` is None if this process calls it alone."""

    def __init__(
        self,
        of: StepFunction,
        backend: Backend,
        settings: CaptureSettings,
        processes: StepProcesses | None,
        announce: Callable[[str], None] = _log.warning,
        wording: Wording = WORDING,
        narrow: Callable[[UnsupportedError], bool] = lambda error: False,
    ) -> None:
        self.backend = backend
        self._model = of.model
        self._function = getattr(of.function, "__func__", of.function)
        self._framework = of.framework
        self._replicas = of.replicas
        self._settings = settings
        self._processes = processes
        self._wording = wording
        self._reads = of.framework.host_reads or HostReads(user_location, are_all=True)
        self._notes: list[str] = []  # of kinds that were dropped
        self._specializations: dict[Signature, Specialization] = {}
        self._last: Specialization | None = None
        self._sizes = Sizes()  # of kinds that made room for others
        of.framework.check()
        refuse_rebound_methods()
        refuse_unsupported_modules(of.model, averaged=True, sharded=True)
        _refuse_several_devices(of.model, backend.device)
        self._optimizers = OptimizerSteps(of.optimizers, of.scaler, backend.device, self._drop_all)
        self._harmless = settings.harmless | (OWN_ATTRIBUTES if of.replicas.wrappers else frozenset())
        self._recorder = of.recorder(
            of,
            self._optimizers,
            of.framework.rules(self._harmless, of.scaler),
            backend.device,
            are_agreed=processes is not None or not are_several(),
        )
        self._owns_gradients = of.replicas.own_gradients(self._recorder.parameters().values())
        self._context = RunContext(
            backend,
            settings,
            self._recorder.carried,
            announce,
            wording,
            processes,
            self._optimizers.learning_rates,
            narrow,
            replicas=of.replicas,
        )
        self.counts = self._context.counts

    @property
    def summary(self) -> RunSummary:
        calls = {kind.signature: kind.calls for kind in self._specializations.values()}
        max_graphs = self._context.settings.max_graphs
        remedy = self._wording.of(self._sizes.remedy(calls, max_graphs, self._reads))
        return RunSummary(
            backend=self.backend.description,
            calls=StageSummary.of(self.counts, self._context.verifier.checked, remedy=remedy),
            notes=tuple(self.notes),
        )

    @property
    def notes(self) -> list[str]:
        found = [*self._context.verifier.notes, *self._notes]
        found += [note for each in self._specializations.values() for note in each.engine.notes]
        return list(dict.fromkeys([*found, *self._undecided(), *notes(HELD_GRADIENTS)]))

    def _undecided(self) -> Iterator[str]:
        """Kinds that have come too seldom for a capture, beside others with graphs."""
        kinds = self._specializations.values()
        captured = [each.signature for each in kinds if each.engine.graphs]
        few = self._context.settings.warmup_steps
        waiting = [kind for kind in kinds if captured and not kind.is_decided and kind.calls <= few]
        for kind in waiting[:_MAX_NAMED]:
            other = captured[0].another(kind.signature, self._wording.signature)
            yield f"{kind.calls} warm-up step(s) of {self._wording.of(other)}"
        if len(waiting) > _MAX_NAMED:
            more = len(waiting) - _MAX_NAMED
            yield f"{more} more {self._wording.signatures} were in warm-up at the end"

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = self._recorder.arguments(args, kwargs)
        try:
            kind, found = self._specialization(arguments)
        except UnsupportedError as error:
            if self._settings.raise_unsupported:
                raise
            return self._eager(arguments, self._wording.of(error.reason))
        if self._last is not kind and self._last is not None:
            self._last.engine.invalidation.leave()
        self._last = kind
        kind.calls += 1
        if self._processes is not None:
            self._processes.begin(kind.digest)
        if kind.calls % _SUSPECT_EVERY_N_CALLS == 0:
            kind.guards.suspect()
        shards = self._replicas.shards
        evaluates = bool(shards) and not torch.is_grad_enabled()
        step = SpecializedStep(
            arguments.batch,
            # One instance for each phase: its gradients have one address anyway.
            AccumulationPhase(True, kind.gradient_effects.finds_gradients()),
            specialization=kind.mode,
            numbers=arguments.numbers,
            eager_reason=self._replicas.eager_reason(evaluates),
            leaves=None if found is None else found[1],
            optimizers=self._optimizers,
            recorder=self._recorder,
            kind=kind,
            arguments=arguments,
            owns_gradients=self._owns_gradients,
        )
        graphs = None if found is None else found[0]
        in_place = evaluates and not step.eager_reason
        with shards.in_place() if in_place else nullcontext():
            result = self._step(kind, step, graphs)
        if result is None:
            if evaluates:
                shards.note_gathered()
            return copied(step.returned.pop())
        for note in result.host_notes:
            note()
        return copied(result.returned)

    def _step(
        self, kind: Specialization, step: SpecializedStep, graphs: GraphsOfSignature[StepResult] | None
    ) -> StepResult | None:
        """Run a step; what captures read of host values tells which specializations there are."""
        reads, captures = self._reads, self.counts.captures
        version, attributes = reads.version, [*reads.attributes]
        try:
            try:
                return kind.engine.step(step, graphs)[1]
            except MixedWarmUpError as error:
                clear_frames(error)
            kind.begin_again()
            step.signature = None
            return kind.engine.step(step)[1]
        finally:
            signature = step.signature  # None after a replay at once
            if self.counts.captures != captures:
                kind.mixed_warm_ups = 0
            if signature is not None and (
                self.counts.captures != captures or kind.engine.admission.is_refused(signature)
            ):
                kind.signature = signature  # that of the capture: others will differ by what steps read
            if reads.version != version:
                self._close_mixed(reads.attributes.keys() - attributes)
            if signature is not None:
                kinds = self._specializations.values()
                self._specializations = {each.signature: each for each in kinds}

    def _close_mixed(self, attributes: Collection[tuple[int, Any]]) -> None:
        """Close kinds with steps of several values of what counts since this step."""
        for key, kind in [*self._specializations.items()]:
            if not kind.is_of_one_kind(attributes):
                self._notes += kind.engine.notes
                kind.engine.close()
                del self._specializations[key]
                self._last = None if kind is self._last else self._last

    def suspect(self) -> None:
        """Compare everything before the next replay."""
        for kind in self._specializations.values():
            kind.engine.pause()

    def leave(self) -> None:
        """Prepare for a replay of graphs of others: move gradients out of the memory pool."""
        if self._last is not None:
            self._last.engine.invalidation.leave()

    def close(self) -> None:
        with ExitStack() as stack:  # graphs first
            stack.callback(self._replicas.close)
            stack.callback(self._optimizers.close)
            for kind in self._specializations.values():
                stack.callback(kind.engine.close)

    def _specialization(self, arguments: Arguments) -> tuple[Specialization, FoundGraphs | None]:
        """Find the specialization of a call, and its graphs if a quick comparison finds them."""
        mode, last = self._mode(), self._last
        if last is not None and (found := last.graphs_of(arguments, mode, self.backend.device.type)):
            return last, found
        signature = self._signature(arguments, mode)
        if signature not in self._specializations:
            for kind in make_room(self._specializations, lambda kind: not kind.engine.graphs):
                self._sizes.add(kind.signature, kind.calls)
                kind.engine.close()
            self._specializations[signature] = self._specialized(signature, mode, arguments.batch)
        return self._specializations[signature], None

    def _signature(self, arguments: Arguments, mode: Mode) -> Signature:
        return Signature(arguments.batch, self.backend.device, mode, self._reads, arguments.numbers)

    def _mode(self) -> Mode:
        """Return the mode of a call: autograd, autocast, and the switches of DDP wrappers."""
        device_type = self.backend.device.type
        autocast = torch.is_autocast_enabled(device_type)
        if autocast and torch.is_autocast_cache_enabled():
            raise UnsupportedError(
                "The step is called inside `torch.autocast` with its cache of weights on: a graph would"
                " go on with the weights that are in it.",
                "Enter `torch.autocast` inside the step, or pass it `cache_enabled=False`.",
            )
        refuse_inference_mode("The step")
        dtype = torch.get_autocast_dtype(device_type) if autocast else None
        return {
            "torch.is_grad_enabled()": torch.is_grad_enabled(),
            "torch.get_autocast_dtype()": dtype,
            "DistributedDataParallel's switches": self._replicas.switches(),
        }

    def _specialized(self, signature: Signature, mode: Mode, batch: dict[str, Any]) -> Specialization:
        optimizers = self._optimizers
        shards = self._replicas.shards
        framework = self._framework
        name = getattr(self._function, "__name__", "")
        guards = Guards(
            self._model,
            GuardedValues(
                lambda: {
                    **optimizers.hyperparameters(),
                    **_labelled(framework.parts()),
                    **shards.described(),
                },
                optimizers.addresses,
                lambda: (*optimizers.frozen_values(), *map(id, framework.parts()), *shards.settings()),
            ),
            Unguarded(
                framework.unwatched | self._harmless,
                framework.stays_on_host,
                known=() if optimizers.scaler is None else (optimizers.scaler.scaler,),
            ),
            OutsideModel(
                framework.around,
                optimizers.parameters,
                optimizers.places,
                lambda: [*optimizers.stepped(), *framework.callees()],
                # `OptimizerSteps` compares the options, which schedulers of manual optimization move.
                lambda: [*optimizer_roots(optimizers.stepped(), with_options=False)],
                lambda: [
                    *optimizers.read(),
                    *roots_of_comm_hooks(self._replicas.own_hooks),
                    Root(self._function, name, "the step"),
                ],
            ),
        )
        engine: StepEngine[StepResult] = StepEngine(
            self._context,
            guards,
            lambda: made.gradient_effects.is_settled() and optimizers.is_settled(),
            self._reads,
            have_one_signature=True,
        )
        digest = digest_of(f"{_shapes(batch)} {mode}")
        made = Specialization(
            self.backend, signature, mode, engine, guards, self._recorder.gradient_effects(), digest
        )
        return made

    def _drop_all(self, reason: str) -> None:
        for kind in self._specializations.values():
            kind.engine.invalidation.drop(reason)

    def _eager(self, arguments: Arguments, reason: str) -> Any:
        self.counts.note_eager(reason)
        if self._last is not None:
            self._last.engine.invalidation.leave()
        if self._processes is not None:
            self._processes.begin(0)  # the digest of no specialization: no process replays
            self._processes.vote(Intent.EAGER)
        last = self._last
        with self.backend.on_side_stream() if last is None else last.engine.stream_of_eager_steps():
            returned = self._recorder.run(arguments)
        self._replicas.ran()
        return copied(returned)


def _labelled(parts: list[object]) -> dict[str, Identity]:
    found: dict[str, Identity] = {}
    for part in parts:
        name = f"the `{type(part).__qualname__}` of the trainer"
        found[f"{name} ({len(found)})" if name in found else name] = Identity(part)
    return found


def _shapes(batch: dict[str, Any]) -> list[object]:
    """Return the part of the arguments that processes compare; numbers may differ."""
    return [
        (path, tuple(leaf.shape), str(leaf.dtype)) if isinstance(leaf, Tensor) else path
        for path, leaf in flatten_batch(batch)
    ]


def _refuse_several_devices(model: nn.Module, device: torch.device) -> None:
    for name, parameter in model.named_parameters():
        if parameter.device != device:
            raise UnsupportedError(
                f"The parameter `{name}` is on {parameter.device}, and others are on {device}.",
                "Move all modules to one device.",
            )
