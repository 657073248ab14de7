"""Walking batches, comparing them, and copying them into static buffers."""

from __future__ import annotations

import math
from collections import OrderedDict, UserDict, defaultdict
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import PureWindowsPath
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_cudagraph import BatchError, CaptureError, GraphedStep
from lightning_cudagraph.tensors.batch import flatten_batch
from lightning_cudagraph.tensors.batch_signature import Signature
from lightning_cudagraph.tensors.host_values import HostReads
from lightning_cudagraph.tensors.static import StaticBatch
from lightning_cudagraph.tensors.writes import storage_id

CPU = torch.device("cpu")


class Pair(NamedTuple):
    left: Tensor
    right: Any


@dataclass(frozen=True)
class Item:
    x: Tensor
    tag: str


def batch(value: float = 0.0, tag: str = "a") -> Any:
    return {
        "pair": Pair(torch.full((2, 3), value), [torch.full((4,), value, dtype=torch.int64), None]),
        "item": Item(torch.full((1,), value), tag),
        "user": UserDict(z=torch.full((2,), value)),
        "default": defaultdict(list, {"k": (torch.full((2, 2), value).t(), 3)}),
        "ordered": OrderedDict(a=torch.full((), value)),
    }


def test_paths() -> None:
    assert [path for path, _ in flatten_batch(batch())] == [
        "batch['pair'].left",
        "batch['pair'].right[0]",
        "batch['pair'].right[1]",
        "batch['item'].x",
        "batch['item'].tag",
        "batch['user']['z']",
        "batch['default']['k'][0]",
        "batch['default']['k'][1]",
        "batch['ordered']['a']",
    ]


def test_static_batch_keeps_types_and_addresses() -> None:
    static = StaticBatch(batch(1.0))
    before = [leaf for _, leaf in flatten_batch(static.batch) if isinstance(leaf, Tensor)]
    addresses = [leaf.data_ptr() for leaf in before]
    static.copy_from(batch(2.0))
    after = [leaf for _, leaf in flatten_batch(static.batch) if isinstance(leaf, Tensor)]
    assert [leaf.data_ptr() for leaf in after] == addresses
    assert all(bool((leaf == 2).all()) for leaf in after)
    assert type(static.batch["pair"]) is Pair
    assert type(static.batch["item"]) is Item
    assert type(static.batch["user"]) is UserDict
    assert static.batch["default"].default_factory is list
    assert Signature(static.batch, CPU) == Signature(batch(), CPU)


def test_the_same_tensor_twice_stays_one() -> None:
    x = torch.ones(3)
    static = StaticBatch([x, x, x.clone()]).batch
    assert static[0] is static[1]
    assert static[0] is not static[2]
    assert Signature([x, x, x.clone()], CPU) != Signature([x, x.clone(), x], CPU)


def _transposed() -> Any:
    other = batch()
    other["pair"] = Pair(torch.zeros(3, 2).t(), other["pair"].right)
    return other


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: {**b, "item": Item(b["item"].x, "b")}, r"`batch['item'].tag` changed: expected 'a'"),
        (lambda b: {**b, "item": Item(torch.zeros(2), "a")}, "`batch['item'].x` changed: expected (1,)"),
        (lambda b: {**b, "item": Item(b["item"].x.double(), "a")}, "found (1,) float64"),
        (lambda b: _transposed(), "with strides (3, 1), found (2, 3) float32 cpu with strides (1, 2)"),
        (lambda b: {**b, "new": 1}, "containers changed: `batch['new']` is new"),
        (
            lambda b: {**b, "pair": b["pair"]._replace(right=b["pair"].right[:1])},
            "containers changed: `batch['pair'].right[1]` is missing",
        ),
        (
            lambda b: {**b, "pair": list(b["pair"])},
            "containers changed: `batch['pair'].left` is missing",
        ),
    ],
)
def test_what_differs_is_named(change: Any, message: str) -> None:
    one, other = Signature(batch(), CPU), Signature(change(batch()), CPU)
    assert one != other
    assert message in one.difference(other)


def test_values_of_tensors_do_not_matter() -> None:
    assert Signature(batch(1.0), CPU) == Signature(batch(2.0), CPU)
    assert hash(Signature(batch(1.0), CPU)) == hash(Signature(batch(2.0), CPU))


