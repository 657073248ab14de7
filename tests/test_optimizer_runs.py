"""Replays of optimizer steps by themselves come to the bits of plain ones, and so do their ops.

`tests/gpu/test_optimizer_runs.py` does the same on CUDA.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_cudagraph.compat.attributes import setting
from lightning_cudagraph.device.backend_for import backend_for
from lightning_cudagraph.errors import CaptureError
from lightning_cudagraph.optim.gate import Gate
from lightning_cudagraph.optim.host_arithmetic import scalar_ops
from lightning_cudagraph.optim.host_arithmetic.host_program import HostProgram, HostScalar
from lightning_cudagraph.optim.host_arithmetic.host_tensors import Alike, _Moved
from lightning_cudagraph.optim.host_arithmetic.scalar_ops import _BY_NUMBER, is_gated_write, with_tensors
from lightning_cudagraph.optim.host_arithmetic.staged_numbers import Stage
from lightning_cudagraph.optim.outcomes import Outcomes
from lightning_cudagraph.optim.prepared_optimizer import _AS_CAPTURED, PreparedOptimizer
from lightning_cudagraph.optim.scaler import PreparedScaler
from tests.harness import differences
from tests.optimizer_runs import BEHIND, CELLS, FORMS, PLAIN_FAILS, SAME, STEPS, Run, outcome, replayed

O = torch.optim  # noqa: E741


@pytest.fixture
def device(accelerator: str) -> torch.device:
    return torch.device("cuda", 0) if accelerator == "gpu" else torch.device("cpu")


def test_numbers_are_copied_if_they_have_changed(device: torch.device) -> None:
    stage = Stage(device, 2)
    stage.fill([(0.0, 2.0, 3.0)])
    stage.numbers.fill_(7.0)
    stage.fill([(0.0, 2.0, 3.0)])
    assert stage.numbers.tolist() == [[7.0] * 3] * 2
    stage.fill([(-0.0, 2.0, 3.0)])
    assert str(stage.numbers[0].tolist()) == "[-0.0, 2.0, 3.0]"


@pytest.mark.spread(9)
@pytest.mark.parametrize("form", FORMS)
def test_same_bits(device: torch.device, form: str) -> None:
    cells = CELLS if device.type == "cuda" else CELLS[list(FORMS).index(form) % 4 :: 4]
    for cell in cells:
        found, captures = outcome(form, cell, device)
        if found == PLAIN_FAILS:  # no momentum to cycle; `capturable` on a CPU
            assert cell[2] == "OneCycle" or "capturable" in form
            continue
        is_behind = "fused" in form and cell[2] == "OneCycle"
        if device.type == "cuda":
            # The kernel reads a float from a tensor.
            is_behind |= "fused" in form and cell[0] == "float64"
            # Powers of a moving option with counters on the device.
            is_behind |= "capturable" in form and cell[2] == "OneCycle"
        assert found == (BEHIND if is_behind else SAME), (form, cell)
        assert captures <= 1 + ("RAdam" in form)


def test_counters_go_on_after_a_load_and_after_the_graphs(device: torch.device) -> None:
    """The counters are the user's own tensors, in memory that stays where it is."""
    run = Run("Adam", ("float32", "no clip", "constant"), device)
    replayed(run, backend_for(device))
    steps = [state["step"] for state in run.optimizer.state.values()]
    assert {step.item() for step in steps} == {float(len(run.gradients))}
    arrays = [step.numpy() for step in steps]
    prepared = PreparedOptimizer(run.optimizer, device, lambda _: None)
    prepared.check_state()
    live = run.optimizer.state_dict()
    saved = deepcopy(live)
    assert all(state["step"] is step for state, step in zip(live["state"].values(), steps, strict=True))
    steps[0].add_(1)  # by the user, who may
    assert prepared.hyperparameters()[_AS_CAPTURED] is False
    prepared.check_state()
    assert prepared.hyperparameters()[_AS_CAPTURED] is True
    assert [float(array) for array in arrays[:2]] == [61.0, 60.0]
    assert {state["step"].item() for state in saved["state"].values()} == {60.0}
    prepared.restore()
    assert [step.item() for step in steps[:2]] == [61.0, 60.0]


