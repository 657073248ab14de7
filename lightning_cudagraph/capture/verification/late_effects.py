"""Effects of a step that begin after its capture: refused in the first eager pass of a check."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_cudagraph.capture.context import EngineContext
from lightning_cudagraph.capture.graph import CapturedStep
from lightning_cudagraph.checks.audit.calls.host_calls import other_code_refused
from lightning_cudagraph.checks.audit.step_audit import rehearsals_audited
from lightning_cudagraph.compat.attributes import OfThread, setting
from lightning_cudagraph.device.refusals.first_refusal import Gathered, gathering
from lightning_cudagraph.device.saved_memory import UnknownWrites
from lightning_cudagraph.errors import StaleGraphError, UnsupportedError

_is_rehearsing: OfThread[bool] = OfThread(False)


def rehearsing() -> AbstractContextManager[None]:
    """Context of an eager pass of a check, which does what the capture did."""
    return setting(_is_rehearsing, value=True)


def is_rehearsing() -> bool:
    """True in an eager pass of a check in this thread."""
    return _is_rehearsing.value


@contextmanager
def stale_if_refused(since: str = "") -> Iterator[None]:
    """Turn the refusal of an eager pass of a check into the error of a stale graph.

    Args:
        since: the end of the reason.

    Raises:
        StaleGraphError: in place of another `UnsupportedError`.
    """
    try:
        yield
    except StaleGraphError:
        raise
    except UnsupportedError as error:
        raise StaleGraphError(error.reason.rstrip(".") + since, error.remedy) from None


class LateEffects:
    """The audit of the first eager pass of a check, but for those of the first replays.

    The capture had no effects, so those of a later pass have begun since: the graph is stale. In one
    process they are refused before they happen. Several processes are in the middle of a check, so there
    the pass goes on, and what it did is told to all of them.
    """

    def __init__(
        self, engine: EngineContext[Any], captured: CapturedStep[Any], is_suspected: bool
    ) -> None:
        self._engine = engine
        self._is_alone = engine.run.agreement is None
        self._gathered = Gathered()
        # The first replays follow at once on the capture, which has just audited the step.
        first = engine.run.settings.verify.replays
        self._is_done = captured.n_replays < first and not is_suspected

    def words(self) -> str:
        """The effects that a pass among several processes had, in words; empty for none."""
        return "; ".join(finding.what for finding in self._gathered.findings)

    @contextmanager
    def refused(self, state: Mapping[str, Tensor], since: str) -> Iterator[None]:
        """Context of an eager pass.

        Args:
            state: the tensors that the step may change.
            since: what was not checked until now, for the message.

        Raises:
            StaleGraphError: in one process, for an effect. It has not happened, or it is undone.
        """
        is_first, self._is_done = not self._is_done, True
        run = self._engine.run
        known = [*state.values(), *run.replicas.tables()]
        writes = UnknownWrites(run.backend.device.type, known)
        with stale_if_refused(since), ExitStack() as stack:
            stack.enter_context(rehearsing())
            stack.enter_context(run.replicas.tables_known())
            if not self._is_alone:
                stack.enter_context(gathering(self._gathered))
            # No check puts back a generator that it does not know.
            stack.enter_context(run.backend.generators.unknown_refused())
            if not is_first and not self._gathered.findings:
                yield
                return
            guards = self._engine.guards
            stack.enter_context(guards.effects.begun_later())
            # Compiled code has functions of its own, and does not tell what its kernels write.
            if is_first and not self._engine.compiled.is_called:
                code = [*guards.all_mentioned().users_code, *guards.effects.mentioned.users_code]
                stack.enter_context(other_code_refused(code))
                stack.enter_context(rehearsals_audited())
                stack.enter_context(run.backend.generators.repeated())
                # In inference mode, ops that consist of others reach the mode whole, which takes
                # autocast from the others.
                if self._is_alone and not torch.is_inference_mode_enabled():
                    stack.enter_context(writes)
            yield
        if writes.first:
            what = "the step writes into a tensor that the captured step does not write, with"
            raise StaleGraphError(f"{what} {writes.first}{since}", "")
