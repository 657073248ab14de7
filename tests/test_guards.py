"""What a graph has baked in is seen to change, before the replay that would be wrong."""

from __future__ import annotations

import operator
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback, ModelCheckpoint
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_cudagraph import CUDAGraphCallback, GraphedStep
from lightning_cudagraph.checks.audit.mentions import MentionedNames
from lightning_cudagraph.checks.guards.changes import Change
from lightning_cudagraph.checks.guards.guards import (
    GuardedValues,
    Guards,
    OutsideModel,
    Unguarded,
)
from lightning_cudagraph.checks.guards.remedies import kind_of
from lightning_cudagraph.checks.guards.switches import global_switches
from lightning_cudagraph.checks.walk.scope import Root, Scope
from lightning_cudagraph.checks.walk.walker import Walk
from lightning_cudagraph.device.sentry.op_rewrites import HostMemory
from lightning_cudagraph.tensors import layouts
from lightning_cudagraph.trainer.training.hooks.user_hooks import undisturbed
from tests.harness import Net, assert_same, make, train

NAN = float("nan")


def _no_state() -> dict[str, Any]:
    return {}


class _Layers(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("maybe", None)


def _guards(
    model: nn.Module, mentions: Collection[str] = (), codes: Collection[Any] = (), **external: Any
) -> Guards:
    values = GuardedValues(_no_state, _no_state)
    unguarded = Unguarded(frozenset(vars(nn.Module())))
    guards = Guards(model, values, unguarded, OutsideModel(**external))
    guards.mentioned.append(MentionedNames(users={*mentions}, users_code=[*codes]))
    guards.take(model)
    assert guards.changed() is None
    return guards


def _other_data(model: Any) -> None:
    model.layers[2].weight.data = torch.ones(2, 2)


def _other_parameter(model: Any) -> None:
    model.layers[2].weight = nn.Parameter(model.layers[2].weight.data)  # at the same address


def _other_module(model: Any) -> None:
    model.layers[1] = nn.Linear(2, 2)


def _more_modules(model: Any) -> None:
    model.layers[1].more = nn.Identity()


def _other_buffer(model: Any) -> None:
    model.norm.running_mean = torch.ones(2)


def _no_buffer(model: Any) -> None:
    model.norm.running_mean = None


def _new_buffer(model: Any) -> None:
    model.maybe = torch.ones(2)


def _frozen(model: Any) -> None:
    model.layers[3].bias.requires_grad_(False)


def _mode(model: Any) -> None:
    model.norm.eval()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_other_data, "the address of parameter `layers.2.weight` changed"),
        (_other_parameter, "the parameter `layers.2.weight` changed from a `Parameter` to another one"),
        (_other_module, "the module `layers.1` changed from a `Linear` to another one"),
        (_more_modules, "the module `layers.1.more` was set"),
        (_other_buffer, "the address of buffer `norm.running_mean` changed"),
        (_no_buffer, "the address of buffer `norm.running_mean` was removed"),
        (_new_buffer, "the address of buffer `maybe` was set"),
        (_frozen, "`requires_grad` of parameter `layers.3.bias` changed from True to False"),
        (_mode, "`training` of `norm` changed from True to False"),
    ],
)
def test_objects_are_compared_before_every_replay(change: Callable[[Any], None], words: str) -> None:
    model = _Layers()
    guards = _guards(model)
    change(model)
    assert words in (guards.changed() or "")


def test_a_buffer_that_was_bound_anew_is_compared_from_then_on() -> None:
    model = _Layers()
    guards = _guards(model)
    model.norm.running_mean = model.norm.running_mean.view(2)
    assert guards.changed() is None
    model.norm.running_mean.data = torch.ones(2)
    assert "the address of buffer `norm.running_mean` changed" in (guards.changed() or "")
    del model.norm.running_mean
    assert "the address of buffer `norm.running_mean` was removed" in (guards.changed() or "")


