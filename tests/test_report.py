"""The report, as a text of made up times."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_cudagraph.capture.steps import StepCounts
from lightning_cudagraph.timing.output.report import eager_report, evaluation_report, fit_report
from lightning_cudagraph.timing.readings.pace import StepPace
from lightning_cudagraph.timing.readings.spans import Reading
from lightning_cudagraph.timing.readings.windows import WindowSummary
from tests.readings import gpt_readings
from tests.test_tables import flat


def slowed(reading: Reading, times: float) -> Reading:
    offsets_ms = [times * offset_ms for offset_ms in reading.offsets_ms]
    return Reading(reading.layout, reading.step, reading.walltime_s, offsets_ms)


def counts() -> StepCounts:
    found = StepCounts()
    found.warmed_up, found.replayed, found.captures = 3, 200, 1
    found.eager = Counter()
    found.capture_ms, found.memory_bytes = 600, 2**20
    return found


GRAPH = """\
lightning_cudagraph: 200 of 203 steps replayed (98.5%); CUDA graphs
  steps     3 warmed up, 200 replayed, 0 eager; captured 1 time(s)
  capture   600 ms, 1.0 MiB taken
  graph     forward 0.619 ms, backward 1.418 ms, clipping 0.030 ms, optimizer 0.120 ms, copy 0.010 ms
  gap       between two steps, beside the copy of the batch, 0.010 of 2.207 ms (0%)
  note      something
  slowest layers, median of 1 timed step (containers include their members)
    layer      forward ms  backward ms  share of step
    blocks          0.600        1.380    91% ######################
    blocks.0        0.100        0.230    15% ####
    blocks.3        0.100        0.230    15% ####
    blocks.1        0.100        0.230    15% ####
    blocks.5        0.100        0.230    15% ####
    blocks.2        0.100        0.230    15% ####
    blocks.4        0.100        0.230    15% ####
    head            0.006        0.014     1%
    embedding       0.005        0.011     1%
    ln_f            0.004        0.009     1%"""


def test_the_whole_report() -> None:
    summary = WindowSummary(gpt_readings(n=1, noise=0.0))
    found = fit_report("CUDA graphs", counts(), StepPace(), summary, ["something"])
    # Blocks that take the same time come in any order.
    assert sorted(found.splitlines()) == sorted(GRAPH.splitlines())
    assert found.splitlines()[:9] == GRAPH.splitlines()[:9]


def test_columns_beside_wide_names() -> None:
    times = flat(**{"注意力层": 3.0, "e\u0301te\u0301": 2.0, "mlp": 1.0})
    *_, header, wide, combined, narrow = eager_report(times, []).splitlines()
    assert header == "    layer     forward ms  backward ms  share of step"
    assert wide.startswith("    注意力层       3.000            -    ")
    assert combined.startswith("    e\u0301te\u0301            2.000            -    ")
    assert narrow.startswith("    mlp            1.000            -    ")


def test_eager_beside_graph() -> None:
    reading = gpt_readings(n=1, noise=0.0)[0]
    graph, eager = WindowSummary([reading]), WindowSummary([slowed(reading, 10.0)] * 3)
    lines = fit_report("CUDA graphs", counts(), StepPace(), graph, [], None, eager).splitlines()
    assert (
        "  warm-up   forward 6.190 ms, backward 14.185 ms, clipping 0.300 ms, optimizer 1.200 ms,"
        " copy 0.100 ms; watched, so slower: no measure of what is gained"
    ) in lines
    first = next(index for index, line in enumerate(lines) if "slowest layers" in line)
    assert lines[first + 1 : first + 4] == [
        "               in the graph             in warm-up, watched",
        "    layer      forward ms  backward ms  forward ms  backward ms  share of step",
        "    blocks          0.600        1.380       6.000       13.800    91% ######################",
    ]


def test_eager_steps_alone() -> None:
    """Of a run that has given up before its first replay."""
    eager = WindowSummary(gpt_readings(n=1, noise=0.0))
    text = fit_report("CUDA graphs", counts(), StepPace(), WindowSummary([]), [], None, eager)
    assert "  warm-up   forward 0.619 ms, backward 1.418 ms" in text
    assert "    blocks          0.600        1.380    91% ######" in text
    assert "in the graph" not in text


def test_a_gap_that_counts_is_explained() -> None:
    summary = WindowSummary(gpt_readings(n=1, noise=0.0, gap_ms=4.4))
    text = fit_report("CUDA graphs", counts(), StepPace(), summary, [])
    assert (
        "beside the copy of the batch, 2.200 of 6.587 ms (33%): the device waits for loggers, hooks or"
        " the dataloader, or works for them"
    ) in text


def test_a_gap_that_comes_from_the_timings_is_explained() -> None:
    def said(gap_ms: float, event_host_us: float) -> str:
        summary = WindowSummary(gpt_readings(n=3, noise=0.0, gap_ms=gap_ms))
        text = fit_report("CUDA graphs", counts(), StepPace(), summary, [], event_host_us=event_host_us)
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
    text = fit_report("CUDA graphs", counts(), StepPace(), WindowSummary([]), [])
    assert len(text.splitlines()) == 3
    assert eager_report(WindowSummary([]), ["a note"]).splitlines()[1:] == ["  note      a note"]


def test_the_pace_is_that_of_replays_alone() -> None:
    """Steps of the warm-up are watched: the report makes no speed-up of them."""
    pace: Any = SimpleNamespace(replayed_ms=2.4)
    found = fit_report("CUDA graphs", counts(), pace, WindowSummary([]), [])
    (line,) = (line for line in found.splitlines() if line.startswith("  step "))
    assert line == '  step      2.40 ms replayed; to know what is gained, run once with `backend="off"`'


@pytest.mark.parametrize(
    ("warmed_up", "replayed", "eager", "said"),
    [
        (3, 1997, 0, "1997 of 2000 steps replayed (99.8%)"),
        (3, 9997, 0, "9997 of 10000 steps replayed (99.9%)"),  # never 100 where some were not
        (0, 7, 0, "7 of 7 steps replayed (100.0%)"),
        (3, 3, 6, "3 of 12 steps replayed (25.0%)"),
        (2, 0, 0, "0 of 2 steps replayed (0.0%)"),
        (0, 0, 0, "0 of 0 steps replayed (0.0%)"),
    ],
)
def test_the_first_line_is_the_verdict(warmed_up: int, replayed: int, eager: int, said: str) -> None:
    found = StepCounts(warmed_up, min(replayed, 1), replayed)
    found.eager.update({"another batch signature": eager} if eager else {})
    first, *_ = fit_report("CUDA graphs", found, StepPace(), WindowSummary([]), []).splitlines()
    assert first == f"lightning_cudagraph: {said}; CUDA graphs"
    first, *_ = evaluation_report("CUDA graphs", found, []).splitlines()
    assert first == f"lightning_cudagraph: {said.replace('steps', 'batches')}; CUDA graphs"


def test_what_has_ended_the_run_is_the_second_line() -> None:
    ended = "KeyboardInterrupt after step 9"
    line = f"  ended     by {ended}; what had not been read of the last times is left out"
    text = fit_report("CUDA graphs", counts(), StepPace(), WindowSummary([]), [], ended=ended)
    assert text.splitlines()[1] == line
    assert eager_report(WindowSummary([]), [], ended=ended).splitlines()[1:] == [line]
    assert evaluation_report("CUDA graphs", counts(), [], ended).splitlines()[1] == line


def test_eager_times_alone_are_named_so() -> None:
    eager = WindowSummary(gpt_readings(n=2, noise=0.0))
    found = fit_report("CUDA graphs", counts(), StepPace(), WindowSummary([]), [], None, eager)
    assert "slowest layers, in warm-up, watched: median of 2 timed steps" in found
