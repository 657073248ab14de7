"""Decisions of the engine: which graphs are stale, the number of streams."""