def test_what_was_frozen_is_seen_to_thaw() -> None:
    model = _Layers().eval().requires_grad_(False)
    guards = _guards(model)
    model.layers[1].weight.requires_grad_(True)
    assert "`requires_grad` of parameter `layers.1.weight`" in (guards.changed() or "")
    model.layers[1].weight.requires_grad_(False)
    model.layers[1].train()
    assert "`training` of `layers.1` changed from False to True" in (guards.changed() or "")


def _transposed(model: Any) -> None:
    weight = model.layers[2].weight
    weight.data = weight.data.t()  # of the same shape, at the same address


def _narrowed(model: Any) -> None:
    weight = model.layers[2].weight
    weight.data = weight.data[:1]


def _restrided_buffer(model: Any) -> None:
    model.norm.running_mean.as_strided_((2,), (0,))


def _other_dtype(model: Any) -> None:
    model.layers[2].bias.data = model.layers[2].bias.data.view(torch.int32).view(torch.float16)[:2]


class _Special(nn.Parameter):
    pass


def _other_class_of_parameter(model: Any) -> None:
    model.layers[0].bias.__class__ = _Special


class _Doubling(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x)


def _other_class_of_module(model: Any) -> None:
    model.layers[1].__class__ = _Doubling


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_transposed, "the strides of parameter `layers.2.weight` changed from (2, 1) to (1, 2)"),
        (_narrowed, "the shape of parameter `layers.2.weight` changed from (2, 2) to (1, 2)"),
        (_restrided_buffer, "the strides of buffer `norm.running_mean` changed from (1,) to (0,)"),
        (_other_dtype, "the dtype of parameter `layers.2.bias` changed"),
        (_other_class_of_parameter, "the class of parameter `layers.0.bias` changed"),
        (_other_class_of_module, "the class of `layers.1` changed"),
    ],
)
def test_objects_that_stay_and_are_otherwise(
    change: Callable[[Any], None], words: str, one_by_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the private functions of torch, too."""
    if one_by_one:
        monkeypatch.setattr(layouts, "_has_guards", False)
    model = _Layers()
    guards = _guards(model)
    change(model)
    assert words in (guards.changed() or "")


def test_a_buffer_of_two_modules_is_compared_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _Layers()
    model.other = nn.BatchNorm1d(2)
    model.other.running_mean = model.norm.running_mean
    guards = _guards(model)
    monkeypatch.setattr(layouts, "_layout", lambda tensor: pytest.fail("compared in Python"))
    assert guards.changed() is None


def test_an_attribute_of_a_parameter_that_had_none() -> None:
    model = _Layers()
    weight: Any = model.layers[0].weight
    guards = _guards(model, {"scale"})
    weight.other = 1
    assert guards.changed() is None
    assert guards.changed() is None
    weight.scale = 2.0
    assert "scale" in (guards.changed() or "")


def test_torch_compares_all_tensors_at_once() -> None:
    """If this fails with a new version of torch, guards are slower, and still right."""
    assert layouts._has_guards


class _Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("enter", "words"),
    [
        (BaseTorchFunctionMode, "a mode of torch, or hooks on saved tensors, were entered or left"),
        (_Dispatches, "a mode of torch, or hooks on saved tensors, were entered or left"),
        (
            partial(torch.autograd.graph.saved_tensors_hooks, torch.clone, torch.clone),
            "a mode of torch, or hooks on saved tensors, were entered or left",
        ),
        (
            partial(torch.autocast, "cpu", torch.bfloat16),
            "`torch.is_autocast_enabled('cpu')` changed from False to True",
        ),
    ],
)
def test_contexts(enter: Callable[[], Any], words: str) -> None:
    guards = _guards(_Layers())
    with enter():
        assert guards.changed() == words
    assert guards.changed() is None


def test_modes_of_the_thread_are_no_change() -> None:
    """Dynamo's guard compares what autocast and inference mode add to every tensor."""
    guards = _guards(_Layers())
    with torch.autocast("cpu", torch.bfloat16):
        assert guards._structure is not None
        assert not guards._structure.changed()
    with torch.inference_mode():
        assert guards.changed() is None
        assert guards.changed() is None
    with torch.no_grad():
        guards = _guards(_Layers())
        assert guards.changed() is None
    assert guards.changed() is None


class _Base(nn.Linear):
    calls = 0


class _Layer(_Base):
    pass


def _forward(self: Any, x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize("owner", [_Layer, _Base, nn.Linear, nn.Module, Tensor])
@pytest.mark.parametrize("name", ["forward", "added"])
def test_functions_of_classes(owner: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(_Layer(2, 2))
    guards = _guards(model)
    monkeypatch.setattr(owner, name, _forward, raising=False)
    assert guards.changed() == f"`{name}` of the class `{owner.__qualname__}` was replaced"
    monkeypatch.undo()
    assert guards.changed() is None


def test_bases_of_a_class() -> None:
    class Once(nn.Linear):
        pass

    class Twice(nn.Linear):
        pass

    class Below(Once):
        pass

    guards = _guards(nn.Sequential(Below(2, 2)))
    Below.__bases__ = (Twice,)
    assert guards.changed() == f"the bases of the class `{Below.__qualname__}` changed"


def test_functions_of_the_class_of_an_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _Layers()
    optimizer = torch.optim.AdamW(model.parameters())
    guards = _guards(model, callees=lambda: [optimizer])
    monkeypatch.setattr(torch.optim.AdamW, "step", _forward, raising=False)
    assert guards.changed() == "`step` of the class `AdamW` was replaced"


def test_methods_of_an_optimizer_of_its_own() -> None:
    model = _Layers()
    optimizer = torch.optim.AdamW(model.parameters())
    guards = _guards(model, callees=lambda: [optimizer])
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
    assert guards.changed() == "`step` of the `AdamW` was replaced"
    del optimizer.step
    assert guards.changed() is None


@pytest.mark.parametrize("key", ["lr", "momentum", "own"])
def test_an_optimizer_that_the_step_reads_and_does_not_step(key: str) -> None:
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    other.param_groups[0]["own"] = 1.0
    x = torch.ones(3)
    step = GraphedStep(lambda x: x * other.param_groups[0][key])
    for _ in range(6):
        step(x)
    other.param_groups[0][key] = 0.25
    assert torch.equal(step(x), x * 0.25)
    assert any(f"param_groups[0]['{key}']" in why for why in step.summary.calls.recaptures), step.summary


def test_a_counter_of_a_class_is_no_function(monkeypatch: pytest.MonkeyPatch) -> None:
    guards = _guards(nn.Sequential(_Layer(2, 2)))
    for calls in range(1, 4):
        monkeypatch.setattr(_Base, "calls", calls)
        assert guards.changed() is None


def test_hooks_of_autograd_nodes() -> None:
    model = _Layers()
    node = torch.autograd.graph.get_gradient_edge(model.layers[1].bias).node
    guards = _guards(model)
    handle = node.register_hook(_hook)
    words = "the hooks of the autograd node of parameter `layers.1.bias` changed from none to `_hook` ("
    assert words in (guards.changed() or "")
    guards = _guards(model)
    handle.remove()
    assert "to none" in (guards.changed() or "")


class _Scale:
    k = 1.0

    def __call__(self, *args: Any) -> float:
        return self.k


def _of_a_module(model: Any) -> Any:
    return model.layers[1].register_forward_hook


def _of_all_modules(model: Any) -> Any:
    return torch.nn.modules.module.register_module_forward_hook


def _of_a_parameter(model: Any) -> Any:
    return model.layers[1].bias.register_post_accumulate_grad_hook


def _of_a_node(model: Any) -> Any:
    return torch.autograd.graph.get_gradient_edge(model.layers[1].bias).node.register_hook


@pytest.mark.parametrize("place", [_of_a_module, _of_all_modules, _of_a_parameter, _of_a_node])
@pytest.mark.parametrize("form", ["object", "method", "partial", "default"])
def test_what_a_hook_holds(place: Callable[[Any], Any], form: str) -> None:
    scale = _Scale()
    hooks = {
        "object": scale,
        "method": scale.__call__,
        "partial": partial(_Scale.__call__, scale),
        "default": lambda *args, scale=scale: scale(),
    }
    model = _Layers()
    register = place(model)
    handle = register(hooks[form])
    try:
        guards = _guards(model, mentions={"k"}, codes=[_Scale.__call__.__code__])
        scale.other = 1  # type: ignore[attr-defined]
        assert guards.changed() is None
        scale.k = 2.0
        assert re.search("k` of the hook .* was set to 2.0", guards.changed() or "")
    finally:
        handle.remove()


class _Mentions(_Layers):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.calls


def test_a_hook_does_not_read_what_modules_name_alike() -> None:
    scale, model = _Scale(), _Mentions()
    model.layers[1].register_forward_hook(scale)
    codes = [_Scale.__call__.__code__, _Mentions.forward.__code__]
    guards = _guards(model, mentions={"k", "calls"}, codes=codes)
    scale.calls = 1  # type: ignore[attr-defined]
    assert guards.changed() is None
    assert guards.suspicions.of(model) == "`calls` of the hook `_Scale` was set to 1"
    model.calls = 1
    assert guards.changed() == "`calls` of the `_Mentions` was set to 1"


class _Collects:
    def __init__(self) -> None:
        self.kept: list[int] = []

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        if not module.training:
            self.kept.append(output)


@pytest.mark.parametrize("steps_between", [0, 1])
def test_a_check_judges_what_a_hook_collects(steps_between: int) -> None:
    """It does so each time, and never ignores it; what comes in each step is not worth a check."""
    collects, model = _Collects(), _Layers()
    model.layers[1].register_forward_hook(collects)
    guards = _guards(model, mentions={"kept"}, codes=[_Collects.__call__.__code__])
    for number in range(12):
        collects.kept.append(number)
        words = f"`kept[{number}]` of the hook `_Collects` was set to {number}"
        is_stale = number >= 8 and not steps_between
        assert guards.changed() == (words if is_stale else None)
        if is_stale:
            break
        assert guards.suspicions.of(model) == words
        guards.clear_suspicion(model)
        for _ in range(steps_between):
            assert guards.changed() is None
    assert len(collects.kept) == (12 if steps_between else 9)


def test_attributes_of_a_hook_of_torch() -> None:
    model = _Layers()
    nn.utils.spectral_norm(model.layers[1])
    guards = _guards(model)
    (hook,) = model.layers[1]._forward_pre_hooks.values()
    hook.n_power_iterations = 4  # type: ignore[attr-defined]
    words = "`n_power_iterations` of the hook `SpectralNorm` changed from 1 to 4"
    assert guards.changed() == words


class _Scales(BaseTorchFunctionMode):
    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.gain = gain

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {})) if self.gain else None

    def pack(self, x: Tensor) -> Tensor:
        return x * self.gain


@pytest.mark.parametrize("place", ["outer mode", "mode", "saved"])
def test_what_modes_and_hooks_on_saved_tensors_hold(place: str) -> None:
    held = _Scales()
    codes = [_Scales.__torch_function__.__code__, _Scales.pack.__code__]
    with ExitStack() as stack:
        if place == "saved":
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(held.pack, torch.clone))
        else:
            stack.enter_context(held)
        if place == "outer mode":
            stack.enter_context(BaseTorchFunctionMode())
        guards = _guards(_Layers(), codes=codes)
        held.gain = 2.0
        of = "hook `_Scales.pack`" if place == "saved" else "mode `_Scales`"
        assert guards.changed() == f"`gain` of the {of} changed from 1.0 to 2.0"


