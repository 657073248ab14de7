"""Tables of times: what contains what, what is left out, what adds up."""

from __future__ import annotations

import pytest

from lightning_cudagraph.timing.output.tables import layer_table, layers_of, parts_table, window_text
from lightning_cudagraph.timing.output.texts import places, shortened, table
from lightning_cudagraph.timing.readings.spans import Reading, Span, SpanLayout
from lightning_cudagraph.timing.readings.windows import WindowSummary
from tests.readings import gpt_readings, without_optimizer


def flat(**forward_ms: float) -> WindowSummary:
    """One reading of layers that follow one another, the whole of which is the forward pass."""
    offsets_ms = [0.0]
    spans = []
    for index, (name, value_ms) in enumerate(forward_ms.items()):
        offsets_ms.append(offsets_ms[-1] + value_ms)
        spans.append(Span(f"layer_forward_ms/{name}", "forward", ((index, index + 1),)))
    spans.append(Span("step_ms/forward", "forward", ((0, len(forward_ms)),)))
    layout = SpanLayout(tuple(spans), len(offsets_ms))
    return WindowSummary([Reading(layout, 0, 0.0, offsets_ms)])


def test_layers_are_a_tree() -> None:
    summary = WindowSummary(gpt_readings(n=5, n_blocks=2, with_members=True))
    layers = layers_of(summary)
    assert [(layer.own_name, len(layer.containers)) for layer in layers] == [
        ("embedding", 0),
        ("blocks", 0),
        ("0", 1),
        *((name, 2) for name in ("attention", "ln1", "ln2", "mlp")),
        ("1", 1),
        *((name, 2) for name in ("attention", "ln1", "ln2", "mlp")),
        ("ln_f", 0),
        ("head", 0),
    ]
    blocks = layers[1]
    assert blocks.median_ms == pytest.approx(
        summary["layer_forward_ms/blocks"].p50_ms + summary["layer_backward_ms/blocks"].p50_ms
    )
    lines = layer_table(summary)
    assert [line[:11].rstrip() for line in lines[2:8]] == [
        "embedding", "blocks", "  0", "    attenti", "    ln1", "    ln2",
    ]  # fmt: skip


def test_numbers_and_columns() -> None:
    summary = WindowSummary(gpt_readings(n=50))
    lines = layer_table(summary)
    row = next(line for line in lines if line.startswith("head"))
    forward, backward = summary["layer_forward_ms/head"], summary["layer_backward_ms/head"]
    expected = [forward.p50_ms, forward.p95_ms, backward.p50_ms, backward.p95_ms]
    assert row.split()[1:6] == [
        *(f"{value_ms:.3f}" for value_ms in expected),
        f"{forward.share + backward.share:.1%}",
    ]
    rows = [line for line in lines[2:] if "%" in line]
    assert len({line.index("%") for line in rows}) == 1
    assert len({len(line) - len(line.lstrip()) for line in rows}) == 2
    blocks = next(line for line in rows if line.startswith("blocks"))
    bar = blocks.split("%")[1].strip()
    assert set(bar) == {"#", "="}
    assert len(bar) == round(24 * layers_of(summary)[1].share)


def test_parts_add_up_to_the_step() -> None:
    summary = WindowSummary(gpt_readings(n=50))
    rows = {line.split()[0]: line.split() for line in parts_table(summary)[1:]}
    assert list(rows) == ["forward", "backward", "clipping", "optimizer", "whole", "gap", "copy"]
    parts = ("forward", "backward", "clipping", "optimizer")
    for column, precision in ((5, 0.0021), (6, 0.21)):  # mean, share
        values = [float(rows[name][column].rstrip("%")) for name in (*parts, "whole")]
        assert sum(values[:-1]) == pytest.approx(values[-1], abs=precision)
    assert rows["whole"][6] == "100.0%"


def test_members_that_are_called_outside_of_their_container_are_said() -> None:
    spans = (
        Span("layer_forward_ms/encoder", "forward", ((0, 1),)),
        Span("layer_forward_ms/encoder.body", "forward", ((0, 1),)),
        Span("layer_forward_ms/encoder.projection", "forward", ((1, 2),)),
    )
    summary = WindowSummary([Reading(SpanLayout(spans, 3), 0, 0.0, [0.0, 1.0, 3.0])])
    said = "in that of the one above it; but members of `encoder` are called outside of it, too."
    assert layer_table(summary)[-1].endswith(said)
    many = [
        Span(f"layer_forward_ms/{container}{member}", "forward", (times,))
        for container in "abcdef"
        for member, times in (("", (0, 1)), (".inside", (0, 2)))
    ]
    summary = WindowSummary([Reading(SpanLayout(tuple(many), 3), 0, 0.0, [0.0, 1.0, 3.0])])
    assert "members of `a`, `b`, `c`, `d`, `e`, ... are called" in layer_table(summary)[-1]


