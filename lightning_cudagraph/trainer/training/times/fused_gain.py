"""Measurement of the time that a fused optimizer would save, on copies at the end of a run."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cudagraph.device.host_work import HostWork, host_work_of
from lightning_cudagraph.errors import UnsupportedError
from lightning_cudagraph.optim.prepared_optimizer import PreparedOptimizer
from lightning_cudagraph.optim.supported_optimizers import step_hooks

# Fewer replays than this are not worth a measurement, which takes some tens of milliseconds.
_MIN_REPLAYS = 500
# A smaller share of the step is not worth a change of the optimizer.
_MIN_SHARE = 0.02
_REPLAYS = 20
# Parameter, gradient and up to three tensors of state; the rest is what else is on the GPU.
_COPIES, _MAX_SHARE_OF_FREE = 5, 0.5


def fused_notes(optimizer: Optimizer, replayed: int, replay_ms: float | None) -> list[str]:
    """Return a note for the report on what `fused=True` would save in the step of the optimizer.

    None if that is little or unknown: on a CPU, in a short run, without a fused kernel in torch, or if
    free memory is scarce.
    """
    if replay_ms is None or replayed < _MIN_REPLAYS:
        return []
    defaults = optimizer.defaults
    is_torchs = type(optimizer).__module__.startswith("torch.optim.")
    if not is_torchs or "fused" not in defaults or defaults["fused"] or defaults.get("differentiable"):
        return []
    if step_hooks(optimizer):  # some are global, and would run around the steps of the copy
        return []
    groups = [
        [parameter for parameter in group["params"] if parameter.grad is not None]
        for group in optimizer.param_groups
    ]
    parameters = [parameter for group in groups for parameter in group]
    if not parameters or not all(map(_is_plain, parameters)):
        return []
    needed_bytes = _COPIES * sum(parameter.nbytes for parameter in parameters)
    free_bytes, _ = torch.cuda.mem_get_info(parameters[0].device)
    if needed_bytes > free_bytes * _MAX_SHARE_OF_FREE:
        return []
    try:
        present_ms = _step_ms(optimizer, groups, {})
        # torch captures no other form of it.
        fused_ms = _step_ms(optimizer, groups, {"fused": True, "foreach": None, "capturable": True})
    except (RuntimeError, UnsupportedError):  # no fused kernel for this optimizer, device or dtype
        return []
    share = (present_ms - fused_ms) / replay_ms
    if share < _MIN_SHARE:
        return []
    note = (
        f"`{type(optimizer).__name__}(..., fused=True)` would step in {fused_ms:.3f} ms instead of"
        f" {present_ms:.3f} ms, {share:.0%} of a step (measured on copies at the end of the run); its"
        " numbers differ from those of the default form in the last place"
    )
    return [note]


def _is_plain(parameter: Tensor) -> bool:
    return (
        parameter.is_cuda
        and parameter.is_floating_point()
        and not parameter.is_sparse
        and type(parameter) is nn.Parameter
    )


def _step_ms(optimizer: Optimizer, groups: list[list[Tensor]], form: dict[str, Any]) -> float:
    """Time the step of a copy of an optimizer in a graph of this package, on zeros.

    The options in `form` replace the optimizer's.
    """
    copies = []
    for group, parameters in zip(optimizer.param_groups, groups, strict=True):
        zeros = [nn.Parameter(torch.zeros_like(parameter)) for parameter in parameters]
        for zero in zeros:
            zero.grad = torch.zeros_like(zero)
        options = {
            name: value for name, value in {**group, **form}.items() if name in optimizer.defaults
        }
        copies.append({**options, "params": zeros})
    make: Any = type(optimizer)
    copy = make([group for group in copies if group["params"]])
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        copy.step()  # makes the state
    torch.cuda.current_stream().wait_stream(side_stream)
    prepared = PreparedOptimizer(copy, copies[0]["params"][0].device, lambda reason: None)
    graph = torch.cuda.CUDAGraph()
    with ExitStack() as stack:
        stack.callback(prepared.restore)
        prepared.check_state()
        stack.enter_context(host_work_of([HostWork()]))
        # Threads of loaders may call CUDA meanwhile.
        stack.enter_context(torch.cuda.graph(graph, capture_error_mode="thread_local"))
        stack.enter_context(prepared.step_arithmetic(capturing=True))
        copy.step()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    start.record()
    for _ in range(_REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    graph.reset()
    elapsed_ms: float = start.elapsed_time(end)
    return elapsed_ms / _REPLAYS
