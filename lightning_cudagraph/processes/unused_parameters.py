"""Parameters that take no part in a captured step, under `find_unused_parameters=True`.

An eager backward pass reads on the host which parameters no process has used, and leaves their gradients
alone. A capture cannot read. So each parameter takes part in it: those that the step leaves out get a
gradient of zeros, which the wrapper averages for them in an eager step too. Behind the backward pass,
parameters that no process uses lose it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_cudagraph.compat.attributes import TENSOR_HOOKS
from lightning_cudagraph.errors import UnsupportedError
from lightning_cudagraph.tensors.batch import flatten_batch, map_leaves

_ONE_BATCH = (
    "Drop the gradients in every step (`zero_grad()`, with `set_to_none=True`), and average those of one"
    " batch; or leave out `find_unused_parameters=True`."
)
# A replay sets no marks.
IS_ACCUMULATED = (
    "with `find_unused_parameters=True`, a step that accumulates gradients marks on the host which"
    " parameters it uses; the step after it, or after a validation, may find such marks"
)


@dataclass(frozen=True)
class UsedParameters:
    """Parameters of a wrapper in one of its passes in a capture, by position.

    Attributes:
        used: those that the step has used in this process.
        unused: all others.
        dropped: those of them that no process was taken to use, so that their gradients were dropped.
    """

    used: frozenset[int]
    unused: frozenset[int]
    dropped: frozenset[int]


class UnusedParameters:
    """The parameters of one wrapper, of which a captured step may leave out some.

    Attributes:
        passes: those of each pass of the last capture through the wrapper.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self._used_anywhere: list[frozenset[int]] = []  # in each pass
        self.passes: list[UsedParameters] = []

    @property
    def is_accumulating(self) -> bool:
        """True if the last forward pass of the wrapper was not one whose gradients were averaged."""
        return not self._ddp.require_forward_param_sync

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        """Let all parameters take part in the enclosed capture."""
        self.passes = []
        ddp, module = self._ddp, self._ddp.module
        is_inside, depth = False, 0

        def begin_wrapper(*call: Any) -> None:
            nonlocal is_inside
            is_inside = True

        def end_wrapper(*call: Any) -> None:
            nonlocal is_inside
            is_inside = False

        def begin(*call: Any) -> None:
            nonlocal depth
            depth += 1
            if not is_inside and torch.is_grad_enabled():
                raise UnsupportedError(
                    "A step with `find_unused_parameters=True` calls the module past its"
                    " `DistributedDataParallel`, with gradients.",
                    "Make the call under `torch.no_grad()`, or between two steps.",
                )

        def end(module: nn.Module, inputs: Any, outputs: Any) -> Any:
            nonlocal depth
            depth -= 1
            # The wrapper calls Lightning's module for its step, which may call the module once more.
            return self._in(outputs) if is_inside and depth == 0 else outputs

        with ExitStack() as stack:
            stack.callback(ddp.register_forward_pre_hook(begin_wrapper).remove)
            stack.callback(ddp.register_forward_hook(end_wrapper).remove)
            # On the module, because the wrapper itself looks at its outputs.
            stack.callback(module.register_forward_pre_hook(begin).remove)
            stack.callback(module.register_forward_hook(end).remove)
            yield

    def settle(self, of_ranks: Sequence[Sequence[UsedParameters]]) -> bool:
        """Note what all processes use; return True if one of them has dropped other gradients."""
        numbers = {len(passes) for passes in of_ranks}
        used = [frozenset().union(*(each.used for each in one)) for one in zip(*of_ranks, strict=False)]
        self._used_anywhere = used
        return len(numbers) > 1 or any(
            each.dropped != each.unused - anywhere
            for passes in of_ranks
            for each, anywhere in zip(passes, used, strict=True)
        )

    def _in(self, outputs: Any) -> Any:
        ddp = self._ddp
        if not torch.is_grad_enabled():
            return outputs
        if not ddp.require_backward_grad_sync:
            raise UnsupportedError(
                "The step accumulates gradients (`no_sync`) with `find_unused_parameters=True`, which"
                " marks on the host which parameters it uses.",
                _ONE_BATCH,
            )
        named = {name: p for name, p in ddp.module.named_parameters() if p.requires_grad}
        parameters = [*named.values()]
        if len(parameters) != table_of(ddp).numel():
            raise UnsupportedError(
                "Under `find_unused_parameters=True`, other parameters of the module require gradients"
                " than when it was wrapped, or some were to be ignored.",
                "Freeze parameters before the module is wrapped (in `__init__` or `setup`).",
            )
        reached = _reached(leaf for _, leaf in flatten_batch(outputs) if isinstance(leaf, Tensor))
        used = frozenset(index for index, p in enumerate(parameters) if id(p) in reached)
        unused = frozenset(range(len(parameters))) - used
        number = len(self.passes)
        known = self._used_anywhere[number] if number < len(self._used_anywhere) else frozenset()
        dropped = unused - known
        self.passes.append(UsedParameters(used, unused, dropped))
        if not unused:
            return outputs
        left_out = {name: p for index, (name, p) in enumerate(named.items()) if index in unused}
        for name, parameter in left_out.items():
            if any(getattr(parameter, kind, None) for kind in TENSOR_HOOKS):
                raise UnsupportedError(
                    f"`{name}` takes no part in a step with `find_unused_parameters=True`, and has a"
                    " hook, which an eager step does not call.",
                    "Register the hook with a tensor that the step computes, or write it into"
                    " `on_before_optimizer_step`.",
                )
        taking = _Taking(left_out, [parameters[index] for index in sorted(dropped)])

        def taking_part(leaf: Any) -> Any:
            if not (isinstance(leaf, Tensor) and leaf.requires_grad):
                return leaf
            apply: Any = _TakePart.apply  # untyped in some versions
            return apply(leaf, taking, *left_out.values())

        return map_leaves(outputs, taking_part)


