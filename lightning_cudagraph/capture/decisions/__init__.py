"""Decisions of the engine: the plan for a batch, which graphs are stale, the number of streams."""
