"""Audit of a captured step: refuse values that the capture would freeze, and effects that it would lose.

Host code in a captured step runs once, at the capture. A value that it read stays what it was; an
attribute that it set is not set again; a random number that it drew stays the same; a line that it
printed is not printed again. The interpreter's profiling hook sees calls (`calls/host_calls.py`), a
comparison of objects before and after the step sees changes (`walker.py`), and a read of a number that
is another in each step is refused, unless it has few values (`moving_number`).
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterable, Iterator, Mapping, MutableSequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_cudagraph.checks.audit.calls.host_calls import HostCalls
from lightning_cudagraph.checks.audit.calls.rules import HostRules, allowance, frozen_read
from lightning_cudagraph.checks.audit.host_lines import NUMPYS_OWN, first_line, nearest_line
from lightning_cudagraph.checks.audit.read_remedies import (
    DRAW_THE_MASK,
    IN_A_HOST_HOOK,
    is_dropout,
    remedy_of_number,
)
from lightning_cudagraph.checks.walk.host_objects import UNSET, VALUES, attributes_of, is_users_class
from lightning_cudagraph.checks.walk.parts import UNSTEADY, Moved
from lightning_cudagraph.checks.walk.scope import Namespace, Root, Scope
from lightning_cudagraph.checks.walk.walker import Walk
from lightning_cudagraph.compat.attributes import OfThread, setting
from lightning_cudagraph.compat.garbage import garbage_kept
from lightning_cudagraph.compat.names.torch_names import _disable_current_modes
from lightning_cudagraph.device.lines.user_lines import user_location
from lightning_cudagraph.device.refusals.consumers import consumers, consumers_of_attribute, is_called
from lightning_cudagraph.device.refusals.first_refusal import (
    FirstRefusal,
    backward_ended,
    first_refusal_kept,
    is_gathering,
    refuse,
)
from lightning_cudagraph.device.refusals.host_reads import of_library
from lightning_cudagraph.device.refusals.instead import of_draw, of_place
from lightning_cudagraph.errors import CaptureError, Location, UnsupportedError, see
from lightning_cudagraph.tensors.host_values import HostRead, HostReads, HostValue
from lightning_cudagraph.tensors.local import address_of

# A value that a number has for fewer steps, on average, is not worth a graph.
_FEW_STEPS = 32

_HOST_HOOK = f"Do it {IN_A_HOST_HOOK}"
_PLACES = "indices_and_lengths"
_LAST = (
    "a registered buffer, with `self.kept.copy_(torch.cat([self.kept, new.detach()])[-len(self.kept):])`"
)
_LAST_OF_LIST = (
    "a registered buffer, with `self.kept.copy_(torch.cat([self.kept[1:], new.detach()[None]]))`"
)


def moving_number(reads: HostReads, name: str, value: int, max_graphs: int) -> HostValue:
    """A number that is another in each step, for a capture: what is read of it may have a few values.

    Each of them has a graph of its own. Any other read is refused; one behind the capture is not, as of
    a logger that has kept the number and saves it at the end.
    """

    def has_many(read: HostRead) -> bool:
        ahead = range(value, value + _FEW_STEPS * max_graphs)
        return len({read.of(number) for number in ahead}) > max(max_graphs, 2)

    def refuse_read(read: HostRead) -> None:
        if not HostReads.captures and not is_gathering():
            return
        computed = "" if read.text == read.path else read.text
        where = user_location()
        error = frozen_read(
            read.path, where, remedy_of_number(read.path, where, reads.returned), computed
        )
        error.remedy = of_library(where, error.remedy)
        refuse(error)

    return reads.beside_batch(name, value, has_many, refuse_read)


class StepAudit:
    """The audit of a step: the objects that it can change, and the hook that watches its calls."""

    def __init__(self, model: nn.Module, device: torch.device, rules: HostRules) -> None:
        self._rules = rules
        with _disable_current_modes():  # it is no part of the step, and on no tape of it
            self._storages = {
                name: (tensor, tensor.detach(), address_of(tensor))
                for name, tensor in (*model.named_parameters(), *model.named_buffers())
            }
        self._noted = FirstRefusal()
        self.state = Walk(scope=_scope(rules, device))
        self.calls = HostCalls(rules, self.state, lambda: self.after_backward, device.type)
        self.mentioned = self.calls.mentioned
        self.after_backward = False

    def begin(self, noted: FirstRefusal) -> None:
        self._noted = noted
        self.after_backward = False

    def end_backward(self) -> None:
        """Check the changes so far; later ones come from the optimizer's part of the step."""
        self.check()
        self.after_backward = True
        backward_ended()

    def check(self) -> None:
        """Refuse the step if it has had an effect so far, with the user's line."""
        if self._noted.first is not None:  # user code may have caught it
            self._refuse(self._noted.first)
        for change in self.state.changes():
            if not change.is_harmless(self._rules.harmless):
                where = self.calls.where(change) or nearest_line(change, self.mentioned.users_code)
                error = effect_error(change, where)
                if others := self.calls.other_draws(change, where):
                    lines = ", ".join(map(str, others))
                    error.what += f" It is named in other lines of the file too: {lines}."
                self._refuse(error, change.subject, change.holder)
        for name, (tensor, _, address) in self._storages.items():
            if address_of(tensor) != address:
                where = first_line("data", False, self.mentioned.users_code)
                self._refuse(
                    CaptureError(
                        f"The training step gives `{name}` another storage (`.data = ...`), which a"
                        " replay would not do.",
                        "Write into it: `copy_`, `mul_`, under `torch.no_grad()`.",
                        location=where,
                    ),
                    (name, "data"),
                )

    def _refuse(self, error: UnsupportedError, subject: Hashable = None, holder: object = None) -> None:
        is_optimizers = isinstance(holder, type) and issubclass(holder, Optimizer)
        error.in_optimizer = self.after_backward or is_optimizers
        refuse(error, subject)

    def put_back(self) -> None:
        self.state.put_back()
        for tensor, as_it_was, address in self._storages.values():
            if address_of(tensor) != address:
                tensor.data = as_it_was


