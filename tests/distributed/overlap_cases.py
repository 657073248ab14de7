"""Collectives beside the ops of a step that is captured on several streams, on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cudagraph import CUDAGraphCallback
from lightning_cudagraph.device.cuda.cuda_backend import CudaBackend
from lightning_cudagraph.device.streams.branches import Branches
from lightning_cudagraph.device.streams.dataflow import Flow, HeldMemory
from tests.distributed.cases import BUCKETS, Here
from tests.distributed.step_cases import join
from tests.distributed.stream_cases import Branched
from tests.gpu_load import gpu_under_load
from tests.harness import assert_same, differences

_ELEMENTS = (1 << 22, 1 << 10, 1 << 23, 3, 1 << 22, 1 << 20)
_REPLAYS = 30
_MANY_REPLAYS = 3000

_Step = Callable[[], list[Tensor]]


class _Counted:
    """Captures a step, replays it on other inputs each time, and counts ops that ran in parts."""

    def __init__(self, here: Here) -> None:
        self.device = torch.device("cuda", here.rank)
        self.rank = here.rank
        self.x = torch.zeros(1 << 23, device=self.device)
        self.parts = 0

    def replayed(
        self,
        make: Callable[[Tensor], tuple[_Step, list[Tensor]]],
        streams: int,
        replays: int = _REPLAYS,
    ) -> Any:
        """The results of some of the replays, evenly spread."""
        step, state = make(self.x)
        backend = CudaBackend(self.device, streams=streams)
        with backend.on_side_stream():
            for _ in range(11):
                step()
        for tensor in state:
            tensor.fill_(1.0)
        run_parts = Branches._run_parts

        def counted(branches: Branches, *args: Any) -> Any:
            self.parts += 1
            return run_parts(branches, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Branches, "_run_parts", counted)
            graph, outputs = backend.capture(step)
        seen = []
        generator = torch.Generator(self.device).manual_seed(self.rank)
        for number in range(replays):
            self.x.normal_(generator=generator)
            graph.replay()
            if number % (replays // _REPLAYS) == 0:
                seen.append([tensor.clone() for tensor in (*outputs, *state)])
        torch.cuda.synchronize()
        backend.release(graph)
        return seen


def _optimizer_step(x: Tensor) -> tuple[_Step, list[Tensor]]:
    """All-reduces of gradients one after the other, and an optimizer's step on all."""
    weights, momenta, gradients = ([torch.ones(n, device=x.device) for n in _ELEMENTS] for _ in range(3))

    def step() -> list[Tensor]:
        works = []
        for index, gradient in enumerate(gradients):
            torch.mul(x[: gradient.numel()], index + 1.0, out=gradient)
            works.append(dist.all_reduce(gradient, async_op=True))
        beside = (x[: 1 << 20].view(1024, 1024) @ x[: 1 << 20].view(1024, 1024)).tanh()
        for work in works:
            assert work is not None
            work.wait()
        torch._foreach_mul_(momenta, 0.9)
        torch._foreach_add_(momenta, gradients)
        torch._foreach_add_(weights, torch._foreach_sqrt(torch._foreach_abs(momenta)), alpha=-0.1)
        return [beside]

    return step, [*weights, *momenta, *gradients]


def parts_wait_for_their_collectives(here: Here) -> None:
    """Parts of an op wait each for its own all-reduce; without those waits they come out wrong."""
    join(here)
    counted = _Counted(here)
    one = counted.replayed(_optimizer_step, 1)
    assert counted.parts == 0
    for streams in (2, 4):
        assert differences(one, counted.replayed(_optimizer_step, streams)) == []
        assert counted.parts >= 3, counted.parts
    collective = Flow.collective

    def blind(flow: Flow, spans: Any, *args: Any) -> Any:
        return collective(flow, [], *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Flow, "collective", blind)
        assert differences(one, counted.replayed(_optimizer_step, 4)) != []


def thousands_of_replays_under_load(here: Here) -> None:
    """Other work on both GPUs changes the progress of collectives and ops, and no result."""
    join(here)
    counted = _Counted(here)
    one = counted.replayed(_optimizer_step, 1, _MANY_REPLAYS)
    with gpu_under_load(here.rank):
        several = counted.replayed(_optimizer_step, 4, _MANY_REPLAYS)
    assert differences(one, several) == []


