"""Readings of timed steps: spans, windows of them, and the same of several processes."""
