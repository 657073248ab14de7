"""Marks inside a step: which layers are chosen, where their marks lie, and what they leave behind."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from lightning_cudagraph import ConfigurationError, LayerTimings
from lightning_cudagraph.timing.layers import select_layers


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(4, 4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


class Wide(nn.Linear):
    """A class that is derived from torch's."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = Wide(4, 10)
        self.tied = self.head


ATTENTION = [f"blocks.{i}.attn" for i in range(3)]
LINEARS = [f"blocks.{i}.{name}" for i in range(3) for name in ("attn", "mlp.0", "mlp.2")]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"modules": ["blocks.?.attn", "head"]}, [*ATTENTION, "head"]),
        ({"types": ["Linear"]}, [*LINEARS, "head"]),
        ({"types": ["torch.nn.Linear"]}, [*LINEARS, "head"]),
        ({"types": ["torch.nn.modules.linear.Linear"]}, [*LINEARS, "head"]),
        ({"types": ["Wide"]}, ["head"]),
        ({"types": [f"{__name__}.Wide", "Embedding"]}, ["embedding", "head"]),
        ({"depth": 1}, ["embedding", "blocks.0", "blocks.1", "blocks.2", "head"]),
        ({"depth": 2, "types": ["Linear"]}, [*ATTENTION, "head"]),
        ({"modules": ["blocks.1.*"], "types": ["Linear"]}, LINEARS[3:6]),
        ({"modules": ["tied"]}, ["tied"]),
        ({"modules": ["tied", "head"]}, ["head"]),
        ({"max_layers": 5}, ["embedding", "blocks.0", "blocks.1", "blocks.2", "head"]),
        ({"max_layers": 4}, ["embedding", "blocks.0", "blocks.1", "blocks.2"]),
    ],
)
def test_choice(arguments: dict[str, Any], expected: list[str]) -> None:
    model = Model()
    layers = select_layers(model, LayerTimings(**arguments))
    assert list(layers) == expected
    assert all(model.get_submodule(name) is module for name, module in layers.items())


def test_a_depth_beyond_the_last_level_takes_all() -> None:
    assert len(select_layers(Model(), LayerTimings(depth=99))) == 5 + 3 * 2 + 3 * 3


def test_a_module_that_holds_itself() -> None:
    model = Model()
    model.head.root = model  # type: ignore[assignment]
    assert list(select_layers(model, LayerTimings(modules=["head"]))) == ["head"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"modules": ["layers.*"]}, r"'layers\.\*' matches no module of `Model`.*embedding, blocks"),
        ({"types": ["Conv2d"]}, r"'Conv2d' is the class of no module of `Model`.*Linear \(9\)"),
        ({"types": ["torch.nn.Conv2d"]}, r"'torch.nn.Conv2d' is the class of no module"),
        ({"modules": ["head"], "types": ["Embedding"]}, "no module of `Model`.*satisfies all of them"),
    ],
)
def test_what_selects_nothing(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        select_layers(Model(), LayerTimings(**arguments))


@pytest.mark.parametrize("arguments", [{"modules": ["*"]}, {"types": ["Identity"]}])
def test_too_many_layers(arguments: dict[str, Any]) -> None:
    model = nn.ModuleList(nn.Identity() for _ in range(20_000))
    with pytest.raises(ConfigurationError, match=r"select 20000 layers.*at most 1000.*Narrow"):
        select_layers(model, LayerTimings(**arguments))


def test_many_layers_and_an_automatic_choice() -> None:
    model = nn.ModuleList(nn.Linear(1, 1) for _ in range(20_000))
    assert len(select_layers(model, LayerTimings())) == 32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"types": "Linear"}, r"one string. Pass `\['Linear'\]`"),
        ({"types": [nn.Linear]}, 'expected a list of strings, such as `."Linear".`'),
        ({"modules": 3}, "expected a list of strings"),
        ({"depth": 0}, r"depth=0.*at least 1"),
        ({"depth": 1.5}, r"depth=1.5.*an int of at least 1"),
        ({"every_n_steps": 0}, r"every_n_steps=0.*at least 1"),
        ({"every_n_steps": True}, r"every_n_steps=True.*an int"),
        ({"window_steps": 0}, r"window_steps=0.*at least 1"),
        ({"trace_steps": -1}, r"trace_steps=-1.*at least 0"),
        ({"placement": "parallel"}, "placement='parallel'.*'forked' or 'serial'"),
        ({"max_layers": 2000}, "max_layers=2000.*at most 1000"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        LayerTimings(**arguments)
