"""The name of the hook that runs, which Lightning keeps in the module, for `self.log` to read."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from lightning_cudagraph.checks.guards.guards import Guards
from lightning_cudagraph.checks.walk.versions import OwnWrites

_NAME = "_current_fx_name"


class CurrentHook:
    """Sets the name around calls of hooks, in the module's dictionary: its `__setattr__` is slow.

    The guards need not compare the dictionary for it.
    """

    def __init__(self, module: pl.LightningModule, guards: Guards) -> None:
        self._guards = guards
        self._writes = OwnWrites(vars(module), _NAME)
        self._before: Any = None

    def begin(self, name: str) -> None:
        self._before = self._writes.held[_NAME]
        self._writes.begin(name)

    def set(self, name: str) -> None:
        """Set the name between `begin` and `end`; hooks that ran meanwhile may have set another."""
        self._writes.write(name)

    def end(self) -> None:
        """Restore the name. As in Lightning, it stays if a hook raises."""
        self._writes.write(self._before)
        self._guards.pass_over(self._writes)
