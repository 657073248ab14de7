"""Collectives among the marks of a step: which are timed, from when, and until when."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_cudagraph.device.backend import Backend
from lightning_cudagraph.device.cuda.cuda_backend import CudaBackend
from lightning_cudagraph.device.emulator.emulated_graph import HostEvent
from lightning_cudagraph.device.emulator.emulator_backend import EmulatorBackend
from lightning_cudagraph.device.sentry.collective_hooks import group_and_work
from lightning_cudagraph.timing.events.collective_marks import Collectives
from lightning_cudagraph.timing.events.marks import StepMarks
from lightning_cudagraph.timing.readings.spans import Reading, SpanLayout
from lightning_cudagraph.timing.readings.timeline import calls_of

pytestmark = [
    # This group's processes are one, and each test makes its own.
    pytest.mark.filterwarnings("ignore:.*barrier.*using the device under current context"),
    pytest.mark.filterwarnings("ignore:.*no current CUDA context"),
]

# Iterations that the wrapper needs before a capture.
WARM_UP = 11
BUCKETS = 3
# Steps are captured and replayed, or run eagerly.
both_ways = pytest.mark.parametrize("eager", [False, True], ids=["captured", "eager"])


@pytest.fixture
def device(accelerator: str) -> Iterator[torch.device]:
    """A group of one process: its collectives are issued as those of many are."""
    device = torch.device("cuda", 0) if accelerator == "gpu" else torch.device("cpu")
    backend = "nccl" if accelerator == "gpu" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield device
    dist.destroy_process_group()


class Step:
    """A step of a wrapped model with marks, captured and replayed, or run eagerly."""

    def __init__(
        self,
        device: torch.device,
        eager: bool,
        hook: Any = None,
        before: Callable[[Tensor], None] = lambda x: None,
        synced: bool = True,
        with_collectives: bool = True,
    ) -> None:
        self.backend: Backend = CudaBackend(device) if device.type == "cuda" else EmulatorBackend()
        torch.manual_seed(0)
        layers = [nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Linear(16, 4)]
        self.model = nn.Sequential(*layers).to(device)
        x = torch.randn(8, 16, device=device)
        with self.backend.on_side_stream():
            ddp = DistributedDataParallel(self.model, bucket_cap_mb=0.0002)
            if hook is not None:
                ddp.register_comm_hook(None, hook)
            for _ in range(WARM_UP):
                ddp(x).square().mean().backward()
            self.model.zero_grad()

            def run() -> StepMarks:
                marks = StepMarks(
                    self.backend,
                    dict(self.model.named_children()),
                    has_optimizer=False,
                    with_collectives=with_collectives,
                )
                with nullcontext() if synced else ddp.no_sync(), marks.recording():
                    before(x)
                    loss = ddp(x).square().mean()
                    marks.forward_ended(loss)
                    loss.backward()
                    marks.backward_ended()
                return marks

            if eager:
                self.marks = run()
        if not eager:
            graph, self.marks = self.backend.capture(run)
            graph.replay()
        self.offsets_ms = self.marks.read()
        self.layout = self.marks.layout
        self.gradients = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        if not eager:
            self.backend.release(graph)

    @property
    def calls(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """Of the parts that are collectives, by name."""
        return {
            span.tag.removeprefix("step_ms/"): span.calls
            for span in self.layout.spans
            if span.track == "communication"
        }

    def stretches_ms(self, name: str) -> list[tuple[float, float]]:
        return [(self.offsets_ms[begin], self.offsets_ms[end]) for begin, end in self.calls[name]]


def kernels() -> list[str]:
    """The keys under which somebody has kernels of their own for all-reduces."""
    keys = ("Autograd", "AutogradCPU", "AutogradCUDA")
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return [key for key in keys if has("c10d::allreduce_", key)]


@both_ways
def test_one_stretch_for_each_bucket(device: torch.device, eager: bool) -> None:
    step = Step(device, eager)
    assert len(step.calls["all_reduce"]) == BUCKETS
    assert len(step.offsets_ms) == step.layout.n_marks
    stretches = step.stretches_ms("all_reduce")
    assert all(0 < begin <= end for begin, end in stretches), stretches
    apart = pairwise(stretches)
    assert all(end <= begin for (_, end), (begin, _) in apart), stretches
    lag_ms = 0.05  # a stamp on a stream of its own may come a little later than what waits for the same
    exposed = step.stretches_ms("all_reduce_exposed")
    if device.type == "cpu" and not eager:
        assert exposed == stretches  # the emulator runs one op after the other
    else:
        ((exposed_begin, exposed_end),) = exposed
        assert exposed_begin <= stretches[-1][0] + lag_ms
        assert exposed_end == stretches[-1][1]
    # Buffers are broadcast in the forward pass.
    broadcasts = step.stretches_ms("broadcast")
    assert broadcasts
    assert broadcasts[-1][1] <= stretches[0][0]
    # Inside of the backward pass, whose end waits for them.
    backward = next(span for span in step.layout.spans if span.tag == "step_ms/backward")
    assert step.offsets_ms[backward.calls[0][0]] <= stretches[0][0]
    assert stretches[-1][1] <= step.offsets_ms[backward.calls[-1][1]] + lag_ms
    assert not kernels()


@both_ways
def test_gradients_are_the_same_with_and_without(device: torch.device, eager: bool) -> None:
    timed, plain = Step(device, eager), Step(device, eager, with_collectives=False)
    assert plain.calls == {}
    assert len(timed.gradients) == len(plain.gradients) == 8
    assert all(map(torch.equal, timed.gradients, plain.gradients))


@both_ways
def test_none_in_a_step_that_does_not_average(device: torch.device, eager: bool) -> None:
    step = Step(device, eager, synced=False)
    assert "all_reduce" not in step.calls
    assert "all_reduce_exposed" not in step.calls


@both_ways
def test_those_of_a_communication_hook(device: torch.device, eager: bool) -> None:
    step = Step(device, eager, hook=default_hooks.allreduce_hook)
    assert len(step.calls["all_reduce"]) == BUCKETS


@both_ways
def test_those_of_the_users_own(device: torch.device, eager: bool) -> None:
    """Waited for at once; and begun early, and waited for later. Those of lists have no times."""
    # The name in newer versions of torch, in which the older one warns.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def before(x: Tensor) -> None:
        dist.all_reduce(x.clone())
        work = gather(torch.empty_like(x), x, async_op=True)
        x.add(1)
        work.wait()
        dist.all_gather([torch.empty_like(x)], x, async_op=True).wait()

    step = Step(device, eager, before=before)
    assert len(step.calls["all_reduce"]) == BUCKETS + 1
    assert len(step.calls["all_gather"]) == 1
    stretches = step.stretches_ms("all_reduce")
    assert all(begin <= end for begin, end in stretches), stretches
    if device.type == "cuda" or not eager:  # two threads of gloo's take the times, one of them late
        ends = [end for _, end in stretches]
        assert ends == sorted(ends)


def test_the_end_of_each_is_waited_for(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo's threads tell of it, and the one that tells of an earlier collective may come last."""
    if device.type == "cuda":
        pytest.skip("events of CUDA are passed in the order of the collectives")
    late: list[HostEvent] = []
    record_behind = HostEvent.record_behind

    def record(event: HostEvent, work: Any) -> None:
        if late:
            record_behind(event, work)
            return
        late.append(event)
        passed = event._passed = threading.Event()

        def tell() -> None:
            event.take_time()
            passed.set()

        threading.Timer(0.3, tell).start()

    monkeypatch.setattr(HostEvent, "record_behind", record)
    step = Step(device, eager=True)
    assert len(late) == 1
    assert max(step.offsets_ms) >= 300