@pytest.mark.parametrize(
    ("enter", "otherwise"),
    [
        (partial(torch.device, "cpu"), partial(torch.device, "meta")),
        (_Scales, partial(_Scales, 2.0)),
        (_Scales, BaseTorchFunctionMode),
    ],
)
def test_a_mode_that_is_entered_anew(enter: Callable[[], Any], otherwise: Callable[[], Any]) -> None:
    with enter():
        guards = _guards(_Layers())
    words = "a mode of torch, or hooks on saved tensors, were entered or left"
    assert guards.changed() == words
    with enter():
        assert guards.changed() is None
    with otherwise():
        assert guards.changed() == words


class _Holder(nn.Module):
    pass


class _Feature(nn.Dropout1d):
    pass


@pytest.mark.parametrize(
    ("holder", "was", "now", "remedy"),
    [
        (nn.Linear(2, 2), np.ones(2), np.zeros(2), "Hand it to the step in a registered buffer"),
        (nn.Linear(2, 2), b"a", b"b", "Branch on `batch_idx`"),
        (nn.Linear(2, 2), "a", "b", "Branch on `batch_idx`"),
        (nn.Linear(2, 2), abs, round, "Branch on `batch_idx`"),
        (nn.Linear(2, 2), torch.ones(2), torch.ones(2), "Keep the tensor, best as a registered buffer"),
        (nn.Linear(2, 2), 0.1, 0.2, "Hand it to the step in a registered buffer"),
        (_Feature(), 0.1, 0.2, "With a probability that changes, draw the mask yourself"),
    ],
)
def test_the_remedy_by_what_has_changed(holder: Any, was: Any, now: Any, remedy: str) -> None:
    holder.p = was
    walk = Walk([Root(holder, "", "the model", is_entered=True)], Scope(reads=frozenset({"p"})))
    if isinstance(was, np.ndarray):
        was[:] = now
    else:
        holder.p = now
    (moved,) = walk.changes()
    assert Change.of(moved, []).remedy.startswith(remedy)


