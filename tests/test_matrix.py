"""A number that a step reads, kept anywhere and changed at any time, and what a step does to Python.

Each case is equal to a plain run bit for bit, refused with the culprit, or eager: never wrong. The whole
matrix has the mark `matrix`, and runs with `-m matrix` only; `python -m tests.matrix` prints it.
`tests/gpu/test_matrix.py` collects these tests again, on CUDA.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.harness import differences
from tests.matrix.cases import MODES, few, missing, whole
from tests.matrix.controls import CONTROLS
from tests.matrix.effects import EFFECTS
from tests.matrix.graphs import GRAPHS
from tests.matrix.judge import REFUSED, VAGUE, WRONG, Case, judge
from tests.matrix.moments import DUE_BY_EPOCH, MOMENTS, moments_of
from tests.matrix.places import HIGH, LOW, PLACES
from tests.matrix.runs import Setting

pytestmark = [
    # `copy.copy` of an iterator is how a place looks without drawing.
    pytest.mark.filterwarnings("ignore:Pickle, copy, and deepcopy support:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader`"),
    # A place in the datamodule, changed in a hook of the module.
    pytest.mark.filterwarnings("ignore:You have overridden `on_before_batch_transfer`"),
]


def _is_in_the_docs(case: Case, accelerator: str) -> bool:
    """True for what docs/steps.md lists as not found."""
    if case.name == "bytearray of 1 MB":  # compared in pauses
        return MOMENTS[case.moment].due is not DUE_BY_EPOCH
    # Without graphs, autograd runs gradient hooks in a thread with other thread locals.
    of_thread = ("counter: threading.local", "counter: ContextVar")
    return accelerator == "gpu" and case.where == "gradient hook" and case.name in of_thread


def _needs(case: Case) -> None:
    if package := missing(case):
        pytest.importorskip(package)


@pytest.mark.spread(2)
@pytest.mark.parametrize("case", few(), ids=str)
def test_never_wrong(case: Case, accelerator: str) -> None:
    _needs(case)
    verdict = judge(case, accelerator)
    assert verdict.is_right, verdict


@pytest.mark.matrix
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*PLACES, *EFFECTS])
def test_the_whole_matrix(name: str, mode: str, accelerator: str) -> None:
    wrong = []
    for case in whole(name, (mode,)):  # type: ignore[arg-type]
        _needs(case)
        if _is_in_the_docs(case, accelerator):
            continue
        verdict = judge(case, accelerator)
        if not verdict.is_right:
            wrong.append(f"{case}: {verdict}")
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong)


def test_the_few_have_all() -> None:
    cases = few()
    assert {case.mode for case in cases} == {*MODES}
    for moment in moments_of("train"):
        assert len({case.name for case in cases if case.moment == moment}) >= 3


def _graph_is_never_wrong(graph: Any, moment: str, verify: int, accelerator: str) -> None:
    case = Case("random graph", moment, setting=Setting(verify=verify), changes=1, make=graph)
    # Hypothesis has a hook of the garbage collector that reads a clock, for which steps are refused.
    hooks = [*gc.callbacks]
    gc.callbacks.clear()
    try:
        verdict = judge(case, accelerator)
    finally:
        gc.callbacks[:] = hooks
    assert verdict.is_right, verdict


_RANDOM = {
    "graph": GRAPHS,
    "moment": st.sampled_from(moments_of("train")),
    "verify": st.sampled_from([0, 2]),
}
_SETTINGS: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "report_multiple_bugs": False,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}


@pytest.mark.long
@pytest.mark.usefixtures("hypothesis_leaves_no_clock")
@settings(max_examples=6, derandomize=True, phases=[Phase.generate], **_SETTINGS)
@given(**_RANDOM)
def test_random_graphs(graph: Any, moment: str, verify: int, accelerator: str) -> None:
    _graph_is_never_wrong(graph, moment, verify, accelerator)


@pytest.mark.matrix
@pytest.mark.parametrize("part", range(8))  # drawn apart, so that several processes share the work
@pytest.mark.usefixtures("hypothesis_leaves_no_clock")
@settings(max_examples=25, phases=[Phase.generate, Phase.shrink], **_SETTINGS)
@given(**_RANDOM)
def test_many_random_graphs(part: int, graph: Any, moment: str, verify: int, accelerator: str) -> None:
    _graph_is_never_wrong(graph, moment, verify, accelerator)


@pytest.mark.spread
@pytest.mark.parametrize("name", CONTROLS)
def test_wrong_without_the_mechanism(
    name: str, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = CONTROLS[name]
    if control.needs_gpu and accelerator == "cpu":
        pytest.skip("wrong on a GPU alone")
    assert judge(control.case, accelerator).is_right
    control.switch_off(monkeypatch)
    assert judge(control.case, accelerator).outcome == WRONG


# Of the tests themselves: a change, where it comes, matters, and the judge sees it.


@pytest.mark.spread
@pytest.mark.parametrize("use", ["factor", "branch", "shape"])
@pytest.mark.parametrize("mode", MODES)
def test_the_number_matters(mode: str, use: str, accelerator: str) -> None:
    moment = "between two calls" if mode == "step" else "batch start of a callback"
    case = Case("attribute", moment, mode, use=use)  # type: ignore[arg-type]
    once, never = replace(case, changes=1), replace(case, changes=0)
    runs = [chosen.run(None, accelerator).left for chosen in (case, once, never)]
    assert differences(runs[0], runs[1])
    assert differences(runs[1], runs[2])


@pytest.mark.parametrize("name", PLACES)
def test_places_keep_what_is_written(name: str) -> None:
    kind = PLACES[name]
    _needs(Case(name, "epoch start of the module"))
    if kind.needs_trainer:
        pytest.skip("found through a trainer, in the runs above")
    body = torch.nn.Sequential(torch.nn.Linear(4, 8))
    net = SimpleNamespace(body=body, optimizer=torch.optim.SGD(body.parameters(), lr=0.1))
    place = kind(net)
    try:
        place.start()
        read = [place.read()]
        for number in (HIGH, LOW, LOW, HIGH):
            place.write(number)
            read.append(place.read())
    finally:
        place.close()
    assert read == [LOW, HIGH, LOW, LOW, HIGH]


@pytest.mark.spread
@pytest.mark.parametrize("message", ["It cannot be captured.", "`made.made` changed at model.py."])
def test_a_refusal_has_to_name_the_culprit(
    message: str, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("append to a list")
    assert judge(case, accelerator).outcome == REFUSED
    monkeypatch.setattr("tests.matrix.judge.message_of", lambda error: message)
    assert judge(case, accelerator).outcome == VAGUE
