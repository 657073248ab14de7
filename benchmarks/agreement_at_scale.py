"""Simulation of votes on several machines: what they add to a step of 2 ms, for 2 to 1,024 processes.

The messages of a vote are simulated one by one, with latencies drawn from published measurements; then
steps of hosts and devices, with hosts that are late now and then. Nothing is measured but with `--here`.

    python -m benchmarks.agreement_at_scale --figure docs/agreement_at_scale.png

Each machine has eight processes. A vote is needed before a launch, and the device does earlier steps
meanwhile, `AHEAD_STEPS` of them at most; "in turn", the host waits for each step before it votes.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ranks = NDArray[np.int64]

SIZES = tuple(2**power for power in range(1, 11))
PER_MACHINE = 8
STEP_US = 2000.0
BOUND_PERCENT = 1.0
# Every how many steps the processes agree, in the order in which they are tried.
EVERY = (1, 2, 4, 8, 16, 32, 64)
# Assumptions: the host's own work for a step (docs/measured.md, the host), and launches that a device
# queues. Late hosts: each in one of 1,000 steps, by 1 ms at least, 2.7 on the mean (Pareto, 1.5, cut).
HOST_US = 150.0
AHEAD_STEPS = 4
LATE_SHARE, LATE_US, LATE_POWER, LATEST_US = 1e-3, 1000.0, 1.5, 50_000.0

# Costs of gloo, guessed from what `--here 1 2` took on two cores of a Xeon (torch 2.13), where nothing
# finer was measured: a collective of one process; a message that is sent or received; and to wake the
# thread that waits for it.
CALL_US, MESSAGE_US, WAKE_US = 28.0, 5.0, 6.0
# A request to the store; how long a process waits for a reason there, and how often it asks
# (lightning_cudagraph/processes/failures.py).
REQUEST_S, REASON_S, POLL_S = 25e-6, 3.0, 0.02
# Assumed: three exchanges on a page of shared memory, of votes of a machine, and of the lowest and the
# highest of all.
PAGE_US = 15.0
# Processes of an exchange that are simulated: all do the same.
_MOST_RANKS = 32
_REPEATS = 500
# The bottom of the figure, in percent.
_LEAST = 0.01
# Shares of the messages, of which times are given as quantiles.
_SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999, 0.9999)


@dataclass(frozen=True)
class Network:
    """Times of small TCP messages from process to process, one way.

    Attributes:
        us: quantiles at `_SHARES`.
    """

    name: str
    us: tuple[float, ...]


# Half of a round trip between two processes on those two cores: measured at 10, 50, 90 and 99 %, the
# others are interpolated, and the rarest assumed.
LOOPBACK = Network("one machine", (10.2, 10.6, 10.9, 11.4, 12.3, 17.6, 40.0, 80.0))
# 10 GbE: netperf TCP_RR from node to node, 47,560 a second, the spread assumed as on one machine
# (ConnectX-5; github.com/spidernet-io/spiderpool, docs/concepts/io-performance.md, where sockperf took
# 32 us for the same way: the networks below cover that).
# InfiniBand: sockperf --tcp over IPoIB between VMs with eight GPUs
# (github.com/Azure/aks-rdma-infiniband, tests/expected-output.md, 3.4).
# Cloud: lagscope, half of a round trip, VMs with accelerated networking
# (github.com/microsoft/lagscope/pull/49). The lower quartile is interpolated.
# Cloud, containers: sockperf --tcp on eth0 of the VMs with eight GPUs (as InfiniBand, 1.5).
NETWORKS = (
    Network("10 GbE, bare metal", tuple(value * 10.5 / 11.0 for value in LOOPBACK.us)),
    Network("Azure, accelerated networking", (17.8, 18.7, 19.5, 22.0, 28.5, 74.0, 265.0, 1406.0)),
    Network("Azure, InfiniBand (IPoIB)", (30.1, 34.3, 38.7, 43.2, 49.9, 53.4, 57.7, 120.7)),
    Network("Azure, Ethernet, containers", (67.0, 79.4, 81.2, 86.7, 90.5, 98.9, 108.4, 174.2)),
)


class Links:
    """Draws the times of messages between processes, or between machines.

    Attributes:
        n_votes: the number of votes that are simulated side by side.
    """

    def __init__(self, network: Network, per_machine: int, n_votes: int) -> None:
        self.n_votes = n_votes
        self._random = np.random.default_rng(1)
        self._network, self._per_machine = network, per_machine

    def us(self, senders: Ranks, receivers: Ranks) -> Array:
        """Draw the time of one message from each sender to its receiver, for all votes."""
        shares = self._random.random((self.n_votes, len(senders)))
        is_far = senders // self._per_machine != receivers // self._per_machine
        times = np.interp(shares, _SHARES, LOOPBACK.us)
        times[:, is_far] = np.interp(shares[:, is_far], _SHARES, self._network.us)
        return times


# A message of gloo (gloo/transport/tcp/pair.cc) is announced by both sides, and leaves once its sender
# knows that the other one receives. All processes begin a vote at the same time; it ends with the last.


def around_a_ring(size: int, links: Links, n_values: int = 8) -> Array:
    """Simulate gloo's all-reduce: a reduce-scatter and an all-gather around a ring.

    This is what `ProcessGroupGloo` asks for, however small the tensor is (torch's
    ProcessGroupGlooDetail.hpp sets no algorithm, for which gloo/allreduce.cc takes `ring`). It has two
    segments for each process at least, and sends those that are not empty.
    """
    per_segment = -(-n_values // (2 * size))
    full = -(-n_values // per_segment)
    now = np.full((links.n_votes, size), CALL_US)
    for first in (1, 0):  # the segments that a process sends first: of the next one, or its own
        arrived: dict[int, tuple[Ranks, Array]] = {}
        for index in range(2 * size):
            if index - 2 in arrived:
                ranks, times = arrived.pop(index - 2)
                now[:, ranks] = np.maximum(now[:, ranks], times)
            if index >= 2 * size - 2:
                continue
            segments = np.arange(full)
            segments = segments[(segments - index) % 2 == 0]
            senders = ((segments - index) // 2 - first) % size
            receivers = (senders - 1) % size
            now[:, receivers] += MESSAGE_US
            wanted = now[:, receivers] + links.us(receivers, senders)
            now[:, senders] += MESSAGE_US
            sent = np.maximum(now[:, senders], wanted) + links.us(senders, receivers)
            arrived[index] = receivers, sent + WAKE_US
    return now.max(axis=1)


def to_all(size: int, links: Links) -> Array:
    """Simulate gloo's all-to-all: each process sends a message to each other one (gloo/alltoall.cc).

    One thread announces all messages, another one serves what comes. Some processes are simulated.
    """
    ends = []
    for rank in np.unique(np.linspace(0, size - 1, _MOST_RANKS).astype(np.int64)):
        others = np.delete(np.arange(size), rank)
        here = np.full(size - 1, rank)
        # Of each other process come two notes and a message, and one goes to it.
        served = np.sort(links.us(others, here), axis=1) + 4 * MESSAGE_US * np.arange(1, size)
        ends.append(served[:, -1] + links.us(others[:1], here[:1])[:, 0])
    return np.max(ends, axis=0) + CALL_US + WAKE_US


def in_pairs(size: int, links: Links) -> Array:
    """Simulate exchanges with the process at distance 1, 2, 4 and so on, until each has all votes."""
    now = np.full((links.n_votes, size), CALL_US)
    ranks = np.arange(size)
    for distance in (2**power for power in range((size - 1).bit_length())):
        other = (ranks + distance) % size
        asking = (ranks - distance) % size
        now += 2 * MESSAGE_US
        sent = np.maximum(now, now[:, other] + links.us(other, ranks))
        arrived = (sent + links.us(ranks, other))[:, asking] + WAKE_US
        now = np.maximum(now, arrived)
    return now.max(axis=1)


@dataclass(frozen=True)
class Way:
    """A way to vote.

    Attributes:
        messages: what it does between processes, or, with `page`, between machines.
        page: the processes of a machine vote on a page of shared memory first.
    """

    messages: Callable[[int, Links], Array]
    page: bool = False

    def us(self, network: Network, size: int, n_votes: int) -> Array:
        """Simulate votes; returns their times."""
        members = max(1, size // PER_MACHINE) if self.page else size
        if members == 1:
            return np.full(n_votes, PAGE_US)
        links = Links(network, 1 if self.page else PER_MACHINE, n_votes)
        return self.messages(members, links) + (PAGE_US if self.page else 0.0)


RING, ALL = "all-reduce of gloo", "each process to each"
WAYS = {
    RING: Way(around_a_ring),
    ALL: Way(to_all),
    "page, each machine to each": Way(to_all, page=True),
    "page, machines in pairs": Way(in_pairs, page=True),
}


@dataclass(frozen=True)
class Hosts:
    """The hosts of a run.

    Attributes:
        size: the number of processes.
        late_share: the share of its steps in which a process is late.
        n_steps: how many steps are simulated.
    """

    size: int
    late_share: float = LATE_SHARE
    n_steps: int = 1000

    def period_us(self, votes_us: Array, every: int, ahead: int = AHEAD_STEPS) -> Array:
        """Simulate steps; returns the mean time of one.

        Args:
            votes_us: times of votes, a row for each variant.
            every: they vote before every so many steps; 0 for never.
            ahead: how many launched steps the host does not wait for.
        """
        random, drawn = np.random.default_rng(2), np.random.default_rng(3)
        launched: Array = np.zeros((len(votes_us), 1))
        done = np.zeros((self.n_steps + 1, len(votes_us)))
        for step in range(self.n_steps):
            late = np.minimum(LATE_US * random.random(self.size) ** (-1 / LATE_POWER), LATEST_US)
            host = HOST_US * random.uniform(0.9, 1.1, self.size)
            host += late * (random.random(self.size) < self.late_share)
            launched = np.maximum(launched, done[max(step - ahead, 0)][:, None]) + host
            if every and step % every == 0:
                vote_us = votes_us[:, drawn.integers(votes_us.shape[1])]
                launched = launched.max(axis=1, keepdims=True) + vote_us[:, None]
            # The all-reduces of a step end when all processes have launched it.
            done[step + 1] = np.maximum(done[step], launched.max(axis=1)) + STEP_US
        warm = self.n_steps // 10
        return (done[-1] - done[warm]) / (self.n_steps - warm)

    def added_percent(self, votes_us: Array, every: int, ahead: int = AHEAD_STEPS) -> Array:
        """Simulate steps with votes and without; returns what the votes add to a step."""
        without = self.period_us(votes_us[:1], 0, ahead)
        return 100 * (self.period_us(votes_us, every, ahead) - without) / STEP_US


@dataclass(frozen=True)
class Row:
    """The result for a way to vote, on a network, by a number of processes.

    Attributes:
        vote_us: the median and the 99th percentile of a vote.
        added_percent: what a vote before each step adds to it, while the device does earlier ones.
        late_percent: the same with hosts that are late now and then.
        in_turn_percent: the same if the host waits for the device before it votes.
        every: votes before every so many steps add 1 % at most; None if they always add more.
    """

    way: str
    network: str
    size: int
    vote_us: tuple[float, float]
    added_percent: float
    late_percent: float
    in_turn_percent: float
    every: int | None


def simulate(sizes: Sequence[int] = SIZES, n_votes: int = 32, n_steps: int = 1000) -> list[Row]:
    """Simulate all ways on all networks."""
    rows: list[Row] = []
    names = [(way, network) for way in WAYS for network in NETWORKS]
    for size in sizes:
        votes = np.array([WAYS[way].us(network, size, n_votes) for way, network in names])
        hosts, punctual = Hosts(size, n_steps=n_steps), Hosts(size, 0.0, n_steps)
        added = punctual.added_percent(votes, 1)
        late = hosts.added_percent(votes, 1)
        in_turn = punctual.added_percent(votes, 1, ahead=0)
        fitting: dict[int, int] = {}
        for every in EVERY:
            left = [index for index in range(len(names)) if index not in fitting]
            if left:
                percent = punctual.added_percent(votes[left], every)
                fitting |= {
                    index: every
                    for index, each in zip(left, percent, strict=True)
                    if each <= BOUND_PERCENT
                }
        for index, (way, network) in enumerate(names):
            quantiles = float(np.median(votes[index])), float(np.quantile(votes[index], 0.99))
            percents = (float(each[index]) for each in (added, late, in_turn))
            rows.append(Row(way, network.name, size, quantiles, *percents, fitting.get(index)))
    return rows


def known_after_s(size: int) -> float:
    """Time until all processes know that one was killed, if no other machine is gone.

    Each loses its connection at once, and asks the store for the reason, time and again, until it gives
    up. The first one then writes that it ends, and the others read it.
    """
    return REASON_S + 2 * max(POLL_S, 2 * (size - 1) * REQUEST_S)


def table(rows: Sequence[Row]) -> list[str]:
    """The rows of all sizes in Markdown: the range over the networks."""
    lines = ["| processes | way | vote, us | added, % | with late hosts, % | in turn, % | every |"]
    lines.append("|---" * 7 + "|")
    for size, way in dict.fromkeys((row.size, row.way) for row in rows):
        some = [row for row in rows if (row.size, row.way) == (size, way)]
        cells = [
            f"{min(values):.{digits}f} to {max(values):.{digits}f}"
            for digits, values in (
                (0, [row.vote_us[0] for row in some]),
                (1, [row.added_percent for row in some]),
                (1, [row.late_percent for row in some]),
                (1, [row.in_turn_percent for row in some]),
            )
        ]
        every = [row.every for row in some]
        cells.append("more than 64" if None in every else f"{max(filter(None, every))}")
        lines.append(f"| {size} | {way} | {' | '.join(cells)} |")
    return lines


def thresholds(rows: Sequence[Row]) -> list[str]:
    """For each way, the smallest number of processes at which it adds more than 1 % on any network."""
    lines = []
    for way in WAYS:
        sizes = [row.size for row in rows if row.way == way and row.added_percent > BOUND_PERCENT]
        lines.append(f"{way}: " + (f"more than 1 % at {min(sizes)}" if sizes else "never more than 1 %"))
    return lines


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the times of votes, and what they add, into a PNG, an SVG or a PDF file."""
    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for way, colour in zip(WAYS, ("#8c96a3", "#c44e52", "#4c72b0", "#55a868"), strict=True):
        sizes = sorted({row.size for row in rows})
        of = [[row for row in rows if (row.way, row.size) == (way, size)] for size in sizes]
        for axes, values in (
            (left, [[row.vote_us[0] / 1000 for row in some] for some in of]),
            (right, [[max(row.added_percent, _LEAST) for row in some] for some in of]),
        ):
            axes.fill_between(sizes, [*map(min, values)], [*map(max, values)], color=colour, alpha=0.25)
            axes.plot(sizes, [*map(statistics.median, values)], color=colour, label=way, marker=".")
    left.axhline((STEP_US - HOST_US) / 1000, color="black", linewidth=0.9, linestyle="--")
    left.set_title("ms per vote; hidden below the dashed line", fontsize=9)
    left.legend(fontsize=7)
    right.axhline(BOUND_PERCENT, color="black", linewidth=0.9, linestyle="--")
    right.set_title("% of a step of 2 ms that a vote before each adds", fontsize=9)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("processes, eight on a machine; the range is that of four networks", fontsize=7)
        axes.set_xticks(sizes, map(str, sizes), fontsize=7)
        axes.tick_params(axis="y", labelsize=7)
    figure.savefig(path, dpi=110)