# True in the first eager pass of a check, which is audited as a capture is.
_audits_rehearsals: OfThread[bool] = OfThread(False)


def rehearsals_audited() -> AbstractContextManager[None]:
    """Audit the eager passes of a step; otherwise captures alone are audited."""
    return setting(_audits_rehearsals, value=True)


def is_audited(capturing: bool) -> bool:
    """True if the step that is about to run must be audited."""
    return capturing or _audits_rehearsals.value


# The audits that captures share, by model; None if each has its own.
_shared: OfThread[dict[int, StepAudit] | None] = OfThread(None)


def one_audit() -> AbstractContextManager[None]:
    """Let the captures of one step share the audit of the first.

    They run the same Python from the same state, and the first has read nothing that moves. So the calls
    of the others are not watched, which takes half of the time of a capture. What they change is.
    """
    return setting(_shared, value={})


@contextmanager
def step_audit(
    model: nn.Module,
    trainer: Any,
    device: torch.device,
    rules: HostRules,
    others: Mapping[str, Any] | None = None,
) -> Iterator[StepAudit]:
    """Refuse a step with effects on the host that a replay would not have.

    If the step is refused or fails, all watched objects are restored. Python collects no garbage
    meanwhile, because the step does not do what finalizers do.

    Args:
        trainer: the trainer or None; its own switches and numbers are watched, and no object below it.
        others: the user's objects that the step gets, by name; watched with all that they hold.

    Yields:
        The audit. Call its `end_backward` after the backward pass.
    """
    with garbage_kept(), _audited(model, trainer, device, rules, others or {}) as audit:
        yield audit


@contextmanager
def _audited(
    model: nn.Module, trainer: Any, device: torch.device, rules: HostRules, others: Mapping[str, Any]
) -> Iterator[StepAudit]:
    shared = {} if _shared.value is None else _shared.value
    known = shared.get(id(model))
    audit = known or StepAudit(model, device, rules)
    try:
        if known is None:
            audit.state.add(*_roots(model, trainer, others))
        else:
            audit.state.record_again()  # patches of each capture are objects of their own
        with first_refusal_kept() as noted, audit.calls if known is None else nullcontext():
            audit.begin(noted)
            yield audit
        audit.check()
        if is_gathering():
            audit.put_back()
    except BaseException:
        if is_gathering():
            audit.check()
        audit.put_back()
        raise
    finally:
        if known is None:
            audit.state.release()
    shared[id(model)] = audit