def _inputs_that_are_let_go(x: Tensor) -> tuple[_Step, list[Tensor]]:
    """Memory that only collectives under way use, and work of other kinds between them."""
    gathered = torch.zeros(2, x.numel(), device=x.device)
    other = dist.new_group([0, 1])

    def step() -> list[Tensor]:
        made = x * 2.0
        work = dist.all_gather_into_tensor(gathered, made, async_op=True)
        del made
        # More than there are streams: one is on the stream of `made`, and given its memory if free.
        outputs = [x * factor for factor in (3.0, 5.0, 9.0, 11.0, 13.0)]
        of_others = x * 7.0
        between = dist.all_reduce(of_others, async_op=True, group=other)
        dist.all_reduce(outputs[0])
        assert work is not None
        assert between is not None
        between.wait()
        work.wait()
        return [*outputs, of_others + 1.0, gathered.sum(0)]

    return step, [gathered]


def memory_of_collectives_is_kept(here: Here) -> None:
    """Memory that a collective uses is not given to later ops before it is done."""
    join(here)
    counted = _Counted(here)
    one = counted.replayed(_inputs_that_are_let_go, 1)
    for streams in (2, 4):
        assert differences(one, counted.replayed(_inputs_that_are_let_go, streams)) == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HeldMemory, "use", lambda *args: None)
        for streams in (2, 4):
            with pytest.raises(Exception, match="memory was given to an op"):
                counted.replayed(_inputs_that_are_let_go, streams)


def _others(x: Tensor) -> tuple[_Step, list[Tensor]]:
    """Collectives that copy through other memory, one without elements, and ops between them."""
    half, whole = 1 << 19, 1 << 20
    lists = [torch.zeros(whole, device=x.device) for _ in range(2)]

    def step() -> list[Tensor]:
        made = x[:whole] * 2.0
        reduced, scattered = x[:whole] * 0.5, torch.empty(half, device=x.device)
        works = [
            dist.all_reduce(reduced, async_op=True),
            dist.all_gather(lists, made, async_op=True),
            dist.reduce_scatter(scattered, [made[:half].clone(), made[half:].clone()], async_op=True),
        ]
        beside = [x[:whole] * factor for factor in (3.0, 5.0, 7.0)]
        works.append(dist.all_reduce(x.new_empty(0), async_op=True))
        last = beside[0] - 1.0
        works.append(dist.all_reduce(last, async_op=True))
        beside.append(x[:whole] * 9.0)
        assert works[-1] is not None
        works[-1].wait()  # and so for all before it, on one stream of NCCL's
        return [*beside, lists[0] + lists[1], scattered * 2.0, reduced * 2.0, last * 2.0]

    return step, lists


def collectives_that_are_not_followed(here: Here) -> None:
    """Behind the wait for the last collective, all before it are done."""
    join(here)
    counted = _Counted(here)
    one = counted.replayed(_others, 1)
    for streams in (2, 4):
        assert differences(one, counted.replayed(_others, streams)) == []


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def _fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def _momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, weight_decay=0.01, nesterov=True)


def optimizers_on_several_streams(here: Here) -> None:
    """Optimizers in small buckets train as in plain DDP, with and without clipping, and views."""
    for name, optimizer, clip, views in (
        ("adamw", _adamw, None, True),
        ("fused", _fused, None, True),
        ("without views", _fused, None, False),
        ("clipped", _momentum, 0.5, True),
    ):
        how: dict[str, Any] = {
            "build": lambda make=optimizer: Branched(make),
            "wrapper": {**BUCKETS, "gradient_as_bucket_view": views},
            "gradient_clip_val": clip,
        }
        plain = here.train(f"plain, {name}", None, **how)
        graph = here.train(f"graph, {name}", CUDAGraphCallback(streams=4, timings=None), **how)
        assert_same(plain, graph, ignore=("_ms/",))
        assert graph.counts.replayed >= 10, graph.counts