def test_kernels_are_gone_after_an_error(device: torch.device) -> None:
    def before(x: Tensor) -> None:
        assert kernels()
        raise ValueError("no more cheese")

    with pytest.raises(ValueError, match="no more cheese"):
        Step(device, eager=True, before=before)
    assert not kernels()


def test_which_are_followed_among_other_ops(device: torch.device) -> None:
    """Those with their process group that use their arguments alone, and are issued at once."""
    found: list[Any] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            returned = func(*args, **kwargs or {})
            found.append(group_and_work(func, args, returned))
            return returned

    x, other = torch.ones(3, device=device), dist.new_group([0])
    with Seen():
        # NCCL's others are on the current stream, as any op, and have no work.
        works = [dist.all_reduce(x, async_op=True), dist.broadcast(x, 0, group=other, async_op=True)]
        for work in works:
            assert work is not None
            work.wait()
        x.add_(1)
        dist.all_gather([torch.empty_like(x)], x)
        if device.type == "cuda":  # gloo gathers none by itself
            with dist.distributed_c10d._coalescing_manager(device=device, async_ops=True) as manager:
                dist.reduce(x, 0, async_op=True)
            manager.wait()
    groups = [each and each[0] for each in found]
    assert groups[:3] == [dist.group.WORLD, other, None]
    assert groups[3:] == [None] * len(groups[3:])
    assert all(each is None or callable(each[1].wait) for each in found)


