"""The report, as a text of made up times."""

from __future__ import annotations

import copy
import json
import pickle
import re
from typing import Any

import pytest

from lightning_cudagraph import RunSummary, StageSummary, StepTimes
from lightning_cudagraph.checks.audit.read_remedies import afterwards
from lightning_cudagraph.checks.guards.changes import Change
from lightning_cudagraph.checks.guards.remedies import kind_of, remedy_of
from lightning_cudagraph.errors import Location
from lightning_cudagraph.timing.output.report import stage_lines, time_lines
from lightning_cudagraph.timing.readings.windows import WindowSummary
from tests.readings import gpt_readings
from tests.test_tables import flat

NOTHING = WindowSummary([])


def replayed(**numbers: Any) -> StageSummary:
    known: dict[str, Any] = {"warmed_up": 3, "replayed": 200, "captures": 1, "checked": 2}
    return StageSummary(**{**known, "capture_ms": 600.0, "memory_bytes": 2**20, **numbers})


def report(
    fit: StageSummary,
    graph: WindowSummary = NOTHING,
    event_host_us: float = 0.0,
    **others: Any,
) -> str:
    times = StepTimes.of_window(graph, time_lines(graph, event_host_us=event_host_us))
    told: dict[str, Any] = {"times": times, **others}
    return str(RunSummary(backend="CUDA graphs", fit=fit, **told))


GRAPH = """\
lightning_cudagraph: 200 of 203 steps replayed (98.5%); CUDA graphs
  fit       3 warmed up, 200 replayed, 0 eager; captured 1 time(s) in 600 ms, 1.0 MiB taken
            2 replay(s) verified against eager steps
  graph     forward 0.619 ms, backward 1.418 ms, clipping 0.030 ms, optimizer 0.120 ms, copy 0.010 ms
  gap       between two steps, beside the copy of the batch, median 0.010 of 2.207 ms (0%)
  charts    tensorboard --logdir 'runs/a'
  note      something
  slowest layers of 1 timed step
               forward          backward           both
    layer       p50 ms  p95 ms    p50 ms  p95 ms  share  # forward = backward
    embedding    0.005   0.005     0.011   0.011   0.8%
    blocks       0.600   0.600     1.380   1.380  90.5%  #######===============
      0          0.100   0.100     0.230   0.230  15.1%  #===
      1          0.100   0.100     0.230   0.230  15.1%  #===
      2          0.100   0.100     0.230   0.230  15.1%  #===
      3          0.100   0.100     0.230   0.230  15.1%  #===
      4          0.100   0.100     0.230   0.230  15.1%  #===
      5          0.100   0.100     0.230   0.230  15.1%  #===
    ln_f         0.004   0.004     0.009   0.009   0.6%
    head         0.006   0.006     0.014   0.014   0.9%
    The time of an indented layer is contained in that of the one above it.
    Mean forward: 0.615 ms in the outermost layers + 0.004 ms outside of them = 0.619 ms.
    Mean backward: 1.414 ms in the outermost layers + 0.004 ms outside of them = 1.418 ms."""


def test_the_whole_report() -> None:
    summary = WindowSummary(gpt_readings(n=1, noise=0.0))
    assert report(replayed(), summary, notes=("something",), tensorboard_dir="runs/a") == GRAPH


def test_columns_beside_wide_names() -> None:
    times = flat(**{"注意力层": 3.0, "e\u0301te\u0301": 2.0, "mlp": 1.0})
    *_, header, wide, combined, narrow, _ = report(replayed(), times).splitlines()
    assert header == "    layer      p50 ms  p95 ms    p50 ms  p95 ms  share  # forward = backward"
    assert wide.startswith("    注意力层    3.000   3.000         -       -  50.0%  #")
    assert combined.startswith("    e\u0301te\u0301         2.000   2.000         -       -  33.3%  #")
    assert narrow.startswith("    mlp         1.000   1.000         -       -  16.7%  #")


def test_a_gap_that_counts_is_explained() -> None:
    summary = WindowSummary(gpt_readings(n=1, noise=0.0, gap_ms=4.4))
    text = report(replayed(), summary)
    assert (
        "beside the copy of the batch, median 2.200 of 6.587 ms (33%): the device waits for loggers,"
        " hooks or the dataloader, or works for them"
    ) in text


