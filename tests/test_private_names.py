"""Private names that this package is built on: all declared, and what is done where one is gone."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import eval_frame
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassConfusionMatrix

from lightning_cudagraph import CUDAGraphCallback, CUDAGraphError, GraphedStep, LayerTimings
from lightning_cudagraph.compat import features
from lightning_cudagraph.compat.features import Feature
from lightning_cudagraph.compat.probes import PrivateName, accepts, members
from lightning_cudagraph.compat.tables import TABLE
from lightning_cudagraph.device.cuda.cuda_backend import CudaBackend
from lightning_cudagraph.optim.prepared_optimizer import PreparedOptimizer
from lightning_cudagraph.optim.scaler import PreparedScaler
from lightning_cudagraph.processes.ddp import check_wrapper
from lightning_cudagraph.processes.nccl import check_nccl
from lightning_cudagraph.processes.shards import check_shards
from lightning_cudagraph.trainer.common.fit_processes import FitProcesses
from lightning_cudagraph.trainer.manual.frameworks import FabricLoop, ManualOptimization
from lightning_cudagraph.trainer.metrics import fixed_counts
from tests import harness
from tests.harness import Net, assert_same, make, train
from tests.sources import FILES, ROOT, tree

_OF_CUDA = (features.CUDA, features.SEGMENTS)
_NAMES = [name for name in TABLE if name.features]
_CASES = [(name, feature) for name in _NAMES for feature in name.features]


def _id(value: Any) -> str:
    return str(value.what if isinstance(value, Feature) else "+".join((value.where, *value.fields)))


def _lose(monkeypatch: pytest.MonkeyPatch, gone: PrivateName) -> None:
    """Let one name be gone, or not what it was, as far as anybody asks."""
    asked = PrivateName.trouble
    trouble = f"`{gone.where}` is gone from the version of this test"
    monkeypatch.setattr(PrivateName, "trouble", lambda name: trouble if name == gone else asked(name))


@pytest.mark.parametrize("name", _NAMES, ids=_id)
def test_each_is_what_it_was(name: PrivateName) -> None:
    if set(name.features) <= {*_OF_CUDA} and not torch.version.cuda:
        pytest.skip("a torch without CUDA has not all of these")
    assert name.trouble() == ""


class Counting(Net):
    """Trains on seven batches, and counts what comes to it."""

    steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return super().training_step(batch, batch_idx)


class Measured(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()


def _refused_fit(tmp_path: Path, callback: CUDAGraphCallback, build: type[Counting] = Counting) -> str:
    model = make(build)
    run = train(model, tmp_path, callback, watched=False, checkpoint_every=0, raises=CUDAGraphError)
    assert model.steps == 0  # type: ignore[attr-defined]
    return str(run.error)


def _refused_step() -> str:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    with pytest.raises(CUDAGraphError) as refused:
        GraphedStep(step, [model], [optimizer])(torch.ones(3, 2))
    assert torch.equal(model.weight, before)
    return str(refused.value)


def _refused_evaluation(tmp_path: Path) -> str:
    model = Counting()
    trainer = harness.pl.Trainer(
        accelerator="cpu",
        logger=False,
        callbacks=[CUDAGraphCallback(evaluation=True)],
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    with pytest.raises(CUDAGraphError) as refused:
        trainer.validate(model, harness.loader(), verbose=False)
    return str(refused.value)


def _prepared_with_capturable() -> PreparedOptimizer:
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(1))], capturable=True)
    return PreparedOptimizer(optimizer, torch.device("cpu"), lambda reason: None)


def _refused_call(call: Any) -> str:
    with pytest.raises(CUDAGraphError) as refused:
        call()
    return str(refused.value)


@pytest.fixture
def group() -> Any:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*barrier.*using the device under current context")
@pytest.mark.parametrize(("name", "feature"), [c for c in _CASES if not c[1].is_optional], ids=_id)
def test_refused_before_the_first_step(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    name: PrivateName,
    feature: Feature,
) -> None:
    if feature in (features.REPLICAS, features.COLLECTIVES):
        request.getfixturevalue("group")
    _lose(monkeypatch, name)
    if feature is features.SHARDS:
        monkeypatch.setattr(
            "lightning_cudagraph.processes.shards.sharded_modules", lambda model: [model]
        )
    trainer: Any = SimpleNamespace(world_size=2, strategy=None)
    cuda = torch.device("cuda")
    ways: dict[Feature, list[Any]] = {
        features.CAPTURES: [_refused_step, lambda: _refused_fit(tmp_path, CUDAGraphCallback())],
        features.LOOPS: [
            lambda: _refused_fit(tmp_path, CUDAGraphCallback()),
            lambda: _refused_evaluation(tmp_path),
            lambda: _refused_call(lambda: ManualOptimization(trainer).check()),
        ],
        features.TIMES: [
            lambda: _refused_fit(tmp_path / "graph", CUDAGraphCallback(timings=LayerTimings())),
        ],
        features.METRICS: [lambda: _refused_fit(tmp_path, CUDAGraphCallback(), Measured)],
        features.CAPTURABLE_ON_CPU: [lambda: _refused_call(_prepared_with_capturable)],
        features.FP16: [
            lambda: _refused_call(lambda: PreparedScaler(GradScaler("cpu"), torch.device("cpu"), list)),
        ],
        features.REPLICAS: [
            lambda: _refused_call(
                lambda: check_wrapper("a wrapper", DistributedDataParallel(nn.Linear(2, 1)))
            )
        ],
        features.SHARDS: [lambda: _refused_call(lambda: check_shards(nn.Linear(2, 1)))],
        features.COLLECTIVES: [lambda: _refused_call(lambda: FitProcesses(trainer))],
        features.CAPTURED_MODULES: [
            lambda: _refused_fit(tmp_path, CUDAGraphCallback(scope="modules", modules=["head"])),
        ],
        features.FABRIC: [lambda: _refused_call(lambda: FabricLoop([], []).check())],
        features.CUDA: [lambda: _refused_call(lambda: CudaBackend(cuda))],
        features.SEGMENTS: [lambda: _refused_call(lambda: check_nccl(cuda))],
    }
    for way in ways[feature]:
        said = way()
        assert f"`{name.where}` is gone" in said
        assert "docs/versions.md" in said


class Graded(Net):
    """With a metric that counts classes."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = MulticlassConfusionMatrix(num_classes=4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = super().training_step(batch, batch_idx)
        self.matrix.update(found["logits"], batch[1])
        return found


