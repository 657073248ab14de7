"""A captured module: each of its calls is a warm-up, a replay or eager."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_cudagraph.capture.captures import raised_in_capture
from lightning_cudagraph.capture.decisions.short_lives import ShortLives
from lightning_cudagraph.capture.steps import Phase, StepCounts
from lightning_cudagraph.checks.guards.remedies import kind_of
from lightning_cudagraph.compat.method_patches import Original
from lightning_cudagraph.device.cuda.capture_errors import clear_frames
from lightning_cudagraph.device.lines.user_lines import location_of
from lightning_cudagraph.device.sentry.sentry import is_capturing
from lightning_cudagraph.errors import CUDAGraphError, StaleGraphError, UnsupportedError, Wording
from lightning_cudagraph.tensors.batch_signature import Signature
from lightning_cudagraph.tensors.signatures import make_room
from lightning_cudagraph.trainer.captured_modules.calls import LEAVE_OUT, Call
from lightning_cudagraph.trainer.captured_modules.graph import ModuleGraph
from lightning_cudagraph.trainer.captured_modules.run import ModulesRun
from lightning_cudagraph.trainer.captured_modules.variant import Variant

WORDING = Wording(words={"the training step": "the module", "`batch[": "`call["})
_OUTSIDE = (
    "Do it outside of the module, where all is eager: in the step, with what `forward` returns, or in a"
    " forward hook of the module. See docs/modules.md."
)
# Changes in a row, each after fewer replays than this, after which a module is eager for good.
_MAX_SHORT, _FEW_REPLAYS = 3, 8


class CapturedModule:
    """A module whose calls in training steps are replays, if they can be.

    Attributes:
        name: its name in the LightningModule.
        module: the module itself.
    """

    def __init__(self, run: ModulesRun, name: str, module: nn.Module) -> None:
        self._run, self.name, self.module = run, name, module
        self._forward = Original(module, "forward")
        self._parameters, self._modules = [*module.parameters()], [*module.modules()]
        self._variants: dict[Signature, Variant] = {}
        self._last: Variant | None = None
        self._retired: list[ModuleGraph] = []  # which may still be in use
        self._short = ShortLives(_MAX_SHORT, _FEW_REPLAYS)
        self._given_up: str | None = None
        self._counts = StepCounts()  # of its calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, in place of its `forward`."""
        # Dynamo knows the answer, and compiles the plain call.
        if torch.compiler.is_compiling() or not self._run.on.value or is_capturing():
            return self._forward(*args, **kwargs)
        returned, reason = self._tried(args, kwargs)
        if reason is None:
            return returned
        self._note(Phase.EAGER, reason)
        return self._forward(*args, **kwargs)

    def _tried(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, str | None]:
        """Make a call: as a step of a warm-up, or as a replay.

        Returns:
            What the module returns, and None. Or None, and why the call must be eager: nothing of it
            has happened.
        """
        if self._given_up is not None:
            return None, self._given_up
        try:
            if not self._run.backend.is_on_side_stream():
                raise UnsupportedError("The module is called on a stream of the user's.", LEAVE_OUT)
            device = self._run.backend.device
            call = Call(args, kwargs, self._parameters, self._modules, device)
            variant = self._variant(call)
        except UnsupportedError as error:
            return None, self._unsupported(error)
        if variant.graphs and (change := self._run.changed(variant.guards)):
            self._drop(variant, change)
        variant.begin()
        if variant.refused is not None:
            return None, self._refuse(variant, variant.refused)
        if not variant.is_warm:
            self._note(Phase.WARMING)
            return variant.warm_up(args, kwargs), None
        return self._captured(variant, call, args, kwargs)

    def _variant(self, call: Call) -> Variant:
        last = self._last
        if last is not None and last.graphs and last.graphs[0].fits(call):
            return last
        signature = call.signature
        if signature not in self._variants:
            make_room(self._variants, lambda variant: not variant.graphs)
            self._variants[signature] = Variant(self._run, self.module, self._forward, call)
        self._last = self._variants[signature]
        return self._last

    def _captured(
        self, variant: Variant, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, str | None]:
        """Replay a call, with a graph that is not in use, or with a new one; see `_tried`."""
        graph = next((each for each in variant.graphs if not each.is_in_use), None)
        if graph is None:
            max_graphs = self._run.settings.max_graphs
            if sum(len(each.graphs) for each in self._variants.values()) >= max_graphs:
                return None, f"its {max_graphs} graphs were all in use, or of other signatures"
            if variant.graphs and (change := self._run.changed(variant.guards, True)):
                self._drop(variant, change)
                return None, kind_of(change)
            try:
                graph = variant.capture(call)
            except UnsupportedError as error:
                return None, self._refuse(variant, error)
            except CUDAGraphError:
                raise
            except Exception as error:
                what = f"The module raised {raised_in_capture(error)}; eagerly it did not."
                only_here = UnsupportedError(what, LEAVE_OUT, location=location_of(error))
                clear_frames(error)
            if graph is None:
                # If user code raised it, this raises it again, with the usual effects.
                returned = self._forward(*args, **kwargs)
                self._note(Phase.EAGER, self._refuse(variant, only_here))
                return returned, None
            self._counts.captures += 1
        try:
            returned = variant.replay(graph, call)
        except StaleGraphError as error:
            WORDING.rephrase(error)
            self._drop(variant, error.reason)
            return None, kind_of(error.reason)
        except UnsupportedError as error:
            return None, self._refuse(variant, error)
        self._note(Phase.CAPTURED)
        return returned, None

    def _refuse(self, variant: Variant, error: UnsupportedError) -> str:
        """Leave the calls of a signature eager because of `error`; return the reason."""
        variant.refused = error
        clear_frames(error)
        self._retired += variant.drop()
        return self._unsupported(error)

    def _note(self, phase: Phase, reason: str = "") -> None:
        """Count a call, among those of the module and of the step."""
        self._counts.note(phase, reason)
        self._run.calls.append((phase, f"a call of `{self.name}`: {reason}" if reason else ""))

    def _unsupported(self, error: UnsupportedError) -> str:
        """Raise if the module has had no graph, and the user wants that; return the reason otherwise."""
        WORDING.rephrase(error)
        if error.is_effect:
            error.remedy = _OUTSIDE
        if self._run.settings.raise_unsupported and not self._counts.replayed:
            error.what = f"`{self.name}`: {error.what}"
            raise error
        return error.reason

    def _drop(self, variant: Variant, reason: str) -> None:
        """Let go of graphs that a change has made invalid."""
        short = self._short
        short.ended(sum(graph.replays for graph in variant.graphs))
        self._retired += variant.drop()
        self._parameters, self._modules = [*self.module.parameters()], [*self.module.modules()]
        self._run.counts.note_recapture(reason, WORDING)
        again = "and is captured again"
        if short.are_too_many:
            self._given_up = f"given up after {short.limit} captures that served few replays; {reason}"
            again = "and is eager from now on"
        self._run.announce(f"The graph of `{self.name}` is invalid {again}: {reason}.")

    def begin_step(self) -> None:
        """Release graphs that are invalid and not in use any more."""
        for graph in [each for each in self._retired if not each.is_in_use]:
            self._retired.remove(graph)
            graph.release()

    def suspect(self) -> None:
        """Compare everything before the next replay."""
        for variant in self._variants.values():
            if variant.graphs:
                variant.guards.suspect()

    def close(self) -> None:
        """Release all graphs, in use or not."""
        for variant in self._variants.values():
            self._retired += variant.drop()
        self._variants, self._last = {}, None
        for graph in self._retired:
            graph.release()
        self._retired.clear()

    @property
    def note(self) -> str:
        """The calls so far, for the report."""
        counts = self._counts
        said = [f"{counts.replayed} replays", f"{counts.warmed_up} in warm-up"]
        said += [f"{number} eager: {reason}" for reason, number in counts.eager.most_common()]
        if not (counts.replayed or counts.warmed_up or counts.eager):
            return f"`{self.name}`: not called in a step, or by compiled code alone"
        return f"`{self.name}`: {counts.captures} captures; calls: {'; '.join(said)}"