def _scope(rules: HostRules, device: torch.device) -> Scope:
    def modules(found: nn.Module, path: str, of: str) -> Iterator[Root]:
        for name, module in found.named_modules(prefix=path):
            if not rules.stays_on_host(module):
                of = f"`{name}`" if name else f"the `{type(module).__qualname__}`"
                yield Root(module, "", of, is_entered=True)

    # On a CPU, replays draw new numbers from torch's generators.
    stops = (*rules.stops, *((torch.Generator,) if device.type == "cpu" else ()))
    return Scope(stops, modules=modules, in_capture=True, harmless=rules.harmless)


def _roots(model: nn.Module, trainer: Any, others: Mapping[str, Any]) -> Iterable[Root]:
    """The roots of the walk over objects that a step can change."""
    yield Root(torch.default_generator, "torch.default_generator", "")
    yield Root(random.getstate.__self__, "random", "")  # type: ignore[attr-defined]
    yield Root(NUMPYS_OWN, "numpy.random", "")
    yield Root(model, "", "")
    if trainer is not None:  # its own numbers, switches and strings alone
        values = vars(trainer)
        names = frozenset(name for name, value in [*values.items()] if type(value) in VALUES)
        yield Root(Namespace(values), "", f"the `{type(trainer).__qualname__}`", reads=names)
    for name, value in others.items():
        kind = type(value)
        if is_users_class(kind) and attributes_of(value) is not None:
            yield Root(value, "", f"the `{kind.__qualname__}`")
        else:
            yield Root(value, name, "the step")


def _is_in_hook(where: Location | None) -> bool:
    return where is not None and where.function.startswith("on_")


def _keep(where: Location | None) -> str:
    if _is_in_hook(where):  # a hook returns nothing
        return "bind the tensor itself to an attribute, `self.kept = ...`, and read it"
    return "return it, and take it from the outputs"


class SetOption(tuple[str, str]):
    """The subject of an error for an option of an optimizer: that of a change of its param group.

    Attributes:
        item: the option, as `['lr']`.
    """

    item: str


def option_error(path: str, of: str) -> CaptureError:
    """The error for a step that sets an option of an optimizer, such as `param_groups[0]['lr']`."""
    error = CaptureError(
        f"The training step sets or changes `{path}` of {of}, which a replay would not do.",
        "Set it in `on_train_batch_start`, or let a scheduler do so, such as `LambdaLR` with"
        ' `"interval": "step"`.' + see("changing_numbers"),
    )
    error.is_effect = True
    error.subject = SetOption((path.rpartition("[")[0], of))
    error.subject.item = "[" + path.rpartition("[")[2]
    return error


def _holds_tensors(value: Any) -> bool:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
    return any(isinstance(each, Tensor) for each in values)


def _is_state(change: Moved) -> bool:
    """True for a list of tensors that is another one in each step, or has others in their places."""
    if isinstance(change.holder, list):
        return change.was is not UNSET and isinstance(change.now, Tensor) and bool(_owner(change))
    is_list = isinstance(change.now, list) and all(isinstance(each, Tensor) for each in change.now)
    return is_list and isinstance(change.holder, nn.Module)


def _is_returnable(change: Moved, where: Location | None) -> bool:
    """True for a tensor or a float that the step itself appends to a list: it can return it."""
    if not (_holds_tensors(change.now) or type(change.now) is float):
        return False
    is_in_step = where is not None and (where.function == "training_step" or is_called(where))
    return isinstance(change.holder, MutableSequence) and (is_in_step or not _owner(change))


def _of_pointer(change: Moved, where: Location | None) -> str:
    """The remedy for a whole number of a module by which the step that changes it finds places."""
    if where is None or type(change.now) is not int or not isinstance(change.holder, nn.Module):
        return ""
    name = f"{_owner(change)}{change.name}"
    places = of_place(consumers_of_attribute(where, change.attribute), name)
    return places and (
        "Keep it in a registered buffer, a tensor of whole numbers without dimensions, which the step"
        f" writes: `{name}.copy_(...)` for `{name} = ...`. {places}"
    )


def _is_longer(change: Moved) -> bool:
    """True for an attribute with another number of tensors than before."""
    both = all(isinstance(each, (list, tuple)) for each in (change.was, change.now))
    return both and len(change.was) != len(change.now) and _holds_tensors([*change.now])


def _is_resized(change: Moved) -> bool:
    both = isinstance(change.was, Tensor) and isinstance(change.now, Tensor)
    return both and change.was.shape != change.now.shape


