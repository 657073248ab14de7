"""Steps that branch on `batch_idx` or `global_step`: a graph for each path, chosen by what they read.

`tests/gpu/test_paths.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torchmetrics import CatMetric

from lightning_cudagraph import CaptureError, CUDAGraphCallback
from lightning_cudagraph.checks.audit.step_audit import moving_number
from lightning_cudagraph.tensors.host_values import HostReads
from tests.harness import Net, Trace, assert_same, differences, loader, make, train
from tests.test_fp16 import run as fp16

BATCHES = 24


class Branching(Net):
    """Passes the loss to a function, and has a layer for some steps."""

    def __init__(self, use: Callable[[Branching, Tensor, Any], Any]) -> None:
        super().__init__(lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.3))
        self.use = use
        self.extra = nn.Linear(12, 4)
        self.every = 4

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        return self.use(self, loss, batch_idx)

    def penalty(self) -> Tensor:
        return self.extra.weight.square().mean()


def regularises(net: Branching, loss: Tensor, batch_idx: Any) -> Any:
    """Other parameters, other logged values and other outputs on one path."""
    if batch_idx % net.every == 0:
        penalty = net.penalty()
        net.log("penalty", penalty, on_step=True, on_epoch=True)
        return {"loss": loss + penalty, "penalty": penalty.detach()}
    return {"loss": loss}


def alternates(net: Branching, loss: Tensor, batch_idx: Any) -> Any:
    return loss if batch_idx % 2 else net.penalty() - loss


def warms_up(net: Branching, loss: Tensor, batch_idx: Any) -> Any:
    return loss * (0.1 if batch_idx < 10 else 1.0)


def computes(net: Branching, loss: Tensor, batch_idx: Any) -> Any:
    """Part of the index in arithmetic, in place, as an index, and in C code."""
    part = loss.new_ones(4)
    view = part[:2]
    view *= 1 + batch_idx % 3
    weights = [1.0, 2.0, 3.0]
    return loss * weights[batch_idx % 3] + torch.mul(part, 2 * (batch_idx % 3)).sum()


def logs_numbers(net: Branching, loss: Tensor, batch_idx: Any) -> Any:
    """A number that is constant on each path."""
    is_odd = bool(batch_idx & 1)
    net.log("scale", 2.0 if is_odd else 1.0)
    return loss * (2.0 if is_odd else 1.0)


def comes_late(net: Branching, loss: Tensor, batch_idx: Any) -> Any:
    """The first step of a path comes behind many captured ones; on it, the step reads more."""
    if batch_idx >= 16:
        return loss * (2 if batch_idx % 2 == 0 else 3)
    return loss


def counts_steps(net: Branching, loss: Tensor, batch_idx: Any) -> Any:
    """The number of steps, across epochs."""
    is_late = net.global_step >= 30 and net.trainer.global_step % 2 == 1
    return loss + net.penalty() if is_late or net.global_step < 2 else loss


def decays(net: Branching, loss: Tensor, batch_idx: Any) -> Any:
    """The fourth step is the first of its path: its capture is discarded, with what it has set."""
    if batch_idx % 10 == 3:
        for group in net.optimizers().param_groups:
            group["weight_decay"] *= 0.9
    return loss


def test_a_discarded_capture_leaves_no_effect(tmp_path: Path, accelerator: str) -> None:
    assert both(tmp_path, accelerator, decays, max_epochs=1).counts.replayed > 0


def both(tmp_path: Path, accelerator: str, use: Any, ours: Any = None, **kwargs: Any) -> Trace:
    """Train without and with the callback, and return the second run, which must equal the first."""
    kwargs = {"accelerator": accelerator, "max_epochs": 4, **kwargs}
    plain, graph = (
        train(
            make(lambda: Branching(use)),
            tmp_path / name,
            callback,
            train_loader=loader(batches=BATCHES, ragged=False),
            **kwargs,
        )
        for name, callback in (("plain", None), ("graph", ours or CUDAGraphCallback()))
    )
    assert_same(plain, graph)
    return graph


@pytest.mark.parametrize(
    "verify", [pytest.param(True, marks=pytest.mark.long), False], ids=["verified", "alone"]
)
@pytest.mark.parametrize(
    ("use", "paths"),
    [
        pytest.param(regularises, 2, marks=pytest.mark.long),
        pytest.param(alternates, 2, marks=pytest.mark.long),
        pytest.param(warms_up, 2, marks=pytest.mark.long),
        (computes, 3),
        pytest.param(logs_numbers, 2, marks=pytest.mark.long),
        pytest.param(comes_late, 4, marks=pytest.mark.long),
        (counts_steps, 3),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_paths(tmp_path: Path, accelerator: str, use: Any, paths: int, verify: bool) -> None:
    ours = CUDAGraphCallback() if verify else CUDAGraphCallback(verify=None)
    run = both(tmp_path, accelerator, use, ours, max_epochs=4 if use is comes_late else 3)
    assert run.counts.captures == paths
    assert run.counts.recaptures == ()
    assert run.counts.replayed > BATCHES


class InTurn(Branching):
    """Two heads, of which each path trains one or both; the counters of their optimizer meet again."""

    def __init__(self, make_optimizer: Any, turns: tuple[str, ...]) -> None:
        super().__init__(regularises)
        self.make_optimizer, self.turns = make_optimizer, turns

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        turn = self.turns[batch_idx % len(self.turns)]
        loss = nn.functional.cross_entropy(self(x), y) if "head" in turn else 0
        return loss + nn.functional.cross_entropy(self.extra(x), y) if "extra" in turn else loss


@pytest.mark.spread(2)
@pytest.mark.parametrize("turns", [("head", "extra"), ("head, extra", "head", "extra")], ids=str)
@pytest.mark.parametrize(
    "make_optimizer",
    [torch.optim.AdamW, lambda p: torch.optim.NAdam(p, foreach=True)],
)
def test_parameters_in_turn(tmp_path: Path, accelerator: str, turns: Any, make_optimizer: Any) -> None:
    plain, graph = (
        train(
            make(lambda: InTurn(make_optimizer, turns)),
            tmp_path / name,
            callback,
            accelerator=accelerator,
            train_loader=loader(batches=BATCHES, ragged=False),
            max_epochs=2,
        )
        for name, callback in (("plain", None), ("graph", CUDAGraphCallback(verify=None)))
    )
    assert_same(plain, graph)
    assert graph.counts.replayed > BATCHES
    assert not graph.counts.eager


class ReadsWhatIsKept(Branching):
    """One path keeps what it has computed, and the others read it."""

    def __init__(self) -> None:
        super().__init__(alternates)
        self.kept: Tensor | None = None
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        if batch_idx % 6 == 0:
            self.kept = self.features(x).detach()
        loss = nn.functional.cross_entropy(self(x), y)
        return (
            loss if self.kept is None else loss + (self.head(self.kept) - self.head.bias).square().mean()
        )

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.kept is not None:
            self.seen += [self.kept, self.kept.clone()]


@pytest.mark.long
def test_a_path_that_reads_what_another_has_kept(tmp_path: Path, accelerator: str) -> None:
    """No replay overwrites it, also where a hook keeps it beyond that."""
    plain, graph = (
        train(
            make(ReadsWhatIsKept),
            tmp_path / name,
            callback,
            accelerator=accelerator,
            train_loader=loader(batches=BATCHES, ragged=False),
            max_epochs=4,
        )
        for name, callback in (("plain", None), ("graph", CUDAGraphCallback()))
    )
    assert_same(plain, graph)
    assert graph.counts.replayed > 2 * BATCHES
    seen = graph.module.seen
    assert all(map(torch.equal, seen[::2], seen[1::2]))


class Gains(Callback):
    """Gives the loss of odd steps another factor, before a step of the other path."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 0:
            module.gain = 1.0
        elif trainer.current_epoch == 1 and batch_idx == 10:
            module.gain = 0.5


