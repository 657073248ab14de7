"""Functions of torch that seed or set the generators of a step, and the words of their refusals."""

from __future__ import annotations

from inspect import unwrap
from types import CodeType
from typing import Any

import torch

from lightning_cudagraph.errors import see

SEEDED = (
    "in the step, which a replay would not repeat",
    "Set it in `on_train_batch_start`. Or leave it out: draw numbers that shall be the same in each step"
    " before `fit`, and keep them in a buffer (`register_buffer`)." + see("host_random"),
)
_SET = (
    "in the step, on the CPU emulator",
    "On a GPU this can be captured. On a CPU, leave it out: the step then draws with the numbers of its"
    " own generator, others in each replay." + see("host_random"),
)
_SEEDS: dict[str, Any] = {
    "torch.manual_seed": torch.manual_seed,
    "torch.seed": torch.seed,
    "torch.cuda.manual_seed": torch.cuda.manual_seed,
    "torch.cuda.manual_seed_all": torch.cuda.manual_seed_all,
    "torch.cuda.seed": torch.cuda.seed,
    "torch.cuda.seed_all": torch.cuda.seed_all,
}
_SETTERS: dict[str, Any] = {
    "torch.set_rng_state": torch.set_rng_state,
    "torch.random.fork_rng": torch.random.fork_rng,
}


def seeds(device_type: str) -> dict[CodeType, tuple[str, str, str]]:
    """Functions of torch that set the generators of a step: their names, and the words of a refusal.

    A graph of a GPU can set back a state that it has read, a tape of the emulator cannot.
    """
    found = [(function, name, SEEDED) for name, function in _SEEDS.items()]
    if device_type == "cpu":
        found += [(function, name, _SET) for name, function in _SETTERS.items()]
    return {unwrap(function).__code__: (name, *words) for function, name, words in found}
