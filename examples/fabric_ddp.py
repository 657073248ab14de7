"""A Fabric loop on several processes, with CUDA graphs and accumulated gradients.

Two functions are captured: forward and backward pass of one batch, and the optimizer's work after every
fourth one. All processes replay together, with the all-reduce in the graph. Without GPUs, an emulator is
used.

    python examples/fabric_ddp.py --devices 2
    torchrun --standalone --nproc-per-node 2 examples/fabric_ddp.py --devices 2
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import Tensor, nn

from lightning_cudagraph import GraphedStep


def train(
    fabric: Fabric, batches: int = 400, graphs: bool = True, accumulate: int = 4
) -> tuple[nn.Module, list[Tensor], str]:
    """Fit a small net to the sine of the sum of its inputs.

    Args:
        fabric: A launched Fabric.
        batches: In each process.
        graphs: Capture the steps.
        accumulate: Batches in a window, after which the optimizer steps.

    Returns:
        The net, the loss of each batch of this process, and the reports.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, fused=True)
    net, optimizer = fabric.setup(net, optimizer)
    generator = torch.Generator().manual_seed(fabric.global_rank)

    def forward_backward(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(net(x), y)
        fabric.backward(loss / accumulate)
        return loss

    def update() -> None:
        # The host would have to wait for the GPU to tell whether the norm is finite.
        fabric.clip_gradients(net, optimizer, max_norm=1.0, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()

    run: Callable[[Tensor, Tensor], Tensor] = forward_backward
    finish: Callable[[], None] = update
    graphed_run = GraphedStep(forward_backward, modules=net)
    graphed_finish = GraphedStep(update, modules=net, optimizers=optimizer)
    if graphs:
        run, finish = graphed_run, graphed_finish
    losses = []
    with graphed_run, graphed_finish:
        for index in range(batches):
            x = torch.rand(32, 8, generator=generator).to(fabric.device)
            is_last = index % accumulate == accumulate - 1
            with fabric.no_backward_sync(net, enabled=not is_last):
                losses.append(run(x, x.sum(dim=1, keepdim=True).sin()).detach())
            if is_last:
                finish()
    return net, losses, f"{graphed_run.summary}\n{graphed_finish.summary}"


def main() -> None:
    """Train, and print the reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--no-graphs", action="store_true")
    args = parser.parse_args()
    fabric = Fabric(devices=args.devices, num_nodes=args.nodes, strategy="ddp")
    fabric.launch()
    losses, report = train(fabric, args.batches, not args.no_graphs)[1:]
    mean = fabric.all_reduce(torch.stack(losses[-40:]).mean())
    fabric.print(report)
    fabric.print(f"loss of the last 40 batches, over all processes: {float(mean):.4f}")
    if torch.distributed.is_initialized():
        # After the graphs, which `train` has let go of, and the wrapped net. What still refers to the
        # group keeps its threads, and they may be in the middle of something when Python ends.
        gc.collect()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
