"""Places to keep a Python number that a step reads: one small class each.

A new one is a subclass of `Place` with a name: it makes its holder, reads the number as a step does, and
writes it as code between two steps does. Tests and table find it automatically.
"""

from __future__ import annotations

import array
import builtins
import configparser
import contextvars
import copy
import ctypes
import dataclasses
import enum
import importlib
import io
import itertools
import locale
import logging
import mmap
import multiprocessing
import operator
import os
import queue
import shutil
import sqlite3
import struct
import sys
import tempfile
import threading
import types
import weakref
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache, partial, singledispatch
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torchmetrics import MeanMetric

from tests.matrix import settings

# Every place can hold these two, and most of them any number.
LOW, HIGH = 1.0, 3.0


class Place:
    """A place that keeps a number.

    Attributes:
        packages: packages that must be installed.
        needs_trainer: it is reached through a trainer, so plain loops do not have it.
        counts: it can keep any number, so a step can count there.
        callbacks: callbacks for the trainer.
        needs_datamodule: it needs batches of a datamodule.
    """

    packages: ClassVar[tuple[str, ...]] = ()
    needs_trainer: ClassVar[bool] = False
    needs_datamodule: ClassVar[bool] = False
    counts: ClassVar[bool] = True

    def __init_subclass__(cls, name: str = "", seldom: bool = False) -> None:
        if name:
            assert name not in PLACES, name
            PLACES[name] = cls
        if seldom:
            SELDOM.add(name)

    def __init__(self, net: Any) -> None:
        self.net = net
        self.callbacks: list[Callback] = []
        self.make()

    def make(self) -> None:
        """Make the holder, before there is a trainer or an optimizer."""

    def start(self) -> None:
        """Put the first number there, when training starts."""
        self.write(LOW)

    def read(self) -> float:
        raise NotImplementedError

    def write(self, number: float) -> None:
        raise NotImplementedError

    def seen(self) -> Any:
        """The state at the end of the run."""
        return self.read()

    def close(self) -> None:
        """Undo everything that outlives the run."""

    def optimizer(self) -> torch.optim.Optimizer:
        if isinstance(self.net, pl.LightningModule):
            return self.net.trainer.optimizers[0]
        return self.net.optimizer


PLACES: dict[str, type[Place]] = {}
# Those that have a near neighbour: left to the whole matrix.
SELDOM: set[str] = set()


class _Box:
    """An object with one number."""

    def __init__(self, scale: float = LOW) -> None:
        self.scale = scale


class _InABox(Place):
    """A number in the attribute `scale` of an object."""

    def box(self) -> Any:
        raise NotImplementedError

    def read(self) -> float:
        return self.box().scale

    def write(self, number: float) -> None:
        self.box().scale = number


class _Held(Place):
    """A number in the attribute `scale` of an object that the place holds."""

    held: Any

    def read(self) -> float:
        return self.held.scale

    def write(self, number: float) -> None:
        self.held.scale = number


class _ByKey(Place):
    """A number under a key of an object that the place holds."""

    held: Any
    key: Any = "scale"

    def read(self) -> float:
        return float(self.held[self.key])

    def write(self, number: float) -> None:
        self.held[self.key] = number


class _Either(Place):
    """A place for one of two numbers."""

    counts = False

    def is_high(self) -> bool:
        raise NotImplementedError

    def toggle(self) -> None:
        raise NotImplementedError

    def read(self) -> float:
        return HIGH if self.is_high() else LOW

    def write(self, number: float) -> None:
        if self.is_high() != (number == HIGH):
            self.toggle()


# Attributes


class Attribute(Place, name="attribute"):
    def read(self) -> float:
        return self.number

    def write(self, number: float) -> None:
        self.number = number


class OfTheModule(_InABox, name="attribute of the module"):
    def box(self) -> Any:
        return self.net


class Namespace(_Held, name="SimpleNamespace"):
    def make(self) -> None:
        self.held = types.SimpleNamespace(scale=LOW)


@dataclasses.dataclass
class _Config:
    scale: float = LOW
    inner: Any = None


class Dataclass(_Held, name="dataclass", seldom=True):
    def make(self) -> None:
        self.held = _Config()


@dataclasses.dataclass(frozen=True)
class _Frozen:
    scale: float = LOW


class FrozenDataclass(_Held, name="frozen dataclass", seldom=True):
    def make(self) -> None:
        self.held = _Frozen()

    def write(self, number: float) -> None:
        object.__setattr__(self.held, "scale", number)


class _Pair(NamedTuple):
    scale: float
    other: str


class ReplacedTuple(_Held, name="named tuple, replaced", seldom=True):
    def make(self) -> None:
        self.held = _Pair(LOW, "other")

    def write(self, number: float) -> None:
        self.held = self.held._replace(scale=number)