def test_the_remedy_for_a_list_that_grows() -> None:
    """The changes of all its members are of one kind."""
    holder: Any = _Holder()
    holder.kept = []
    kinds = set()
    for value in (1.5, 2.5):
        walk = Walk([Root(holder, "", "the model", is_entered=True)], Scope(reads=frozenset({"kept"})))
        holder.kept.append(value)
        (moved,) = walk.changes()
        change = Change.of(moved, [])
        assert change.remedy.startswith("If the step appends it, return it in its place")
        kinds.add(kind_of(change))
    assert kinds == {"`kept[...]` of the model was set"}


@pytest.mark.parametrize(
    ("reads", "was", "now", "remedy"),
    [
        (
            lambda self, x: nn.functional.dropout(x, self.p),
            0.1,
            0.2,
            "With a probability that changes, draw the mask",
        ),
        (
            lambda self, x: nn.functional.dropout(x * self.p, 0.1),
            1,
            2,
            "Hand it to the step in a registered buffer",
        ),
        (lambda self, x: x.roll(self.p % 7, 1), 1, 2, "Hand it.*Roll by an index.*`x.index_select"),
        (lambda self, x: x[: self.p], 1, 2, "Hand it.*Keep the full length"),
        (
            lambda self, x: x if self.p else -x,
            True,
            False,
            r"Keep it in a .*`torch.where\(self.p, a, b\)`",
        ),
    ],
)
def test_the_remedy_by_what_takes_a_number(
    reads: Callable[..., Tensor], was: Any, now: Any, remedy: str
) -> None:
    holder: Any = _Holder()
    holder.p = was
    walk = Walk([Root(holder, "", "the model", is_entered=True)], Scope(reads=frozenset({"p"})))
    holder.p = now
    (moved,) = walk.changes()
    found = Change.of(moved, [reads.__code__]).remedy
    assert re.match(remedy, found), found


