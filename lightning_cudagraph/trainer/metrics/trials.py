"""Trials of metric calls on copies in warm-up, to see if they can be in a graph.

A trial runs the call on a copy, with all checks of a capture, but captures nothing. So a metric that
cannot be in a graph costs no failed capture: its calls are deferred.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, ExitStack
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_max, dim_zero_min, dim_zero_sum

from lightning_cudagraph.capture.graph import outside_inference_mode
from lightning_cudagraph.checks.audit.calls.rules import HostRules
from lightning_cudagraph.checks.audit.step_audit import step_audit
from lightning_cudagraph.compat.attributes import setting
from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.device.lines.user_lines import user_location
from lightning_cudagraph.device.refusals.first_refusal import forbid
from lightning_cudagraph.errors import CaptureError, UnsupportedError
from lightning_cudagraph.tensors.batch import map_leaves
from lightning_cudagraph.tensors.state import StaticState
from lightning_cudagraph.tensors.writes import storage_id, tensors_in
from lightning_cudagraph.trainer.metrics.calls import CALL_STATE, Probe
from lightning_cudagraph.trainer.metrics.fixed_counts import FixedCounts
from lightning_cudagraph.trainer.metrics.model_metrics import metrics_of, states_of
from lightning_cudagraph.trainer.metrics.outside import NoWrites

# Reductions by which `forward` merges the old state and the batch's, without the update count.
_REDUCTIONS = (dim_zero_sum, dim_zero_max, dim_zero_min)
# Attributes that a metric's own code must not read: a graph would bake in the value.
_READS = {*CALL_STATE, "update_count", "update_called", "_update_called"}

_SUBJECTS = re.compile(r"^(A call of the metric `[^`]*` |The training step )")


def keep_states(state: StaticState, name: str, metric: nn.Module) -> None:
    """Give each state of a metric and its members a static tensor."""
    for path, own, attribute in states_of(metric):
        where = f"{name}.{path}" if path else name
        state.keep(own, attribute, f"the state `{attribute}` of the metric `{where}`")


def known_only(known: set[int]) -> AbstractContextManager[None]:
    """Refuse calls of unknown metrics, of which a replay would not repeat the host part."""
    plain = Metric.__setattr__

    def checked(self: Metric, name: str, value: Any) -> None:
        if name == "_update_count" and id(self) not in known:
            forbid(
                f"a call of a `{type(self).__qualname__}` that is no attribute of the model",
                "Make the metric an attribute of the LightningModule.",
                user_location(),
            )
        plain(self, name, value)

    return setting(Metric, __setattr__=checked)


class MetricTrials:
    """Trials of metric calls on copies, under the checks of a capture."""

    def __init__(self, module: nn.Module, trainer: Any, backend: Backend, rules: HostRules) -> None:
        self._trainer = trainer
        self._backend = backend
        self._rules = replace(rules, stays_on_host=lambda module: False)
        # A metric may refer to these, which must not be copied with it.
        self._shared = {id(held): held for held in (module, trainer)}

    def why_not(
        self, name: str, metric: Metric, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> str | None:
        """The reason why a call cannot be in a graph, in a few words; None if it can."""
        if (reason := self._reason_without_trial(metric, method)) is not None:
            return reason
        rng_state = self._backend.rng_state()
        try:
            with outside_inference_mode():  # like a capture
                memo: dict[int, Any] = {}
                copy = self._copy(metric, memo)
                copied_args, copied_kwargs = map_leaves((args, kwargs), _copied)
                copies = [part for part in memo.values() if isinstance(part, Tensor)]
                copies += tensors_in(copied_args, copied_kwargs)
                self._run(name, copy, method, copied_args, copied_kwargs, copies)
        except UnsupportedError as error:
            return _in_short(error)
        except Exception as error:
            # The copy failed, or the call, which the step then makes on the metric itself.
            return f"a trial of it raised `{type(error).__qualname__}`"
        finally:
            draws = not torch.equal(rng_state, self._backend.rng_state())
            if draws:
                self._backend.set_rng_state(rng_state)
        return "it draws random numbers" if draws else None

    def rng_state(self) -> Tensor:
        """The states of the generators of the device and of the host, in host memory."""
        return torch.cat([self._backend.rng_state(), torch.get_rng_state()])

    def _reason_without_trial(self, metric: Metric, method: str) -> str | None:
        if any(True for _ in metric.parameters()):
            return "it holds a network"
        for _, inner in metrics_of(metric):
            if inner.dist_sync_on_step:
                return "`dist_sync_on_step`"
            if any(isinstance(default, list) for default in inner._defaults.values()):
                return "it keeps all that it is given, in a list"
            reduces = method == "forward" and inner.full_state_update is False
            if reduces and not all(r in _REDUCTIONS for r in inner._reductions.values()):
                return "its `forward` reduces a state by another rule than sum, minimum or maximum"
        for _, own, state in states_of(metric):
            value = own.get(state)
            if not isinstance(value, Tensor) or value.device.type != self._backend.device.type:
                return f"its state `{state}` is not on the device"
        return _shared(metric)

    def _copy(self, metric: Metric, memo: dict[int, Any]) -> Metric:
        """A copy, without cached results, which may refer to an autograd graph."""
        memo |= self._shared
        spaces = [vars(inner) for _, inner in metrics_of(metric)]
        for own in spaces:
            if own.get("process_group") is not None:
                memo[id(own["process_group"])] = own["process_group"]
        kept = [{name: own[name] for name in CALL_STATE} for own in spaces]
        try:
            for own in spaces:
                own.update(_computed=None, _forward_cache=None)
            return deepcopy(metric, memo)
        finally:
            for own, attributes in zip(spaces, kept, strict=True):
                own.update(attributes)

    def _run(
        self,
        name: str,
        copy: Metric,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        copies: list[Tensor],
    ) -> None:
        state = StaticState()
        keep_states(state, name, copy)
        copies += tensors_in([own[name] for _, own, name in states_of(copy) if name in own])
        with ExitStack() as stack:
            device = self._backend.device
            audit = step_audit(copy, self._trainer, device, self._rules)
            mentioned = stack.enter_context(audit).mentioned
            stack.enter_context(known_only({id(inner) for _, inner in metrics_of(copy)}))
            stack.enter_context(self._backend.checked())
            with FixedCounts(), NoWrites(copies), Probe(name, copy) as probe:
                getattr(copy, method)(*args, **kwargs)
                call = probe.call()
            if (shared := _shared(copy)) is not None:
                raise CaptureError(f"{shared}.", "Give each its own tensor.")
            state.write_back()
        for output in call.outputs():
            if output.device.type != self._backend.device.type:
                raise CaptureError("its result is not on the device.", "Keep it there.")
        if reads := _READS & mentioned.of_users_objects():
            raise CaptureError(f"its code reads `{sorted(reads)[0]}`.", "Count in a tensor.")


def _shared(metric: Metric) -> str | None:
    """A sentence about two states in the same memory; None if there are none."""
    seen: dict[int, str] = {}
    for _, own, state in states_of(metric):
        value = own.get(state)
        if isinstance(value, Tensor) and value.numel():
            other = seen.setdefault(storage_id(value), state)
            if other is not state:
                return f"its states `{other}` and `{state}` lie in the same memory"
    return None


def _in_short(error: UnsupportedError) -> str:
    """The reason of a refusal, shortened for a list."""
    reason = error.what.split(", in code called by torch")[0].split(", which a replay would not ")[0]
    return _SUBJECTS.sub("it ", reason.replace("A CUDA graph cannot hold", "it needs")).rstrip(".")


def _copied(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)
