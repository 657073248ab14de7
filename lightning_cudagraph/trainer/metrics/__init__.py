"""Metrics of torchmetrics in a captured step: in the graph, or deferred until after the replay."""
