"""A plain PyTorch training loop, without Lightning, with a CUDA graph of its step.

Three lines differ from the loop without a graph: `GraphedStep` is imported, made, and called instead of
the function. On a CPU an emulator is used instead of a GPU.

    python examples/plain_loop.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_cudagraph import GraphedStep


def train(
    steps: int = 300, graphs: bool = True, device: str = "cpu"
) -> tuple[nn.Module, list[Tensor], str]:
    """Fit a small net to the sine of the sum of its inputs.

    Args:
        steps: Training steps.
        graphs: Capture the step.
        device: Where it trains.

    Returns:
        The net, the loss of each step, and the report.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Dropout(0.05), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    step: Callable[[Tensor, Tensor], Tensor] = train_step
    graphed = GraphedStep(train_step, modules=net, optimizers=optimizer)
    if graphs:
        step = graphed
    losses: list[Any] = []
    with graphed:
        for _ in range(steps):
            x = torch.rand(32, 8, device=device)
            losses.append(step(x, x.sum(dim=1, keepdim=True).sin()).detach())
            scheduler.step()
    return net, losses, str(graphed.summary)


def main() -> None:
    """Train, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    device = "cuda" if torch.cuda.is_available() else "cpu"
    _, losses, report = train(steps, device=device)
    print(report)
    print(f"loss {losses[0].item():.4f} at first, {losses[-1].item():.4f} at last")


if __name__ == "__main__":
    main()
