"""The state of objects that a check uses and puts back: dataloaders, samplers, datasets, generators."""

from __future__ import annotations

import lightning.pytorch as pl
import numpy as np
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_cudagraph.checks.walk.host_generators import generator_state
from lightning_cudagraph.checks.walk.scope import Root, Scope
from lightning_cudagraph.checks.walk.walker import Walk

# A file in memory is not read, and the model and the trainer are not a loader's.
_STOPS = (pl.Trainer, pl.LightningModule, np.memmap)


class SavedState:
    """A record of an object, such as a dataloader, several or a datamodule, and of all that it reaches.

    Python objects, NumPy arrays and the states of generators are put back. Iterators and files cannot
    be, and the memory of tensors is not copied; what has changed of these is named.
    """

    def __init__(self, saved: object, name: str) -> None:
        root = Root(saved, "", name, is_entered=True)
        self._walk = Walk([root], Scope(_STOPS, modules=_entered, enters=(DataLoader,)))
        self._name = name
        reached = self._walk.reached
        states = [state for value in reached if (state := generator_state(value)) is not None]
        self._generators = [(write, read()) for read, write in states]
        self._versions = [(value, value._version) for value in reached if isinstance(value, Tensor)]

    def put_back(self) -> list[str]:
        """Restore the record; return what could not be restored, in words."""
        self._walk.put_back()
        for write, state in self._generators:
            write(state)
        moves = self._walk.changes()
        left = [*dict.fromkeys(each.words if each.path else f"{self._name} changed" for each in moves)]
        written = sum(tensor._version != version for tensor, version in self._versions)
        if written:
            left.append(f"{written} tensor(s) of {self._name} were written")
        return left


def _entered(module: nn.Module, path: str, of: str) -> list[Root]:
    """Enter modules too, such as the transforms of a dataset."""
    return [Root(module, path, of, is_entered=True)]