@pytest.mark.long
@pytest.mark.parametrize("window", [1, 2])
def test_a_change_that_the_next_step_does_not_read(
    tmp_path: Path, accelerator: str, window: int
) -> None:
    def use(net: Branching, loss: Tensor, batch_idx: Any) -> Any:
        return loss * getattr(net, "".join(("ga", "in"))) if batch_idx % 2 else loss

    run = both(
        tmp_path,
        accelerator,
        use,
        CUDAGraphCallback(verify=None),
        callbacks=(Gains(),),
        max_epochs=2,
        accumulate_grad_batches=window,
    )
    (reason,) = run.counts.recaptures
    assert "`gain` of the `Branching` changed from 1.0 to 0.5" in reason


@pytest.mark.long
@pytest.mark.parametrize("window", [2, 3])
def test_windows(tmp_path: Path, accelerator: str, window: int) -> None:
    """Each accumulation phase reads another part of the index, and the phases share a static batch."""

    def use(net: Branching, loss: Tensor, batch_idx: Any) -> Any:
        if (batch_idx + 1) % window == 0:
            net.log("of_the_last", loss)
            return loss * (3 if batch_idx % 4 == 1 else 1)
        return loss + net.penalty() if batch_idx % 3 == 0 else loss

    run = both(
        tmp_path,
        accelerator,
        use,
        CUDAGraphCallback(verify=None),
        accumulate_grad_batches=window,
    )
    assert run.counts.captures >= 4
    assert run.counts.replayed > BATCHES


