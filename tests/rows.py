"""One row of a table of Lightning's features: a run without and a run with the callback, compared.

Used by `test_rows_*.py`. A row describes a run once; both runs are built from it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_cudagraph import CUDAGraphCallback, UnsupportedError
from tests.harness import Net, Trace, assert_same, make, train

__all__ = ["Row", "became", "refused", "row"]


@dataclass
class Row:
    """Two equal runs.

    Attributes:
        plain: the run without the callback.
        graph: the run with it.
    """

    plain: Trace
    graph: Trace


def _nothing(folder: Path) -> dict[str, Any]:
    return {}


def row(
    tmp_path: Path,
    accelerator: str,
    build: Callable[[], pl.LightningModule] = Net,
    setting: Callable[[Path], dict[str, Any]] = _nothing,
    *,
    ours: Callable[[], CUDAGraphCallback] = CUDAGraphCallback,
    ignore: Sequence[str] = (),
    **kwargs: Any,
) -> Row:
    """Train without and with the callback, and fail unless both runs are equal, bit for bit.

    Compared are hooks with their arguments; after each step outputs, metrics, gradients, loops and the
    state of other callbacks; at the end weights, optimizer and random state; checkpoints; logs.
    Checkpoints must not name anything of this package.

    Args:
        tmp_path: folder of both runs' files.
        accelerator: ``"cpu"`` or ``"gpu"``.
        build: makes the module.
        setting: makes, for the folder of a run, the keywords for `harness.train` that the runs cannot
            share: callbacks, loggers, loaders with state.
        ours: makes the callback under test.
        ignore: globs of names of values that differ from run to run, such as times.
        kwargs: further keywords for `harness.train`.
    """

    def run(name: str, callback: CUDAGraphCallback | None) -> Trace:
        folder = tmp_path / name
        merged = {**kwargs, **setting(folder)}
        return train(make(build), folder, callback, accelerator=accelerator, **merged)

    plain, graph = run("plain", None), run("graph", ours())
    assert_same(plain, graph, ignore)
    for path in (tmp_path / "graph").rglob("*.ckpt"):
        assert b"lightning_cudagraph" not in path.read_bytes(), path.name
    return Row(plain, graph)


def became(
    trace: Trace,
    *,
    replayed: int,
    captures: int = 1,
    because: Sequence[str] = (),
    eager: dict[str, int] | None = None,
) -> None:
    """Fail unless a run has these counts.

    Args:
        trace: the run, with the callback.
        replayed: number of replays.
        captures: number of captures, without that for fewer timed steps, which a slow host needs.
        because: part of the reason for each re-capture, in order.
        eager: number of eager steps, by part of the reason.
    """
    counts = trace.counts
    told = f"{counts}"
    assert counts.replayed == replayed, told
    times_fewer = "is timed; each of the first" in str(trace.summary)
    assert counts.captures == captures + times_fewer, told
    assert len(counts.recaptures) == len(because), told
    for found, part in zip(counts.recaptures, because, strict=True):
        assert part in found, told
    eager = eager or {}
    assert sum(counts.eager.values()) == sum(eager.values()), told
    for part, number in eager.items():
        assert sum(n for reason, n in counts.eager.items() if part in reason) == number, told


def refused(
    tmp_path: Path,
    accelerator: str,
    build: Callable[[], pl.LightningModule] = Net,
    setting: Callable[[Path], dict[str, Any]] = _nothing,
    *,
    match: str,
    **kwargs: Any,
) -> Row:
    """Fail unless a run is refused, and with ``on_unsupported="eager"`` equals one without the callback.

    Args:
        tmp_path: folder of the runs' files.
        accelerator: ``"cpu"`` or ``"gpu"``.
        build: makes the module.
        setting: as for `row`.
        match: regular expression for the error.
        kwargs: further keywords for `harness.train`.
    """
    folder = tmp_path / "refused"
    merged = {**kwargs, **setting(folder)}
    with pytest.raises(UnsupportedError, match=f"(?s){match}"):
        train(make(build), folder, CUDAGraphCallback(), accelerator=accelerator, **merged)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "lightning_cudagraph: ")
        done = row(
            tmp_path,
            accelerator,
            build,
            setting,
            ours=lambda: CUDAGraphCallback(on_unsupported="eager"),
            **kwargs,
        )
    callback = done.graph.callback
    assert callback is not None
    assert re.search(match, str(callback.summary)), callback.summary
    return done
