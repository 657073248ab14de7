"""Every form of torch's optimizers, stepped alone: without this package, and by replays of its step.

The gradients are given, so that only the optimizer is compared: parameters and options after each of
many steps, with gradients that are clipped or not, under schedules of the learning rate and of momentum,
in float32 and float64, and with a gradient scaler and some gradients that overflow. The state is
compared after some steps: in between, the host need not know which of them have overflowed.
`tests/test_optimizer_runs.py` runs a part of it, and::

    python -m tests.optimizer_runs cpu     # or: gpu; then, if you like, names of forms, or: all

a third of it, in which each two settings meet, or all, with a line for each form.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cudagraph.compat.attributes import setting
from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.device.backend_for import backend_for
from lightning_cudagraph.errors import UnsupportedError
from lightning_cudagraph.optim.prepared_optimizer import PreparedOptimizer
from lightning_cudagraph.optim.scaler import PreparedScaler
from tests.harness import differences

O = torch.optim  # noqa: E741

STEPS = 60
WARMUP_STEPS = 3
SHAPES = [(), (1,), (7,), (33, 5), (64, 32), (130,)]
FORMS: dict[str, Callable[[Any], O.Optimizer]] = {
    "Adam": lambda p: O.Adam(p, lr=1e-2),
    "Adam(weight_decay, amsgrad)": lambda p: O.Adam(p, lr=1e-2, weight_decay=0.1, amsgrad=True),
    "Adam(foreach=False)": lambda p: O.Adam(p, lr=1e-2, foreach=False),
    "Adam(foreach=False, amsgrad, maximize)": lambda p: O.Adam(
        p, lr=1e-4, foreach=False, amsgrad=True, maximize=True, weight_decay=0.1
    ),
    "Adam(capturable)": lambda p: O.Adam(p, lr=1e-2, capturable=True),
    "Adam(capturable, foreach=False)": lambda p: O.Adam(p, lr=1e-2, capturable=True, foreach=False),
    "Adam(fused)": lambda p: O.Adam(p, lr=1e-2, fused=True, amsgrad=True),
    "AdamW": lambda p: O.AdamW(p, lr=1e-2, weight_decay=0.1),
    "AdamW(foreach=False)": lambda p: O.AdamW(p, lr=1e-2, foreach=False),
    "AdamW(fused)": lambda p: O.AdamW(p, lr=1e-2, fused=True),
    "NAdam": lambda p: O.NAdam(p, lr=1e-2),
    "NAdam(decoupled)": lambda p: O.NAdam(p, lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True),
    "NAdam of numbers": lambda p: O.NAdam([q for q in p if q.ndim == 0], lr=1e-2),
    "NAdam(foreach=False)": lambda p: O.NAdam(p, lr=1e-2, weight_decay=0.1, foreach=False),
    "RAdam": lambda p: O.RAdam(p, lr=1e-2, weight_decay=0.1),
    "RAdam(foreach=False, decoupled)": lambda p: O.RAdam(
        p, lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True, foreach=False
    ),
    "Adamax": lambda p: O.Adamax(p, lr=1e-2),
    "Adamax(foreach=False)": lambda p: O.Adamax(p, lr=1e-2, weight_decay=0.1, foreach=False),
    "RMSprop": lambda p: O.RMSprop(p, lr=1e-3),
    "RMSprop(momentum, centered)": lambda p: O.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "RMSprop(foreach=False)": lambda p: O.RMSprop(p, lr=1e-3, weight_decay=0.1, foreach=False),
    "RMSprop(foreach=False, momentum, centered)": lambda p: O.RMSprop(
        p, lr=1e-3, momentum=0.9, centered=True, foreach=False
    ),
    "Adadelta": lambda p: O.Adadelta(p, lr=1.0),
    "Adadelta(foreach=False)": lambda p: O.Adadelta(p, lr=1.0, weight_decay=0.1, foreach=False),
    "Adagrad": lambda p: O.Adagrad(p, lr=0.1, lr_decay=0.01),
    "Adagrad(foreach=False, maximize)": lambda p: O.Adagrad(
        p, lr=0.01, lr_decay=0.01, weight_decay=0.1, foreach=False, maximize=True
    ),
    "ASGD": lambda p: O.ASGD(p, lr=1e-2, weight_decay=0.1),
    "ASGD(foreach, t0)": lambda p: O.ASGD(p, lr=1e-2, foreach=True, t0=5, maximize=True),
    "ASGD(foreach=False)": lambda p: O.ASGD(p, lr=1e-2, foreach=False),
    "Adafactor": lambda p: O.Adafactor(p, lr=1e-2, weight_decay=0.1),
    "Adafactor(foreach, maximize)": lambda p: O.Adafactor(p, lr=0.3, foreach=True, maximize=True),
    "Rprop": lambda p: O.Rprop(p),
    "Rprop(foreach=False)": lambda p: O.Rprop(p, foreach=False),
    "SGD": lambda p: O.SGD(p, lr=0.1),
    "SGD(momentum, dampening)": lambda p: O.SGD(p, lr=0.1, momentum=0.9, dampening=0.1),
    "SGD(nesterov)": lambda p: O.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD(foreach=False, nesterov)": lambda p: O.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, foreach=False
    ),
    "SGD(fused, momentum)": lambda p: O.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Muon": lambda p: O.Muon([q for q in p if q.ndim == 2], lr=1e-2),
    "two groups": lambda p: O.AdamW(
        [{"params": p[:3], "weight_decay": 0.0}, {"params": p[3:]}], lr=1e-2
    ),
}
# Several in a row, the last of which is the last before the state is read, and one between two others.
OVERFLOWS = (1, 8, 9, 10, 31, 33)
STATE_READ_EVERY_STEPS = 5
PRECISIONS = {"float32": torch.float32, "float64": torch.float64, "fp16 scaler": torch.float32}
CLIPS = ("no clip", "norm")
SCHEDULES = ("constant", "cosine", "OneCycle")
CELLS = tuple(itertools.product(PRECISIONS, CLIPS, SCHEDULES))
PAIRED_CELLS = tuple(
    cell for cell in CELLS if sum(map(tuple.index, (tuple(PRECISIONS), CLIPS, SCHEDULES), cell)) % 3 == 0
)
SAME, BEHIND, PLAIN_FAILS = "=", "b", "x"


def _schedule(name: str, optimizer: O.Optimizer) -> Any:
    if name == "constant":
        return None
    if name == "cosine":
        return O.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    return O.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=2 * STEPS)


class Run:
    """An optimizer of one of `FORMS` in one of `CELLS`, with parameters, and gradients for each step."""

    def __init__(self, form: str, cell: tuple[str, str, str], device: torch.device) -> None:
        precision, self.clip, schedule = cell
        dtype = PRECISIONS[precision]
        generator = torch.Generator().manual_seed(3)

        def some() -> list[Tensor]:
            made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
            return [each.to(dtype).to(device) for each in made]

        self.parameters = [nn.Parameter(each) for each in some()]
        self.gradients = [some() for _ in range(STEPS)]
        self.scaler: torch.amp.GradScaler | None = None
        if precision == "fp16 scaler":
            self.scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=3)
            self.scaler.scale(torch.ones((), device=device))
            for step in OVERFLOWS:
                self.gradients[step][2][1] = float("inf")
        self.optimizer = FORMS[form](self.parameters)
        self.scheduler = _schedule(schedule, self.optimizer)
        self.seen: list[Any] = []

    def step(self) -> None:
        """Unscale and clip the current gradients, step, and update the scale."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.clip == "norm":
            nn.utils.clip_grad_norm_(self.parameters, 1.0)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def note(self) -> None:
        """Record parameters, options and at times the state, and step the schedule."""
        now: dict[str, Any] = {
            "parameters": [parameter.detach().clone() for parameter in self.parameters],
            "groups": [
                {name: value for name, value in group.items() if name != "params"}
                for group in self.optimizer.param_groups
            ],
            "scale": None if self.scaler is None else self.scaler._scale.clone(),
        }
        if len(self.seen) % STATE_READ_EVERY_STEPS == 0:
            now["state"] = {
                (index, name): value.clone() if isinstance(value, Tensor) else value
                for index, entries in self.optimizer.state_dict()["state"].items()
                for name, value in entries.items()
            }
        self.seen.append(now)
        if self.scheduler is not None:
            self.scheduler.step()

    def put_gradients(self, index: int) -> None:
        """Set the parameters' gradients to those of a step, in place if they have some."""
        for parameter, gradient in zip(self.parameters, self.gradients[index], strict=True):
            if parameter.grad is None:
                parameter.grad = gradient.clone()
            else:
                parameter.grad.copy_(gradient)
        if self.scaler is not None:
            torch._foreach_mul_(
                [p.grad for p in self.parameters if p.grad is not None], self.scaler._scale
            )


