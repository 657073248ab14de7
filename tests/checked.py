"""Check of the writes of all ops that torch has samples for, and of models, losses and optimizers.

The result is the list of ops that captures may put on several streams. To add those of a device, or of
another version of torch:

    python -m tests.checked --device cuda
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_iter, tree_map

from benchmarks.models import WORKLOADS, Workload
from lightning_cudagraph.device.streams import accesses
from tests.declared import Declared

__all__ = [
    "LOSSES",
    "MODELS",
    "OPTIMIZERS",
    "Convolutions",
    "Everything",
    "mlp",
    "optimized",
    "samples_of_ops",
    "scaled",
    "sweep",
    "told",
    "trained",
]

_LIST = Path(accesses.__file__).with_name("checked_ops.txt")
_SAMPLES = 2


class Everything:
    """Replaces the list, so that all ops are checked."""

    def __contains__(self, name: object) -> bool:
        return True


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, groups=8),
            nn.GroupNorm(2, 8),
            nn.SiLU(inplace=True),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.BatchNorm1d(32),
            nn.Linear(32, 12),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.repeat(1, 12)[:, :108].reshape(-1, 3, 6, 6))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x.repeat(1, 16)[:, :128].reshape(-1, 8, 16))
        q, k, v = (t.reshape(-1, 8, 2, 8).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1).flatten(1)[:, :12]


class Norms(nn.Module):
    """Layers with weights recomputed in each step, and one that keeps an intermediate tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.RMSNorm(12),
            nn.utils.parametrizations.weight_norm(nn.Linear(12, 24)),
            nn.utils.parametrizations.spectral_norm(nn.Linear(24, 24)),
            nn.RMSNorm(24, elementwise_affine=False),
            nn.Linear(24, 12),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, 2, dropout=0.2, batch_first=True)
        self.gru = nn.GRU(6, 6, batch_first=True, bidirectional=True)
        self.rnn = nn.RNN(12, 12, batch_first=True)
        self.cell = nn.LSTMCell(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.rnn(self.gru(self.lstm(x.reshape(-1, 3, 4))[0])[0])[0]
        return self.cell(x[:, -1])[0]


class Embeddings(nn.Module):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.rows = nn.Embedding(10, 6, sparse=sparse)
        self.bags = nn.EmbeddingBag(10, 6, mode="sum")
        self.out = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        indices = (x.abs() * 3).long().clamp(max=9)
        return self.out(torch.cat([self.rows(indices).mean(1), self.bags(indices)], 1))


class Lists(nn.Module):
    """Writes through views, lists of tensors, and shared memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)
        self.register_buffer("seen", torch.zeros(3, 12))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen[1].add_(x.mean(0))
            self.seen.t()[2:5].mul_(0.5)
            torch._foreach_lerp_([*self.seen.unbind()], [x[0], x[1], x[2]], 0.1)
            self.seen.index_add_(0, torch.zeros(2, dtype=torch.long, device=x.device), x[:2])
            self.seen.scatter_(1, self.seen.argsort(1)[:, :2], x[:3, :2])
        out = self.layer(x)
        out[:, 3:6] *= 2
        return out + self.seen.sum(0).detach()


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 24), nn.LayerNorm(24), nn.GELU(), nn.Dropout(0.3), nn.Linear(24, 12)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "convolutions": Convolutions,
    "attention": Attention,
    "norms": Norms,
    "recurrent": Recurrent,
    "embeddings": Embeddings,
    "lists": Lists,
}
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": F.mse_loss,
    "cross_entropy": lambda out, x: F.cross_entropy(out, x.argmax(1), label_smoothing=0.1),
    "huber": F.huber_loss,
    "bce": lambda out, x: F.binary_cross_entropy_with_logits(out, x.sigmoid()),
    "kl": lambda out, x: F.kl_div(out.log_softmax(1), x.softmax(1), reduction="batchmean"),
}
OPTIMIZERS = [
    "SGD",
    "Adam",
    "AdamW",
    "NAdam",
    "RAdam",
    "Adamax",
    "Adagrad",
    "Adadelta",
    "ASGD",
    "Rprop",
    "RMSprop",
    "LBFGS",
    "SparseAdam",
    "Adafactor",
    "Muon",
]


def told(run: Callable[[], Any], *older: Any) -> Declared:
    """Run a function, and check its ops."""
    watch = Declared()
    watch.meet(older)
    with watch:
        run()
    return watch


def trained(
    model: nn.Module, optimizer: Any, device: str, loss: Any = F.mse_loss, **how: Any
) -> Declared:
    """Declared and actual writes in three training steps."""
    scaler = torch.amp.GradScaler(device) if how.get("scaler") else None
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(9, 12, generator=generator).to(device) for _ in range(3)]

    def steps() -> None:
        for x in batches:
            optimizer.zero_grad(set_to_none=how.get("set_to_none", True))
            dtype = how.get("autocast")
            with torch.autocast(device, dtype) if dtype else contextlib.nullcontext():
                value = loss(model(x), x)
            (scaler.scale(value) if scaler else value).backward()
            if scaler:
                scaler.unscale_(optimizer)
            if how.get("clip"):
                nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=how["clip"] == "foreach")
                nn.utils.clip_grad_value_(model.parameters(), 0.1)
            scaler.step(optimizer) if scaler else optimizer.step()
            if scaler:
                scaler.update()

    return told(steps, list(model.state_dict().values()), batches)


def _forms(name: str, device: str) -> Iterator[dict[str, Any]]:
    """All forms of an optimizer."""
    known = inspect.signature(getattr(torch.optim, name)).parameters
    yield {}
    for option, value in (("foreach", True), ("foreach", False), ("fused", True)):
        if option in known and (name, option, device) != ("Adagrad", "fused", "cuda"):  # no such kernel
            yield {option: value}
            if "capturable" in known and device == "cuda":
                yield {option: value, "capturable": True}
                yield {option: value, "capturable": True, "lr": torch.tensor(0.01, device=device)}
    for option, value in (("amsgrad", True), ("maximize", True), ("momentum", 0.9), ("centered", True)):
        if option in known:
            yield {option: value}


def optimized(name: str, device: str) -> Iterator[tuple[dict[str, Any], Declared]]:
    """Declared and actual writes in three steps of each form of an optimizer."""
    for form in _forms(name, device):
        torch.manual_seed(0)
        sparse = name == "SparseAdam"
        model = Embeddings(sparse).to(device) if sparse else mlp().to(device)
        parameters = [
            parameter
            for place, parameter in model.named_parameters()
            if (place == "rows.weight" if sparse else name != "Muon" or parameter.ndim == 2)
        ]
        optimizer = getattr(torch.optim, name)(parameters, **{"lr": 0.01, **form})
        if name == "LBFGS":
            yield form, _lbfgs(model, optimizer, device)
        else:
            yield form, trained(model, optimizer, device, set_to_none=bool(form))


def scaled(clip: str, fused: bool, device: str) -> Declared:
    """Steps in fp16, with scaled and clipped gradients."""
    model = mlp().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    return trained(model, optimizer, device, scaler=True, clip=clip, autocast=torch.float16)


def _lbfgs(model: nn.Module, optimizer: Any, device: str) -> Declared:
    x = torch.randn(9, 12, device=device)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        return loss

    return told(lambda: optimizer.step(closure), list(model.parameters()), x)


def samples_of_ops(device: str, n: int) -> Iterator[tuple[Callable[..., Any], Any, bool]]:
    """Calls of all ops that torch has samples for: function, arguments, and True for a backward pass."""
    pytest.importorskip("expecttest", reason="torch's own samples of ops need it")
    # The import forbids to set torch's switches, to all that is tested in the same process.
    with patch.object(torch.backends, "disable_global_flags", lambda: None):
        from torch.testing._internal import common_methods_invocations as ops

    for op in ops.op_db:
        dtypes = op.supported_dtypes(torch.device(device).type)
        if not dtypes:
            continue
        dtype = torch.float32 if torch.float32 in dtypes else min(dtypes, key=str)
        forms = [(op.get_op(), op.supports_autograd and dtype is torch.float32)]
        forms += [(op.inplace_variant, False)] if op.inplace_variant is not None else []
        for form, grad in forms:
            with contextlib.suppress(RuntimeError, NotImplementedError):
                some = itertools.islice(op.sample_inputs_func(op, device, dtype, grad), n)
                yield from ((form, sample, grad) for sample in some)
    for kind in ("unary", "binary", "pointwise", "reduce", "other"):
        for op in getattr(ops, f"foreach_{kind}_op_db"):
            for form in filter(None, (op.method_variant, op.inplace_variant)):
                some = itertools.islice(op.sample_inputs_func(op, device, torch.float32, False), n)
                yield from ((form, sample, False) for sample in some)


def sweep(device: str, samples: int = _SAMPLES) -> Declared:
    """Call all ops that torch has samples for, and check what they dispatch."""
    seen = Declared()
    for form, sample, grad in samples_of_ops(device, samples):
        watch = Declared()
        watch.meet((sample.input, sample.args, sample.kwargs))
        # Samples that a device does not take, or that are meant to fail: what ran was looked at.
        with contextlib.suppress(Exception), watch:
            result = form(sample.input, *sample.args, **sample.kwargs)
            if grad:
                found = [t for t in tree_iter(result) if isinstance(t, Tensor) and t.requires_grad]
                torch.autograd.backward(found, list(map(torch.ones_like, found)))
        for name in ("ops", "written", "known", "unknown", "lies"):
            getattr(seen, name).update(getattr(watch, name))
    return seen


def attended(device: str) -> Iterator[Declared]:
    """Attention by each available kernel of torch's, forward and backward."""
    kernels = (
        SDPBackend.MATH,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
    )
    for kernel, masked in itertools.product(kernels, (False, True)):
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        q, k, v = (
            torch.randn(2, 2, 16, 32, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
        )
        mask = torch.zeros(2, 2, 16, 16, device=device, dtype=dtype) if masked else None

        def run(q: Tensor = q, k: Tensor = k, v: Tensor = v, mask: Tensor | None = mask) -> None:
            F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None).sum().backward()

        watch = Declared()
        watch.meet((q, k, v, mask))
        # A kernel may be missing, or not take a mask: what ran was looked at.
        with sdpa_kernel(kernel), contextlib.suppress(RuntimeError), watch:
            run()
        yield watch


def worked(workload: Workload, device: str) -> Declared:
    """A step of a model of the benchmarks; in full size on a GPU, where the size chooses kernels."""
    torch.manual_seed(0)
    tiny = device == "cpu"
    module = workload.make(tiny).to(device).train()
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=torch.tensor(1e-4, device=device), fused=True, capturable=not tiny
    )
    batch = tree_map(lambda tensor: tensor.to(device), workload.batch(tiny))
    autocast = torch.autocast(
        device, torch.bfloat16, enabled=workload.precision == "bf16-mixed", cache_enabled=False
    )

    def step() -> None:
        optimizer.zero_grad()
        with autocast:
            loss: Any = module.training_step(batch, 0)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()

    step()  # makes the optimizer's state
    return told(step, list(module.state_dict().values()), batch)


