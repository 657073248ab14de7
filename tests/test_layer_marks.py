"""Which ops lie between the marks of a layer: on the emulator, whose graphs can be looked into."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from lightning_cudagraph import CUDAGraphError
from lightning_cudagraph.compat.features import TIMES
from lightning_cudagraph.compat.tables import require
from lightning_cudagraph.device.emulator.emulated_graph import HostEvent
from lightning_cudagraph.device.emulator.emulator_backend import EmulatorBackend
from lightning_cudagraph.timing.events.marks import StepMarks
from lightning_cudagraph.timing.layers.layer_selection import untimed_notes
from lightning_cudagraph.timing.readings.spans import BACKWARD_TAG, FORWARD_TAG, STEP_TAG


class Op(nn.Module):
    """A layer whose passes are known by their ops."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


class Model(nn.Module):
    """Layers by name, and what is done with them."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class Taped(EmulatorBackend):
    """Writes down marks, and ops, of a step that is not captured."""

    def __init__(self) -> None:
        super().__init__()
        self.tape: list[Any] = []

    def mark(self, event: HostEvent, forked: bool = True) -> None:
        super().mark(event, forked)
        self.tape.append(event)


class Ops(TorchDispatchMode):
    """Writes down ops, but no views."""

    def __init__(self, tape: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not (func.is_view or func._schema.name == "aten::detach"):
            self.tape.append(func)
        return result


# Steps are captured and replayed, or run eagerly.
both_ways = pytest.mark.parametrize("eager", [False, True])


class Captured:
    """A step that was captured with marks, and replayed; or that was run with them.

    Args:
        model: what is timed, all its layers.
        names: those to time, if not all of them.
        x: what the model is given.
        step: the step, told the marks, if it is another than one of forward and backward.
        eager: it is only run.
    """

    def __init__(
        self,
        model: nn.Module,
        names: tuple[str, ...] = (),
        x: Tensor | None = None,
        step: Callable[[StepMarks, Tensor], None] | None = None,
        eager: bool = False,
    ) -> None:
        self.backend = Taped()
        layers = {n: m for n, m in model.named_modules() if n and (not names or n in names)}
        leaf = torch.randn(4, 4, requires_grad=True) if x is None else x

        def plain(marks: StepMarks, leaf: Tensor) -> None:
            loss = model(leaf).sum()
            marks.forward_ended(loss)
            loss.backward()
            marks.backward_ended()

        def body() -> StepMarks:
            marks = StepMarks(self.backend, layers, has_optimizer=False)
            with marks.recording():
                (step or plain)(marks, leaf)
            return marks

        (step or plain)(_Deaf(), leaf)  # type: ignore[arg-type]
        for tensor in (leaf, *model.parameters()):
            tensor.grad = None
        if eager:
            with Ops(self.backend.tape):
                self.marks = body()
            self.tape = self.backend.tape
        else:
            graph, self.marks = self.backend.capture(body)
            graph.replay()
            parts: list[list[Any]] = graph._parts  # type: ignore[attr-defined]
            self.tape = [op if isinstance(op, HostEvent) else op.func for part in parts for op in part]
        self.offsets_ms = self.marks.read()
        self.layout = self.marks.layout
        for layer in model.modules():
            hooks = (layer._forward_pre_hooks, layer._forward_hooks, layer._forward_hooks_always_called)
            assert not any(hooks)

    @property
    def spans(self) -> dict[str, Any]:
        return {span.tag: span for span in self.layout.spans}

    def ops(self, tag: str) -> list[str]:
        """The names of the ops between the marks of a span."""
        at = [index for index, op in enumerate(self.tape) if isinstance(op, HostEvent)]
        return [
            op._schema.name.removeprefix("aten::")
            for begin, end in self.spans[tag].calls
            for op in self.tape[at[begin] : at[end]]
            if not isinstance(op, HostEvent)
        ]

    def forward(self, name: str) -> list[str]:
        return self.ops(FORWARD_TAG + name)

    def backward(self, name: str) -> list[str]:
        return self.ops(BACKWARD_TAG + name)


class _Deaf:
    """In the place of marks, in the step before the capture."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


def chain(*names: str) -> Callable[[Any, Tensor], Tensor]:
    def run(model: Any, x: Tensor) -> Tensor:
        for name in names:
            x = model.get_submodule(name)(x)
        return x

    return run