def test_the_remedy_for_a_learning_rate() -> None:
    group = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1).param_groups[0]
    walk = Walk([Root(group, "param_groups[0]", "the optimizer", is_entered=True)], Scope())
    group["lr"] = 0.2
    (moved,) = walk.changes()
    assert "`LearningRateMonitor`" in Change.of(moved, []).remedy


def test_quick_values_are_put_into_words() -> None:
    settings = {"the momentum": 0.9}
    other = [0]
    values = GuardedValues(lambda: dict(settings), _no_state, lambda: (*settings.values(), *other))
    guards = Guards(_Layers(), values, Unguarded(), OutsideModel())
    guards.take(guards)
    settings["the momentum"] = 0.8
    assert guards.changed() == "the momentum changed from 0.9 to 0.8"
    settings["the momentum"] = 0.9
    other[0] = 1  # something that has no words
    assert guards.changed() == "the settings of the optimizer changed"


class _Graph:
    """Stands for a captured step."""


def test_each_graph_clears_its_suspicions_alone() -> None:
    model: Any = _Layers()
    first, second, third = _Graph(), _Graph(), _Graph()
    values = GuardedValues(_no_state, _no_state)
    guards = Guards(model, values, Unguarded(frozenset(vars(nn.Module()))), OutsideModel())
    guards.take(first)
    guards.take(second)
    suspicions = guards.suspicions
    for check in range(3):
        model.seen = check
        assert guards.changed() is None
        assert "`seen` of the `_Layers`" in suspicions.of(first)
        guards.clear_suspicion(first)
        assert guards.changed() is None
        assert not suspicions.of(first)
        assert suspicions.of(second)
    model.seen = 3
    assert guards.changed() is None
    assert not suspicions.of(first), "the part is not compared any more"
    for _ in range(3):
        assert suspicions.of(second)
        guards.clear_suspicion(second)
    guards.take(third)
    assert suspicions.of(third)
    assert not suspicions.of(second)


