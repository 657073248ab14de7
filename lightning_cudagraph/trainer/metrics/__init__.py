"""The metrics of torchmetrics that a step calls: in the graph, or on the host after it."""
