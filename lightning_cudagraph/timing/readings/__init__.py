"""Readings of timed steps: spans, statistics of windows, and comparisons of several processes."""