def table_of(ddp: DistributedDataParallel) -> Tensor:
    """The wrapper's table on the device: the numbers of processes that have used each parameter."""
    table: Tensor = ddp.reducer._get_local_used_map()
    return table


@dataclass(frozen=True)
class _Taking:
    """The gradients of parameters that the step leaves out.

    Attributes:
        left_out: the parameters by name.
        dropped: those of them that no process uses.
    """

    left_out: dict[str, nn.Parameter]
    dropped: list[nn.Parameter]

    def begin(self) -> None:
        if (name := next((n for n, p in self.left_out.items() if p.grad is not None), None)) is not None:
            raise UnsupportedError(
                f"`{name}` takes no part in a step with `find_unused_parameters=True`, and has a"
                " gradient from before it.",
                _ONE_BATCH,
            )
        engine: Any = torch.autograd.Variable._execution_engine
        # Behind the wrapper's own callback, which is queued later than this one, and sets gradients.
        engine.queue_callback(lambda: engine.queue_callback(self._end))

    def _end(self) -> None:
        for parameter in self.dropped:
            parameter.grad = None


class _TakePart(torch.autograd.Function):
    """Identity of an output, through whose backward pass other parameters get gradients of zeros."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, taking: _Taking, *left_out: Tensor) -> Tensor:
        ctx.taking, ctx.left_out = taking, left_out
        ctx.set_materialize_grads(False)  # an output of which no loss is made has no gradient
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return None, None, *(None for _ in ctx.left_out)
        ctx.taking.begin()
        zeros = [torch.zeros((), dtype=p.dtype, device=p.device).expand_as(p) for p in ctx.left_out]
        return gradient, None, *zeros


def _reached(outputs: Iterable[Tensor]) -> set[int]:
    """The ids of the leaves that a backward pass from these outputs reaches."""
    nodes = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen, reached = {*nodes}, set()
    while nodes:
        node = nodes.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            reached.add(id(leaf))
        following = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= following
        nodes += following
    return reached