@pytest.mark.parametrize("first", [5, 8])  # the scaler skips step 8
def test_an_open_step_that_counts_in_other_groups_is_waited_for(
    device: torch.device, first: int
) -> None:
    """A graph for all parameters, and behind it one that tells their counters apart."""
    cell = ("fp16 scaler", "no clip", "constant")
    plain, run, backend = Run("NAdam", cell, device), Run("NAdam", cell, device), backend_for(device)
    assert run.scaler is not None
    prepared = PreparedOptimizer(run.optimizer, device, lambda _: None)
    scaler = PreparedScaler(run.scaler, device, prepared.device_state)

    def step(capturing: bool) -> None:
        with scaler.step_arithmetic((run.optimizer,), capturing), prepared.step_arithmetic(capturing):
            run.step()

    def captured() -> None:
        prepared.check_state()
        step(capturing=True)

    def captures() -> Any:
        with scaler.undone():
            return backend.capture(captured)[0]

    for index in range(first):
        for each in (plain, run):
            each.put_gradients(index)
        plain.step()
        step(capturing=False)
    assert scaler.applied
    gradient = run.parameters[2].grad
    whole = captures()
    run.parameters[2].grad = None
    part = captures()
    run.parameters[2].grad = gradient
    with setting(prepared.outcomes, may_be_late=True):
        for index, graph in ((first, whole), (first + 1, part)):
            for each in (plain, run):
                each.put_gradients(index)
            if graph is part:
                plain.parameters[2].grad = run.parameters[2].grad = None
            plain.step()
            graph.replay()
    prepared.outcomes.settle()
    for graph in (whole, part):
        backend.release(graph)
    assert not differences(plain.optimizer.state_dict(), run.optimizer.state_dict())
    assert not differences(plain.parameters, run.parameters)
    prepared.restore()


def test_state_that_was_moved_to_the_host(device: torch.device) -> None:
    """A `state_dict` has it where the user has it, with the values of now, as a kept one has in a load.

    On a GPU a load has put it there. On a CPU this test moves it to other memory instead.
    """
    cell = ("float32", "no clip", "constant")
    plain, run, backend = Run("NAdam", cell, device), Run("NAdam", cell, device), backend_for(device)
    prepared = PreparedOptimizer(run.optimizer, device, lambda _: None)
    for index in range(3):
        for each in (plain, run):
            each.put_gradients(index)
            each.step()
    for each in (plain, run):
        each.optimizer.load_state_dict(deepcopy(each.optimizer.state_dict()))
    products = [state["mu_product"] for state in run.optimizer.state.values()]
    if device.type == "cpu":
        for state, product in zip(run.optimizer.state.values(), products, strict=True):
            prepared._tensors._moved.append(_Moved(state, "mu_product", product, product._version))
            state["mu_product"] = product.clone()
    prepared.bring_state()
    assert all(state["mu_product"].device.type == "cpu" for state in run.optimizer.state.values())

    def step() -> None:
        prepared.check_state()
        with prepared.step_arithmetic(capturing=True):
            run.step()

    graph, _ = backend.capture(step)
    for index in range(3, 9):
        plain.put_gradients(index)
        plain.step()
        run.put_gradients(index)
        graph.replay()
    kept = run.optimizer.state_dict()
    assert all(
        state["mu_product"] is own for state, own in zip(kept["state"].values(), products, strict=True)
    )
    assert not differences(plain.optimizer.state_dict(), kept)
    for index in range(9, 12):
        plain.put_gradients(index)
        plain.step()
        run.put_gradients(index)
        graph.replay()
    backend.release(graph)
    for own, state in zip(products, plain.optimizer.state.values(), strict=True):
        for product in (own, state["mu_product"]):
            product.fill_(0.5)  # by the user, who may
    run.optimizer.load_state_dict(kept)  # which is live, so that nothing else changes
    assert not differences(plain.optimizer.state_dict(), run.optimizer.state_dict())
    others = deepcopy(kept)
    run.optimizer.load_state_dict(others)
    run.optimizer.load_state_dict(deepcopy(others))
    for own in products:  # the user's alone now
        own.fill_(0.25)
    prepared.restore()
    assert all(own.item() == 0.25 for own in products)
    assert not differences(plain.optimizer.state_dict(), run.optimizer.state_dict())