@pytest.mark.long
@pytest.mark.parametrize("first", [0, 1])
def test_windows_without_a_parameter(tmp_path: Path, accelerator: str, first: int) -> None:
    """An optimizer skips a parameter without a gradient, which no zeros of another graph may replace."""

    def use(net: Branching, loss: Tensor, batch_idx: Any) -> Any:
        return loss + net.penalty() if (batch_idx // 2) % 2 == first else loss

    run = both(tmp_path, accelerator, use, accumulate_grad_batches=2)
    assert run.counts.captures == 4
    assert run.counts.recaptures == ()


@pytest.mark.long
def test_fp16(tmp_path: Path, accelerator: str) -> None:
    runs = [
        fp16(
            tmp_path / name,
            accelerator,
            lambda: Branching(regularises),
            callback,
            max_epochs=8,
            gradient_clip_val=0.1,
        )
        for name, callback in (("plain", None), ("graph", CUDAGraphCallback()))
    ]
    (plain, plain_scales), (graph, graph_scales) = runs
    assert_same(plain, graph)
    assert not differences(plain_scales.history, graph_scales.history)
    assert graph.counts.captures == 2


COMPUTE = r"Compute with it in a hook .* in a registered buffer, written with `copy_` or `fill_` \(.*"
COMPARE = r"Compare it with plain numbers, as in `batch_idx % 4 == 0` or .*: each outcome has a graph\."
LOG = r"Log it in `on_train_batch_start`: .*"
AFTERWARDS = "Do it in `on_train_batch_end`, which .*"


# With what is computed from the index where it is that, the remedy, and the page that shows it.
REFUSED: dict[str, tuple[Callable[[Any], Any], str, str, str]] = {
    "the index": (lambda index: index, "", COMPUTE, "paths"),
    "with as many values": (lambda index: 0.5 * index, "0.5 * batch_idx", COMPUTE, "paths"),
    "in C code": (lambda index: divmod(index, 2)[1], "", COMPUTE, "paths"),
    "logarithm": (lambda index: math.log(index + 1), "batch_idx + 1", COMPUTE, "paths"),
    "in a set": (lambda index: 2 if index in {1, 2} else 1, "", COMPARE, "paths"),
    "seldom the same": (lambda index: 1 + index // 10, "1 + (batch_idx // 10)", COMPUTE, "paths"),
    "too many comparisons": (lambda index: index in range(100, 200), "", COMPUTE, "paths"),
}


@pytest.mark.spread(2)
@pytest.mark.parametrize(("read", "computed", "remedy", "recipe"), REFUSED.values(), ids=REFUSED)
def test_refused(
    tmp_path: Path,
    accelerator: str,
    read: Callable[[Any], Any],
    computed: str,
    remedy: str,
    recipe: str,
) -> None:
    def use(net: Branching, loss: Tensor, batch_idx: Any) -> Any:
        return loss * read(batch_idx)

    with pytest.raises(CaptureError) as caught:
        both(tmp_path, accelerator, use, max_epochs=1)
    named = f"`{computed}`, computed from `batch_idx`" if computed else "`batch_idx`"
    assert f"read of {named}, which would stay" in caught.value.what
    assert caught.value.location.path == __file__
    assert re.fullmatch(rf"{remedy} See docs/recipes/{recipe}\.md\.", caught.value.remedy)


@pytest.mark.spread
@pytest.mark.parametrize("what", ["the number", "the loss", "a text"])
def test_printed(tmp_path: Path, accelerator: str, what: str) -> None:
    """Of a line that prints, the print is refused, not what it reads, with which it can be allowed."""

    def use(net: Branching, loss: Tensor, batch_idx: Any) -> Any:
        print({"the number": batch_idx, "the loss": loss}.get(what, what), end="")
        return loss

    with pytest.raises(CaptureError, match=r"a use of `print`") as caught:
        both(tmp_path, accelerator, use, max_epochs=1)
    assert len(caught.value.findings) == 1
    assert re.fullmatch(rf"{AFTERWARDS} See docs/recipes/item_and_print\.md\.", caught.value.remedy)
    allowed = {"a text": '["print"]', "the number": '["print", "batch_idx"]'}.get(what)
    assert re.findall(r"harmless=(\[[^]]*\])", caught.value.remedy) == [allowed] * (allowed is not None)


@pytest.mark.long
def test_control_without_notes_of_reads(
    tmp_path: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph then serves both paths."""
    monkeypatch.setattr(HostReads, "_note", lambda self, read: None)
    with pytest.raises(AssertionError, match="loss"):
        both(tmp_path, accelerator, alternates, CUDAGraphCallback(verify=None))


class Prints(Net):
    """Prints its loss on a path, in automatic or in manual optimization."""

    def __init__(self, is_automatic: bool, prints: Callable[[Prints, Any], Any]) -> None:
        super().__init__(lambda p: torch.optim.AdamW(p, lr=1e-2))
        self.automatic_optimization = is_automatic
        self.prints = prints

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        if self.prints(self, batch_idx):
            print(f"printed: {loss.item()}")
        return loss if self.automatic_optimization else None


# With the steps on the path, and the change that leads to another capture.
LATER: dict[str, tuple[Callable[[Prints, Any], Any], int, str]] = {
    "seldom": (lambda net, index: index % 5 == 0, 4 * 5, ""),
    "from an epoch on": (lambda net, index: net.current_epoch >= 2, 2 * BATCHES, "from 1 to 2"),
    "seldom from an epoch on": (
        lambda net, index: net.current_epoch >= 1 and index < 5,
        3 * 5,
        "from 0 to 1",
    ),
}
_USUAL = [(False, "seldom", "raise"), (True, "from an epoch on", "raise")]


@pytest.mark.spread
@pytest.mark.parametrize(
    ("is_automatic", "case", "on_unsupported"),
    [
        pytest.param(*each, marks=[] if each in _USUAL else pytest.mark.long)
        for each in product((True, False), LATER, ("raise", "eager"))
    ],
)
@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")
def test_a_path_without_a_graph(
    tmp_path: Path,
    accelerator: str,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    is_automatic: bool,
    case: str,
    on_unsupported: Any,
) -> None:
    """It is eager alone, also if it has had a graph before a change, and one line tells why."""
    prints, steps, change = LATER[case]
    with caplog.at_level(logging.INFO):
        plain, graph = (
            train(
                make(lambda: Prints(is_automatic, prints)),
                tmp_path / name,
                callback,
                train_loader=loader(batches=BATCHES, ragged=False),
                accelerator=accelerator,
                max_epochs=4,
            )
            for name, callback in (
                ("plain", None),
                ("graph", CUDAGraphCallback(on_unsupported=on_unsupported)),
            )
        )
    assert_same(plain, graph)
    printed = re.findall("printed: .*", capsys.readouterr().out)
    assert printed[:steps] == printed[steps:]
    assert len(printed) == 2 * steps
    counts = graph.counts
    assert sum(counts.eager.values()) + counts.warmed_up + counts.replayed == 4 * BATCHES
    assert any(f"{__file__}:" in reason for reason in counts.eager)
    assert counts.eager_by_signature <= 8  # before its capture: others have no remedy in the batch
    others = 4 * BATCHES - steps
    assert counts.replayed > others // 2
    (line,) = (message for message in caplog.messages if " run eagerly" in message)
    assert re.search(rf"run eagerly.*{change}.*`\.item\(\)`.*{__file__}:\d+.*Remedy: Return", line)
    assert ("since a change" in line) == bool(change)


@dataclass
class Losses:
    kept: list[float] = field(default_factory=list)


class Appends(Net):
    """Appends its loss to a list on a path; the others read it through a library, not by name."""

    def __init__(self) -> None:
        super().__init__(lambda p: torch.optim.AdamW(p, lr=1e-2))
        self.losses = Losses()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        if batch_idx % 5 == 0:
            self.losses.kept.append(loss.item())
        return loss * 2 if len(dataclasses.astuple(self.losses)[0]) > 5 else loss


@pytest.mark.long
def test_a_list_that_one_path_appends_to(tmp_path: Path, accelerator: str) -> None:
    plain, graph = (
        train(
            make(Appends),
            tmp_path / name,
            callback,
            train_loader=loader(batches=BATCHES, ragged=False),
            accelerator=accelerator,
            max_epochs=4,
        )
        for name, callback in (("plain", None), ("graph", CUDAGraphCallback()))
    )
    assert_same(plain, graph)
    assert any("`losses.kept[" in change for change in graph.counts.recaptures)


class Counting(Net):
    """Gives a part of the index to a metric that is called after each replay."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = CatMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.parts.update(batch_idx % 2)
        return super().training_step(batch, batch_idx)["loss"]


def test_a_metric_on_the_host(tmp_path: Path, accelerator: str) -> None:
    modules = [make(Counting) for _ in range(2)]
    for module, callback in zip(modules, (None, CUDAGraphCallback(verify=None)), strict=True):
        trace = train(module, tmp_path / str(callback is None), callback, accelerator=accelerator)
    assert trace.counts.replayed > 0
    plain, graph = (module.parts.compute() for module in modules)
    assert torch.equal(plain, graph)


class Shows(Net):
    """Does in the first batch of an evaluation what no graph can hold, or what another path has not."""

    def __init__(self, shows: bool) -> None:
        super().__init__()
        self.shows = shows

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        if batch_idx == 0:
            self.log("of_the_first", logits.max())
            if self.shows:
                print(f"shown: {logits.max().item()}")
        self.log("val", logits.mean() * (2 if batch_idx % 2 else 1))
        return {"logits": logits} if batch_idx == 0 else None


@pytest.mark.spread
@pytest.mark.parametrize("shows", [False, True])
def test_evaluation(
    tmp_path: Path, accelerator: str, shows: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first batch has a graph, or is eager alone."""
    plain, graph = (
        train(
            make(lambda: Shows(shows)),
            tmp_path / name,
            callback,
            accelerator=accelerator,
            val_loader=loader(seed=1, batches=8, ragged=False),
            max_epochs=4,
        )
        for name, callback in (("plain", None), ("graph", CUDAGraphCallback(evaluation=True)))
    )
    assert_same(plain, graph)
    shown = re.findall("shown: .*", capsys.readouterr().out)
    assert shown[: len(shown) // 2] == shown[len(shown) // 2 :]
    assert len(shown) == (2 * 4 if shows else 0)
    assert graph.callback is not None
    counts = graph.callback.summary.validate
    assert counts is not None
    assert counts.captures == (2 if shows else 3)
    assert counts.replayed > 12


def test_parts_of_a_number() -> None:
    """Texts, values, and what is the same of two numbers."""
    reads = HostReads(lambda: None)
    refused: list[str] = []
    index: Any = reads.beside_batch(
        "index", 6, lambda read: read.text == "index", lambda read: refused.append(read.text)
    )
    with reads.noted():
        assert index % 4 == 2
        assert (index + 1) % 2 != 0
        assert not index < 3
        assert index - 6 == 0.0
        assert bool(12 // index)
        assert [1, 2, 3][index % 3] == 1
        assert isinstance(index % 4, int)
        assert isinstance(index / 4, float)
    texts = [
        *("index % 4 == 2", "(index + 1) % 2 != 0", "index < 3", "index - 6 == 0.0"),
        *("bool(12 // index)", "index % 3"),
    ]
    assert [text for text, _ in reads.computed("index", 6)] == texts
    assert reads.agree("index", 6, 6)
    assert not reads.agree("index", 6, 18)
    assert dict(reads.computed("index", 0))["bool(12 // index)"] is ZeroDivisionError
    assert not refused
    with reads.noted():
        hash(index)
    assert refused == ["index"]


def test_numbers_that_the_step_returns(tmp_path: Path, accelerator: str) -> None:
    def use(net: Branching, loss: Tensor, batch_idx: Any) -> Any:
        return {"loss": loss, "bi": batch_idx, "gs": net.global_step, "even": batch_idx % 2}

    with pytest.raises(CaptureError) as caught:
        both(tmp_path, accelerator, use, max_epochs=1)
    for finding, name in zip(caught.value.findings, ("bi", "gs"), strict=True):
        assert finding.remedy.startswith(
            f"The step returns it under `{name}`: leave it out, and take it"
        )


class LogsBeside(Branching):
    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        self.logger.log_metrics({"rows": 1.0}, step=batch_idx)
        return super().training_step(batch, batch_idx)


def test_the_number_of_a_refused_step_in_a_logger(tmp_path: Path, accelerator: str) -> None:
    """The logger has kept it, and reads it again when it saves, with the error under way."""
    with pytest.raises(CaptureError, match="log_metrics") as caught:
        train(
            make(lambda: LogsBeside(alternates)), tmp_path, CUDAGraphCallback(), accelerator=accelerator
        )
    assert "log_metrics" in caught.value.location.source


def test_a_kept_number_is_refused_in_captures_of_other_runs() -> None:
    """A replay would freeze it; behind all captures it is a number."""
    kept = moving_number(HostReads(lambda: None), "batch_idx", 3, 8)
    assert int(kept) == 3
    with HostReads(lambda: None).noted(), pytest.raises(CaptureError, match="batch_idx"):
        int(kept)
    assert int(kept) == 3
