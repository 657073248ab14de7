"""Models of the benchmarks under DDP, on two GPUs, or on four where there are so many."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.launch import assert_all_ok, launch
from tests.distributed.model_cases import CASES, UNDER_DDP


@pytest.mark.parametrize("name", UNDER_DDP)
def test_models_train_as_without_the_callback(tmp_path: Path, name: str) -> None:
    if not UNDER_DDP[name].is_here:
        pytest.skip(f"{name} needs {UNDER_DDP[name].needs}")
    size = 4 if torch.cuda.device_count() >= 4 else 2
    cases = [case for case in CASES if case.startswith(name)]
    assert len(cases) == 2
    assert_all_ok(launch(tmp_path, cases, "gpu", timeout_s=400, size=size), cases)
