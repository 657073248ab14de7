"""Methods and properties of `Tensor` that user code has bound to something else: refused.

What the step calls is in its graph, and a wrapper with it. But the host calls them between steps, too:
to move batches, say, and to add up what is logged. With replays it makes other calls.
"""

from __future__ import annotations

import os

from torch import Tensor

from lightning_cudagraph.device.lines.user_lines import TORCH_DIR
from lightning_cudagraph.errors import UnsupportedError

_TORCHS = f"{TORCH_DIR}_tensor.py"


def refuse_rebound_methods() -> None:
    """Refuse wrappers in place of what `Tensor` has from its base class, which is written in C."""
    in_c = vars(Tensor.__base__)
    for name, value in vars(Tensor).items():
        if name in in_c and value is not in_c[name] and _file_of(value) != _TORCHS:
            raise UnsupportedError(
                f"`torch.Tensor.{name}` is bound to a `{type(value).__qualname__}` that is not torch's."
                " The host may call it between steps, and with replays it makes other calls there.",
                "Leave it as it is, and call a function of yours where the step needs one.",
            )


def _file_of(value: object) -> str:
    code = getattr(value, "__code__", None)
    return "" if code is None else os.path.abspath(code.co_filename)