def _collectives_here(rank: int, size: int, port: int, found: Any) -> None:
    """Measure collectives of gloo in one of some processes."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    values, words = torch.zeros(8, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)
    of: dict[str, Callable[[], object]] = {
        RING: lambda: dist.all_reduce(values, dist.ReduceOp.MAX),
        ALL: lambda: dist.all_to_all_single(torch.empty_like(words), words),
    }
    for way, collective in of.items():
        times_us = []
        for _ in range(_REPEATS):
            started_s = time.perf_counter()
            collective()
            times_us.append(1e6 * (time.perf_counter() - started_s))
        if rank == 0:
            found[way] = statistics.median(times_us)
    dist.destroy_process_group()


def here(sizes: Sequence[int]) -> Iterator[str]:
    """Measure the collectives of gloo between processes of this machine."""
    for size in sizes:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with mp.get_context("spawn").Manager() as manager:
            found = manager.dict()
            mp.spawn(_collectives_here, (size, port, found), nprocs=size)
            for way, us in found.items():
                yield f"{size} processes here, {way}: {us:.0f} us"


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, help="powers of 2")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--figure", type=Path, help="draw a figure into this file")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument(
        "--here", type=int, nargs="*", help="measure gloo with so many processes instead"
    )
    args = parser.parse_args(given)
    if args.here is not None:
        for line in here(args.here):
            print(line, flush=True)
        return
    rows = simulate(args.sizes, n_steps=args.steps)
    print("\n".join([*table(rows), "", *thresholds(rows), ""]))
    for size in args.sizes:
        print(f"{size} processes know of one that was killed after {known_after_s(size):.2f} s")
    if args.figure:
        draw(rows, args.figure)
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