class _Slots:
    __slots__ = ("__weakref__", "scale")

    def __init__(self) -> None:
        self.scale = LOW


class Slots(_Held, name="slots"):
    def make(self) -> None:
        self.held = _Slots()


class _ListWithSlots(list[Any]):
    __slots__ = ("scale",)


class _BytesWithSlots(bytearray):
    __slots__ = ("scale",)


class _PartialWithSlots(partial[Any]):
    __slots__ = ("scale",)


class SlotsOfAList(Slots, name="slots of a list"):
    def make(self) -> None:
        self.held = _ListWithSlots()
        self.held.scale = LOW


class SlotsOfAPartial(Slots, name="slots of a partial", seldom=True):
    def make(self) -> None:
        self.held = _PartialWithSlots(int)
        self.held.scale = LOW


class BytesBesideSlots(_ByKey, name="buffer with slots"):
    key = 0

    def make(self) -> None:
        self.held = _BytesWithSlots(1)
        self.held.scale = None

    def write(self, number: float) -> None:
        self.held[0] = int(number)


class Wide(_Held, name="object of 3000 attributes"):
    def make(self) -> None:
        self.held = _Box()
        for index in range(3000):
            setattr(self.held, f"a{index}", index)

    def read(self) -> float:
        return self.held.a2900

    def write(self, number: float) -> None:
        self.held.a2900 = number


class Deep(Place, name="ten levels deep"):
    def make(self) -> None:
        self.tree: Any = {"scale": LOW}
        for _ in range(5):
            self.tree = [{"deeper": self.tree}]

    def lowest(self) -> Any:
        tree = self.tree
        for _ in range(5):
            tree = tree[0]["deeper"]
        return tree

    def read(self) -> float:
        return self.lowest()["scale"]

    def write(self, number: float) -> None:
        self.lowest()["scale"] = number


class OwnDict(_Held, name="replaced __dict__", seldom=True):
    def make(self) -> None:
        self.held = _Box()

    def write(self, number: float) -> None:
        self.held.__dict__ = {"scale": number}


class Swapped(_Either, name="swap of two attributes"):
    def make(self) -> None:
        self.now, self.later = LOW, HIGH

    def is_high(self) -> bool:
        return self.now == HIGH

    def toggle(self) -> None:
        self.now, self.later = self.later, self.now


class _Fast:
    factor = LOW


class _Slow:
    factor = HIGH


class _FastLayer(nn.Module):
    def factor(self) -> float:
        return LOW


class _SlowLayer(nn.Module):
    def factor(self) -> float:
        return HIGH


class OfAnotherClass(_Either, name="__class__ assigned"):
    def make(self) -> None:
        self.held: Any = _Fast()

    def read(self) -> float:
        return self.held.factor

    def is_high(self) -> bool:
        return isinstance(self.held, _Slow)

    def toggle(self) -> None:
        self.held.__class__ = _Fast if self.is_high() else _Slow


class OfAnotherModuleClass(_Either, name="__class__ of a module assigned"):
    def make(self) -> None:
        self.module: Any = _FastLayer()

    def read(self) -> float:
        return self.module.factor()

    def is_high(self) -> bool:
        return isinstance(self.module, _SlowLayer)

    def toggle(self) -> None:
        self.module.__class__ = _FastLayer if self.is_high() else _SlowLayer


class StridesOfATensor(Place, name="strides of a buffer"):
    counts = False

    def make(self) -> None:
        self.net.body.register_buffer("table", torch.zeros(2, 8))

    def read(self) -> float:
        return LOW if self.net.body.table.stride(0) == 8 else HIGH

    def write(self, number: float) -> None:
        # Within its own memory: a copy on another device has no more than it shows.
        self.net.body.table.as_strided_((2, 8), (8 if number == LOW else 4, 1))


# Attributes that are not what they look like


class _Stored:
    """A descriptor that keeps its values itself."""

    def __init__(self) -> None:
        self.values: dict[int, float] = {}

    def __get__(self, owner: Any, kind: Any = None) -> float:
        return self.values[id(owner)]

    def __set__(self, owner: Any, value: float) -> None:
        self.values[id(owner)] = value


class Descriptor(_Held, name="descriptor"):
    def make(self) -> None:
        self.held = type("Described", (), {"scale": _Stored()})()


class _WithProperty:
    @property
    def scale(self) -> float:
        return _HIDDEN[self]

    @scale.setter
    def scale(self, value: float) -> None:
        _HIDDEN[self] = value


_HIDDEN: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()


class HiddenProperty(_Held, name="property with a hidden store"):
    def make(self) -> None:
        self.held = _WithProperty()


