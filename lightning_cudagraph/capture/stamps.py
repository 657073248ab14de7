"""Points in time of a replay, each written down by a kernel of one thread.

An event that is recorded in a graph takes about 0.3 us of the step, also on a branch that nothing waits
for; a kernel there that writes down what the device's clock says next to nothing (docs/times.md).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lightning_cudagraph.capture.driver import Kernel, load_kernels

__all__ = ["Clock", "Slots", "Stamp", "clock_of", "stamp_times"]

# Translated by the driver, so that no compiler is needed. The first writes down what the clock says, the
# second copies as much as it has threads, and the third writes down when the clock changes, 16 times.
_PTX = b"""
.version 6.0
.target sm_70
.address_size 64

.visible .entry lightning_cudagraph_stamp(.param .u64 slot)
{
    .reg .u64 %slot, %now;
    ld.param.u64 %slot, [slot];
    mov.u64 %now, %globaltimer;
    st.global.u64 [%slot], %now;
    ret;
}

.visible .entry lightning_cudagraph_hand_out(.param .u64 from, .param .u64 to)
{
    .reg .u32 %thread;
    .reg .u64 %from, %to, %offset, %time;
    ld.param.u64 %from, [from];
    ld.param.u64 %to, [to];
    mov.u32 %thread, %tid.x;
    mul.wide.u32 %offset, %thread, 8;
    add.u64 %from, %from, %offset;
    add.u64 %to, %to, %offset;
    ld.global.u64 %time, [%from];
    st.global.u64 [%to], %time;
    ret;
}

.visible .entry lightning_cudagraph_tick(.param .u64 slot)
{
    .reg .pred %same, %tired, %more;
    .reg .u32 %ticks, %reads;
    .reg .u64 %slot, %last, %now;
    ld.param.u64 %slot, [slot];
    mov.u64 %last, %globaltimer;
    mov.u32 %ticks, 0;
    mov.u32 %reads, 0;
AGAIN:
    mov.u64 %now, %globaltimer;
    add.u32 %reads, %reads, 1;
    setp.gt.u32 %tired, %reads, 1000000;
    @%tired bra END;
    setp.eq.u64 %same, %now, %last;
    @%same bra AGAIN;
    mov.u64 %last, %now;
    st.global.u64 [%slot], %now;
    add.u64 %slot, %slot, 8;
    add.u32 %ticks, %ticks, 1;
    setp.lt.u32 %more, %ticks, 16;
    @%more bra AGAIN;
END:
    ret;
}
"""
_TICKS = 16
_NAMES = tuple(f"lightning_cudagraph_{name}" for name in ("stamp", "hand_out", "tick"))
# What CUDA says of its events ("a resolution of around 0.5 microseconds", cudaEventElapsedTime). The
# clock of an H200 goes on every 32 ns; those of older GPUs can be coarser.
_COARSEST_NS = 500
_CHUNK_SLOTS = 1024  # a block has no more threads


class Stamp:
    """A point in time of a graph's replays, set anew by each.

    Args:
        device: memory that the kernel writes into.
        host: pinned memory, to which each replay copies that at its end.
        index: the place in both, of 8 bytes.

    Attributes:
        address: where the kernel writes.
    """

    __slots__ = ("_host", "_slot", "address")

    def __init__(self, device: Tensor, host: Tensor, index: int) -> None:
        self.address = device.data_ptr() + 8 * index
        self._host = host
        self._slot = ctypes.c_int64.from_address(host.data_ptr() + 8 * index)

    @property
    def time_ns(self) -> int:
        """When the last replay came to it, by the clock of the device; 0 if none has."""
        return self._slot.value


class Slots:
    """The memory that the kernels of one graph write into.

    Not that of the host itself, which would cost the GPT of the benchmarks 1.7 % of a step more (159
    stamps, H200).

    Args:
        device: where the graph is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._chunks: list[tuple[Tensor, Tensor]] = []
        self._used = _CHUNK_SLOTS  # of the last of them

    def next(self) -> Stamp:
        """One more, in the capture of the graph."""
        if self._used == _CHUNK_SLOTS:
            with _disable_current_modes():  # it is no part of the step
                device = torch.empty(_CHUNK_SLOTS, dtype=torch.int64, device=self._device)
                host = torch.zeros(_CHUNK_SLOTS, dtype=torch.int64, pin_memory=True)
            self._chunks.append((device, host))
            self._used = 0
        self._used += 1
        return Stamp(*self._chunks[-1], self._used - 1)

    def hand_out(self, kernel: Kernel, stream: torch.cuda.Stream) -> None:
        """At the end of a part of the capture: copy what was stamped to the host.

        Not by a copy node, which would take the step 8 us (GPT, H200).

        Args:
            kernel: what copies.
            stream: it waits for all stamps.
        """
        for device, host in self._chunks:
            used = self._used if host is self._chunks[-1][1] else _CHUNK_SLOTS
            kernel.launch(stream, device.data_ptr(), host.data_ptr(), threads=used)


def stamp_times(stamps: Sequence[Stamp]) -> Callable[[], list[float]]:
    """What reads when a graph came to its stamps.

    Args:
        stamps: of one graph.

    Returns:
        A function that gives milliseconds after the first, one for each. It may be called whenever no
        replay is under way, and raises a RuntimeError if there has been none.
    """

    def read() -> list[float]:
        times_ns = [stamp.time_ns for stamp in stamps]
        if not all(times_ns):
            missing = times_ns.count(0)
            raise RuntimeError(f"No replay has come to {missing} of {len(stamps)} stamps in a graph.")
        start_ns = times_ns[0]
        return [(time_ns - start_ns) * 1e-6 for time_ns in times_ns]

    return read


class Clock(NamedTuple):
    """The kernels that tell a device's time.

    Attributes:
        stamp: writes the time to where a stamp is.
        hand_out: copies as many numbers of 8 bytes as it has threads.
    """

    stamp: Kernel
    hand_out: Kernel


@cache
def clock_of(device: torch.device) -> Clock | None:
    """The clock of a device.

    Args:
        device: a CUDA device, with its index. No capture is under way.

    Returns:
        The clock; None where the driver does not take its kernels, or if it is coarser than events are.
    """
    with torch.cuda.device(device):
        kernels = load_kernels(_PTX, _NAMES)
        if kernels is None:
            return None
        stamp, hand_out, tick = kernels
        ticks = torch.zeros(_TICKS, dtype=torch.int64, device=device)
        host = torch.zeros(_TICKS, dtype=torch.int64, pin_memory=True)
        stream = torch.cuda.current_stream(device)
        try:  # the driver may translate each when it is first launched
            tick.launch(stream, ticks.data_ptr())
            hand_out.launch(stream, ticks.data_ptr(), host.data_ptr(), threads=_TICKS)
            stamp.launch(stream, ticks.data_ptr())
        except RuntimeError:
            return None
        stream.synchronize()
    times_ns = host.tolist()
    if not all(times_ns):
        return None
    # Not the longest: a process that shares the GPU may have had its turn in between.
    step_ns = median(later - earlier for earlier, later in pairwise(times_ns))
    return Clock(stamp, hand_out) if step_ns <= _COARSEST_NS else None