def test_members_that_take_turns_are_not_called_elsewhere() -> None:
    layouts = [
        SpanLayout(
            (
                Span("layer_forward_ms/experts", "forward", ((0, 1),)),
                Span(f"layer_forward_ms/experts.{name}", "forward", ((0, 1),)),
            ),
            2,
        )
        for name in ("first", "second")
    ]
    readings = [Reading(layouts[step % 2], step, 0.0, [0.0, 1.0]) for step in range(10)]
    said = "The time of an indented layer is contained in that of the one above it."
    assert layer_table(WindowSummary(readings))[-1] == said


def test_a_gap_of_steps_that_are_not_known_has_no_share() -> None:
    summary = WindowSummary([without_optimizer()])
    assert parts_table(summary)[-1].split()[-5:] == ["1.000", "-", "(beside", "the", "copy)"]


def test_what_is_counted_twice_is_said() -> None:
    summary = WindowSummary(gpt_readings(n=50))
    text = window_text(summary)
    assert text.startswith("50 timed steps, 0 to 49\n")
    assert "The time of an indented layer is contained in that of the one above it." in text
    outermost = ("embedding", "blocks", "ln_f", "head")
    inside_ms = sum(summary[f"layer_forward_ms/{name}"].mean_ms for name in outermost)
    whole_ms = summary["step_ms/forward"].mean_ms
    assert (
        f"Mean forward: {inside_ms:.3f} ms in the outermost layers + {whole_ms - inside_ms:.3f} ms"
        f" outside of them = {whole_ms:.3f} ms."
    ) in text
    assert "contained" not in window_text(flat(a=1.0, b=2.0))


def test_layers_that_run_inside_of_others_are_said() -> None:
    spans = [("layer_forward_ms/a", (0, 2)), ("layer_forward_ms/b", (1, 2)), ("step_ms/forward", (0, 2))]
    layout = SpanLayout(tuple(Span(tag, "forward", (call,)) for tag, call in spans), 3)
    text = window_text(WindowSummary([Reading(layout, 0, 0.0, [0.0, 1.0, 2.0])]))
    assert "Mean forward: 3.000 ms in the outermost layers, 2.000 ms in all: some of them run" in text


def test_of_many_layers_the_slowest() -> None:
    summary = flat(**{f"layer{i}": 0.001 * (i + 1) for i in range(300)})
    lines = layer_table(summary, most_rows=4)
    assert [line.split()[0] for line in lines[2:6]] == ["layer296", "layer297", "layer298", "layer299"]
    assert lines[6] == "and 296 faster layers, none above 0.296 ms in both passes"
    # With a slow member comes what contains it.
    nested = flat(a=0.001, b=0.5, c=0.3, **{"a.slow": 1.0})
    lines = layer_table(nested, most_rows=3)
    assert [line.split()[0] for line in lines[2:5]] == ["a", "slow", "b"]


def test_long_names_are_shortened_in_the_middle() -> None:
    assert shortened("short", 10) == "short"
    assert shortened("encoder.layers.attention", 12) == "encod...tion"[:4] + "...ntion"
    assert [len(shortened("x" * 30, width)) for width in range(1, 40)] == [
        min(width, 30) for width in range(1, 40)
    ]
    name = "model_" + "x" * 200 + "_head"
    row = layer_table(flat(**{name: 1.0}))[2]
    assert row.startswith("model_xxx")
    assert "..." in row
    assert row.split()[0].endswith("_head")
    assert len(row) < 120


def test_characters_of_two_places_and_of_none() -> None:
    assert [places(text) for text in ("head", "注意力层", "e\u0301")] == [4, 8, 1]
    rows = [["注意力", "1.0", "注"], ["e\u0301te\u0301", "10.0", "ab"], ["mlp", "2.0", ""]]
    assert table(rows, left=(0, 2)) == [
        "注意力   1.0  注",
        "e\u0301te\u0301     10.0  ab",
        "mlp      2.0",
    ]
    names = ["注意力层" * 4, "e\u0301" * 20, "encoder.注意力层.e\u0301"]
    for name in names:
        for width in range(1, 40):
            short = shortened(name, width)
            # A character of two places may leave one empty, at both sides of what is left out.
            assert min(width, places(name)) - 2 <= places(short) <= width
            assert (short == name) == (width >= places(name))
    assert shortened("注意力层注意力层", 11) == "注意...力层"


def test_no_accent_without_its_letter() -> None:
    """It would be one of the dots'."""
    assert shortened("e\u0301" * 8, 5) == "e\u0301...e\u0301"


def test_columns_beside_wide_names() -> None:
    lines = layer_table(flat(**{"注意力层": 1.0, "e\u0301tage": 2.0, "head": 3.0}))
    rows = [line for line in lines if "%" in line]
    assert len(rows) == 3
    assert len({places(line.partition("%")[0]) for line in rows}) == 1


def test_nothing_was_timed() -> None:
    assert window_text(WindowSummary([])) == "No step was timed."
    empty = WindowSummary([Reading(SpanLayout((), 1), 3, 0.0, [0.0])])
    assert window_text(empty) == "1 timed step, 3 to 3"
