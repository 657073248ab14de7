"""Times of blocks inside a CUDA graph that other code captures and replays.

The model marks its blocks, the loop captures the graph, and neither knows of the other. On a CPU there
is no graph, and the blocks are timed as they run.

    python examples/profile_any_graph.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn

from lightning_cudagraph import Profiler


class Block(nn.Module):
    """A residual block with two timed halves."""

    def __init__(self, profiler: Profiler[str], name: str, width: int) -> None:
        super().__init__()
        self.profiler = profiler
        self.name = name
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        with self.profiler.time(f"{self.name}.norm"):
            normed = self.norm(x)
        with self.profiler.time(f"{self.name}.mlp"):
            return x + self.mlp(normed)  # type: ignore[no-any-return]


def graphed(net: nn.Module, static_x: Tensor) -> Callable[[], None]:
    """Capture the net by hand, without the profiler; returns its replay."""
    side = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(side):
        net(static_x)  # warm-up
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        net(static_x)
    return graph.replay


def run(
    replays: int = 50, device: str = "cpu", width: int = 256, depth: int = 4
) -> dict[str, list[float]]:
    """Time all blocks.

    Args:
        replays: Number of runs of the net.
        device: Device that it runs on.
        width: Width of the layers.
        depth: Number of blocks.

    Returns:
        The times of each block, in milliseconds.
    """
    times_ms: dict[str, list[float]] = {}

    def note(name: str, elapsed_ms: float) -> None:
        times_ms.setdefault(name, []).append(elapsed_ms)

    with Profiler(note) as profiler:
        net = nn.Sequential(*(Block(profiler, f"blocks.{i}", width) for i in range(depth))).to(device)
        static_x = torch.empty(64, width, device=device)
        step: Callable[[], object]
        if device == "cuda":
            step = graphed(net, static_x)
        else:
            step = torch.no_grad()(lambda: net(static_x))
        times_ms.clear()  # those of the warm-up
        for _ in range(replays):
            static_x.normal_()
            step()
    return times_ms


def main() -> None:
    """Run, and print the median of each block."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replays", type=int, default=50)
    replays = parser.parse_args().replays
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, found_ms in run(replays, device).items():
        print(f"{name:<16}{median(found_ms):8.4f} ms, median of {len(found_ms)}")


if __name__ == "__main__":
    main()
