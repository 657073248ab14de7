"""torchmetrics inside a captured step: refused for the time being.

A metric rebinds its state at every call, and counts its calls on the host; captured, it would stand
still without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torchmetrics import Metric, MetricCollection

from lightning_cudagraph.capture.sentry import forbid, user_location

__all__ = ["metrics_refused"]


@contextmanager
def metrics_refused(model: nn.Module) -> Iterator[None]:
    """Refuse calls of the model's metrics inside.

    Raises:
        CaptureError: at the call, naming the metric and the user's line.
    """

    def refuse(name: str, metric: nn.Module) -> Any:
        def called(*args: Any, **kwargs: Any) -> None:
            forbid(
                f"a call of the metric `{name}` (`{type(metric).__qualname__}`), whose state is kept by"
                " host code",
                "Return what it needs from `training_step` and update it in `on_train_batch_end`, or"
                " use it in the validation step.",
                user_location(),
            )

        return called

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if isinstance(module, (Metric, MetricCollection)):
                for method in ("forward", "update"):
                    had = module.__dict__.get(method)
                    module.__dict__[method] = refuse(name, module)
                    if had is None:
                        stack.callback(module.__dict__.pop, method)
                    else:
                        stack.callback(module.__dict__.__setitem__, method, had)
        yield
