"""Verified replays, and effects that begin after a capture."""
