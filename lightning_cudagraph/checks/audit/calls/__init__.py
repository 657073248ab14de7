"""Calls on the host that a step makes, seen by the interpreter's profiling hook."""
