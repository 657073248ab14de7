"""The graphs of one call of a module, forward and backward, with a memory pool of their own.

What the forward pass saves for the backward pass stays in the pool until that has run, and other calls
may come between. So calls share no pool, and a graph is in use until autograd lets go of its nodes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_cudagraph.capture.verification.late_effects import stale_if_refused
from lightning_cudagraph.checks.audit.step_audit import step_audit
from lightning_cudagraph.checks.guards.guards import Guards
from lightning_cudagraph.checks.verify.tape import OpTape, TapeDifference
from lightning_cudagraph.compat.attributes import setting
from lightning_cudagraph.device.backend import Graph
from lightning_cudagraph.device.cuda.capture_errors import clear_frames
from lightning_cudagraph.errors import CUDAGraphError, UnsupportedError
from lightning_cudagraph.graphed_step.processes import CollectiveRules, is_in_group
from lightning_cudagraph.tensors.batch import compared_outputs, retains_gradient
from lightning_cudagraph.tensors.static import StaticBatch
from lightning_cudagraph.tensors.writes import storage_id, whole
from lightning_cudagraph.trainer.captured_modules.calls import LEAVE_OUT, Call, tensors_of, with_tensors
from lightning_cudagraph.trainer.captured_modules.gradients import (
    GradientForms,
    Mode,
    copied,
    fill,
    fill_for_check,
)
from lightning_cudagraph.trainer.captured_modules.node import Use, attached
from lightning_cudagraph.trainer.captured_modules.passes import Pass
from lightning_cudagraph.trainer.captured_modules.refusals import (
    own_gradients_refused,
    refuse_shared_outputs,
    refuse_sparse,
)
from lightning_cudagraph.trainer.captured_modules.run import ModulesRun

T = TypeVar("T")

# Backward graphs of a call, each for gradients in another form, after which later calls are eager.
_MAX_BACKWARDS = 8
_ALONE = "a module that is captured by itself"


@dataclass
class _Backward:
    """A backward graph, with its static gradients: of the outputs, and of the inputs for each use.

    Attributes:
        calls_user_code: it bakes in what that reads when the backward pass comes.
    """

    graph: Graph
    given: list[Tensor | None]
    gradients: list[Tensor | None]
    calls_user_code: bool


class ModuleGraph:
    """The graphs of one call of a module.

    Args:
        guards: those on what its captures bake in.

    Attributes:
        written: the tensors older than the captures that the module writes.
        replays: the number of forward replays.
        has_changed: a change has been found of what it has baked in.
        is_unproved: a backward graph has been captured since the last check.
        refused: why later calls are eager, found in a backward pass; None if they are not.
    """

    def __init__(
        self,
        run: ModulesRun,
        guards: Guards,
        module: nn.Module,
        forward: Callable[..., Any],
        call: Call,
    ) -> None:
        self._run, self._backend, self._guards = run, run.backend, guards
        self._module, self._forward = module, forward
        self._mode, self._needs_grad = call.mode, call.needs_grad  # not its tensors
        self._forward_mode = Mode.now(run.backend.device.type)
        self._static = StaticBatch(call.batch)
        self._aliased = self._static.aliased()
        self._leaves = tensors_of(self._aliased.batch)
        self._graphs: list[Graph] = []
        self._backwards: dict[GradientForms, _Backward] = {}
        self.has_changed = self.is_unproved = False
        self._use: weakref.ref[Use] | None = None
        self._tape = OpTape()
        self.written: list[Tensor] = []
        self.replays = 0
        self.refused: UnsupportedError | None = None

    def capture(self, forms: GradientForms | None) -> None:
        """Capture the call, and its backward pass for gradients in one form, if there is one."""
        try:
            self._pass, _ = self._recorded(lambda: self._passed(self._aliased.batch))
            own = (self._static.batch, *self._module.parameters(), *self._module.buffers())
            refuse_shared_outputs(self.outputs, tensors_of(own))
            self._aliased.refuse_changes(self.written)
            if forms is not None and self._pass.uses:
                self._capture_backward(forms)
            self._guards.take(self)
        except BaseException:
            self.release()
            raise

    def _capture_backward(self, forms: GradientForms) -> _Backward:
        given = forms.static()

        def body() -> list[Tensor | None]:
            with forms.mode.entered():
                return self._pass.gradients(given)

        gradients, calls_user_code = self._recorded(body)
        refuse_sparse(gradients)
        if len(self._graphs) > 1 + _MAX_BACKWARDS:
            self.refused = UnsupportedError(
                "Gradients come to other outputs of the module, or with other strides, again and again.",
                LEAVE_OUT,
            )
        made = _Backward(self._graphs[-1], given, gradients, calls_user_code)
        self._backwards[forms] = made
        self.is_unproved, self._tape = True, OpTape()
        return made

    def _recorded(self, body: Callable[[], T]) -> tuple[T, bool]:
        """Capture a part of the call, which must leave its arguments and all gradients as they are.

        Returns:
            What `body` returns, and True if it has called user code.
        """
        run, guards = self._run, self._guards
        before = len(guards.mentioned)
        with self._aliased.watched(), own_gradients_refused(self._module, self._leaves):
            started_s = perf_counter()
            with ExitStack() as stack:
                stack.enter_context(setting(run.on, value=False))
                stack.enter_context(guards.effects.refused(guards.all_mentioned))
                stack.enter_context(run.backend.in_pool(self._graphs[0] if self._graphs else None))
                stack.enter_context(setting(run.backend, streams=1))
                graph, found = run.backend.capture(lambda: self._audited(body))
            self._graphs.append(graph)  # to be released, if what follows raises
            run.counts.capture_ms += (perf_counter() - started_s) * 1e3
            run.counts.memory_bytes = run.backend.graph_bytes()
        self.written += graph.written
        return found, any(names.users_code for names in guards.mentioned[before:])

    def _audited(self, body: Callable[[], T]) -> T:
        """Run a part of the call in a capture, and refuse what a replay would not repeat."""
        run = self._run
        with ExitStack() as stack:
            if is_in_group():
                stack.enter_context(CollectiveRules(_ALONE, LEAVE_OUT))
            audit = step_audit(self._module, run.trainer, run.backend.device, run.rules)
            mentioned = stack.enter_context(audit).mentioned
            self._guards.mentioned.append(mentioned)
            found = body()
            if "retain_grad" in mentioned.users:
                error = retains_gradient("The module calls `retain_grad()`.")
                error.is_effect = True
                raise error
        return found

    def _passed(self, batch: Any) -> Pass:
        """Run the module on the static batch."""
        arguments = [(f"argument {i}", each) for i, each in enumerate(tensors_of(batch))]
        parameters = [(f"`{name}`", p) for name, p in self._module.named_parameters()]

        def passed() -> Any:
            for tensor, needs_grad in zip(tensors_of(batch), self._needs_grad, strict=True):
                tensor.requires_grad_(needs_grad)
            return self._forward(*batch["args"], **batch["kwargs"])

        state = [*self._module.parameters(), *self._module.buffers()]
        return Pass(passed, [*arguments, *parameters], state)

    @property
    def outputs(self) -> list[Tensor]:
        """The static outputs."""
        return self._pass.outputs

    @property
    def is_in_use(self) -> bool:
        """True if the backward pass of the latest replay may still come."""
        return self._use is not None and self._use() is not None

    def fits(self, call: Call) -> bool:
        """True if a quick comparison shows that a call has the signature of this graph."""
        device_type = self._backend.device.type
        return self._mode == call.mode and self._static.leaves_of(call.batch, device_type) is not None

    def replay(self, call: Call) -> Any:
        """Replay the forward pass, and return what the module would return."""
        self._static.fill(call.plain)
        self._graphs[0].replay()
        self.replays += 1
        with torch.no_grad():
            outputs = [each for each in copied(self.outputs) if each is not None]
        if self._pass.uses:
            places = [index for index, own in enumerate(self.outputs) if own.requires_grad]
            with_grad = [outputs[place] for place in places]
            versions = [each._version for each in self._pass.saved]
            backward = partial(self.backward, versions)
            found, self._use = attached(backward, with_grad, self._inputs(call), self._pass.groups)
            for place, output in zip(places, found, strict=True):
                outputs[place] = output
        return with_tensors(self._pass.returned, outputs)

    def _inputs(self, call: Call) -> list[Tensor]:
        """The tensors that get gradients, once for each gradient."""
        static = {id(own): given for own, given in zip(self._leaves, call.tensors, strict=True)}
        return [static.get(id(use.tensor), use.tensor) for use in self._pass.uses]

    def backward(
        self, versions: Sequence[int], gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """The gradients of the latest replay: of its inputs, once for each use.

        Args:
            versions: those of the weights and buffers that it reads, at the replay.
            gradients: those of the outputs that gradients can come to.
        """
        if not self._graphs:
            raise CUDAGraphError(
                "A backward pass through a captured module came after the end of the run, when its graph"
                " has been released. Call `backward()` inside of the training step."
            )
        if versions != [each._version for each in self._pass.saved]:
            raise RuntimeError(
                "A weight or buffer of a captured module, which its backward pass needs, has been"
                " changed in place since the forward pass. Torch refuses this without a graph, too."
            )
        forms = GradientForms.of(gradients, self._backend.device)
        with torch.no_grad():
            if (found := self._backward_for(forms)) is None:
                with self._backend.on_side_stream():
                    return copied(self._pass.gradients(gradients))
            fill(found.given, gradients)
            found.graph.replay()
            return copied(found.gradients)

    def _backward_for(self, forms: GradientForms) -> _Backward | None:
        """The backward graph for gradients of a form, captured if need be; None if none can be."""
        found = self._backwards.get(forms)
        if found is not None and not found.calls_user_code:
            return found
        with self._forward_mode.entered():
            has_changed = self.has_changed or self._run.changed(self._guards, found is None)
        if found is not None and not has_changed:
            return found
        if not forms.is_plain:
            return None
        try:
            found = self._capture_backward(forms)
        except UnsupportedError as error:
            clear_frames(error)
            self.refused = error
            return None
        if not has_changed:  # else the next call finds it
            with self._forward_mode.entered():
                self._guards.take(self)
        return found

    def check(self, call: Call, suspicion: str) -> None:
        """Compare a replay with an eager pass from the same state, forward and backward.

        Args:
            suspicion: a change, in words, that the pass may depend on: what it does on the host is
                refused and undone.

        Raises:
            VerificationError: if they differ. The state is that before the call.
        """
        self._static.fill(call.plain)
        for each in self._backwards.values():
            fill_for_check(each.given)
        live = self._state()

        def passed() -> dict[str, Tensor]:
            refused = self._guards.effects.begun_later() if suspicion else nullcontext()
            with self._backend.on_side_stream(), stale_if_refused(), refused:
                found = self._passed(self._static.aliased_with_values().batch)
                gradients = []
                for forms, each in self._backwards.items():
                    with forms.mode.entered():
                        gradients.append(found.gradients(each.given))
                return _values(found, gradients)

        def traced() -> tuple[TapeDifference | None, dict[str, Tensor]]:
            with self._tape.compared(live):
                values = passed()
            return self._tape.difference, values

        def replay() -> tuple[None, dict[str, Tensor]]:
            self._graphs[0].replay()
            for each in self._backwards.values():
                each.graph.replay()
            return None, _values(self._pass, [each.gradients for each in self._backwards.values()])

        with setting(self._run.on, value=False):
            self._run.verifier.check(self, live, passed, replay, False, traced, suspicion)
        self.is_unproved = False

    def _state(self) -> dict[str, Tensor]:
        """The tensors that the module writes, by name."""
        names = {storage_id(buffer): f"buffer `{n}`" for n, buffer in self._module.named_buffers()}
        other = "a tensor that belongs to no module"
        return {
            names.get(storage_id(tensor), f"{other} ({index})"): whole(tensor)
            for index, tensor in enumerate(self.written)
        }

    def release(self) -> None:
        """Release the graphs and their memory."""
        for graph in self._graphs:
            self._backend.release(graph)
        self._graphs.clear()
        self._backwards.clear()
        vars(self).pop("_pass", None)


def _values(found: Pass, gradients: Sequence[Sequence[Tensor | None]]) -> dict[str, Tensor]:
    """The results of a pass, by name: outputs, and gradients for each form in which those come."""
    values = compared_outputs(found.returned, "the output of the module")
    for form, of_form in enumerate(gradients):
        for index, (use, gradient) in enumerate(zip(found.uses, of_form, strict=True)):
            if gradient is not None:
                values[f"gradient {form}.{index}, of {use.name}"] = gradient
    return values
