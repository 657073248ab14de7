"""One process of a launch: runs cases, and writes what became of each."""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from pathlib import Path

import torch

from tests.distributed import cases

# As in pyproject.toml; and one run is not told about logging that the other is told about.
_IGNORED = (
    r".*treespec, LeafSpec.*",
    r".*does not have many workers.*",
    r".*GPU available but not used.*",
    r"The number of training batches .* is smaller than the logging interval.*",
    r"Checkpoint directory .* exists and is not empty.*",
    r"It is recommended to use `self.log.*",
    # Without the callback, Lightning wraps the module on a stream of its own.
    r"The AccumulateGrad node's stream does not match.*",
    r".*has Tensor Cores.*",
    # The first thing that autograd's thread does is a product of matrices.
    r".*no current CUDA context.*",
)


def main(folder: Path, accelerator: str, names: list[str]) -> int:
    """Run the cases; returns the exit status."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    for message in _IGNORED:
        warnings.filterwarnings("ignore", message)
    rank = int(os.environ["LOCAL_RANK"])
    found: dict[str, str] = {}
    for name in names:
        place = folder / name
        place.mkdir(exist_ok=True)
        try:
            getattr(cases, name)(cases.Here(place, rank, accelerator))
            found[name] = "ok"
        except Exception:
            found[name] = traceback.format_exc()
        (folder / f"cases{rank}.json").write_text(json.dumps(found))
    return 0 if set(found.values()) == {"ok"} else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