def test_arrays_and_other_leaves_count_by_value() -> None:
    one = [np.arange(3), {1, 2}, 2.5]
    assert Signature(one, CPU) == Signature([np.arange(3), {1, 2}, 2.5], CPU)
    assert Signature(one, CPU) != Signature([np.arange(3) + 1, {1, 2}, 2.5], CPU)
    assert Signature(one, CPU) != Signature([np.arange(3), {1, 3}, 2.5], CPU)
    assert Signature([1], CPU) != Signature([True], CPU)


class Opaque:
    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner


@pytest.mark.parametrize(
    ("hidden", "path"),
    [
        (Opaque(torch.zeros(1)), "`batch[0].inner`"),
        (Opaque({"a": [torch.zeros(1)]}), "`batch[0].inner['a'][0]`"),
        (Opaque(Opaque(torch.zeros(1))), "`batch[0].inner.inner`"),
    ],
)
def test_an_object_that_hides_a_tensor_is_refused_by_its_path(hidden: Any, path: str) -> None:
    with pytest.raises(BatchError) as caught:
        Signature([hidden], CPU)
    assert path in str(caught.value)
    assert "`Opaque`" in str(caught.value)


def test_a_tensor_that_carries_another_is_refused() -> None:
    carrying: Any = torch.zeros(1)
    carrying.mask = torch.zeros(1)
    with pytest.raises(BatchError, match=r"holds a tensor at `batch\[0\].mask`"):
        Signature([carrying], CPU)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_elsewhere_and_sparse_ones_are_refused() -> None:
    with pytest.raises(BatchError, match=r"`batch\[0\]` is on meta"):
        Signature([torch.zeros(1, device="meta")], CPU)
    with pytest.raises(BatchError, match=r"`batch\[0\]` is a tensor of layout torch.sparse_coo"):
        Signature([torch.zeros(2, 2).to_sparse()], CPU)
    with pytest.raises(BatchError, match=r"`batch\[0\]` is a nested tensor"):
        Signature([torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])], CPU)


def test_a_parameter_without_a_gradient_stays_one() -> None:
    plain, rows = torch.ones(3), nn.Parameter(torch.ones(3), requires_grad=False)
    text = "found (3,) float32 cpu with strides (1,) in a `Parameter`"
    assert text in Signature([plain], CPU).difference(Signature([rows], CPU))
    static = StaticBatch([rows, plain])
    kinds = [nn.Parameter, Tensor]
    assert [*map(type, static.batch)] == [*map(type, static.aliased().batch)] == kinds


def plain_batch() -> Any:
    return {"x": torch.zeros(2, 3), "rest": (torch.zeros(4), "a", 1, None)}


def test_tensors_that_a_gradient_would_leave_are_refused() -> None:
    weight = nn.Parameter(torch.zeros(2, 3))
    leaf = torch.zeros(2, 3, requires_grad=True)
    for tensor in (weight, weight * 2, leaf):
        with pytest.raises(BatchError, match=r"`batch\[0\]` requires a gradient"):
            Signature([tensor], CPU)
        assert StaticBatch([leaf.detach()]).leaves_of([tensor], "cpu") is None
    Signature([weight.detach(), nn.Parameter(torch.zeros(3), requires_grad=False)], CPU)


def test_a_quick_yes() -> None:
    static = StaticBatch(plain_batch())
    other = plain_batch()
    found = static.leaves_of(other, "cpu")
    assert found is not None
    tensors, values = found
    assert values == []
    assert [id(tensor) for tensor in tensors] == [id(other["x"]), id(other["rest"][0])]
    assert Signature(plain_batch(), CPU) == Signature(other, CPU)


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.zeros(2, 4)},
        {"x": torch.zeros(3, 2).t()},
        {"x": torch.zeros(2, 3, dtype=torch.float64)},
        {"x": torch.zeros(2, 3, requires_grad=True)},
        {"x": torch.zeros(2, 3).to_sparse()},
        {"x": nn.Parameter(torch.zeros(2, 3))},
        {"x": [torch.zeros(2, 3)]},
        {"rest": [torch.zeros(4), "a", 1, None]},
        {"rest": (torch.zeros(4), "b", 1, None)},
        {"rest": (torch.zeros(4), "a", True, None)},
        {"rest": (torch.zeros(4), "a", 1)},
        {"more": 1},
    ],
)
def test_no_quick_yes(change: dict[str, Any]) -> None:
    static = StaticBatch(plain_batch())
    assert static.leaves_of({**plain_batch(), **change}, "cpu") is None
    assert static.leaves_of(plain_batch(), "cuda") is None