def plainly(run: Run) -> list[Any]:
    """All steps, without this package."""
    for index in range(STEPS):
        run.put_gradients(index)
        run.step()
        run.note()
    return run.seen


def replayed(run: Run, backend: Backend) -> tuple[list[Any], int]:
    """All steps but the first few as replays; also returns the number of captures."""
    prepared = PreparedOptimizer(run.optimizer, backend.device, lambda _: None)
    scaler = None
    if run.scaler is not None:
        scaler = PreparedScaler(run.scaler, backend.device, prepared.device_state)
    graph: Any = None
    frozen: Any = None
    captures = 0

    def step(capturing: bool) -> None:
        if scaler is None:
            with prepared.step_arithmetic(capturing):
                run.step()
            return
        with scaler.step_arithmetic((run.optimizer,), capturing), prepared.step_arithmetic(capturing):
            run.step()

    def captured() -> None:
        prepared.check_state()
        step(capturing=True)

    for index in range(STEPS):
        run.put_gradients(index)
        prepared.note_moves()
        prepared.hyperparameters()
        if index < WARMUP_STEPS or (scaler is not None and not scaler.applied):
            with backend.on_side_stream():
                step(capturing=False)
        else:
            if graph is not None and frozen != prepared.frozen_values():
                backend.release(graph)
                graph = None
            if graph is None:
                prepared.bring_state()
                if scaler is None:
                    graph, _ = backend.capture(captured)
                else:
                    with scaler.undone():
                        graph, _ = backend.capture(captured)
                frozen = prepared.frozen_values()
                captures += 1
            with setting(prepared.outcomes, may_be_late=True):
                graph.replay()
        run.note()
    if graph is not None:
        backend.release(graph)
    prepared.restore()
    return run.seen, captures