def test_neighbours_share_their_marks() -> None:
    inner = nn.Sequential(Op(torch.tanh), Op(torch.sigmoid))
    step = Captured(Model(chain("inner", "last"), inner=inner, last=Op(F.silu)))
    assert step.forward("inner.0") == ["tanh"]
    assert step.forward("inner.1") == ["sigmoid"]
    assert step.forward("inner") == ["tanh", "sigmoid"]
    assert step.forward("last") == ["silu"]
    assert step.backward("last") == ["silu_backward"]
    assert step.backward("inner.1") == ["sigmoid_backward"]
    assert step.backward("inner.0")[0] == "tanh_backward"
    assert step.backward("inner") == step.backward("inner.1") + step.backward("inner.0")
    # The beginning; behind each of three layers; the end of the forward pass, and what `sum` adds to the
    # backward pass; behind each of three layers.
    assert step.layout.n_marks == 1 + 3 + 2 + 3 == len(step.offsets_ms)
    assert step.offsets_ms == sorted(step.offsets_ms)
    assert step.marks.untimed == {}


def test_the_parts_add_up_to_the_whole() -> None:
    inner = nn.Sequential(Op(torch.tanh), Op(torch.sigmoid))
    step = Captured(Model(chain("inner"), inner=inner))
    times_ms = dict(
        zip(
            step.layout.tags,
            step.layout.durations_ms(torch.tensor(step.offsets_ms).numpy()),
            strict=True,
        )
    )
    for tag in (FORWARD_TAG, BACKWARD_TAG):
        members = times_ms[f"{tag}inner.0"] + times_ms[f"{tag}inner.1"]
        assert members == pytest.approx(times_ms[f"{tag}inner"], rel=1e-5)
    stages = times_ms[f"{STEP_TAG}forward"] + times_ms[f"{STEP_TAG}backward"]
    assert stages == pytest.approx(step.offsets_ms[-1], rel=1e-5)


@both_ways
def test_layers_side_by_side(eager: bool) -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        return model.q(x) + model.k(x) * model.v(x)

    model = Model(run, q=Op(torch.tanh), k=Op(torch.sigmoid), v=Op(F.silu))
    step = Captured(model, eager=eager)
    # Gradients of one input are added up where the last of them has come.
    assert step.backward("v") == ["silu_backward"]
    assert step.backward("k") == ["sigmoid_backward", "add"]
    assert step.backward("q")[:2] == ["tanh_backward", "add"]


@both_ways
def test_what_lies_between_layers_belongs_to_none(eager: bool) -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        return model.b(F.gelu(model.a(x)))

    step = Captured(Model(run, a=Op(torch.tanh), b=Op(torch.sigmoid)), eager=eager)
    assert step.forward("a") == ["tanh"]
    assert step.forward("b") == ["sigmoid"]
    assert step.backward("b") == ["sigmoid_backward"]
    assert step.backward("a")[0] == "tanh_backward"
    assert "gelu_backward" in step.ops(f"{STEP_TAG}backward")


def test_linear_layers_with_weights_and_gradients_that_are_added_to() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def step(marks: StepMarks, x: Tensor) -> None:
        loss = model(x).sum()
        marks.forward_ended(loss)
        loss.backward()
        loss = model(x).sum()
        loss.backward()
        marks.backward_ended()

    captured = Captured(model, x=torch.randn(4, 4), step=step)
    for name in ("0", "1"):
        # The gradients of weight and bias: made once, and then added to. What is called in between
        # counts as recomputed.
        assert captured.backward(name).count("mm") >= 2
        assert captured.backward(name).count("add_") == 2
        assert captured.forward(name) == ["addmm"]


