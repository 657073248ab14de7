"""Private names of torch's that captures are built on: what is said where one is gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import eval_frame
from torch.nn.parallel import DistributedDataParallel

from lightning_cudagraph import CUDAGraphCallback, CUDAGraphError, GraphedStep
from lightning_cudagraph.capture.own_modes import DYNAMO_NAMES
from lightning_cudagraph.capture.processes.wrappers import check_wrapper
from tests.harness import Net, make, train


@pytest.mark.parametrize("name", DYNAMO_NAMES)
def test_of_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    monkeypatch.delattr(eval_frame, name)
    said = rf"`{name}` of `torch\._dynamo\.eval_frame` is gone from torch .* that this package names"
    with pytest.raises(CUDAGraphError, match=said):
        GraphedStep(step, [model], [optimizer])(torch.ones(3, 2))
    run = train(make(Net), tmp_path, CUDAGraphCallback(backend="emulator"), raises=CUDAGraphError)
    assert f"`{name}`" in str(run.error)


class _Names:
    """All names of a wrapper but one."""

    def __init__(self, wrapper: Any, gone: str) -> None:
        self._wrapper, self._gone = wrapper, gone

    def __getattr__(self, name: str) -> Any:
        if name == self._gone:
            raise AttributeError(name)
        return getattr(self._wrapper, name)


@pytest.mark.filterwarnings("ignore:.*barrier.*using the device under current context")
def test_of_the_wrapper() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapper = DistributedDataParallel(nn.Linear(2, 1))
        check_wrapper("a wrapper", wrapper)
        for name in ("reducer", "_comm_hooks", "_join_config", "_get_ddp_logging_data"):
            gone: Any = _Names(wrapper, name)
            for by_strategy, owner in ((True, "CUDAGraphCallback"), (False, "GraphedStep")):
                said = rf"`DistributedDataParallel\.{name}` is gone .*`{owner}\(backend=\"off\"\)`"
                with pytest.raises(CUDAGraphError, match=said):
                    check_wrapper("a wrapper", gone, by_strategy)
    finally:
        dist.destroy_process_group()
