"""Batch signatures: which of them get graphs, their warm-up, and their graphs."""