_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("number", [0.1, -0.0, float("nan"), 1e30])
def test_counters_of_each_dtype_get_the_bits_of_an_op(dtype: torch.dtype, number: float) -> None:
    if not dtype.is_floating_point and number != number:
        pytest.skip("not a number of this dtype")
    value = torch.tensor(number, dtype=torch.float64).to(dtype)
    counters = [torch.zeros((), dtype=dtype) for _ in range(3)]
    alike = Alike.of("step", counters)
    alike.write(value)
    assert alike.are_equal()
    for counter in (*counters, alike.read()):
        assert torch.equal(counter.view(1).view(torch.uint8), value.view(1).view(torch.uint8))
    counters[1].view(1).view(torch.uint8).add_(1)
    assert not alike.are_equal()


def test_a_counter_that_parameters_share_is_refused(device: torch.device) -> None:
    run = Run("Adam", ("float32", "no clip", "constant"), device)
    run.put_gradients(0)
    run.step()
    first, second, *_ = run.optimizer.state.values()
    second["step"] = first["step"].detach()
    prepared = PreparedOptimizer(run.optimizer, device, lambda _: None)
    with pytest.raises(CaptureError, match="`Adam` counts in one tensor for several parameters"):
        prepared.check_state()
    prepared.restore()


def _gradients_of(run: Run, index: int) -> None:
    run.put_gradients(index)
    if index >= 3:
        run.parameters[2].grad = None


def test_a_parameter_without_a_gradient_is_not_counted(device: torch.device) -> None:
    """A graph moves some of the equal counters; an earlier one that moves all of them is stale then."""
    cell = ("float32", "no clip", "constant")
    plain, run, backend = Run("NAdam", cell, device), Run("NAdam", cell, device), backend_for(device)
    for index in range(STEPS):
        _gradients_of(plain, index)
        plain.step()
    prepared = PreparedOptimizer(run.optimizer, device, lambda _: None)

    def step() -> None:
        prepared.check_state()
        with prepared.step_arithmetic(capturing=True):
            run.step()

    graphs: list[Any] = []
    for index in range(STEPS):
        _gradients_of(run, index)
        if index in (2, 3):
            graphs.append(backend.capture(step)[0])
            frozen = prepared.frozen_values()
        graphs[-1].replay() if index >= 2 else run.step()
        # The first graph is stale as soon as the second has told counters apart.
        assert index < 2 or (frozen == prepared.frozen_values()) is (index == 2)
    assert prepared.hyperparameters()[_AS_CAPTURED] is False
    backend.release(graphs.pop(0))
    assert prepared.hyperparameters()[_AS_CAPTURED] is True
    counted = [state["step"].item() for state in run.optimizer.state.values()]
    assert counted == [STEPS, STEPS, 3, *[STEPS] * (len(counted) - 3)]
    assert not differences(plain.optimizer.state_dict(), run.optimizer.state_dict())
    assert not differences(plain.parameters, run.parameters)
    prepared.restore()


def test_an_option_that_is_deleted_has_changed(device: torch.device) -> None:
    """Its step fails without this package, also if the option was None."""
    optimizer = Run("Adam", ("float32", "no clip", "constant"), device).optimizer
    prepared = PreparedOptimizer(optimizer, device, lambda _: None)
    values, named = prepared.frozen_values(), prepared.hyperparameters()
    del optimizer.param_groups[0]["foreach"]
    assert prepared.frozen_values() != values
    assert prepared.hyperparameters() != named
    prepared.restore()