def _fit(path: Path, callback: CUDAGraphCallback | None = None) -> harness.Trace:
    return train(make(Graded), path, callback, watched=False, checkpoint_every=0, max_epochs=1)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> harness.Trace:
    return _fit(tmp_path_factory.mktemp("plain"))


def _one_for_each_feature() -> list[Any]:
    """Names of optional features; all but the first one of each feature are long."""
    found: dict[Feature, list[PrivateName]] = {}
    for name, feature in _CASES:
        if feature.is_optional:
            found.setdefault(feature, []).append(name)
    return [
        pytest.param(name, feature, marks=[pytest.mark.long] * (name is not names[0]))
        for feature, names in found.items()
        for name in names
    ]


@pytest.mark.parametrize(("name", "feature"), _one_for_each_feature(), ids=_id)
def test_off_and_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plain: harness.Trace,
    name: PrivateName,
    feature: Feature,
) -> None:
    _lose(monkeypatch, name)
    fixed_counts._counts.cache_clear()
    graph = _fit(tmp_path, CUDAGraphCallback())
    fixed_counts._counts.cache_clear()
    assert_same(plain, graph)
    assert graph.counts.replayed >= 4
    said = f"off: {feature.what}, because `{name.where}` is gone"
    assert said in str(graph.callback.summary)  # type: ignore[union-attr]


def test_of_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gone from torch itself, and not only from what is asked."""
    monkeypatch.delattr(eval_frame, "set_code_exec_strategy")
    said = "`torch._dynamo.eval_frame.set_code_exec_strategy` is gone from torch"
    assert said in _refused_step()
    assert said in _refused_fit(tmp_path, CUDAGraphCallback())


def _gives_up() -> None:
    raise RuntimeError("another shape")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (PrivateName("torch.nn._gone.Name"), "`torch.nn._gone.Name` is gone from torch"),
        (members("torch.nn.Module", "_modules _gone"), "`torch.nn.Module._gone` is gone from torch"),
        (PrivateName("sys._getframe", (), lambda f: False), "`sys._getframe` of Python 3"),
        (PrivateName("sys._getframe", (), lambda f: _gives_up()), "`sys._getframe` of Python 3"),
        (PrivateName("copy.deepcopy", (), accepts("x", unknown=1)), "`copy.deepcopy` of Python 3"),
        (PrivateName("torch._gone", (), if_imported="torch.nothing"), ""),
    ],
)
def test_what_is_said_of_a_name(name: PrivateName, said: str) -> None:
    assert name.trouble().startswith(said)
    assert bool(name.trouble()) is bool(said)


# In a process of its own, which loads torch and Lightning, and the package twice.
_IMPORT = """
import contextlib, sys, types
import torch
def fail(*args, **kwargs): raise SystemExit("touched CUDA")
torch.cuda.init = torch.cuda._lazy_init = torch.cuda.current_device = fail
import lightning.pytorch
# Loaded when something is shown. (Lightning's metrics load matplotlib themselves.)
for name in ("matplotlib", "tensorboard"):
    for module in [m for m in sys.modules if m.partition(".")[0] == name]:
        del sys.modules[module]
    sys.modules[name] = None  # an import of it fails