def test_a_gap_that_comes_from_the_timings_is_explained() -> None:
    def said(gap_ms: float, event_host_us: float) -> str:
        summary = WindowSummary(gpt_readings(n=3, noise=0.0, gap_ms=gap_ms))
        text = report(replayed(), summary, event_host_us=event_host_us)
        (line,) = (line for line in text.splitlines() if line.startswith("  gap "))
        return line.partition(" or works for them")[2]

    typical = WindowSummary(gpt_readings(n=3, noise=0.0, gap_ms=4.4)).typical()
    assert typical is not None
    n_events = typical.layout.n_marks
    assert said(4.4, 0.65e3 / n_events) == ""  # of 6.587 ms
    assert said(4.4, 0.67e3 / n_events) == (
        f"; the {n_events} events of a timed step take the host about 0.67 ms"
        " (`LayerTimings(every_n_steps=50)` times fewer steps)"
    )
    assert said(0.1, 0.67e3 / n_events) == ""


def test_nothing_was_timed() -> None:
    text = report(replayed())
    assert len(text.splitlines()) == 3


def step_line(text: str) -> str:
    (line,) = (line for line in text.splitlines() if line.startswith("  step "))
    return line


def test_without_plain_steps_no_gain_is_claimed() -> None:
    """Steps of the warm-up are watched: the report makes no speed-up of them."""
    text = report(replayed(replay_ms=2.4))
    assert text.startswith("lightning_cudagraph: 200 of 203 steps replayed (98.5%); CUDA graphs\n")
    told = '2.40 ms replayed on average; to know what is gained, run once with `backend="off"`'
    assert step_line(text) == f"  step      {told}"


@pytest.mark.parametrize(
    ("plain_ms", "said"),
    [
        (19.44, "8.1x your plain step; "),
        (3.6, "1.50x your plain step; "),
        (2.448, "not launch-bound: 1.02x your plain step, leave it out; "),
        (1.8, "not launch-bound: 0.75x your plain step, leave it out; "),
    ],
)
def test_the_gain_is_the_first_thing_said(plain_ms: float, said: str) -> None:
    fit = replayed(replay_ms=2.4, plain_ms=plain_ms, plain_steps=4)
    text = report(fit)
    share = "200 of 203 steps replayed (98.5%); CUDA graphs"
    assert text.splitlines()[0] == f"lightning_cudagraph: {said}{share}"
    told = f"2.40 ms replayed on average, {plain_ms:.2f} ms plain (4 steps before the capture)"
    assert step_line(text) == f"  step      {told}"
    assert fit.speedup == pytest.approx(plain_ms / 2.4)
    assert fit.speedup is not None
    assert re.findall(r"([0-9.]+)x", text) == [f"{fit.speedup:.{1 if fit.speedup >= 2 else 2}f}"]


@pytest.mark.parametrize(
    ("warmed_up", "replays", "eager", "said"),
    [
        (3, 1997, 0, "1997 of 2000 steps replayed (99.8%)"),
        (3, 9997, 0, "9997 of 10000 steps replayed (99.9%)"),  # never 100 where some were not
        (0, 7, 0, "7 of 7 steps replayed (100.0%)"),
        (3, 3, 6, "3 of 12 steps replayed (25.0%)"),
        (2, 0, 0, "0 of 2 steps replayed (0.0%)"),
        (0, 0, 0, "0 of 0 steps replayed (0.0%)"),
    ],
)
def test_the_first_line_is_the_verdict(warmed_up: int, replays: int, eager: int, said: str) -> None:
    reasons = {"another batch signature": eager} if eager else {}
    stage = StageSummary(warmed_up=warmed_up, replayed=replays, eager=reasons)
    first, *_ = report(stage).splitlines()
    assert first == f"lightning_cudagraph: {said}; CUDA graphs"
    if stage.steps:
        first, *_ = str(RunSummary(backend="CUDA graphs", test=stage)).splitlines()
        assert first == f"lightning_cudagraph: {said.replace('steps', 'batches')}; CUDA graphs"
        first, *_ = str(RunSummary(backend="CUDA graphs", calls=stage)).splitlines()
        assert first == f"lightning_cudagraph: {said.replace('steps', 'calls')}; CUDA graphs"


def test_reasons_are_below_their_stage() -> None:
    fit = replayed(eager={"a": 1, "b": 4}, recaptures=("c", "d"))
    validate = StageSummary(warmed_up=2, not_captured="e")
    lines = str(RunSummary(backend="CUDA graphs", fit=fit, validate=validate)).splitlines()
    assert lines[1:] == [
        "  fit       3 warmed up, 200 replayed, 5 eager; captured 1 time(s) in 600 ms, 1.0 MiB taken",
        "            4 eager: b",
        "            1 eager: a",
        "            invalidated: c",
        "            invalidated: d",
        "            2 replay(s) verified against eager steps",
        "  validate  2 warmed up, 0 replayed, 0 eager; captured 0 time(s)",
        "            nothing was captured: e",
    ]