def test_numbers_that_are_read_from_the_device_stay_there(device: torch.device) -> None:
    """The larger of two is taken without a branch, so that one graph serves all steps."""
    module = vars(sys.modules["torch.optim._adafactor"])
    for form in ("Adafactor", "Adafactor(foreach, maximize)"):
        assert outcome(form, ("float32", "no clip", "cosine"), device) == (SAME, 1)
    assert module.keys().isdisjoint({"max", "min"})


_SCALED = ("fp16 scaler", "norm", "cosine")


@pytest.mark.parametrize("form", ["AdamW", "NAdam", "RAdam"])
def test_numbers_for_one_outcome_alone_are_found(
    device: torch.device, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control: without those for a skipped step before, bias corrections are those of later steps."""
    own, asked = Outcomes.possible, list[int]()

    def as_if_done(outcomes: Outcomes) -> list[Any]:
        states = own(outcomes)
        asked.append(len(states))
        return states[:1]

    monkeypatch.setattr(Outcomes, "possible", as_if_done)
    monkeypatch.setattr("lightning_cudagraph.device.host_work.LateValue.is_known", lambda _: False)
    with pytest.raises((AssertionError, IndexError)):
        outcome(form, _SCALED, device)
    assert max(asked) == 2


@pytest.mark.parametrize("form", ["AdamW", "SGD(momentum, dampening)", "Rprop"])
@pytest.mark.parametrize("name", ["number", "save"])
def test_a_gate_that_lets_through_is_found(
    device: torch.device, form: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control: the forms of ops with a gate, and the copies for all others, are what is needed."""
    if name == "number":  # of factors; the other forms with a gate are those of `put` and fused SGD
        monkeypatch.setattr(scalar_ops, "_neutral", lambda name, gate: None)
        monkeypatch.setattr(Gate, "put", lambda gate, target, value: target.copy_(value))
        monkeypatch.setattr(Gate, "__torch_dispatch__", _unwatched)
    else:
        monkeypatch.setattr(Gate, "save", lambda gate, tensors: None)
    is_needed = name == "number" or form == "Rprop"
    if is_needed:
        with pytest.raises(AssertionError):
            outcome(form, _SCALED, device)
    else:
        assert outcome(form, _SCALED, device) == (SAME, 1)


def _unwatched(gate: Gate, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    return func(*args, **(kwargs or {}))


OPS: dict[str, Callable[..., Any]] = {
    "mul_": lambda a, b, c, s: a[0].mul_(s),
    "mul": lambda a, b, c, s: a[0] * s,
    "div": lambda a, b, c, s: a[0] / s,
    "div_": lambda a, b, c, s: a[0].div_(s),
    "rdiv": lambda a, b, c, s: s / c[0],
    "add_": lambda a, b, c, s: a[0].add_(b[0], alpha=s),
    "add": lambda a, b, c, s: a[0].add(b[0], alpha=s),
    "plus": lambda a, b, c, s: a[0].add_(s),
    "addcmul_": lambda a, b, c, s: a[0].addcmul_(b[0], c[0], value=s),
    "addcdiv_": lambda a, b, c, s: a[0].addcdiv_(b[0], c[0], value=s),
    "lerp_": lambda a, b, c, s: a[0].lerp_(b[0], s),
    "lerp": lambda a, b, c, s: a[0].lerp(b[0], s),
    "foreach mul_": lambda a, b, c, s: torch._foreach_mul_(a, s),
    "foreach mul": lambda a, b, c, s: torch._foreach_mul(a, [s] * len(a)),
    "foreach div_": lambda a, b, c, s: torch._foreach_div_(a, s),
    "foreach div_ list": lambda a, b, c, s: torch._foreach_div_(a, [s] * len(a)),
    "foreach add_": lambda a, b, c, s: torch._foreach_add_(a, b, alpha=s),
    "foreach plus list": lambda a, b, c, s: torch._foreach_add_(a, [s] * len(a)),
    "foreach addcmul_": lambda a, b, c, s: torch._foreach_addcmul_(a, b, c, s),
    "foreach addcmul_ value": lambda a, b, c, s: torch._foreach_addcmul_(a, b, c, value=s),
    "foreach addcdiv_": lambda a, b, c, s: torch._foreach_addcdiv_(a, b, c, s),
    "foreach addcdiv_ list": lambda a, b, c, s: torch._foreach_addcdiv_(a, b, c, [s] * len(a)),
    "foreach lerp_": lambda a, b, c, s: torch._foreach_lerp_(a, b, s),
    "foreach lerp_ list": lambda a, b, c, s: torch._foreach_lerp_(a, b, [s] * len(a)),
}


class _InTensors(torch.overrides.TorchFunctionMode):
    """Every op with a number of a program gets it in a tensor."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.replaced = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def staged(number: Any, dtype: torch.dtype, neutral: float | None) -> Tensor:
            assert neutral is None
            return torch.full((), number.program.value(number.node), dtype=dtype, device=self.device)

        done = with_tensors(func, args, kwargs or {}, staged)
        assert done is not None, func
        self.replaced += 1
        return done[0]


@pytest.mark.spread
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_an_op_with_its_number_in_a_tensor_comes_to_the_same_bits(
    device: torch.device, op: str, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    for draw in range(40):
        made = [
            [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((5,), (33, 65))]
            for _ in range(3)
        ]
        made[2] = [each.abs() + 1e-3 for each in made[2]]
        lists = [[each.to(dtype).to(device) for each in several] for several in made]
        others = deepcopy(lists)
        number = float(torch.rand((), generator=generator, dtype=torch.float64)) + 1e-3
        if draw % 3 == 0 and "lerp" not in op:
            number = -number
        program = HostProgram()
        scalar = program.scalar(program.source("number", lambda: 0.0, number))
        expected = OPS[op](*lists, number)
        with _InTensors(device) as mode:
            found = OPS[op](*others, scalar)
        assert mode.replaced == 1
        pairs = zip([*lists[0], *_listed(expected)], [*others[0], *_listed(found)], strict=True)
        assert all(torch.equal(one, other) for one, other in pairs), (op, dtype, number)


_LEFT = [-0.0, 0.0, 1e-42, -3.5, 2.0**120]


@pytest.mark.spread
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("op", [op for op in OPS if "_" in op or "plus" in op])
@pytest.mark.parametrize("is_skipped", [False, True], ids=["done", "skipped"])
def test_an_op_behind_a_gate(
    device: torch.device, op: str, dtype: torch.dtype, is_skipped: bool
) -> None:
    """The same bits as the op's own if the step is done; none changed if not, and no copy is needed."""
    plain, found, before = _behind_a_gate(device, op, dtype, is_skipped)
    _assert_equal_bits(before if is_skipped else plain, found)


@pytest.mark.spread
@pytest.mark.parametrize("op", [op for op in OPS if "foreach" in op and "_" in op])
@pytest.mark.parametrize("is_skipped", [False, True], ids=["done", "skipped"])
def test_an_op_on_a_list_behind_a_gate(
    op: str, is_skipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launches of a GPU, on a CPU: they leave the targets alone, and otherwise round differently."""
    monkeypatch.setattr(scalar_ops, "_is_in_one_launch", lambda one: True)
    plain, found, before = _behind_a_gate(torch.device("cpu"), op, torch.float32, is_skipped)
    if is_skipped:
        _assert_equal_bits(before, found)
    else:
        torch.testing.assert_close(plain, found)


def _assert_equal_bits(ones: list[Tensor], others: list[Tensor]) -> None:
    pairs = zip(ones, others, strict=True)
    assert all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in pairs)


def _behind_a_gate(
    device: torch.device, op: str, dtype: torch.dtype, is_skipped: bool
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The target after an op itself, after it behind a gate, and before; no copy was made of it."""
    number = 0.125 if "lerp" in op else -1.7
    lists = [
        [
            torch.tensor([*_LEFT, *map(float, range(size))], dtype=dtype, device=device)
            for size in (3, 70)
        ]
        for _ in range(3)
    ]
    lists[2] = [each.abs() + 1 for each in lists[2]]
    if is_skipped:
        lists[1][0][:3] = torch.tensor([float("inf"), float("-inf"), float("nan")])
    others, plain = deepcopy(lists), deepcopy(lists[0])
    OPS[op](plain, *deepcopy(lists[1:]), number)
    gate = Gate(torch.tensor(float(is_skipped), device=device), torch.tensor(False, device=device))
    with gate, _Gated(gate) as mode:
        OPS[op](*others, number)
    assert mode.gated == 1
    assert not gate._saved
    gate.restore()
    return plain, others[0], lists[0]


class _Gated(torch.overrides.TorchFunctionMode):
    """Every op that a gate holds back takes its form with the gate."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.gate = gate
        self.gated = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def staged(number: Any, dtype: torch.dtype, neutral: float | None) -> Tensor:
            tensor = torch.full((), number, dtype=dtype, device=self.gate.skip.device)
            return tensor if neutral is None else tensor.masked_fill(self.gate.skip, neutral)

        kwargs = kwargs or {}
        if not is_gated_write(func, args, self.gate):
            return func(*args, **kwargs)
        done = with_tensors(func, args, kwargs, staged, self.gate)
        assert done is not None, func
        self.gated += 1
        return done[0]


@pytest.mark.parametrize("is_skipped", [False, True], ids=["done", "skipped"])
def test_memory_that_other_ops_write_behind_a_gate(device: torch.device, is_skipped: bool) -> None:
    """Views, several writes, and memory made inside, which needs no copy."""
    one, whole = torch.arange(4.0, device=device), torch.arange(6.0, device=device).view(2, 3)
    before = deepcopy((one, whole))
    gate = Gate(torch.tensor(float(is_skipped), device=device), torch.tensor(False, device=device))
    with gate:
        one.exp_()
        one.sub_(1)
        whole[1].neg_()
        whole.sqrt_()
        made = one * 2
        made.exp_()
    after = deepcopy((one, whole))
    assert len(gate._saved) == 3
    gate.restore()
    for found, expected in zip((one, whole), before if is_skipped else after, strict=True):
        assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert not torch.equal(made, made * 0)


class _Overloads(TorchDispatchMode):
    """Notes the overloads that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "expected"), [("mul", [6.0, 15.0]), ("plus", [5.0, 8.0])])
def test_a_number_in_a_tensor_is_not_read(name: str, expected: list[float]) -> None:
    """On a GPU that would wait for the device; torch's parser prefers some overloads that read it."""
    ones = [torch.tensor([2.0]), torch.tensor([5.0])]
    with _Overloads() as overloads:
        _BY_NUMBER[name](ones, torch.tensor(3.0))
    assert [one.item() for one in ones] == expected
    assert not [each for each in overloads.seen if "_local_scalar_dense" in each]


def _listed(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [] if result is None else list(result)


def test_a_program_does_what_its_numbers_were_computed_by() -> None:
    given = {"lr": 0.1, "step": 3.0}
    program = HostProgram()
    lr, step = (program.scalar(program.source(n, lambda n=n: given[n], given[n])) for n in given)
    corrected = -lr / (1 - 0.9**step)
    root = (1 - 0.999**step) ** 0.5
    assert step <= 5
    assert program.value(corrected.node) == -0.1 / (1 - 0.9**3.0)
    given |= {"lr": 0.07, "step": 4.0}
    values = program.run()
    assert values[corrected.node] == -0.07 / (1 - 0.9**4.0)
    assert values[root.node] == (1 - 0.999**4.0) ** 0.5
    assert program.holds()
    given["step"] = 6.0
    assert not program.holds()
    with pytest.raises(CaptureError, match="converts a number that it computes on the host"):
        float(lr)
    assert isinstance(min(lr, 0.05), (float, HostScalar))
