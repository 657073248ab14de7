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

from lightning_cudagraph.errors import UnsupportedError
from lightning_cudagraph.tensors.batch import flatten_batch, map_leaves


@dataclass(frozen=True)
class UsedParameters:
    """Parameters of a wrapper in a capture, by position among those that require gradients.

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
        last: those of the last capture; None if it has averaged no gradients.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self._used_anywhere: frozenset[int] = frozenset()
        self.last: UsedParameters | None = None

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        """Let all parameters take part in the enclosed capture."""
        self.last = None
        module, depth = self._ddp.module, 0

        def begin(*call: Any) -> None:
            nonlocal depth
            depth += 1

        def end(module: nn.Module, inputs: Any, outputs: Any) -> Any:
            nonlocal depth
            depth -= 1
            # The wrapper calls Lightning's module for its step, which may call the module once more.
            return self._in(outputs) if depth == 0 else outputs

        with ExitStack() as stack:
            # On the module, because the wrapper itself looks at its outputs.
            stack.callback(module.register_forward_pre_hook(begin).remove)
            stack.callback(module.register_forward_hook(end).remove)
            yield

    def table(self) -> Tensor:
        """The numbers of processes that have used each parameter, as of the last eager step."""
        table: Tensor = self._ddp.reducer._get_local_used_map()
        return table

    def settle(self, of_ranks: Sequence[UsedParameters | None]) -> bool:
        """Note what all processes use; return True if one of them has dropped other gradients."""
        known = [each for each in of_ranks if each is not None]
        self._used_anywhere = frozenset().union(*(each.used for each in known))
        return any(each.dropped != each.unused - self._used_anywhere for each in known)

    def _in(self, outputs: Any) -> Any:
        ddp = self._ddp
        if not (torch.is_grad_enabled() and ddp.require_backward_grad_sync):
            return outputs
        parameters = [p for p in ddp.module.parameters() if p.requires_grad]
        reached = _reached(leaf for _, leaf in flatten_batch(outputs) if isinstance(leaf, Tensor))
        used = frozenset(index for index, p in enumerate(parameters) if id(p) in reached)
        unused = frozenset(range(len(parameters))) - used
        dropped = unused - self._used_anywhere
        self.last = UsedParameters(used, unused, dropped)
        if not unused:
            return outputs
        taking = _Taking(
            {name: p for name, p in ddp.module.named_parameters() if p.requires_grad},
            [parameters[index] for index in sorted(dropped)],
        )
        left_out = [parameters[index] for index in sorted(unused)]

        def taking_part(leaf: Any) -> Any:
            if not (isinstance(leaf, Tensor) and leaf.requires_grad):
                return leaf
            return _TakePart.apply(leaf, taking, *left_out)  # type: ignore[no-untyped-call]

        return map_leaves(outputs, taking_part)


@dataclass(frozen=True)
class _Taking:
    """The gradients of parameters that the step leaves out."""

    named: dict[str, nn.Parameter]
    dropped: list[nn.Parameter]

    def begin(self, left_out: Iterable[Tensor]) -> None:
        if any(parameter.grad is not None for parameter in left_out):
            ids = {id(parameter) for parameter in left_out if parameter.grad is not None}
            name = next(name for name, parameter in self.named.items() if id(parameter) in ids)
            raise UnsupportedError(
                f"`{name}` takes no part in a step with `find_unused_parameters=True`, and has the"
                " gradient of a step before, to which an eager step adds nothing.",
                "Drop the gradients in every step, with `set_to_none=True` and without accumulation; or"
                " freeze the parameter with `requires_grad_(False)`.",
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
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.taking.begin(ctx.left_out)
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
