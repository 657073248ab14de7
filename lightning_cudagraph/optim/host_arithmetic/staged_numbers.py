"""Staged numbers: numbers that the host computes for a replay, in static memory that its graph reads."""

from __future__ import annotations

from array import array
from itertools import chain

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_cudagraph.device.host_work import HostInput
from lightning_cudagraph.optim.gate import Gate, gate_of
from lightning_cudagraph.optim.host_arithmetic.refusal import refused


class Stage:
    """Static input of a graph for numbers that the host computes.

    Attributes:
        numbers: the tensor on the device, in double precision, with three columns: the numbers if the
            step before was done, those if it was skipped, and those for a step that is itself skipped.
    """

    def __init__(self, device: torch.device, size: int) -> None:
        self._input = HostInput(device, size * 3 * 8)
        self.numbers = self._input.memory.view(torch.float64).view(size, 3)
        self._filled = b""

    def fill(self, rows: list[tuple[float, float, float]]) -> None:
        """Copy numbers to the device, on the current stream, unless the last ones were the same."""
        values = array("d", chain.from_iterable(rows))
        if (now := values.tobytes()) == self._filled:
            return
        with self._input.filled(len(now)) as source:
            source.copy_(torch.frombuffer(values, dtype=torch.uint8))
        self._filled = now


class StagedNumbers:
    """The numbers of an optimizer's steps in one graph, in the static input, as tensors for its ops.

    Attributes:
        depend_on_outcome: the graph selects the numbers by the outcome of the step before.
    """

    def __init__(self, stage: Stage, optimizer: Optimizer) -> None:
        self._stage = stage
        self._optimizer = optimizer
        # The slot of each node, and of its numbers that are neutral in a skipped step.
        self._slots: dict[tuple[int, float | None], int] = {}
        self._numbers: Tensor | None = None
        # By type, and the gate of the step that they are neutral in.
        self._casts: dict[tuple[torch.dtype, Gate | None], Tensor] = {}
        self.depend_on_outcome = False

    @property
    def nodes(self) -> list[tuple[int, float]]:
        """The node of the program in each slot, and its neutral number."""
        return [(node, 0.0 if neutral is None else neutral) for node, neutral in self._slots]

    def at(self, node: int, dtype: torch.dtype, neutral: float | None = None) -> Tensor:
        """The value of a node in the static input; if the step is skipped, the neutral number."""
        slot = self._slots.setdefault((node, neutral), len(self._slots))
        if slot >= self._stage.numbers.shape[0]:
            raise refused("computes more numbers on the host than a graph has room for")
        kind = dtype, None if neutral is None else gate_of(self._optimizer)
        if kind not in self._casts:
            self._casts[kind] = self._column(*kind)
        return self._casts[kind][slot]

    def _column(self, dtype: torch.dtype, gate: Gate | None) -> Tensor:
        done, skipped, neutral = self._stage.numbers.unbind(1)
        if self._numbers is None:
            first = gate_of(self._optimizer)
            self.depend_on_outcome = first is not None
            self._numbers = done if first is None else torch.where(first.last_was_skipped, skipped, done)
        if gate is None:
            return self._numbers.type(dtype)
        return torch.where(gate.skip, neutral, self._numbers).type(dtype)