@both_ways
def test_in_place_activations(eager: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    step = Captured(model, eager=eager)
    assert step.forward("2") == ["relu_"]
    assert step.backward("2") == ["threshold_backward"]
    assert step.backward("1") == ["native_batch_norm_backward"]
    assert step.marks.untimed == {}


@both_ways
def test_a_layer_called_twice_has_the_sum(eager: bool) -> None:
    step = Captured(Model(chain("a", "b", "a"), a=Op(torch.tanh), b=Op(torch.sigmoid)), eager=eager)
    assert step.forward("a") == ["tanh", "tanh"]
    assert len(step.spans[f"{FORWARD_TAG}a"].calls) == 2
    assert [op for op in step.backward("a") if "backward" in op] == ["tanh_backward"] * 2
    assert step.backward("b") == ["sigmoid_backward"]


@both_ways
def test_a_layer_under_two_parents(eager: bool) -> None:
    shared = Op(torch.tanh)
    one, other = nn.Sequential(shared, Op(torch.sigmoid)), nn.Sequential(shared, Op(F.silu))
    step = Captured(Model(chain("one", "other"), one=one, other=other), eager=eager)
    assert step.forward("one.0") == ["tanh", "tanh"]
    assert step.forward("one") == ["tanh", "sigmoid"]
    assert step.forward("other") == ["tanh", "silu"]
    assert step.backward("other") == ["silu_backward", "tanh_backward"]


@both_ways
def test_a_layer_called_inside_itself_counts_once(eager: bool) -> None:
    class Nested(nn.Module):
        def forward(self, x: Tensor, depth: int = 2) -> Tensor:
            x = torch.tanh(x)
            return self(x, depth - 1) if depth else x

    step = Captured(Model(chain("a"), a=Nested()), eager=eager)
    assert step.forward("a") == ["tanh"] * 3
    assert [op for op in step.backward("a") if "backward" in op] == ["tanh_backward"] * 3
    assert len(step.spans[f"{FORWARD_TAG}a"].calls) == 1


@dataclass
class Output:
    first: Tensor
    second: Tensor


@both_ways
@pytest.mark.parametrize(
    "pack",
    [
        lambda a, b: (a, b),
        lambda a, b: {"first": a, "second": [b]},
        lambda a, b: Output(a, b),
    ],
)
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_several_outputs(
    pack: Callable[[Tensor, Tensor], Any], used: tuple[int, ...], eager: bool
) -> None:
    def tensors(packed: Any) -> list[Tensor]:
        if isinstance(packed, tuple):
            return list(packed)
        if isinstance(packed, dict):
            return [packed["first"], packed["second"][0]]
        return [packed.first, packed.second]

    def run(model: Any, x: Tensor) -> Tensor:
        outputs = tensors(model.both(model.before(x)))
        return F.gelu(sum((outputs[i] for i in used), torch.zeros(())))

    both = Op(lambda x: pack(torch.tanh(x), torch.sigmoid(x)))
    step = Captured(Model(run, before=Op(F.silu), both=both), eager=eager)
    found = [op for op in step.backward("both") if op.endswith("_backward")]
    assert sorted(found) == sorted([("tanh_backward", "sigmoid_backward")[i] for i in used])
    assert [op for op in step.backward("before") if op.endswith("_backward")] == ["silu_backward"]


@both_ways
def test_a_loss_that_lies_in_an_attribute(eager: bool) -> None:
    class Gate(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.penalty = torch.sigmoid(x).sum()
            return torch.tanh(x)

    def run(model: Any, x: Tensor) -> Tensor:
        return model.gate(model.before(x)).sum() + model.gate.penalty

    step = Captured(Model(run, before=Op(F.silu), gate=Gate()), eager=eager)
    found = [op for op in step.backward("gate") if op.endswith("_backward")]
    assert found == ["tanh_backward", "sigmoid_backward"]


@both_ways
def test_an_output_that_nobody_may_use_any_more(eager: bool) -> None:
    def rows(x: Tensor) -> tuple[Tensor, ...]:
        y = F.elu(x)
        first = y.unbind(0)[0]
        return y.add_(1), first

    def run(model: Any, x: Tensor) -> Tensor:
        return model.last(model.rows(x)[0])

    step = Captured(Model(run, rows=Op(rows), last=Op(F.silu)), eager=eager)
    assert step.forward("rows") == ["elu", "add_"]
    assert step.backward("last") == ["silu_backward"]
    assert "elu_backward" in step.backward("rows")


@both_ways
def test_an_embedding_ends_the_backward_pass(eager: bool) -> None:
    model = nn.Sequential(nn.Embedding(8, 4), Op(torch.tanh))
    step = Captured(model, x=torch.tensor([1, 2, 3]), eager=eager)
    assert step.forward("0") == ["embedding"]
    assert step.backward("0") == ["embedding_dense_backward"]
    assert step.backward("1") == ["tanh_backward"]


@both_ways
def test_views_cost_nothing(eager: bool) -> None:
    step = Captured(Model(chain("a", "view"), a=Op(torch.tanh), view=nn.Flatten(0)), eager=eager)
    assert step.forward("view") == []
    assert step.forward("a") == ["tanh"]
    assert step.backward("view") == []
    begin, end = step.spans[f"{FORWARD_TAG}view"].calls[0]
    assert eager or begin == end
    assert step.marks.untimed == {}


# TorchScript is at its end, and still in use: from torch 2.15 on, this is a `FutureWarning`.
@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_what_is_not_timed_is_named() -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = model.teacher(x)
        same = model.same(x)
        dead = model.dead(same).detach()
        return model.student(same) + model.scripted(same) + teacher + dead + model.frozen(x.detach())

    class Doubled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    model = Model(
        run,
        teacher=nn.Linear(4, 4),
        same=nn.Identity(),
        dead=Op(torch.tanh),
        student=nn.Linear(4, 4),
        scripted=torch.jit.trace(Doubled(), torch.zeros(4, 4)),  # type: ignore[no-untyped-call]
        frozen=nn.Linear(4, 4).requires_grad_(False),
        unused=nn.Linear(4, 4),
        members=nn.ModuleList(),
    )
    step = Captured(model)
    nothing = "it computes nothing that needs a gradient"
    assert step.marks.untimed == {
        "the backward pass of `teacher`": nothing,
        "the backward pass of `same`": nothing,
        "the backward pass of `dead`": "no gradient came to what it computes",
        "`scripted`": "a ScriptModule takes no hooks",
        "the backward pass of `frozen`": nothing,
        "`unused`": "the step does not call it, or past its hooks only (`.forward()`, compiled code)",
        "`members`": "the step does not call it, or past its hooks only (`.forward()`, compiled code)",
    }
    assert step.forward("teacher") == step.forward("frozen") == ["addmm"]
    assert step.forward("dead") == ["tanh"]
    assert step.backward("student")
    notes = untimed_notes(step.marks.untimed)
    assert any(note.startswith("not timed: `unused`, `members`: the step") for note in notes)
    assert len(notes) == 4


def test_compiled_layers_are_named() -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4))

    in_place, wrapped = block(), torch.compile(block(), backend="eager")
    in_place.compile(backend="eager")
    model = Model(lambda model, x: model.plain(x), plain=block(), in_place=in_place, wrapped=wrapped)
    step = Captured(model)
    compiled = "it is compiled, or part of what is"
    assert step.marks.untimed == {
        "`in_place`": compiled,
        "`in_place.0`": compiled,
        # From outside, this one can be timed.
        "`wrapped`": "the step does not call it, or past its hooks only (`.forward()`, compiled code)",
        "`wrapped._orig_mod`": compiled,
        "`wrapped._orig_mod.0`": compiled,
    }