def test_what_is_recorded_again_hides_no_change_of_large_objects() -> None:
    model: Any = _Layers()
    model.seen, model.pair, model.rows = 0, [1.0], [0] * 5000
    graph = _Graph()
    guards = Guards(
        model,
        GuardedValues(_no_state, _no_state),
        Unguarded(frozenset(vars(nn.Module()))),
        OutsideModel(),
    )
    guards.take(graph)
    model.seen, model.rows[7] = 1, 1
    assert guards.changed() is None
    assert "`seen`" in guards.suspicions.of(graph)
    guards.clear_suspicion(graph)
    assert guards.changed() is None
    assert "`rows[7]`" in guards.suspicions.of(graph)
    guards.clear_suspicion(graph)
    assert guards.changed() is None
    assert not guards.suspicions.of(graph)
    model.pair, model.rows[8] = [1.0], 1
    assert guards.changed() is None
    assert "`rows[8]`" in guards.suspicions.of(graph)


def _hook(*args: Any) -> None:
    return None


def _second_hook(*args: Any) -> None:
    return None


@pytest.mark.parametrize(
    ("register", "words"),
    [
        ("register_forward_hook", "`_forward_hooks` of `layers.1`"),
        ("register_forward_pre_hook", "`_forward_pre_hooks` of `layers.1`"),
        ("register_full_backward_hook", "`_backward_hooks` of `layers.1`"),
        ("register_full_backward_pre_hook", "`_backward_pre_hooks` of `layers.1`"),
    ],
)
def test_hooks_of_modules(register: str, words: str) -> None:
    model = _Layers()
    was_there = getattr(model.layers[1], register)(_hook)
    guards = _guards(model)
    was_there.remove()
    getattr(model.layers[1], register)(_second_hook)
    change = guards.changed() or ""
    assert words in change
    assert "from `_hook` (" in change
    assert "to `_second_hook` (" in change


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters(register: str) -> None:
    model = _Layers()
    guards = _guards(model)
    getattr(model.layers[0].bias, register)(_hook)
    assert "of parameter `layers.0.bias` changed from none to `_hook` (" in (guards.changed() or "")