class _Delegates:
    __slots__ = ("_target",)

    def __init__(self, target: Any) -> None:
        object.__setattr__(self, "_target", target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._target, name, value)


class GetAttr(_Held, name="__getattr__"):
    def make(self) -> None:
        self.held = _Delegates(_Box())


class _Computes(_Box):
    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__("kept" if name == "scale" else name)


class GetAttribute(_Held, name="__getattribute__", seldom=True):
    def make(self) -> None:
        self.held = _Computes()

    def write(self, number: float) -> None:
        self.held.kept = number


class _Number:
    def __init__(self) -> None:
        self.kept = [LOW]

    def __float__(self) -> float:
        return self.kept[0]


class Float(Place, name="__float__", seldom=True):
    def make(self) -> None:
        self.number = _Number()

    def read(self) -> float:
        return float(self.number)

    def write(self, number: float) -> None:
        self.number.kept[0] = number


class _Lazy:
    source = LOW

    @cached_property
    def scale(self) -> float:
        return self.source


class CachedProperty(_Held, name="cached_property, deleted"):
    def make(self) -> None:
        self.held = _Lazy()

    def write(self, number: float) -> None:
        self.held.source = number
        self.held.__dict__.pop("scale", None)


# Mappings and sequences


class Dict(_ByKey, name="dict"):
    def make(self) -> None:
        self.held = {}