@both_ways
def test_a_call_that_fails(eager: bool) -> None:
    def fails(x: Tensor) -> Tensor:
        torch.sigmoid(x)
        raise ValueError

    def run(model: Any, x: Tensor) -> Tensor:
        try:
            x = model.outer(x)
        except ValueError:
            x = model.other(x)
        return model.last(x)

    outer = nn.Sequential(Op(torch.tanh), Op(fails))
    step = Captured(Model(run, outer=outer, other=Op(F.silu), last=Op(F.gelu)), eager=eager)
    assert step.forward("outer") == ["tanh", "sigmoid"]
    assert step.forward("other") == ["silu"]
    assert step.backward("last") == ["gelu_backward"]
    assert step.backward("other")[0] == "silu_backward"
    assert "the backward pass of `outer.0`" in step.marks.untimed


@both_ways
def test_a_hook_on_all_modules_that_raises(eager: bool) -> None:
    """It runs before those on one module, so that the call of its layer never begins."""

    class Falls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fails, self.other = Op(torch.tanh), Op(F.silu)

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.fails(x)
            except ValueError:
                return self.other(x)

    falls = Falls()

    def refuses(module: nn.Module, args: Any) -> None:
        if module is falls.fails:
            raise ValueError

    handle = register_module_forward_pre_hook(refuses)
    try:
        step = Captured(Model(chain("falls", "last"), falls=falls, last=Op(F.gelu)), eager=eager)
    finally:
        handle.remove()
    assert step.forward("falls") == step.forward("falls.other") == ["silu"]
    assert step.forward("last") == ["gelu"]
    assert step.backward("last") == ["gelu_backward"]
    assert step.backward("falls")[0] == "silu_backward"
    assert list(step.marks.untimed) == ["`falls.fails`"]


