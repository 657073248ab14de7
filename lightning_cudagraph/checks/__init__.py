"""Checks that keep a graph right: the audit of the step's Python, guards, and verified replays."""
