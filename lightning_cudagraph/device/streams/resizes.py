"""Resizes of storages in the middle of a step, as `fully_shard` does with gathered weights.

A resize allocates or frees memory, and is no op: no dispatch mode sees it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from lightning_cudagraph.compat.attributes import setting

plain_resize: Any = torch.UntypedStorage.resize_


def resizes_told(
    tell: Callable[[torch.UntypedStorage, int], None],
) -> AbstractContextManager[None]:
    """Call `tell` before each resize in this thread, with the storage and its new size in bytes."""
    thread = threading.get_ident()

    def resize_(storage: torch.UntypedStorage, size_bytes: int) -> Any:
        if threading.get_ident() == thread:
            tell(storage, size_bytes)
        return plain_resize(storage, size_bytes)

    return setting(torch.UntypedStorage, resize_=resize_)