def _watches(device: str, samples: int) -> Iterator[Declared]:
    for make, autocast in itertools.product(MODELS.values(), (None, torch.bfloat16)):
        torch.manual_seed(0)
        model = make().to(device)
        yield trained(model, torch.optim.SGD(model.parameters(), 0.1), device, autocast=autocast)
    for loss in LOSSES.values():
        model = mlp().to(device)
        yield trained(model, torch.optim.SGD(model.parameters(), 0.1), device, loss=loss)
    for name in filter(lambda name: hasattr(torch.optim, name), OPTIMIZERS):
        yield from (watch for _, watch in optimized(name, device))
    for clip, fused in itertools.product(("foreach", "one by one"), (False, True)):
        yield scaled(clip, fused, device)
    yield from attended(device)
    for workload in WORKLOADS:
        if workload.is_here:
            yield worked(workload, device)
    yield sweep(device, samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--samples", type=int, default=8, help="of each op")
    parser.add_argument("--list", type=Path, default=_LIST)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    known: set[str] = set()
    lies: set[str] = set()
    with patch.object(accesses, "_CHECKED", Everything()):
        for watch in _watches(args.device, args.samples):
            known |= watch.known
            lies |= watch.lies
    print(*sorted(lies), sep="\n")
    names = {*args.list.read_text().split(), *known} - {lie.split()[0].partition(".")[0] for lie in lies}
    args.list.write_text("\n".join(sorted(names)) + "\n")
    print(f"{len(known)} ops on {args.device}, {len(lies)} lies, {len(names)} in {args.list.name}")


if __name__ == "__main__":
    main()
