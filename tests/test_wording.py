"""The words that front ends put into messages take the place of words that are there."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest
import torch

import lightning_cudagraph
from lightning_cudagraph.errors import UnsupportedError, Wording
from lightning_cudagraph.graphed_step.wording import WORDING
from lightning_cudagraph.tensors.batch_signature import Signature
from lightning_cudagraph.trainer.captured_modules.captured_module import WORDING as MODULE
from lightning_cudagraph.trainer.evaluation import wording_of

ROOT = Path(lightning_cudagraph.__file__).parent
WORDINGS = {
    "step": WORDING,
    "module": MODULE,
    "validate": wording_of("validation"),
    "test": wording_of("test"),
}


@cache
def _texts() -> list[str]:
    """All texts of the package but those of the tables themselves, and a path that is put together."""
    files = [
        path for path in sorted(ROOT.rglob("*.py")) if path.name not in ("wording.py", "evaluation.py")
    ]
    nodes = (node for path in files for node in ast.walk(ast.parse(path.read_text())))
    signatures = [Signature({"x": torch.zeros(n)}, torch.device("cpu")) for n in (1, 2)]
    return [
        signatures[0].difference(signatures[1]),
        *(
            node.value
            for node in nodes
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ),
    ]


@pytest.mark.parametrize("wording", WORDINGS.values(), ids=WORDINGS)
def test_all_that_is_replaced_is_said_somewhere(wording: Wording) -> None:
    texts = _texts()
    assert not [old for old in wording.words if not any(old in text for text in texts)]


@pytest.mark.parametrize("wording", WORDINGS.values(), ids=WORDINGS)
def test_no_part_hides_a_longer_one(wording: Wording) -> None:
    """Each is replaced where a shorter one has not been before it."""
    known = list(wording.words)
    assert not [
        (shorter, longer)
        for index, shorter in enumerate(known)
        for longer in known[index + 1 :]
        if shorter in longer
    ]


def test_an_error_is_rephrased_as_a_whole() -> None:
    error = UnsupportedError("The training step reads `batch['x']`.", "Do it in `on_train_batch_end`.")
    for _ in range(2):  # where it is raised, and where it leaves
        WORDING.rephrase(error)
        assert error.reason == "The step reads `arguments['x']`."
        assert error.remedy == "Do it after the call of the step."
        what, remedy, way_out = str(error).splitlines()
        assert (what, remedy) == (error.what, f"  Remedy: {error.remedy}")
        assert way_out.startswith("To go on without a graph, pass `GraphedStep(on_unsupported=")
