"""Checks that keep a graph right: audit of the step's Python, guards, and verified replays."""