class _OwnDict(dict[str, Any]):
    """A dictionary with its items as attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class DictSubclass(_ByKey, name="dict subclass"):
    def make(self) -> None:
        self.held = _OwnDict()

    def read(self) -> float:
        return self.held.scale


class BigDict(_ByKey, name="dict of 2000", seldom=True):
    key = 1500

    def make(self) -> None:
        self.held = dict.fromkeys(range(2000), 0.0)


class DictOrder(_Either, name="order of a dict"):
    def make(self) -> None:
        self.numbers = {LOW: "low", HIGH: "high"}

    def is_high(self) -> bool:
        return next(iter(self.numbers)) == HIGH

    def toggle(self) -> None:
        first = next(iter(self.numbers))
        self.numbers[first] = self.numbers.pop(first)


class OrderedOrder(DictOrder, name="order of an OrderedDict", seldom=True):
    def make(self) -> None:
        self.numbers = OrderedDict({LOW: "low", HIGH: "high"})

    def toggle(self) -> None:
        self.numbers.move_to_end(next(iter(self.numbers)))  # type: ignore[attr-defined]


class Defaults(_ByKey, name="defaultdict", seldom=True):
    def make(self) -> None:
        self.held = defaultdict(float)


class Counted(_ByKey, name="Counter", seldom=True):
    def make(self) -> None:
        self.held = Counter()


class UserDictionary(_ByKey, name="UserDict"):
    def make(self) -> None:
        self.held = UserDict()


class UserSequence(_ByKey, name="UserList", seldom=True):
    key = 0

    def make(self) -> None:
        self.held = UserList([LOW])


class Chain(_ByKey, name="ChainMap"):
    def make(self) -> None:
        self.defaults = {"scale": LOW}
        self.held = ChainMap({}, self.defaults)

    def write(self, number: float) -> None:
        self.defaults["scale"] = number


class MappingProxy(_ByKey, name="mappingproxy"):
    def make(self) -> None:
        beneath = {"scale": LOW}
        self.held = types.MappingProxyType(beneath)
        self.set_beneath = partial(operator.setitem, beneath, "scale")

    def write(self, number: float) -> None:
        self.set_beneath(number)


class WeakKeys(Place, name="WeakKeyDictionary"):
    def make(self) -> None:
        self.key = _Box()
        self.numbers: weakref.WeakKeyDictionary[_Box, float] = weakref.WeakKeyDictionary()

    def read(self) -> float:
        return self.numbers[self.key]

    def write(self, number: float) -> None:
        self.numbers[self.key] = number


class WeakValues(_InABox, name="WeakValueDictionary", seldom=True):
    def make(self) -> None:
        box = _Box()
        _KEPT[id(self)] = box
        self.boxes = weakref.WeakValueDictionary({"box": box})

    def box(self) -> Any:
        return self.boxes["box"]

    def close(self) -> None:
        _KEPT.pop(id(self))


class List(_ByKey, name="list", seldom=True):
    key = 0

    def make(self) -> None:
        self.held = [LOW]


class LongList(_ByKey, name="list of 2000"):
    key = 1500

    def make(self) -> None:
        self.held = [0.0] * 2000


class Deque(_ByKey, name="deque"):
    key = 1

    def make(self) -> None:
        self.held = deque([0.0, LOW])


class Members(_Either, name="set"):
    def make(self) -> None:
        self.modes = {"fast"}

    def is_high(self) -> bool:
        return "slow" in self.modes

    def toggle(self) -> None:
        self.modes ^= {"slow"}


class QueuesHead(Place, name="head of a queue"):
    def make(self) -> None:
        self.waiting: queue.Queue[float] = queue.Queue()

    def read(self) -> float:
        return self.waiting.queue[0]

    def write(self, number: float) -> None:
        if not self.waiting.empty():
            self.waiting.get()
        self.waiting.put(number)


# Bytes, and memory behind them


class Array(_ByKey, name="array.array"):
    key = 0

    def make(self) -> None:
        self.held = array.array("d", [LOW])


class SharedValue(Place, name="multiprocessing.Value"):
    def make(self) -> None:
        self.shared = multiprocessing.Value("d", LOW)

    def read(self) -> float:
        return self.shared.value

    def write(self, number: float) -> None:
        self.shared.value = number


class SmallNumPy(_ByKey, name="NumPy array"):
    key = 1

    def make(self) -> None:
        self.held = np.zeros(3)


class ShapeOfAnArray(Place, name="shape of a NumPy array"):
    counts = False

    def make(self) -> None:
        self.held = np.zeros((1, 6))

    def read(self) -> float:
        return float(self.held.shape[0])

    def write(self, number: float) -> None:
        self.held.resize((int(number), 6 // int(number)), refcheck=False)


class LargeNumPy(_ByKey, name="NumPy array of 16 KB"):
    key = 1500

    def make(self) -> None:
        self.held = np.zeros(2000)


class NumPyView(_ByKey, name="base of a NumPy view", seldom=True):
    key = 0

    def make(self) -> None:
        self.base = np.zeros((3, 4))
        self.held = self.base[1:, 2]

    def write(self, number: float) -> None:
        self.base[1, 2] = number


class Bytes(Place, name="bytearray"):
    def make(self) -> None:
        self.bytes: Any = bytearray(8)

    def read(self) -> float:
        return struct.unpack_from("d", self.bytes)[0]

    def write(self, number: float) -> None:
        struct.pack_into("d", self.bytes, 0, number)


class MemoryView(Bytes, name="memoryview", seldom=True):
    def make(self) -> None:
        self.bytes = memoryview(bytearray(8))


class LargeBytes(Bytes, name="bytearray of 1 MB", seldom=True):
    def make(self) -> None:
        self.bytes = bytearray(1 << 20)

    def read(self) -> float:
        return struct.unpack_from("d", self.bytes, 1 << 19)[0]

    def write(self, number: float) -> None:
        struct.pack_into("d", self.bytes, 1 << 19, number)


class MemoryMap(Bytes, name="mmap"):
    def make(self) -> None:
        self.bytes = mmap.mmap(-1, 8)


class CDouble(Place, name="ctypes"):
    def make(self) -> None:
        self.number = ctypes.c_double(LOW)

    def read(self) -> float:
        return self.number.value

    def write(self, number: float) -> None:
        self.number.value = number


class Text(Place, name="io.StringIO"):
    def make(self) -> None:
        self.text = io.StringIO()

    def read(self) -> float:
        return float(self.text.getvalue())

    def write(self, number: float) -> None:
        self.text.seek(0)
        self.text.truncate()
        self.text.write(str(number))


class DataBase(Place, name="sqlite3"):
    def make(self) -> None:
        self.base = sqlite3.connect(":memory:", check_same_thread=False)
        self.base.execute("create table numbers (scale real)")
        self.base.execute("insert into numbers values (1.0)")

    def read(self) -> float:
        return self.base.execute("select scale from numbers").fetchone()[0]

    def write(self, number: float) -> None:
        self.base.execute("update numbers set scale = ?", (number,))

    def close(self) -> None:
        self.base.close()


# Threads


class ThreadLocal(_Held, name="threading.local"):
    def make(self) -> None:
        self.held = threading.local()
        self.held.scale = LOW


class ContextVariable(Place, name="ContextVar"):
    def make(self) -> None:
        self.variable: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=LOW)

    def read(self) -> float:
        return self.variable.get()

    def write(self, number: float) -> None:
        self.variable.set(number)


class Locked(_Either, name="Lock"):
    def make(self) -> None:
        self.lock = threading.Lock()

    def is_high(self) -> bool:
        return self.lock.locked()

    def toggle(self) -> None:
        (self.lock.release if self.lock.locked() else self.lock.acquire)()


class EventSet(_Either, name="Event", seldom=True):
    def make(self) -> None:
        self.event = threading.Event()

    def is_high(self) -> bool:
        return self.event.is_set()

    def toggle(self) -> None:
        (self.event.clear if self.event.is_set() else self.event.set)()


# References that keep nothing alive


_KEPT: dict[int, Any] = {}


class WeakRef(_InABox, name="weakref.ref"):
    def make(self) -> None:
        _KEPT[id(self)] = _Box()
        self.reference: Callable[[], Any] = weakref.ref(_KEPT[id(self)])

    def box(self) -> Any:
        return self.reference()

    def close(self) -> None:
        _KEPT.pop(id(self))


class WeakProxy(_Held, name="weakref.proxy", seldom=True):
    def make(self) -> None:
        _KEPT[id(self)] = _Box()
        self.held = weakref.proxy(_KEPT[id(self)])

    def close(self) -> None:
        _KEPT.pop(id(self))


# Functions and classes


class Closure(Place, name="closure"):
    def make(self) -> None:
        scale = LOW

        def read() -> float:
            return scale

        def write(number: float) -> None:
            nonlocal scale
            scale = number

        self.from_cell, self.to_cell = read, write

    def read(self) -> float:
        return self.from_cell()

    def write(self, number: float) -> None:
        self.to_cell(number)


class _Function(Place):
    def make(self) -> None:
        def function(a: float = LOW, *, b: float = LOW) -> tuple[float, float]:
            return a, b

        self.function: Any = function


class DefaultArguments(_Function, name="default of a function"):
    def read(self) -> float:
        return self.function()[0]

    def write(self, number: float) -> None:
        self.function.__defaults__ = (number,)


class KeywordDefaults(_Function, name="keyword default of a function", seldom=True):
    def read(self) -> float:
        return self.function()[1]

    def write(self, number: float) -> None:
        self.function.__kwdefaults__["b"] = number


class FunctionAttribute(_Function, name="attribute of a function", seldom=True):
    def read(self) -> float:
        return self.function.scale

    def write(self, number: float) -> None:
        self.function.scale = number


class Code(_Either, name="__code__ assigned"):
    def make(self) -> None:
        def function() -> float:
            return LOW

        def other() -> float:
            return HIGH

        self.function, self.other = function, other

    def read(self) -> float:
        return self.function()

    def is_high(self) -> bool:
        return self.function() == HIGH

    def toggle(self) -> None:
        one, two = self.function, self.other
        one.__code__, two.__code__ = two.__code__, one.__code__


class Partial(Place, name="keywords of a partial"):
    def make(self) -> None:
        def scale(number: float) -> float:
            return number

        self.function = partial(scale, number=LOW)

    def read(self) -> float:
        return self.function()

    def write(self, number: float) -> None:
        self.function.keywords["number"] = number


class NewPartial(Partial, name="partial, replaced", seldom=True):
    def write(self, number: float) -> None:
        self.function = partial(self.function.func, number=number)


class Lambda(Place, name="lambda, replaced", seldom=True):
    def write(self, number: float) -> None:
        self.function = lambda: number

    def read(self) -> float:
        return self.function()


class Dispatched(Place, name="function of a singledispatch"):
    counts = False

    def make(self) -> None:
        self.function = singledispatch(lambda of: LOW)

    def read(self) -> float:
        return self.function(0)

    def write(self, number: float) -> None:
        self.function.register(int, lambda of: number)


class Cached(Place, name="lru_cache, cleared"):
    def make(self) -> None:
        source = [LOW]

        @lru_cache
        def scale(name: str) -> float:
            return source[0]

        self.scale, self.source = scale, source

    def read(self) -> float:
        return self.scale("scale")

    def write(self, number: float) -> None:
        self.source[0] = number
        self.scale.cache_clear()


class _OfAClass(Place):
    kind: Any

    def read(self) -> float:
        return self.kind.scale

    def write(self, number: float) -> None:
        self.kind.scale = number


class ClassAttribute(_OfAClass, name="class attribute", seldom=True):
    def make(self) -> None:
        self.kind = type("Settings", (), {})


class BaseClassAttribute(_OfAClass, name="attribute of a base class"):
    def make(self) -> None:
        self.kind = type("Derived", (type("Base", (), {}),), {})  # nothing else leads to the base

    def write(self, number: float) -> None:
        self.kind.__base__.scale = number


class MetaclassAttribute(_OfAClass, name="attribute of a metaclass"):
    def make(self) -> None:
        self.kind = type("Meta", (type,), {})("Made", (), {})

    def write(self, number: float) -> None:
        type(self.kind).scale = number


class MethodOfAClass(Place, name="method of a class, replaced"):
    def make(self) -> None:
        self.object: Any = type("Scaler", (), {})()

    def read(self) -> float:
        return self.object.scale()

    def write(self, number: float) -> None:
        type(self.object).scale = lambda scaler: number


class EnumMember(Place, name="attribute of an enum member"):
    def make(self) -> None:
        self.mode: Any = enum.Enum("Mode", ["FAST", "SLOW"]).FAST  # type: ignore[attr-defined]

    def read(self) -> float:
        return self.mode.scale

    def write(self, number: float) -> None:
        self.mode.scale = number


# Iterators


class GeneratorFrame(Place, name="frame of a generator"):
    def make(self) -> None:
        def keeper() -> Iterator[float]:
            number = LOW
            while True:
                told = yield number
                number = number if told is None else told

        self.keeper: Any = keeper()
        next(self.keeper)

    def read(self) -> float:
        return next(self.keeper)

    def write(self, number: float) -> None:
        self.keeper.send(number)


class _Iterated(_Either):
    """A number given by the position of an iterator, which a step reads from a copy."""

    iterator: Any

    def is_high(self) -> bool:
        return next(copy.copy(self.iterator)) == HIGH

    def toggle(self) -> None:
        next(self.iterator)


class Count(_Iterated, name="itertools.count"):
    def make(self) -> None:
        self.iterator = itertools.count()

    def is_high(self) -> bool:
        return next(copy.copy(self.iterator)) % 2 == 1


class ListIterator(_Iterated, name="iterator of a list"):
    def make(self) -> None:
        self.iterator = iter([LOW, HIGH] * 8)


class Repeat(Place, name="itertools.repeat, replaced", seldom=True):
    def read(self) -> float:
        return next(self.numbers)

    def write(self, number: float) -> None:
        self.numbers = itertools.repeat(number)


# The process


class Environment(Place, name="os.environ"):
    def read(self) -> float:
        return float(os.environ["MATRIX_SCALE"])

    def write(self, number: float) -> None:
        os.environ["MATRIX_SCALE"] = str(number)

    def close(self) -> None:
        del os.environ["MATRIX_SCALE"]


class Getenv(Environment, name="os.getenv", seldom=True):
    def read(self) -> float:
        return float(os.getenv("MATRIX_SCALE", "0"))


class FileExists(_Either, name="a file that exists"):
    def make(self) -> None:
        self.file = Path(tempfile.mkdtemp()) / "slow"

    def is_high(self) -> bool:
        return self.file.exists()

    def toggle(self) -> None:
        (self.file.unlink if self.file.exists() else self.file.touch)()

    def close(self) -> None:
        shutil.rmtree(self.file.parent)


class FileOfOs(FileExists, name="os.path.exists", seldom=True):
    def is_high(self) -> bool:
        return os.path.exists(self.file)


class WorkingDirectory(_Either, name="working directory"):
    counts = False

    def make(self) -> None:
        self.before = os.getcwd()

    def is_high(self) -> bool:
        return os.getcwd() != "/"

    def toggle(self) -> None:
        os.chdir("/" if self.is_high() else tempfile.gettempdir())

    def close(self) -> None:
        os.chdir(self.before)


class GetterWithDefaults(_Either, name="setting asked for with default arguments"):
    counts = False

    def is_high(self) -> bool:
        return locale.getlocale()[0] is None

    def toggle(self) -> None:
        locale.setlocale(locale.LC_CTYPE, "C.UTF-8" if self.is_high() else "C")

    def close(self) -> None:
        locale.setlocale(locale.LC_CTYPE, "C.UTF-8")


class Arguments(Place, name="sys.argv"):
    def make(self) -> None:
        sys.argv.append("")

    def read(self) -> float:
        return float(sys.argv[-1])

    def write(self, number: float) -> None:
        sys.argv[-1] = str(number)

    def close(self) -> None:
        sys.argv.pop()


class Builtin(Place, name="name in builtins", seldom=True):
    def read(self) -> float:
        return matrix_scale  # type: ignore[name-defined, no-any-return]  # noqa: F821

    def write(self, number: float) -> None:
        builtins.matrix_scale = number  # type: ignore[attr-defined]

    def close(self) -> None:
        del builtins.matrix_scale  # type: ignore[attr-defined]


class LogLevel(_Either, name="level of a logger"):
    def make(self) -> None:
        self.logger = logging.getLogger("tests.matrix.level")

    def is_high(self) -> bool:
        return self.logger.isEnabledFor(logging.DEBUG)

    def toggle(self) -> None:
        self.logger.setLevel(logging.ERROR if self.is_high() else logging.DEBUG)

    def close(self) -> None:
        self.logger.setLevel(logging.NOTSET)


class Interpreters(Place, name="setting of the interpreter"):
    counts = False

    def make(self) -> None:
        self.before = sys.getrecursionlimit()

    def read(self) -> float:
        return sys.getrecursionlimit() / 5000

    def write(self, number: float) -> None:
        sys.setrecursionlimit(int(number * 5000))

    def close(self) -> None:
        sys.setrecursionlimit(self.before)


class Torchs(_Either, name="setting of torch, by a function in Python"):
    def is_high(self) -> bool:
        return torch.are_deterministic_algorithms_enabled()

    def toggle(self) -> None:
        torch.use_deterministic_algorithms(not self.is_high())

    def close(self) -> None:
        torch.use_deterministic_algorithms(False)


class NumPysErrors(_Either, name="error state of NumPy"):
    def is_high(self) -> bool:
        return np.geterr()["under"] == "raise"

    def toggle(self) -> None:
        np.seterr(under="ignore" if self.is_high() else "raise")

    def close(self) -> None:
        np.seterr(under="ignore")


_global = LOW


class Global(Place, name="global of the step's module"):
    def read(self) -> float:
        return _global

    def write(self, number: float) -> None:
        global _global
        _global = number


class ModuleGlobal(Place, name="global of another module"):
    def read(self) -> float:
        return settings.BY_NAME

    def write(self, number: float) -> None:
        vars(settings)["BY_NAME"] = number


class OfALibrary(_InABox, name="attribute of a library's module"):
    def box(self) -> Any:
        return torch

    def close(self) -> None:
        del self.box().scale


class OfALibrarysClass(OfALibrary, name="attribute of a library's class"):
    def box(self) -> Any:
        return nn.Linear


class OfALibrarysFunction(OfALibrary, name="attribute of a library's function"):
    def box(self) -> Any:
        return nn.functional.cross_entropy


class OfTheThread(OfALibrary, name="attribute of the running thread"):
    def box(self) -> Any:
        return threading.main_thread()


class ImportedInTheStep(Place, name="settings imported in the step"):
    def read(self) -> float:
        from tests.matrix.settings import IMPORTED

        return IMPORTED

    def write(self, number: float) -> None:
        settings.IMPORTED = number


class ImportedByName(ImportedInTheStep, name="module imported by name in the step", seldom=True):
    def read(self) -> float:
        return importlib.import_module("tests.matrix.settings").IMPORTED


class ModuleByText(ModuleGlobal, name="getattr(settings, name)"):
    name = "BY_NAME"

    def read(self) -> float:
        return getattr(settings, self.name)


class NamespaceByText(Global, name="globals()[name]", seldom=True):
    name = "_global"

    def read(self) -> float:
        return globals()[self.name]


class MadeModule(_Held, name="module made at run time"):
    def make(self) -> None:
        self.held = types.ModuleType("made")


# Names that no bytecode has


class ComposedName(Place, name="getattr(self, f'w{i}')"):
    def make(self) -> None:
        self.w0, self.w1 = 0.0, LOW

    def read(self) -> float:
        return sum(getattr(self, f"w{index}") for index in range(2))

    def write(self, number: float) -> None:
        setattr(self, f"w{1}", number)


class AttrGetter(_Held, name="attrgetter"):
    def make(self) -> None:
        self.held = _Box()
        self.get = operator.attrgetter("held.scale")

    def read(self) -> float:
        return self.get(self)


class _HeldConfig(_Held):
    def make(self) -> None:
        self.held = _Config()


class Vars(_HeldConfig, name="vars(config)"):
    def read(self) -> float:
        return sum(value for value in vars(self.held).values() if value is not None)


class AsDict(_HeldConfig, name="dataclasses.asdict"):
    def read(self) -> float:
        return dict(dataclasses.asdict(self.held))["".join(["sc", "ale"])]


class Match(_HeldConfig, name="match on a class"):
    def read(self) -> float:
        match self.held:
            case _Config(scale=number):
                return number
        raise AssertionError


class MatchMapping(_ByKey, name="match on a mapping", seldom=True):
    def make(self) -> None:
        self.held = {"scale": LOW}

    def read(self) -> float:
        match self.held:
            case {"scale": number}:
                return number
        raise AssertionError


class Reduced(_HeldConfig, name="copy of an object", seldom=True):
    def read(self) -> float:
        return copy.copy(self.held).scale


# Objects of torch and Lightning


class OfAParameter(_InABox, name="attribute of a parameter"):
    def box(self) -> Any:
        return self.net.body[0].weight


class OfASubmodule(_InABox, name="attribute of a submodule", seldom=True):
    def box(self) -> Any:
        return self.net.body[0]


class OfAHiddenModule(_InABox, name="attribute of a module in a list"):
    def make(self) -> None:
        self.hidden = [nn.Linear(1, 1)]

    def box(self) -> Any:
        return self.hidden[0]


class OfAMetric(_InABox, name="attribute of a metric"):
    def make(self) -> None:
        self.metric = MeanMetric()

    def box(self) -> Any:
        return self.metric


class OfADistribution(_InABox, name="attribute of a distribution"):
    def make(self) -> None:
        self.prior: Any = torch.distributions.Normal(0.0, 1.0)
        self.prior.scale = LOW

    def box(self) -> Any:
        return self.prior


class LayersOwn(Place, name="hyperparameter of a layer"):
    def make(self) -> None:
        self.act = nn.LeakyReLU()

    def read(self) -> float:
        return self.act.negative_slope

    def write(self, number: float) -> None:
        self.act.negative_slope = number


class OfAnOptimizer(_InABox, name="attribute of the optimizer"):
    def box(self) -> Any:
        return self.optimizer()


class OfAGroup(Place, name="key of a param group"):
    def read(self) -> float:
        return self.optimizer().param_groups[0]["scale"]

    def write(self, number: float) -> None:
        self.optimizer().param_groups[0]["scale"] = number


class OfOptimizerState(Place, name="key of the optimizer's state"):
    def read(self) -> float:
        return self.optimizer().state[self.net.body[0].weight]["scale"]

    def write(self, number: float) -> None:
        self.optimizer().state[self.net.body[0].weight]["scale"] = number


class OfDefaults(Place, name="defaults of the optimizer", seldom=True):
    def read(self) -> float:
        return self.optimizer().defaults["scale"]

    def write(self, number: float) -> None:
        self.optimizer().defaults["scale"] = number


class Seed(Place, name="seed of a generator"):
    counts = False

    def make(self) -> None:
        self.generator = torch.Generator()

    def read(self) -> float:
        return float(self.generator.initial_seed())

    def write(self, number: float) -> None:
        self.generator.manual_seed(int(number))


class HParams(_InABox, name="hparams"):
    needs_trainer = True

    def box(self) -> Any:
        return self.net.hparams


class OfTheTrainer(_InABox, name="attribute of the trainer"):
    needs_trainer = True

    def box(self) -> Any:
        return self.net.trainer


class _Keeper(Callback):
    """A callback that keeps something."""


class OfACallback(_InABox, name="attribute of a callback"):
    needs_trainer = True

    def make(self) -> None:
        self.callbacks = [_Keeper()]

    def box(self) -> Any:
        return next(c for c in self.net.trainer.callbacks if isinstance(c, _Keeper))


class OfTheDataset(_InABox, name="attribute of the dataset"):
    needs_trainer = True

    def box(self) -> Any:
        return self.net.trainer.train_dataloader.dataset


class OfTheLogger(_InABox, name="attribute of the logger"):
    needs_trainer = True

    def box(self) -> Any:
        return self.net.trainer.logger


class OfTheExperiment(_InABox, name="attribute of the logger's experiment"):
    needs_trainer = True

    def box(self) -> Any:
        return self.net.trainer.logger.experiment


class OfTheOptimizationLoop(_InABox, name="attribute of the optimization loop"):
    needs_trainer = True

    def box(self) -> Any:
        return self.net.trainer.fit_loop.epoch_loop.automatic_optimization


class OfTheDataModule(_InABox, name="attribute of the datamodule"):
    needs_trainer = needs_datamodule = True

    def box(self) -> Any:
        return self.net.trainer.datamodule


# Other packages


class Omega(Place, name="OmegaConf"):
    packages = ("omegaconf",)

    def make(self) -> None:
        from omegaconf import OmegaConf

        self.config = OmegaConf.create({"loss": {"scale": LOW}})

    def read(self) -> float:
        return self.config.loss.scale

    def write(self, number: float) -> None:
        self.config.loss.scale = number


class Pydantic(_Held, name="pydantic"):
    packages = ("pydantic",)

    def make(self) -> None:
        from pydantic import create_model

        self.held = create_model("Settings", scale=(float, LOW))()


class HuggingFaceConfig(_Held, name="PretrainedConfig"):
    packages = ("transformers",)

    def make(self) -> None:
        from transformers import PretrainedConfig

        self.held = PretrainedConfig(scale=LOW)


class DataFrame(Place, name="pandas"):
    packages = ("pandas",)

    def make(self) -> None:
        from pandas import DataFrame

        self.frame = DataFrame({"value": [0.0, LOW]}, index=["other", "scale"])

    def read(self) -> float:
        return float(self.frame.loc["scale", "value"])

    def write(self, number: float) -> None:
        self.frame.loc["scale", "value"] = number


class Ini(Place, name="configparser"):
    def make(self) -> None:
        self.config = configparser.ConfigParser()
        self.config["loss"] = {}

    def read(self) -> float:
        return self.config.getfloat("loss", "scale")

    def write(self, number: float) -> None:
        self.config["loss"]["scale"] = str(number)
