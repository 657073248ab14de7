"""The memory that the ops of an eager run read or write, as it was before, to put it back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.device.lines.user_lines import user_location
from lightning_cudagraph.device.sentry.autocast import reaching
from lightning_cudagraph.device.sentry.own_modes import InputsMode
from lightning_cudagraph.device.sentry.tables import is_on_tables
from lightning_cudagraph.tensors.writes import storage_id, written_by


class SavedMemory:
    """Copies of storages that are older than a run."""

    def __init__(self) -> None:
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}
        self.made_inside: set[int] = set()

    def before(self, tensors: Iterable[Tensor]) -> None:
        """Copy the older storages among the inputs of an op that follows.

        All inputs, not only those that the schema declares as written: `native_batch_norm` writes its
        running statistics undeclared.
        """
        for tensor in tensors:
            key = storage_id(tensor)
            if key in self._saved or key in self.made_inside:
                continue
            storage = tensor.untyped_storage()
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            self._saved[key] = (whole, whole.clone())

    def after(self, tensors: Iterable[Tensor]) -> None:
        """Note the storages of an op's results that are not older: they were made inside."""
        self.made_inside.update(key for t in tensors if (key := storage_id(t)) not in self._saved)

    @property
    def has_any(self) -> bool:
        """True if something was copied."""
        return bool(self._saved)

    def put_back(self) -> None:
        with torch.no_grad():
            # Two storages may share memory (`from_dlpack`): the copy saved first holds the state before.
            for whole, saved in reversed(self._saved.values()):
                whole.copy_(saved)


class _Saving(InputsMode):
    """Mode that copies what each op reads or writes, before it runs."""

    def __init__(self, memory: SavedMemory) -> None:
        super().__init__()
        self._memory = memory
        self.made = memory.made_inside

    def look(self, func: Any, args: Any, kwargs: dict[str, Any], inputs: list[Tensor]) -> None:
        self._memory.before(filter(_is_plain, inputs))


class UnknownWrites(InputsMode):
    """Mode that finds writes into memory that is older than a run and not known, and undoes them.

    Args:
        known: tensors that may be written.

    Attributes:
        first: the op of the first such write, with the user's line; empty if there is none.
    """

    def __init__(self, device_type: str, known: Iterable[Tensor]) -> None:
        super().__init__()
        self._device_type = device_type
        self._memory = SavedMemory()
        self.made = self._memory.made_inside
        self.made.update(map(storage_id, known))
        self.first = ""

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._memory.put_back()

    def look(self, func: Any, args: Any, kwargs: dict[str, Any], inputs: list[Tensor]) -> None:
        if is_on_tables(func, args, kwargs):
            return
        self._memory.before(filter(_is_plain, written_by(func, args, kwargs)))
        if self._memory.has_any and not self.first:
            where = user_location()
            self.first = f"`{func}`" + (f" at {where}" if where else "")

    def around(self, func: Any) -> AbstractContextManager[Any]:
        return reaching(func, self._device_type)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and type(tensor) in (Tensor, torch.nn.Parameter)


@contextmanager
def undone(backend: Backend, known: Iterable[Tensor]) -> Iterator[None]:
    """Run the `with` block for real, and put memory back, `known` tensors too, and random state."""
    memory = SavedMemory()
    memory.before(known)
    rng_state = backend.rng_state()
    try:
        with _Saving(memory):
            yield
    finally:
        memory.put_back()
        backend.set_rng_state(rng_state)
