"""The graphs of one call of a module, forward and backward, with a memory pool of their own.

What the forward pass saves for the backward pass stays in the pool until that has run, and other calls
may come between. So calls share no pool, and a graph is in use until autograd lets go of its nodes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_cudagraph.capture.verification.late_effects import stale_if_refused
from lightning_cudagraph.checks.audit.effects import Effects
from lightning_cudagraph.checks.verify.tape import OpTape, TapeDifference
from lightning_cudagraph.checks.verify.verifier import Verifier
from lightning_cudagraph.device.backend import Backend, Graph
from lightning_cudagraph.device.cuda.capture_errors import clear_frames
from lightning_cudagraph.errors import CUDAGraphError, UnsupportedError
from lightning_cudagraph.tensors.batch import compared_outputs
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

T = TypeVar("T")

# Backward graphs of a call, each for gradients in another form, after which later calls are eager.
_MAX_BACKWARDS = 8


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
        record: captures a part of the call, into the pool of another graph, and refuses what a replay
            would not repeat; returns the graph, what the part returns, and True if it calls user code.
        changed: returns the first change of what captures have baked in, in words, or None; compares
            everything if its argument is True.
        take: takes what captures have baked in, to find changes.

    Attributes:
        written: the tensors older than the captures that the module writes.
        replays: the number of forward replays.
        has_changed: a change has been found of what it has baked in.
        is_unproved: a backward graph has been captured since the last check.
        refused: why later calls are eager, found in a backward pass; None if they are not.
    """

    def __init__(
        self,
        backend: Backend,
        module: nn.Module,
        forward: Callable[..., Any],
        call: Call,
        record: Callable[..., tuple[Graph, Any, bool]],
        changed: Callable[[bool], str | None],
        take: Callable[[ModuleGraph], None],
    ) -> None:
        self._backend = backend
        self._module = module
        self._forward = forward
        self._mode, self._needs_grad = call.mode, call.needs_grad  # not its tensors
        self._forward_mode = Mode.now(backend.device.type)
        self._static = StaticBatch(call.batch)
        self._record, self._changed, self._take = record, changed, take
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
            self._take(self)
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
        """Capture a part of the call, which must leave its arguments and all gradients as they are."""
        with self._aliased.watched(), own_gradients_refused(self._module, self._leaves):
            first = self._graphs[0] if self._graphs else None
            graph, found, calls_user_code = self._record(body, first)
        self._graphs.append(graph)
        self.written += self._backend.written(graph)
        return found, calls_user_code

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
            has_changed = self.has_changed or self._changed(found is None)
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
                self._take(self)
        return found

    def check(self, call: Call, verifier: Verifier, suspicion: str, effects: Effects) -> None:
        """Compare a replay with an eager pass from the same state, forward and backward.

        Args:
            suspicion: a change, in words, that the pass may depend on.
            effects: refuses and undoes what the eager pass does on the host, if there is a suspicion.

        Raises:
            VerificationError: if they differ. The state is that before the call.
        """
        self._static.fill(call.plain)
        for each in self._backwards.values():
            fill_for_check(each.given)
        live = self._state()

        def passed() -> dict[str, Tensor]:
            refused = effects.begun_later() if suspicion else nullcontext()
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

        verifier.check(self, live, passed, replay, False, traced, suspicion)
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
