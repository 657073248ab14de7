"""torchmetrics inside a captured step.

A metric rebinds its state at every call, counts its calls on the host, and may read values back;
captured, it would stand still without a word. So its calls are put off: the capture notes the metric and
the static tensors that it was given, and after every replay the call is made on copies of these. The
state is the metric's own at any time, for `compute`, `reset` and checkpoints.

What such a call returns is known only after the replay. The step may log it, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torchmetrics import Metric, MetricCollection

from lightning_cudagraph.capture.batch import map_leaves, refuse_hidden_tensors
from lightning_cudagraph.capture.sentry import forbid, user_location

__all__ = ["DeferredCall", "Later", "deferred_metrics", "is_metric"]

_AFTERWARDS = (
    "Return what it needs from `training_step`, and call it in `on_train_batch_end`.",
    "Log it, or use it in `on_train_batch_end`.",
)


@dataclass
class DeferredCall:
    """A call of a metric, to be made after each replay.

    Attributes:
        name: of the metric in the module.
        metric: the metric, or collection of metrics.
        method: ``"forward"`` or ``"update"``.
        arguments: positional and keyword arguments, static tensors among them.
    """

    name: str
    metric: Metric | MetricCollection
    method: str
    arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def make(self) -> list[Any]:
        """Make the call on copies, which the metric may keep; returns the leaves of its result."""
        args, kwargs = map_leaves(self.arguments, _copied)
        return tree_leaves(getattr(self.metric, self.method)(*args, **kwargs))

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that it is given, by name."""
        leaves = [leaf for leaf in tree_leaves(self.arguments) if isinstance(leaf, Tensor)]
        return {f"argument {i} of the metric `{self.name}`": leaf for i, leaf in enumerate(leaves)}


class Later(Tensor):
    """Stands for what a metric returns after the replay; it may be logged, but not looked at."""

    call: DeferredCall
    leaf: int

    @staticmethod
    def of(call: DeferredCall, leaf: int) -> Later:
        """The placeholder of one leaf of what a call returns."""
        value: Later = torch.Tensor._make_subclass(Later, torch.empty(()))
        value.call, value.leaf = call, leaf
        return value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        later = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Later))
        if func is not Tensor.detach:
            later.refuse()
        return later

    def refuse(self) -> None:
        """Refuse a use of the value."""
        forbid(
            f"a use of what the metric `{self.call.name}` returns, which is known only after the replay",
            _AFTERWARDS[1],
            user_location(),
        )


@contextmanager
def deferred_metrics(model: nn.Module, note: Callable[[DeferredCall], None]) -> Iterator[None]:
    """Put off the calls of the model's metrics inside.

    Args:
        model: whose metrics.
        note: told of each call, in order.

    Raises:
        CaptureError: where a metric is computed or reset, or where what it returns is looked at; naming
            the metric and the user's line.
    """

    def put_off(name: str, metric: Metric | MetricCollection, method: str) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            refuse_hidden_tensors((args, kwargs), f"what the metric `{name}` is given")
            arguments = map_leaves((args, kwargs), _detached)
            call = DeferredCall(name, metric, method, arguments)
            note(call)
            return _returned(call) if method == "forward" else None

        return called

    def refuse(name: str, method: str) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> None:
            forbid(
                f"`{name}.{method}()`, because the state of a metric is brought up to date after the"
                " replay",
                _AFTERWARDS[0],
                user_location(),
            )

        return called

    with ExitStack() as stack:
        for name, metric in _metrics(model):
            replaced = {method: put_off(name, metric, method) for method in ("forward", "update")}
            replaced |= {method: refuse(name, method) for method in ("compute", "reset")}
            for method, function in replaced.items():
                if method in metric.__dict__:
                    stack.callback(metric.__dict__.__setitem__, method, metric.__dict__[method])
                else:
                    stack.callback(metric.__dict__.pop, method)
                metric.__dict__[method] = function
        yield


def is_metric(module: Any) -> bool:
    """Whether a module is a metric, or a collection of them."""
    return isinstance(module, (Metric, MetricCollection))


def _metrics(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in model.named_modules() if is_metric(module)]


def _returned(call: DeferredCall) -> Any:
    """Something of the shape of what the call returned in the step before, with nothing in it."""
    metric = call.metric
    if isinstance(metric, Metric):
        last = metric._forward_cache
    else:
        members = metric.items(keep_base=True, copy_state=False)
        last = {metric._set_name(name): member._forward_cache for name, member in members}
        if any(isinstance(value, dict) for value in last.values()):
            forbid(
                f"the result of the collection `{call.name}`, one of whose metrics returns a dictionary",
                f"Call its metrics one by one, or only `{call.name}.update(...)`.",
                user_location(),
            )
    index = iter(range(len(tree_leaves(last))))
    return tree_map(lambda _: Later.of(call, next(index)), last)


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf
