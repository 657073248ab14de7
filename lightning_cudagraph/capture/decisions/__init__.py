"""Decisions before a replay: the plan for a batch, and the release of graphs that are stale."""
