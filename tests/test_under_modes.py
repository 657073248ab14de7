"""What torch computes in another way under the modes of a capture: here it is the same, or refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_cudagraph import (
    CaptureError,
    CUDAGraphCallback,
    GraphedStep,
    Verification,
    VerificationError,
)
from lightning_cudagraph.device.sentry import sentry
from lightning_cudagraph.graphed_step import gradients
from tests.harness import Net, Trace, assert_same, differences, loader, make, train
from tests.loops import device_of

# of torch, where it imports its own compiler, and where that looks at every attribute
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.*deprecated:DeprecationWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf",
    "ignore:size_average and reduce args will be deprecated",
)


@torch.library.custom_op("tests_under_modes::times", mutates_args=())
def times(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight).float()


@times.register_fake
def _made(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1], dtype=torch.float32)


def _saved(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    return times(gradient, weight.t()), times(x.t(), gradient)


torch.library.register_autograd("tests_under_modes::times", _backward, setup_context=_saved)


class Whole(Net):
    """Ops that come to the dispatcher as one, and consist of others, which autocast knows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 12) * 0.3)

    def more(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.more(x).float().mean()


class Custom(Whole):
    def more(self, x: Tensor) -> Tensor:
        return times(times(x, self.weight), self.weight)


class ByName(Whole):
    """The same op, called as those are that C++ registers; and once with autocast off."""

    def more(self, x: Tensor) -> Tensor:
        op = torch.ops.tests_under_modes.times
        with torch.autocast(x.device.type, enabled=False):
            x = op(x, self.weight)
        return op(x, self.weight)


class Bilinear(Whole):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Bilinear(12, 12, 4)

    def more(self, x: Tensor) -> Tensor:
        return self.both(x, x.flip(0))


class Grid(Whole):
    def more(self, x: Tensor) -> Tensor:
        theta = (x @ self.weight).float().reshape(-1, 2, 6)[:, 0].reshape(-1, 2, 3)
        return F.affine_grid(theta, [len(theta), 1, 3, 3], align_corners=False)


class Distances(Whole):
    """What autocast knows, and runs in fp32: it does not come into that."""

    def more(self, x: Tensor) -> Tensor:
        x = (x @ self.weight).repeat(8, 1)
        return torch.cdist(x, x.flip(0) + 1, compute_mode="use_mm_for_euclid_dist")


class Lists(Whole):
    """A list of products, which torch has since 2.13."""

    def more(self, x: Tensor) -> Tensor:
        if not hasattr(torch, "_foreach_mm"):
            return times(x, self.weight)
        return torch._foreach_mm([x], [self.weight.detach()])[0] * self.weight.sum()


class Inverse(Whole):
    """On a CPU autocast knows `pinverse`, but not what it calls. On a GPU no graph can hold it."""

    def more(self, x: Tensor) -> Tensor:
        return torch.pinverse(self.weight)


class Attends(Whole):
    """Attention of several ops, some inside of others that autocast knows."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 2, batch_first=True, dropout=0.1)

    def more(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, 4, 12)
        mask = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        mask[1:, 3] = True
        return self.attention(x, x, x, key_padding_mask=mask, need_weights=self.training)[0]


def _fit(kind: type[Net], path: Path, accelerator: str, *args: Any, **kwargs: Any) -> Trace:
    kwargs.setdefault("train_loader", loader(ragged=False))
    kwargs.setdefault("val_loader", loader(ragged=False, seed=1, batches=2))
    return train(make(kind), path, *args, accelerator=accelerator, **kwargs)


class Checkpointed(Whole):
    """Computed again in the backward pass, under autocast as in the forward pass."""

    def more(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, self.weight, use_reentrant=False, preserve_rng_state=False)

    def inner(self, x: Tensor, weight: Tensor) -> Tensor:
        return times(times(x, weight).sigmoid(), weight)


class Reentrant(Checkpointed):
    def more(self, x: Tensor) -> Tensor:
        x = (x @ self.weight).float()
        return checkpoint(self.inner, x, self.weight, use_reentrant=True, preserve_rng_state=False)


class InFp32(torch.autograd.Function):
    """Switches autocast off for both of its passes."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return times(x, weight)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return times(gradient, weight.t()), times(x.t(), gradient)


class Switched(Whole):
    def more(self, x: Tensor) -> Tensor:
        return InFp32.apply(x @ self.weight, self.weight)


class CompiledAround(Whole):
    """The op inside of compiled code, which torch's compiler leaves as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.fast = torch.compile(self.inner, backend="eager")

    def inner(self, x: Tensor) -> Tensor:
        return times(x.sin(), self.weight)

    def more(self, x: Tensor) -> Tensor:
        return self.fast(x)


_WHOLE = [
    *(Custom, ByName, Bilinear, Grid, Distances, Attends),
    *(Checkpointed, Reentrant, Switched, CompiledAround, Lists, Inverse),
]


@pytest.mark.long
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("kind", _WHOLE, ids=lambda kind: kind.__name__)
def test_autocast_comes_to_what_ops_consist_of(
    tmp_path: Path, accelerator: str, kind: type[Net], precision: str
) -> None:
    if precision == "16-mixed" and accelerator == "cpu":
        pytest.skip("a gradient scaler needs a GPU")
    if kind is Inverse and accelerator == "gpu":
        pytest.skip("copies between host and device in the middle of the op")
    plain = _fit(kind, tmp_path / "plain", accelerator, precision=precision)
    callback = CUDAGraphCallback(evaluation=True)
    graph = _fit(kind, tmp_path / "graph", accelerator, callback, precision=precision)
    assert_same(plain, graph)
    assert graph.counts.replayed == 18


def _not_reaching(*_: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


@pytest.mark.long
@pytest.mark.parametrize("verify_replays", [0, 2])
def test_without_that_it_would_not(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch, verify_replays: int
) -> None:
    plain = _fit(Custom, tmp_path / "plain", accelerator, precision="bf16-mixed")
    monkeypatch.setattr(sentry, "reaching", _not_reaching)
    callback = CUDAGraphCallback(verify=Verification(replays=verify_replays))
    if verify_replays:
        with pytest.raises(VerificationError):
            _fit(Custom, tmp_path / "graph", accelerator, callback, precision="bf16-mixed")
    else:
        graph = _fit(Custom, tmp_path / "graph", accelerator, callback, precision="bf16-mixed")
        assert list(differences(plain.final, graph.final))


Loop = Callable[[type[Whole], bool, bool], list[Tensor]]


@pytest.fixture
def looped(accelerator: str) -> Loop:
    """Losses and weights of a loop of one's own, by the model, and how it is run."""
    device = torch.device(device_of(accelerator))

    def run(kind: type[Whole], backward_inside: bool, graphed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = kind().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
                if backward_inside:
                    loss.backward()
            if not backward_inside:
                loss.backward()
            optimizer.step()
            return loss

        with GraphedStep(step, modules=model, optimizers=optimizer) as graph:
            call = graph if graphed else step
            losses = [call(x.to(device), y.to(device)).clone() for x, y in loader(ragged=False)]
        return [*losses, *model.state_dict().values()]

    return run


@pytest.mark.spread
@pytest.mark.parametrize("backward_inside", [False, True], ids=["behind", "inside"])
@pytest.mark.parametrize("kind", [Custom, Checkpointed, Switched, Distances], ids=lambda k: k.__name__)
def test_autocast_in_a_loop_of_ones_own(looped: Loop, kind: type[Whole], backward_inside: bool) -> None:
    """Its warm-up steps are watched, under a mode."""
    assert not list(
        differences(looped(kind, backward_inside, False), looped(kind, backward_inside, True))
    )


@pytest.mark.long
def test_without_that_its_warm_up_would_be_another(
    looped: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = looped(Custom, False, False)
    monkeypatch.setattr(gradients, "reaching", _not_reaching)
    assert differences(plain[:2], looped(Custom, False, True)[:2])


_library = torch.library.Library("tests_under_modes", "FRAGMENT")
_library.define("in_fp32(Tensor x, Tensor weight) -> Tensor")


def _in_fp32(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return torch.ops.tests_under_modes.times(x.float(), weight)


_library.impl("in_fp32", _in_fp32, "CompositeImplicitAutograd")


class Calls(Whole):
    def more(self, x: Tensor) -> Tensor:
        return torch.ops.tests_under_modes.in_fp32(x, self.weight)


@pytest.mark.long
def test_an_op_that_another_calls(tmp_path: Path, accelerator: str) -> None:
    """Nobody knows whether it has switched autocast off."""
    name = "`tests_under_modes::times`, called by the Python of another one under autocast"
    with pytest.raises(CaptureError, match=f"(?s){name}"):
        _fit(Calls, tmp_path / "raise", accelerator, CUDAGraphCallback(), precision="bf16-mixed")
    plain = _fit(Calls, tmp_path / "plain", accelerator)
    graph = _fit(Calls, tmp_path / "graph", accelerator, CUDAGraphCallback())
    assert_same(plain, graph)
    assert graph.counts.replayed == 18


class PassesOn(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class UnderAMode(Whole):
    """Below a mode of the user's, autocast is off in what the op consists of, with us and without."""

    def more(self, x: Tensor) -> Tensor:
        with PassesOn():
            return times(times(x, self.weight), self.weight)


class Selective(Checkpointed):
    def more(self, x: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        return checkpoint(self.inner, x, self.weight, context_fn=contexts, **options)


@torch.library.custom_op("tests_under_modes::cast", mutates_args=())
def cast(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


for _device_type in ("cpu", "cuda"):
    torch.library.register_autocast("tests_under_modes::cast", _device_type, torch.float32)


class Registered(Whole):
    """Autocast knows the op itself: it is off inside."""

    def more(self, x: Tensor) -> Tensor:
        return cast(x, self.weight.detach()) * self.weight.mean()


class Encodes(Whole):
    """In evaluation, an op that consists of a whole layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(12, 2, 24, batch_first=True)

    def more(self, x: Tensor) -> Tensor:
        return self.layer(x.reshape(-1, 4, 12))


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    "kind", [UnderAMode, Selective, Registered, Encodes], ids=lambda kind: kind.__name__
)
def test_autocast_is_off_where_it_is_without(tmp_path: Path, accelerator: str, kind: type[Net]) -> None:
    plain = _fit(kind, tmp_path / "plain", accelerator, precision="bf16-mixed")
    callback = CUDAGraphCallback(evaluation=True)
    graph = _fit(kind, tmp_path / "graph", accelerator, callback, precision="bf16-mixed")
    assert_same(plain, graph)
    assert graph.counts.replayed == 18


class Wrapped(Whole):
    def more(self, x: Tensor) -> Tensor:
        return (TwoTensor(x, x) * 2).a @ self.weight


def test_tensors_that_consist_of_others(tmp_path: Path, accelerator: str) -> None:
    if accelerator == "gpu":
        pytest.skip("there kernels are captured, whoever asks for them")
    with pytest.raises(CaptureError, match="`TwoTensor`, which consists of other tensors, on the CPU"):
        _fit(Wrapped, tmp_path, accelerator, CUDAGraphCallback())


class Products(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor(self.features(x)).mean()

    def factor(self, x: Tensor) -> Tensor:
        return x.sigmoid().prod(1)


class Running(Products):
    def factor(self, x: Tensor) -> Tensor:
        return x.sigmoid().cumprod(1)


class Filled(Products):
    def factor(self, x: Tensor) -> Tensor:
        return x.masked_fill(x > 0, x.mean())


class Smoothed(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weight = torch.linspace(1, 2, 4, device=self.device)
        return self.loss(self(batch[0]), batch[1], weight)

    def loss(self, *args: Tensor) -> Tensor:
        return F.cross_entropy(*args, label_smoothing=0.1)


class SmoothedByAnOldName(Smoothed):
    def loss(self, *args: Tensor) -> Tensor:
        return F.cross_entropy(*args, size_average=True, reduction="sum", label_smoothing=0.1)


class SmoothedOutsideOfCompiledCode(Smoothed):
    """Where compiled code leaves a function as it is, it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.fast = torch.compile(self.both, backend="aot_eager")

    def both(self, *args: Tensor) -> Tensor:
        return self.outside(args[0] * 2, *args[1:])

    @torch.compiler.disable
    def outside(self, *args: Tensor) -> Tensor:
        return F.cross_entropy(*args, label_smoothing=0.1)

    def loss(self, *args: Tensor) -> Tensor:
        return self.fast(*args)


class SmoothedInOne(Smoothed):
    """With the last layer in one function, which torch has since 2.13."""

    def loss(self, *args: Tensor) -> Tensor:
        if not hasattr(F, "linear_cross_entropy"):
            return super().loss(*args)
        eye = torch.eye(4, device=args[0].device)
        return F.linear_cross_entropy(*args[:1], eye, args[1], weight=args[2], label_smoothing=0.1)


class SmoothedByTheOp(Smoothed):
    def loss(self, *args: Tensor) -> Tensor:
        return torch.ops.aten.cross_entropy_loss(*args, 1, -100, 0.1)


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (Products, "the gradient of `prod`.*functools.reduce"),
        (Running, "the gradient of `cumprod`.*accumulate"),
        (Filled, "(the gradient of the value of )?`masked_fill`.*torch.where"),
        (Smoothed, "`cross_entropy` with label smoothing and weights.*reduction"),
        (SmoothedByAnOldName, "`cross_entropy` with label smoothing and weights.*reduction"),
        (SmoothedOutsideOfCompiledCode, "`cross_entropy` with label smoothing and weights.*reduction"),
        (SmoothedInOne, "`cross_entropy` with label smoothing and weights.*reduction"),
        (SmoothedByTheOp, "`cross_entropy` with label smoothing and weights.*reduction"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_reads_that_a_mode_would_hide(
    tmp_path: Path, accelerator: str, kind: type[Net], what: str
) -> None:
    with pytest.raises(CaptureError, match=f"(?s)A CUDA graph cannot hold {what}") as found:
        _fit(kind, tmp_path / "raise", accelerator, CUDAGraphCallback())
    assert f"{Path(__file__).stem}.py" in str(found.value)
    plain = _fit(kind, tmp_path / "plain", accelerator)
    callback = CUDAGraphCallback(on_unsupported="eager")
    eager = _fit(kind, tmp_path / "eager", accelerator, callback)
    assert_same(plain, eager)
    assert eager.counts.replayed == 0


class FilledWith(Products):
    def factor(self, x: Tensor) -> Tensor:
        return x.masked_fill(x > 0, x.detach().mean())


class Assigned(Products):
    def factor(self, x: Tensor) -> Tensor:
        x = x.clone()
        x[x > 0] = x.detach().mean()
        return x


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (FilledWith, "`masked_fill` with a tensor on the GPU.*torch.where"),
        (Assigned, "indexing with a boolean mask"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_reads_in_kernels(tmp_path: Path, accelerator: str, kind: type[Net], what: str) -> None:
    if accelerator == "cpu":
        pytest.skip("a CPU has its values at hand")
    with pytest.raises(CaptureError, match=f"(?s)A CUDA graph cannot hold {what}"):
        _fit(kind, tmp_path, accelerator, CUDAGraphCallback())


class NotRead(Net):
    """The same ops where torch reads nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        features = self.features(x)
        known = features.detach()
        factor = known.sigmoid().prod(1).mean() + known.sigmoid().cumprod(1).mean()
        features = features.masked_fill(known > 1, torch.tensor(2.0)).masked_fill(known < -1, 0.5)
        weight = torch.linspace(1, 2, 4, device=self.device)
        out = self.head(features) * factor
        loss = F.cross_entropy(out, y, weight) + F.cross_entropy(out, y, label_smoothing=0.1)
        smoothed = F.cross_entropy(out, y, weight, reduction="none", label_smoothing=0.1)
        as_chances = F.cross_entropy(out, out.detach().softmax(1), weight, label_smoothing=0.1)
        return loss + smoothed.sum() / weight[y].sum() + as_chances


class CompiledProducts(Products):
    """Compiled code was traced under modes, and reads nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.fast = torch.compile(super().factor, backend="aot_eager")

    def factor(self, x: Tensor) -> Tensor:
        return self.fast(x)


@pytest.mark.spread(2)
@pytest.mark.parametrize("kind", [NotRead, CompiledProducts], ids=lambda kind: kind.__name__)
def test_where_torch_reads_nothing(tmp_path: Path, accelerator: str, kind: type[Net]) -> None:
    plain = _fit(kind, tmp_path / "plain", accelerator)
    graph = _fit(kind, tmp_path / "graph", accelerator, CUDAGraphCallback())
    assert_same(plain, graph)
    assert graph.counts.replayed == 18


class Asks(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x) * (2.0 if torch.is_inference_mode_enabled() else 1.0)
        self.log("val_loss", F.cross_entropy(logits, y))


def test_a_step_that_asks_for_inference_mode(tmp_path: Path, accelerator: str) -> None:
    """In `fit`, validation is not in it."""
    plain = _fit(Asks, tmp_path / "plain", accelerator)
    graph = _fit(Asks, tmp_path / "graph", accelerator, CUDAGraphCallback(evaluation=True))
    assert_same(plain, graph)

    def validate(**options: Any) -> float:
        callback = CUDAGraphCallback(evaluation=True)
        trainer = pl.Trainer(
            accelerator=accelerator,
            devices=1,
            callbacks=[callback],
            logger=False,
            enable_progress_bar=False,
            **options,
        )
        found = trainer.validate(make(Asks), loader(ragged=False, batches=8), verbose=False)
        assert callback.summary.validate.replayed == 5
        return found[0]["val_loss"]

    with pytest.raises(CaptureError, match=r"is_inference_mode_enabled\(\)` would say another thing"):
        validate()
    validate(inference_mode=False)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.overrides._get_current_function_mode_stack()