def test_hooks_that_are_removed() -> None:
    model = _Layers()
    handles = [model.layers[0].register_forward_hook(_hook), model.norm.weight.register_hook(_hook)]
    for handle in handles:
        guards = _guards(model)
        handle.remove()
        assert "to none" in (guards.changed() or "")


def _made_again(model: Any) -> None:
    model.layers[1].__init__(2, 2)


def _in_another_order(model: Any) -> None:
    model.layers._modules = dict(reversed(model.layers._modules.items()))


def _equal_table(model: Any) -> None:
    model.layers[1]._parameters = dict(model.layers[1]._parameters)


def _no_forward_hooks(model: Any) -> None:
    model.layers[0]._forward_hooks = OrderedDict()


def _no_tensor_hooks(model: Any) -> None:
    model.norm.weight._backward_hooks = None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_made_again, "of `layers.1` changed"),
        (_in_another_order, "`_modules` of `layers` changed"),
        (_equal_table, "`_parameters` of `layers.1` changed"),
        (_no_forward_hooks, "`_forward_hooks` of `layers.0` changed"),
        (_no_tensor_hooks, "`_backward_hooks` of parameter `norm.weight` changed from `_hook` ("),
    ],
)
def test_tables_that_are_bound_anew(change: Callable[[Any], None], words: str) -> None:
    model = _Layers()
    model.layers[0].register_forward_hook(_hook)
    model.norm.weight.register_hook(_hook)
    guards = _guards(model)
    change(model)
    assert words in (guards.changed() or "")


def test_hooks_of_others() -> None:
    guards = _guards(_Layers())
    nn.Linear(1, 1).register_forward_hook(_hook)
    assert guards.changed() is None


def test_what_has_to_stay() -> None:
    state = {"a": {"moment": torch.ones(1)}}
    guards = _guards(_Layers(), containers=lambda: [state.values(), state["a"].values()])
    state["a"]["moment"] = torch.ones(1)  # equal, and another one
    assert guards.changed() == "an object of the model, or an entry of `optimizer.state`, was replaced"


def test_hooks_of_all_modules() -> None:
    guards = _guards(_Layers())
    handle = torch.nn.modules.module.register_module_forward_hook(_hook)
    try:
        assert "`_global_forward_hooks` of torch changed from none" in (guards.changed() or "")
        guards = _guards(_Layers())
    finally:
        handle.remove()
    assert "to none" in (guards.changed() or "")


@pytest.mark.parametrize(
    ("was", "now", "moved"),
    [(1.0, 1.0, False), (1.0, 2.0, True), (NAN, NAN, False), (NAN, 1.0, True), (1.0, NAN, True)],
)
def test_numbers_in_host_memory(was: float, now: float, moved: bool) -> None:
    memory = HostMemory.__new__(HostMemory)  # without pinned memory, of which there is none here
    memory.scalars = [(torch.tensor(now), was)]
    assert memory.moved() is moved


def test_hooks_of_all_optimizers() -> None:
    guards = _guards(_Layers())
    handle = register_optimizer_step_post_hook(_hook)
    try:
        assert "`_global_optimizer_post_hooks` of torch changed" in (guards.changed() or "")
    finally:
        handle.remove()


@contextmanager
def _switched(path: str, value: Any) -> Iterator[None]:
    # Not by `monkeypatch`, which deletes what torch answers by `__getattr__`.
    owner, _, name = path.removeprefix("torch.").rpartition(".")
    holder = operator.attrgetter(owner)(torch)
    was = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, was)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("torch.backends.cuda.matmul.fp32_precision", "tf32"),
        ("torch.backends.cudnn.conv.fp32_precision", "ieee"),
        ("torch.backends.cudnn.rnn.fp32_precision", "ieee"),
        ("torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction", False),
        ("torch.backends.cuda.matmul.allow_fp16_accumulation", True),
        ("torch.backends.cudnn.enabled", False),
        ("torch.backends.cudnn.benchmark", True),
        ("torch.backends.cudnn.deterministic", True),
    ],
)
def test_switches_are_compared_before_each_replay(path: str, value: Any) -> None:
    guards = _guards(_Layers())
    assert guards.changed() is None
    with _switched(path, value):
        assert f"`{path}` changed from" in (guards.changed() or "")
    assert guards.changed() is None