def test_no_quick_yes_where_only_a_signature_can_tell() -> None:
    one = torch.zeros(3)
    assert StaticBatch([one, one]).leaves_of([one, one], "cpu") is None
    assert StaticBatch([one, one.clone()]).leaves_of([one, one], "cpu") is None
    assert StaticBatch(batch()).leaves_of(batch(), "cpu") is None
    expanded = torch.zeros(1, 3).expand(2, 3)
    assert StaticBatch([expanded]).leaves_of([torch.zeros(2, 3)], "cpu") is None
    named: Any = torch.zeros(3)
    named.scale = 2.0
    assert StaticBatch([named]).leaves_of([torch.zeros(3)], "cpu") is None
    assert StaticBatch([torch.zeros(3)]).leaves_of([named], "cpu") is None
    assert StaticBatch([named]).batch[0].scale == 2.0


def test_a_zero_has_a_sign() -> None:
    for one, other in ((0.0, -0.0), (complex(0.0, 0.0), complex(0.0, -0.0))):
        assert Signature([one], CPU) == Signature([one], CPU)
        assert Signature([one], CPU) != Signature([other], CPU)
        assert Signature([{one}], CPU) != Signature([{other}], CPU)
        assert Signature([slice(one)], CPU) != Signature([slice(other)], CPU)
        assert StaticBatch([torch.ones(1), one]).leaves_of([torch.ones(1), other], "cpu") is None
        assert StaticBatch([torch.ones(1), one]).leaves_of([torch.ones(1), one], "cpu") is not None
    for kind in (np.float16, np.float32, np.complex64):
        one, other = kind(0.0), kind(-0.0)
        assert Signature([one], CPU) != Signature([other], CPU)
        reads = HostReads(lambda: None)
        reads.kinds = (np.generic,)
        static = StaticBatch([torch.ones(1), one], reads)
        assert static.leaves_of([torch.ones(1), one], "cpu") is not None
        assert static.leaves_of([torch.ones(1), other], "cpu") is None
    assert "expected 0.0, found -0.0" in Signature([0.0], CPU).difference(Signature([-0.0], CPU))
    assert Signature([math.nan], CPU) == Signature([float("nan")], CPU)


def test_one_tensor_at_two_places_gives_no_quick_yes_to_two() -> None:
    one = torch.zeros(3)
    static = StaticBatch([one, one])
    assert static.leaves_of([one, one.clone()], "cpu") is None
    with pytest.raises(ValueError, match="2 tensors for 1 static buffers"):
        static.fill([one, one.clone()])


def test_the_same_tensor_in_words() -> None:
    one = torch.zeros(3)
    same, apart = Signature([one, one], CPU), Signature([one, one.clone()], CPU)
    text = "`batch[1]` changed: expected the same tensor as `batch[0]`, found a tensor of its own"
    assert same.difference(apart) == text


def test_a_step_is_lent_containers_of_its_own() -> None:
    static = StaticBatch(plain_batch())
    aliased = static.aliased()
    aliased.refuse_changes()
    assert storage_id(aliased.batch["x"]) == storage_id(static.batch["x"])
    aliased.batch["x"] = aliased.batch["x"] * 2
    with pytest.raises(CaptureError, match=r"replaces `batch\['x'\]`"):
        aliased.refuse_changes()
    static.aliased().refuse_changes()


def test_a_write_is_found_by_version_and_by_memory() -> None:
    static = StaticBatch(plain_batch())
    aliased = static.aliased()
    with pytest.raises(CaptureError, match=r"writes into `batch\['rest'\]\[0\]` in place"):
        aliased.refuse_changes([static.batch["rest"][0][1:]])
    static.batch["x"][0].mul_(2)
    with pytest.raises(CaptureError, match=r"writes into `batch\['x'\]` in place"):
        aliased.refuse_changes()