@both_ways
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("names", [(), ("last", "block.0", "block.1", "block.2")])
def test_recomputation_belongs_to_the_backward_pass(
    reentrant: bool, names: tuple[str, ...], eager: bool
) -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        return model.last(checkpoint(model.block, x, use_reentrant=reentrant, preserve_rng_state=False))

    block = nn.Sequential(Op(torch.tanh), Op(torch.sigmoid), Op(torch.exp))
    step = Captured(Model(run, block=block, last=Op(F.silu)), names, eager=eager)
    assert step.forward("block.0") == ["tanh"]
    assert step.forward("block.1") == ["sigmoid"]
    assert step.forward("last") == ["silu"]
    assert step.backward("last") == ["silu_backward"]
    first = [op for op in step.backward("block.0") if op in ("tanh", "tanh_backward")]
    assert first == ["tanh", "tanh_backward"]
    assert step.backward("block.1") == ["sigmoid", "sigmoid_backward"]
    assert [op for op in step.backward("block.2") if op != "detach"] == ["exp", "mul"]
    if not names:
        whole = [op for op in step.backward("block") if op not in ("detach", "add")]
        assert whole[:3] == ["tanh", "sigmoid", "exp"]
        assert "tanh_backward" in whole
    assert step.marks.untimed == {}


@both_ways
@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("names", [("outer", "outer.a", "outer.b"), ("outer.a", "outer.b", "before")])
def test_recomputation_between_layers(early_stop: bool, names: tuple[str, ...], eager: bool) -> None:
    """It belongs to the layers in which it was called, and not to the one whose node asks for it."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Op(torch.tanh), Op(torch.sigmoid)

        def forward(self, x: Tensor) -> Tensor:
            def inside(x: Tensor) -> Tensor:
                return F.gelu(self.b(F.silu(self.a(F.elu(x)))))

            with set_checkpoint_early_stop(early_stop):
                return checkpoint(inside, x, use_reentrant=False, preserve_rng_state=False) + 1

    step = Captured(
        Model(chain("before", "outer"), before=Op(F.softplus), outer=Outer()), names, eager=eager
    )
    assert [op for op in step.backward("outer.b") if op != "detach"] == ["sigmoid", "sigmoid_backward"]
    assert [op for op in step.backward("outer.a") if op != "detach"] == ["tanh", "tanh_backward"]
    last = [] if early_stop else ["gelu"]
    between = ["elu", "tanh", "silu", "sigmoid", *last]
    if "outer" in names:
        whole = [op for op in step.backward("outer") if op != "detach"]
        assert whole[: len(between)] == between
        backward = ["gelu", "sigmoid", "silu", "tanh", "elu"]
        assert [op for op in whole if op.endswith("_backward")] == [f"{op}_backward" for op in backward]
    else:
        assert step.backward("before")[0] == "softplus_backward"


def test_second_derivatives_are_named() -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        y = model.a(x)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.sum() + gradient.square().sum()

    step = Captured(Model(run, a=Op(torch.tanh)))
    assert step.forward("a") == ["tanh"]
    assert BACKWARD_TAG + "a" not in step.layout.tags
    assert "create_graph=True" in step.marks.untimed["the backward pass of `a`"]


def test_captures_of_one_step_share_their_layout() -> None:
    model = Model(chain("a"), a=Op(torch.tanh))
    assert Captured(model).layout is Captured(model).layout
    other = Model(chain("a", "b"), a=Op(torch.tanh), b=Op(torch.tanh))
    assert Captured(model).layout is not Captured(other).layout


def test_marks_are_read_after_a_replay_only() -> None:
    backend = EmulatorBackend()
    model = nn.Sequential(Op(torch.tanh))
    marks = StepMarks(backend, dict(model.named_children()))
    with pytest.raises(CUDAGraphError, match="no step has been recorded"):
        marks.read()

    def body() -> None:
        with marks.recording():
            model(torch.ones(2))
            with pytest.raises(CUDAGraphError, match="while a step is captured"):
                marks.read()

    graph, _ = backend.capture(body)
    with pytest.raises(CUDAGraphError, match=r"Both events must have been recorded.*Expected a replay"):
        marks.read()
    graph.replay()
    assert marks.read()[0] == 0.0
    with pytest.raises(CUDAGraphError, match="not being recorded"), marks.stage("host"):
        pass


def test_a_private_name_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    require(TIMES)
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    with pytest.raises(CUDAGraphError, match=r"_current_graph_task_id` is gone .* the times of layers"):
        require(TIMES)