@pytest.mark.parametrize(
    ("getter", "setter", "value"),
    [
        (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
        (torch.get_num_threads, torch.set_num_threads, 7),
        (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
        (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, False),
        (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, False),
        (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp, False),
        (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp, False),
    ],
)
def test_setters_are_noticed_before_each_replay(getter: Any, setter: Any, value: Any) -> None:
    guards = _guards(_Layers())
    was = getter()
    setter(value)
    try:
        assert f"{getter.__name__}()` changed from {was} to {value}" in (guards.changed() or "")
    finally:
        setter(was)
    assert guards.changed() is None


@pytest.mark.filterwarnings("ignore:Please use the new API settings to control TF32")  # torch 2.9
def test_old_and_new_names_of_tf32_do_not_trouble_the_guards() -> None:
    """Reading the old names raises once somebody has written to the new ones."""
    path = "torch.backends.cuda.matmul.fp32_precision"
    before = global_switches()[path]
    with _switched(path, "tf32"):
        with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
            torch.get_float32_matmul_precision()
        assert global_switches()[path] == "tf32"
    with _switched("torch.backends.cuda.matmul.allow_tf32", True):
        assert global_switches()[path] == "tf32"
    with _switched(path, before):
        pass


class _Quiet(Net):
    """Has no hook between steps."""


class _Hooked(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Anything can happen here."""


class _HookedCallback(Callback):
    def on_train_batch_end(self, *args: Any) -> None:
        """Anything can happen here."""


class _Trainer:
    def __init__(self, *callbacks: Callback) -> None:
        self.callbacks = list(callbacks)


def test_whose_code_runs_between_steps(tmp_path: Path) -> None:
    ours = (ModelCheckpoint(tmp_path), CUDAGraphCallback())
    quiet: Any = _Trainer(*ours)
    assert undisturbed(quiet, make(_Quiet))
    assert not undisturbed(quiet, make(_Hooked))
    for callback in (_HookedCallback(), LambdaCallback(on_train_batch_start=_hook)):
        hooked: Any = _Trainer(*ours, callback)
        assert not undisturbed(hooked, make(_Quiet))


class FreezesInAHook(Net):
    """Freezes one bias in the middle of an epoch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.head.bias.requires_grad_(self.global_step != 6)


class AddsAHook(Net):
    """Registers a forward hook at the start of the second epoch."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.head.register_forward_hook(_doubled)


def _doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


class ChoosesOtherKernels(Net):
    """Wants other kernels from the second epoch on."""

    def on_train_epoch_start(self) -> None:
        torch.backends.cudnn.deterministic = self.current_epoch > 0


class AnotherGroup(Net):
    """Leaves one parameter out of the optimizer from the second epoch on, in the list itself."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        parameters = self.trainer.optimizers[0].param_groups[0]["params"]
        if self.global_step == 6:
            del self.trainer.optimizers[0].state[parameters.pop()]


@pytest.mark.spread(2)
@pytest.mark.parametrize("module", [FreezesInAHook, AddsAHook, ChoosesOtherKernels, AnotherGroup])
def test_runs_that_change_are_captured_anew(module: Any, tmp_path: Path, accelerator: str) -> None:
    was = torch.backends.cudnn.deterministic
    try:
        plain = train(make(module), tmp_path / "plain", accelerator=accelerator)
        torch.backends.cudnn.deterministic = was
        callback = CUDAGraphCallback(verify=None)
        graph = train(make(module), tmp_path / "graph", callback, accelerator=accelerator)
    finally:
        torch.backends.cudnn.deterministic = was
    assert_same(plain, graph)
    assert graph.counts.recaptures
    assert graph.counts.replayed > 8