def _owner(change: Moved) -> str:
    """The object with the changed attribute, as its code has it; empty for a variable."""
    if change.of.startswith("`"):
        return f"self.{change.of.strip('`')}."
    return "self." if change.of.startswith("the `") else ""


def _to_keep(change: Moved, keep: str) -> str:
    """The remedy for tensors that the step leaves in a container, or in another object."""
    owner = _owner(change)
    if owner:
        keep = (
            " To keep it, let an attribute of a module be the tensor itself, `module.kept ="
            " output.detach()`, and read it in `on_train_batch_end`."
        )
    if not any(isinstance(each, (dict, list)) for each in (change.holder, change.now)):
        return keep.strip()
    return (
        "If the step alone reads it, empty it before the step returns:"
        f" `{owner}{change.name}.clear()`.{keep}"
    )


# Replays do not draw, and so other code would get other numbers of the generator.
_NO_OTHER_DRAWS = ", and nothing else draws from this generator (a dataset, an augmentation)"


def effect_error(change: Moved, where: Location | None) -> CaptureError:
    """The error for an effect of a step on the host."""
    named = f"`{change.name}`" + (f" of {change.of}" if change.of else "")
    allowed = allowance(change.name, _NO_OTHER_DRAWS if change.draws else "")
    if change.draws:
        remedy = of_draw(() if where is None else consumers(where, change.attribute), allowed)
        return CaptureError(
            f"The training step draws from {named}, on the host: every replay would use the numbers"
            " of this one step.",
            of_library(where, remedy + see("host_random")),
            location=where,
        )
    if change.label == UNSTEADY:
        return CaptureError(
            f"{named} changes while it is looked at: what the training step does to it is not known.",
            f"Write to it between steps, or keep it where the step does not read it.{allowed}",
            location=where,
        )
    if isinstance(change.holder, dict) and "params" in change.holder:
        error = option_error(change.path, change.of)
        error.location = where
        return error
    if change.registered:
        of = "self" if change.of.startswith("the ") else change.of.strip("`")
        return CaptureError(
            f"The training step puts another tensor into the {change.registered} {named}; a replay would"
            " go on with the one that was there at the capture.",
            f"Write into it, `{of}.{change.name}.copy_(...)`, under `torch.no_grad()`. `harmless` cannot"
            " allow it." + see("kept_tensors"),
            location=where,
        )
    keep = f" To keep what the step computes, {_keep(where)} in `on_train_batch_end`."
    remedy = f"{_HOST_HOOK}.{keep}"
    recipe = "counters"
    if change.label == "p" and is_dropout(change.holder):
        remedy, recipe = DRAW_THE_MASK, "changing_numbers"
    elif _is_longer(change):
        remedy = f"Keep one size from the first step on: {_LAST_OF_LIST}."
        recipe = "kept_tensors"
    elif _is_state(change):
        remedy = (
            f"Keep a tuple, `self.{change.attribute} = tuple(...)`: its tensors go from replay to"
            " replay."
        )
        recipe = "kept_tensors"
    elif _is_resized(change):
        remedy = (
            "Keep one size: by `DataLoader(drop_last=True)`, if it is that of the batch; else, from the"
            f" first step on, {_LAST}."
        )
        recipe = "kept_tensors"
    elif _is_returnable(change, where):
        remedy = (
            f"{keep.strip()} If later steps read it: the last one as an attribute, `self.last ="
            f" new.detach()`; the last few in {_LAST_OF_LIST}."
        )
    elif _holds_tensors(change.now):
        remedy = _to_keep(change, keep)
        recipe = "forward_hooks"
    elif pointer := _of_pointer(change, where):
        remedy, allowed, recipe = pointer.removesuffix(see(_PLACES)), "", _PLACES
    elif type(change.now) is int:
        remedy += (
            " For a choice in every n-th step, compare `batch_idx` or `global_step`: each path has a"
            " graph."
        )
    if where is not None and _is_in_hook(where):
        named += f" (in `{where.function}`, a hook that is inside the graph)"
    error = CaptureError(
        f"The training step sets or changes {named}, which a replay would not do: it would keep what"
        " this one step left there.",
        of_library(where, remedy + allowed + see(recipe), keep + allowed),
        location=where,
    )
    error.is_effect = True
    return error