@pytest.mark.parametrize("reduced", [False, True])
def test_those_of_a_capture_are_in_the_record_of_its_data_flow(
    device: torch.device, reduced: bool
) -> None:
    backend: Backend = CudaBackend(device) if device.type == "cuda" else EmulatorBackend()
    backend.records_flow = True
    x = torch.ones(3, device=device)

    def step() -> Tensor:
        work = (dist.all_reduce if reduced else partial(dist.broadcast, src=0))(x, async_op=True)
        y = x * 2.0
        assert work is not None
        work.wait()
        return y

    with backend.on_side_stream():
        step()
    graph, _ = backend.capture(step)
    backend.release(graph)
    assert backend.flow is not None
    assert backend.flow.has_all_reduces == reduced


@both_ways
def test_those_that_are_issued_as_one(device: torch.device, eager: bool) -> None:
    def before(x: Tensor) -> None:
        with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
            for part in x.clone():
                dist.all_reduce(part)
        manager.wait()

    step = Step(device, eager, before=before)
    assert len(step.calls["all_reduce"]) == BUCKETS + 1


@both_ways
def test_those_that_are_issued_later_have_no_end_yet(device: torch.device, eager: bool) -> None:
    if device.type == "cpu":
        pytest.skip("gloo gathers none by itself")

    def before(x: Tensor) -> None:
        with dist.distributed_c10d._coalescing_manager(device=device, async_ops=True) as manager:
            dist.reduce(x.clone(), 0, async_op=True)
        manager.wait()

    step = Step(device, eager, before=before)
    assert "reduce" not in step.calls
    assert len(step.calls["all_reduce"]) == BUCKETS


def test_when_each_begins_and_what_the_step_waits_for() -> None:
    """Three buckets: the second is ready while the first is on its way, the third when both are done."""
    found = Collectives()
    found.add("all_reduce", 1, 3, ())
    found.add("all_reduce", 2, 4, ())
    found.add("all_reduce", 5, 6, ())
    found.add_waited_for("all_gather", 0, 1)
    offsets_ms = [0.0, 1.0, 2.0, 4.0, 6.0, 7.0, 9.5]
    begins_ms = found.begins_ms(offsets_ms)
    assert begins_ms == [1.0, 4.0, 7.0]
    layout = SpanLayout(tuple(found.spans(7)), 7 + len(found.ends))
    reading = Reading(layout, 0, 0.0, offsets_ms + begins_ms)
    times_ms = dict(zip(layout.tags, reading.durations_ms.tolist(), strict=True))
    assert times_ms == {
        "step_ms/all_reduce": 3.0 + 2.0 + 2.5,
        "step_ms/all_reduce_exposed": 2.5,
        "step_ms/all_gather": 1.0,
    }
    # One behind the other in one row; what the step waits for is none of its own.
    slices = calls_of(reading)
    assert [one.span.name for one in slices] == ["all_gather", *["all_reduce"] * 3]
    assert {(one.span.track, one.row, one.depth) for one in slices} == {("communication", 0, 0)}


def test_one_that_takes_no_time_does_not_begin_behind_its_end() -> None:
    """Nothing is sent in a group of one, and stamps on two streams can be a little apart."""
    found = Collectives()
    found.add("all_reduce", 0, 1, ())
    assert found.begins_ms([1.001, 1.0]) == [1.0]


def test_what_runs_between_the_kernels_is_waited_for_from_its_beginning() -> None:
    found = Collectives()
    found.add_waited_for("all_reduce", 0, 1)
    found.add("all_reduce", 2, 3, ())
    found.add("broadcast", 3, 4, ())
    offsets_ms = [0.0, 1.0, 2.0, 5.0, 6.0]
    begins_ms = found.begins_ms(offsets_ms)
    layout = SpanLayout(tuple(found.spans(5)), 7)
    times_ms = layout.durations_ms(torch.tensor(offsets_ms + begins_ms).numpy())
    assert dict(zip(layout.tags, times_ms.tolist(), strict=True)) == {
        "step_ms/all_reduce": 4.0,
        "step_ms/all_reduce_exposed": 4.0,
        "step_ms/broadcast": 1.0,
    }