def test_a_step_is_lent_tensors_of_its_own() -> None:
    tensor = torch.zeros(3)
    tensor.length = 3  # type: ignore[attr-defined]
    static = StaticBatch([tensor, tensor])
    for number in (1.0, 2.0):
        static.copy_from([torch.full((3,), number)] * 2)
        first, second = static.aliased().batch
        assert first is second
        assert first.length == 3
        first.requires_grad_().sum().backward()
        assert first.tolist() == [number] * 3
        assert first.grad.tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: setattr(x, "seen", 1), r"sets an attribute of `batch\[0\]`"),
        (lambda x: setattr(x, "data", torch.ones(3)), r"gives `batch\[0\]` other memory"),
        (lambda x: x.requires_grad_(), ""),
    ],
)
def test_what_a_step_does_to_its_tensors(change: Any, said: str) -> None:
    aliased = StaticBatch([torch.zeros(3)]).aliased()
    change(aliased.batch[0])
    with pytest.raises(CaptureError, match=said) if said else nullcontext():
        aliased.refuse_changes()


class _Named(dict[str, Tensor]):
    """A dictionary with a number beside its items."""

    scale = 1.0


@dataclass
class _Fields:
    x: Tensor


def _tensor(x: Tensor) -> Any:
    return x


@pytest.mark.parametrize(
    "make", [lambda x: _Named(x=x), _Fields, _tensor], ids=["dict", "dataclass", "tensor"]
)
def test_numbers_beside_items_and_fields(make: Any) -> None:
    batch, same, other = (make(torch.ones(2)) for _ in range(3))
    batch.scale, same.scale, other.scale = 1.5, 1.5, 2.5
    signatures = [Signature([b], torch.device("cpu")) for b in (batch, same, other)]
    assert signatures[0] == signatures[1]
    assert signatures[0] != signatures[2]
    difference = signatures[0].difference(signatures[2])
    assert difference == "`batch[0].scale` changed: expected 1.5, found 2.5"


def test_training_on_batches_with_a_number_beside_them() -> None:
    def trained(**kwargs: Any) -> Tensor:
        torch.manual_seed(0)
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(batch: _Named) -> Tensor:
            optimizer.zero_grad()
            loss = net(batch["x"]).square().mean() * batch.scale
            loss.backward()
            optimizer.step()
            return loss

        with GraphedStep(step, net, optimizer, verify=None, **kwargs) as graphed:
            for index in range(14):
                batch = _Named(x=torch.rand(8, 4))
                batch.scale = 1.0 + (index > 7)
                graphed(batch)
            if "backend" not in kwargs:
                assert graphed.summary.calls.replayed >= 6
        return net.weight.detach()

    assert torch.equal(trained(backend="off"), trained())


class Weighted(str):
    """A string with state and an equality of its own."""

    weight: float

    def __eq__(self, other: object) -> bool:
        return str.lower(self) == str.lower(str(other))

    def __hash__(self) -> int:
        return hash(self.lower())


def test_subclasses_of_values_are_compared_by_all_they_hold() -> None:
    def weighted(text: str, weight: float) -> Weighted:
        made = Weighted(text)
        made.weight = weight
        return made

    same = Signature([weighted("a", 1.0)], CPU)
    assert same == Signature([weighted("a", 1.0)], CPU)
    assert same != Signature([weighted("A", 1.0)], CPU)
    assert same != Signature([weighted("a", 2.0)], CPU)
    assert StaticBatch([weighted("a", 1.0)]).leaves_of([weighted("a", 1.0)], "cpu") is None


def test_keys_are_compared_by_type_and_sign() -> None:
    for one, other in ((1, 1.0), (1, True), (0.0, -0.0)):
        x = torch.zeros(1)
        assert Signature({one: x}, CPU) != Signature({other: x}, CPU)
        assert StaticBatch({one: x}).leaves_of({other: x}, "cpu") is None
    one, other = PureWindowsPath("A"), PureWindowsPath("a")
    assert Signature([one], CPU) != Signature([other], CPU)
    reads = HostReads(lambda: None)
    reads.widen("")
    reads.widen("")
    assert StaticBatch([one], reads).leaves_of([one], "cpu") is not None
    assert StaticBatch([one], reads).leaves_of([other], "cpu") is None
