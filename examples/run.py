"""Run an example from the command line, with its own config files read before the arguments."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from lightning_cudagraph.trainer.command import main

__all__ = ["run_example"]


def run_example(script: str | os.PathLike[str]) -> None:
    """Run `examples/<name>.py fit|validate|test|predict ...` as `lightning-cudagraph` would.

    It reads `configs/<name>.yaml` and, where there is no CUDA GPU, `configs/<name>_cpu.yaml` over it;
    arguments of the command line override both.

    Args:
        script: path of the example, its `__file__`.
    """
    path = Path(script).resolve()
    root = path.parent.parent
    configs = [root / "configs" / f"{path.stem}.yaml"]
    if not torch.cuda.is_available():
        configs.append(root / "configs" / f"{path.stem}_cpu.yaml")
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):  # behind the subcommand
        sys.argv[2:2] = [f"--config={config}" for config in configs]
    sys.path.insert(0, str(root))  # the configs name classes of `examples`
    main()