def test_other_shapes_of_one_tensor_are_one_line() -> None:
    expected = "another batch signature: `batch['ids']` changed: expected (8, 31) int64"
    eager = {f"{expected}, found (8, {n}) int64": 2 for n in (39, 37)}
    lines = stage_lines("fit", StageSummary(replayed=3, eager={**eager, "a": 1}))
    remedy = "Pad to a few (`pad_to` of the callback). See docs/recipes/buckets.md."
    assert lines[1] == f"            4 eager: {expected}, found 2 other shapes. {remedy}"
    assert lines[2] == "            1 eager: a"


def test_what_has_ended_the_run_is_the_second_line() -> None:
    ended = "KeyboardInterrupt after step 9"
    line = f"  ended     by {ended}; times of the last steps are missing"
    assert report(replayed(), ended=ended).splitlines()[1] == line


def test_numbers_for_a_log() -> None:
    fit = replayed(replay_ms=2.0, plain_ms=8.0, plain_steps=4, eager={"a": 2}, recaptures=("b",))
    window = WindowSummary(gpt_readings(n=3, noise=0.0))
    times = StepTimes.of_window(window, ["d"])
    summary = RunSummary(backend="CUDA graphs", fit=fit, notes=("c",), times=times)
    found = json.loads(json.dumps(summary.to_dict()))
    assert (
        found["verdict"]
        == summary.verdict
        == "4.0x your plain step; 200 of 205 steps replayed (97.5%); CUDA graphs"
    )
    assert {*found["stages"]} == {"fit"}
    stage = found["stages"]["fit"]
    assert stage["eager"] == {"a": 2}
    assert stage["recaptures"] == ["b"]
    assert (stage["speedup"], stage["steps"], stage["eager_steps"]) == (4.0, 205, 2)
    assert stage["replayed_share"] == pytest.approx(200 / 205)
    assert found["notes"] == ["c"]
    assert found["times"]["timed_steps"] == found["times"]["parts"]["forward"]["count"] == 3
    assert found["times"]["backward"]["blocks"]["p50_ms"] == pytest.approx(1.38)
    assert not {"lines", "layers"} & {*found["times"]}
    assert str(times).splitlines()[0] == "d"
    assert "blocks" in str(times)
    assert pickle.loads(pickle.dumps(summary)) == copy.deepcopy(summary) == summary


def test_what_changes_again_and_again_is_one_line() -> None:
    reasons = tuple(Change(f"the address of `p` changed from {n} to {n + 1}") for n in range(3))
    reasons[-1].remedy = "Write into the tensor."
    stage = StageSummary(captures=4, recaptures=(*reasons, "c"))
    lines = stage_lines("fit", stage)
    assert any(
        line.startswith("            invalidated 3 times: the address of `p` changed. Write into the")
        for line in lines
    )
    assert "            invalidated: c" in lines
    for reason in reasons:
        reason.is_after_pause = True
    assert "`p` changed. It was so at the start of an epoch" in str(stage_lines("fit", stage))


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("`k` of the `A` changed from 1 to 2", "`k` of the `A` changed"),
        (
            "`k` changed; `aten.mul` had 1 in the captured step, has 2 now at a.py:3 (`x * 2`)",
            "`k` changed; `aten.mul` got another argument at a.py:3 (`x * 2`)",
        ),
    ],
)
def test_reasons_without_their_values_are_of_one_kind_with_a_remedy(reason: str, kind: str) -> None:
    assert kind_of(reason) == kind
    assert remedy_of(kind).startswith("Hand it to the step")


def test_remedies_of_changes_by_kind() -> None:
    assert remedy_of(kind_of("torch.backends.cudnn.benchmark changed from False to True")) == (
        "Set it once, before training."
    )
    assert not remedy_of(kind_of("the number of param groups of the optimizer changed from 1 to 2"))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("self.logger.log_metrics({'lr': self.lr}, step=self.global_step)", "`on_train_batch_start`"),
        ("self.logger.log_metrics({'loss': 1.0}, step=self.global_step)", "counts this step too"),
        ("print('here')", "`on_train_batch_end`, which runs on the host after every step."),
    ],
)
def test_remedies_of_what_a_line_does_for_the_user(source: str, words: str) -> None:
    assert words in afterwards(Location("step.py", 1, source))