def outcome(form: str, cell: tuple[str, str, str], device: torch.device) -> tuple[str, int]:
    """The outcome of a cell, and its number of captures.

    Raises:
        AssertionError: if the replays differ from the run without; it names the first difference.
    """
    try:
        expected = plainly(Run(form, cell, device))
    except (RuntimeError, ValueError, AssertionError):
        return PLAIN_FAILS, 0
    try:
        found, captures = replayed(Run(form, cell, device), backend_for(device))
    except UnsupportedError:
        return BEHIND, 0
    for step, (one, other) in enumerate(zip(expected, found, strict=True)):
        differing = differences(one, other)
        assert not differing, f"{form} {cell}, step {step}: {differing[:4]}"
    return SAME, captures


def _outcome_or_failure(
    form: str, cell: tuple[str, str, str], device: torch.device
) -> tuple[str | Exception, int]:
    try:
        return outcome(form, cell, device)
    except Exception as error:  # all of them are to be seen, in one run
        return error, 0


def main(accelerator: str, forms: list[str]) -> None:
    """Run the cells, and print a line for each form."""
    device = torch.device("cuda", 0) if accelerator == "gpu" else torch.device("cpu")
    print(torch.__version__, torch.cuda.get_device_name() if device.type == "cuda" else "CPU")
    every = forms == ["all"]
    cells = CELLS if every else PAIRED_CELLS
    for form in FORMS if every else forms or FORMS:
        letters, failures, most = "", list[str](), 0
        for cell in cells:
            letter, captures = _outcome_or_failure(form, cell, device)
            if isinstance(letter, Exception):
                failures.append(f"    {cell}: {type(letter).__name__}: {str(letter)[:400]}")
                letter = "!"
            letters, most = letters + letter, max(most, captures)
        print(f"{form:44}{letters}  captured at most {most} times", *failures[:3], sep="\n", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
