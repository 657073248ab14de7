"""Run a script as Python does, and destroy the process group at its end.

Neither Lightning nor most scripts do that, and then one of gloo's threads sometimes still runs when
Python ends, which the system takes for a crash; with the callback or without.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch.distributed as dist

if __name__ == "__main__":
    script, *sys.argv[1:] = sys.argv[1:]
    sys.argv[0] = script
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