before = set(sys.modules)
import lightning_cudagraph
late = ("networkx", "torch._inductor", "torch._dynamo.backends")  # when a step is captured: 0.3 s
assert not [m for m in set(sys.modules) - before if m.startswith(late)]
lightning_cudagraph.CUDAGraphCallback()
lightning_cudagraph.CUDAGraphCallback(timings=lightning_cudagraph.LayerTimings())

import torch._dynamo, torchmetrics
from torch.utils.data import dataloader
from lightning_cudagraph.compat.names.lightning_names import LIGHTNING
from lightning_cudagraph.compat.probes import found
from lightning_cudagraph.compat.names.torch_names import TORCH
from lightning_cudagraph.compat.names.torchmetrics_names import TORCHMETRICS
deleted = 0
# torch itself asks for it as it makes a module
own = ("torch.overrides._get_current_function_mode_stack",)
for name in (*TORCH, *LIGHTNING, *TORCHMETRICS):
    place, _, attribute = name.where.rpartition(".")
    if name.where in own or name.if_imported or "._" not in name.where or name.where.endswith("__"):
        continue
    with contextlib.suppress(AttributeError, ImportError, TypeError):
        delattr(found(place), attribute)
        deleted += 1
for name in [name for name in sys.modules if name.startswith("lightning_cudagraph")]:
    del sys.modules[name]
import lightning_cudagraph
lightning_cudagraph.CUDAGraphCallback()
print(deleted)
"""


def test_importing_needs_no_gpu_no_drawing_no_tensorboard_and_none_of_them() -> None:
    command = [sys.executable, "-c", _IMPORT]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 50


def _defined(module: ast.AST) -> set[str]:
    """What a module gives names to: functions, classes, variables, and attributes of objects."""
    found: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found


def _strings(node: ast.AST) -> list[str]:
    """The strings by which a node asks for something: in a call, as a key, or to the left of `in`."""
    found: list[ast.expr] = []
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") not in _OF_STRINGS:
        found = node.args
    elif isinstance(node, ast.Subscript):
        found = [node.slice]
    elif isinstance(node, ast.Compare) and not isinstance(node.comparators[0], ast.Name):
        found = [node.left]
    return [each.value for each in found if isinstance(each, ast.Constant) and type(each.value) is str]


def _asked_for(module: ast.AST, inherited: set[str]) -> Iterator[tuple[str, int]]:
    """The private names of others that a module asks for, each with its line.

    Args:
        module: its syntax tree.
        inherited: what other modules of this package define, which objects of their classes have.
    """
    own = _defined(module)
    for node in ast.walk(module):
        names = _strings(node)
        if isinstance(node, ast.Attribute):
            of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
            names = [] if of_self and node.attr in inherited else [node.attr]
        elif isinstance(node, ast.ImportFrom) and not str(node.module).startswith("lightning_cudagraph"):
            names = [*str(node.module).split("."), *(alias.name for alias in node.names)]
        for name in names:
            if _PRIVATE.fullmatch(name) and name not in own:
                yield name, node.lineno  # type: ignore[attr-defined]


_PRIVATE = re.compile(r"_(?!_)\w*[a-z]\w*")
_OF_STRINGS = ("endswith", "startswith", "removesuffix", "removeprefix")
_DECLARED = {part for name in TABLE for part in (*name.where.split("."), *name.fields)}


def test_every_one_is_declared() -> None:
    """What begins with an underscore, and is not this package's own, is in a table of `compat`."""
    inherited = {name for path in FILES for name in _defined(tree(path))}
    assert [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in FILES
        for name, line in _asked_for(tree(path), inherited)
        if name not in _DECLARED
    ] == []


def test_none_is_declared_in_vain() -> None:
    """Where one that no code asks for is gone, its features would be refused for nothing."""
    sources = "\n".join(path.read_text() for path in FILES if path.parent.name != "names")
    words = {*re.findall(r"\w+", sources)}
    names = [each for name in TABLE for each in name.fields or [name.where.rpartition(".")[2]]]
    assert [name for name in names if name not in words] == []


def test_none_is_imported_but_in_compat() -> None:
    """Where one is gone, a module that imports it from there could not be imported."""
    for path in FILES:
        if "compat" in (path.parent.name, path.parent.parent.name):
            continue
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ImportFrom) and "lightning_cudagraph" not in str(node.module):
                names = [*str(node.module).split("."), *(alias.name for alias in node.names)]
                assert not [name for name in names if _PRIVATE.fullmatch(name)], (path, node.lineno)


def test_names_that_are_not_declared_are_found() -> None:
    """By each way in which code can ask for one."""
    code = """
class Own:
    def __init__(self): self._own = self._inherited = 1
def asks(module):
    module._by_dot, getattr(module, "_by_name"), vars(module)["_by_key"], "_in" in vars(module)
    from torch._somewhere import _something
    return Own()._own, "it_has_none"
"""
    found = {name for name, _ in _asked_for(ast.parse(code), set())}
    assert found == {"_by_dot", "_by_name", "_by_key", "_in", "_somewhere", "_something"}
