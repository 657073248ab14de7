"""Models of the benchmarks under DDP, on two GPUs, or on four where there are so many."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.distributed.launch import assert_all_ok, launch
from tests.distributed.model_cases import CASES


def test_models_train_as_without_the_callback(tmp_path: Path) -> None:
    size = 4 if torch.cuda.device_count() >= 4 else 2
    assert_all_ok(launch(tmp_path, [*CASES], "gpu", timeout_s=400, size=size), [*CASES])
