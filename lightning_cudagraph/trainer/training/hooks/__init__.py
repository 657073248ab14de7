"""Hooks between two steps, and those inside a step that run on the host in every replay."""
